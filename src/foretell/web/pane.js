// One run: its text, token by token, with where each came from, and its figures.
"use strict";

const FIGURES = [
  ["rate", "tokens / s", "Tokens a second after the first ones, as they reached this page"],
  ["length", "tokens / step", "Tokens written by one pass of the model, on average"],
  ["accepted", "accepted", "Guesses accepted, of all guesses made"],
  ["steps", "steps", "Passes of the model"],
  ["first", "first token", "Time from the request to the first token"],
];

/** "draft", "bonus" or "plain", and the same in words. */
function origin(source) {
  if (source.startsWith("draft:")) return { kind: "draft", words: `accepted guess of ${source.slice(6)}` };
  if (source === "bonus") return { kind: "bonus", words: "the model’s own, after the guesses" };
  return { kind: "plain", words: "the model’s own, nothing guessed" };
}

/**
 * How much of `rest`, the text that follows, is a token's own: 0 where it is not found. A token alone may read without the
 * blank it has in the text, and the text may lack blanks of the token's beside a thought.
 */
function lengthIn(rest, token) {
  const reach = Math.max(1, /^\s*/.exec(rest)[0].length);
  for (const own of new Set([token ?? "", token?.trim() ?? ""])) {
    const found = own ? rest.slice(0, reach + own.length).indexOf(own) : -1;
    if (found >= 0) return found + own.length;
  }
  return 0;
}

/** An element for a token's text. */
function tokenSpan(kind) {
  const outer = document.createElement("span");
  outer.className = `token ${kind}`;
  return outer;
}

/**
 * Give a token's element its text, which follows `before`. Indentation stays outside the inner element, the one that is
 * underlined: lines under nothing are noise.
 */
function fill(outer, text, before) {
  const inner = document.createElement("span");
  const [blank] = (/(?:^|\s)$/.test(before) ? /^\s*/ : /^(?:\s{2,}|[\n\t])?/).exec(text);
  inner.textContent = text.slice(blank.length);
  outer.append(blank, inner);
}

/** What the model thought: open as long as nothing else is there, then folded, unless the user has a wish of their own. */
class Thought {
  constructor() {
    [this.element, this.summary, this.body] = ["details", "summary", "div"].map((tag) => document.createElement(tag));
    this.element.className = "thought";
    this.element.open = true;
    this.element.append(this.summary, this.body);
    this.fresh = document.createDocumentFragment();
    this.isChosen = false; // opened or folded by hand
    this.summary.addEventListener("click", () => (this.isChosen = true));
    this.first = this.last = null; // its tokens, which the marks are none of
  }

  say(numTokens, isOver) {
    const count = numTokens ?? this.last - this.first + 1;
    const words = `${count} ${count === 1 ? "token" : "tokens"}`;
    this.summary.textContent = isOver ? `Thought for ${words}` : `Thinking: ${words}`;
  }

  fold() {
    if (!this.isChosen) this.element.open = false;
    this.isChosen = true;
  }
}

class Pane {
  /** `onstep(step)` is called when the user picks a token. */
  constructor(section, onstep = () => {}) {
    this.section = section;
    this.output = section.querySelector(".output");
    this.ended = section.querySelector(".ended");
    this.figures = {};
    for (const [name, label, title] of FIGURES) {
      const [group, term, value] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      group.title = title;
      group.dataset.figure = name;
      term.textContent = label;
      group.append(term, value);
      section.querySelector(".figures").append(group);
      this.figures[name] = value;
    }
    this.onstep = onstep;
    this.output.addEventListener("mouseover", (event) => this.#point(event.target.closest(".token")));
    this.output.addEventListener("mouseleave", () => tip.hide());
    this.output.addEventListener("click", (event) => this.#pick(this.spans.indexOf(event.target.closest(".token"))));
    this.output.addEventListener("keydown", (event) => this.#key(event));
    this.output.addEventListener("blur", () => this.#pick(-1));
    this.output.addEventListener("scroll", () => tip.hide());
    this.clear();
  }

  clear() {
    this.output.replaceChildren();
    this.fresh = document.createDocumentFragment(); // written, and not shown yet
    this.thought = null;
    this.numThought = null; // the server's own count
    this.text = ""; // thoughts too, without their marks
    this.spans = []; // one a token, or one a chunk where the server does not tell tokens
    this.numPlaced = 0; // spans that have their text, and are in the thought or beside it
    this.isThinking = false; // where the last one is
    this.isTold = false; // whether the server tells tokens
    this.isOver = false;
    this.tokens = []; // {token, token_id, source, logprob, step}
    this.steps = []; // {spans, trace}: its tokens, and its tree where the server told it
    this.numClosed = 0; // steps whose tokens are all here
    this.numTraced = 0;
    this.cursor = -1;
    this.started = performance.now();
    this.firstAt = this.lastAt = null;
    this.numFirst = 0;
    this.final = null; // the server's own figures
    this.numTokens = 0;
    this.finish = null;
    this.known = ""; // said of the prompt, where the server had read some of it before
    this.ended.textContent = "";
    this.shown = -1;
    this.refresh();
  }

  /** Take one chunk of the stream. */
  take(chunk) {
    const choice = chunk.choices?.[0];
    const metrics = chunk.metrics?.speculative_decoding;
    if (metrics) this.final = metrics;
    if (choice) {
      const delta = choice.delta ?? {};
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      const text = choice.text ?? delta.content ?? "";
      this.#arrive(choice.provenance ?? [], Boolean(thought || text));
      if (thought) this.#write(thought, true);
      if (text) this.#write(text, false);
      for (const trace of choice.trace ?? []) this.#step(this.numTraced++).trace = trace;
      if (choice.finish_reason) this.finish = choice.stop_reason ?? choice.finish_reason;
    }
    if (chunk.usage) {
      this.numTokens = chunk.usage.completion_tokens;
      this.numThought = chunk.usage.completion_tokens_details?.reasoning_tokens || null;
      const cached = chunk.usage.prompt_tokens_details?.cached_tokens;
      if (cached) this.known = `; ${cached} of the prompt’s ${chunk.usage.prompt_tokens} were known from an earlier run, so its first token came sooner`;
    }
  }

  /** Tokens have come, of this chunk's text and of the next ones'. Nothing here may ask for the layout: the tokens a
      second would be those of the drawing. */
  #arrive(provenance, hasText) {
    this.isTold ||= provenance.length > 0;
    const tokens = this.isTold || !hasText ? provenance : [null];
    if (!tokens.length) return;
    this.lastAt = performance.now();
    for (const token of tokens) {
      const { kind } = origin(token?.source ?? "plain");
      const span = tokenSpan(kind);
      this.#step(this.numClosed).spans.push(span);
      this.spans.push(span);
      this.tokens.push({ ...token, step: this.numClosed });
      if (kind !== "draft") this.numClosed += 1; // the model's own token is a step's last
    }
    this.numTokens += tokens.length;
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.numFirst = this.numTokens;
    }
  }

  /**
   * Cut a text into the tokens' own. Of characters that take several tokens, and of what is not found, the last token has
   * all. Marks of thoughts are tokens without a text.
   */
  #write(text, isThought) {
    if (isThought) this.thought ??= new Thought();
    let rest = text;
    if (this.numPlaced === this.spans.length) { // a rest after the last token
      if (isThought === this.isThinking) {
        this.spans.at(-1).lastChild.append(rest);
        this.text += rest;
        return;
      }
      this.spans.push(tokenSpan("plain"));
      this.tokens.push({ step: this.steps.length - 1 });
    }
    while (rest) {
      const nth = this.numPlaced;
      const length = nth === this.spans.length - 1 ? rest.length : lengthIn(rest, this.tokens[nth].token);
      if (length && isThought) {
        this.thought.first ??= nth;
        this.thought.last = nth;
      }
      this.#place(rest.slice(0, length), isThought);
      rest = rest.slice(length);
    }
  }

  /** Put the next token where it belongs. */
  #place(text, isThought) {
    const span = this.spans[this.numPlaced];
    fill(span, text, this.text.slice(-1));
    (isThought ? this.thought : this).fresh.append(span);
    this.text += text;
    this.isThinking = isThought;
    this.numPlaced += 1;
  }

  #show() {
    const { output: box, thought } = this;
    if (!this.fresh.hasChildNodes() && !thought?.fresh.hasChildNodes()) return;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
    if (thought && !thought.element.parentElement) box.prepend(thought.element);
    thought?.body.append(thought.fresh);
    if (this.fresh.textContent) thought?.fold();
    box.append(this.fresh);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  #step(number) {
    while (this.steps.length <= number) this.steps.push({ spans: [], trace: null });
    return this.steps[number];
  }

  /** Tokens a second after the first chunk; NaN before the second. */
  get rate() {
    return (1000 * (this.numTokens - this.numFirst)) / (this.lastAt - this.firstAt || NaN);
  }

  /** Guesses made so far; null where the server does not tell. */
  get numGuesses() {
    if (this.final) return this.final.num_draft_tokens;
    if (!this.steps.some((step) => step.trace)) return null;
    return this.steps.reduce((sum, { trace }) => sum + (trace ? trace.tokens.length - 1 : 0), 0);
  }

  /** The trace of a step as it is drawn: its path, and the text of the model's own token, null where there is none. */
  tree(number) {
    const { trace, spans } = this.steps[number];
    if (trace.bonus === null) return trace; // the text ended with a guess
    const last = this.tokens[this.spans.indexOf(spans.at(-1))];
    const is = (node) => trace.parent[node] === trace.path.at(-1) && trace.token_ids[node] === trace.bonus;
    const node = trace.tokens.findIndex((_, candidate) => is(candidate));
    // The text may end with an accepted guess: nothing follows it then, and the trace names it in the bonus's place.
    if (node > 0 && last?.source?.startsWith("draft:")) return { ...trace, path: [...trace.path, node], bonus: null };
    const isKnown = last?.token_id === trace.bonus && last.token !== undefined;
    return { ...trace, bonus: typeof trace.bonus === "string" ? trace.bonus : isKnown ? last.token : `#${trace.bonus}` };
  }

  /** Show the text and the figures as they stand. */
  refresh() {
    this.#show();
    this.thought?.say(this.numThought, this.isOver || !this.isThinking);
    const traces = this.steps.map((step) => step.trace).filter(Boolean);
    const drafted = this.final?.num_draft_tokens ?? traces.reduce((sum, trace) => sum + trace.tokens.length - 1, 0);
    const accepted = this.final?.num_accepted_draft_tokens ?? traces.reduce((sum, trace) => sum + trace.path.length - 1, 0);
    const show = (name, value, text) => (this.figures[name].textContent = Number.isFinite(value) ? text(value) : "–");
    show("rate", this.rate, (value) => value.toFixed(value < 100 ? 1 : 0));
    show("length", this.numTokens / this.steps.length, (value) => value.toFixed(2));
    show("accepted", drafted ? (this.final?.draft_acceptance_rate ?? accepted / drafted) : NaN, percent);
    show("steps", this.steps.length || NaN, String);
    show("first", this.firstAt === null ? NaN : this.firstAt - this.started, (value) =>
      value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(1)} s`,
    );
  }

  /** Say how the run ended. */
  close(words) {
    this.ended.textContent = this.numTokens ? `${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}, ${words}${this.known}` : "";
    while (this.numPlaced < this.spans.length) this.#place("", this.isThinking); // ends of texts, say
    this.isOver = true;
    this.refresh();
  }

  /** Tint the tokens of one step. */
  mark(number) {
    if (this.shown === number) return;
    for (const span of this.steps[this.shown]?.spans ?? []) span.classList.remove("of-step");
    for (const span of this.steps[number]?.spans ?? []) span.classList.add("of-step");
    this.shown = number;
  }

  /** Mark the token that holds the character at `offset`. */
  markDifference(offset) {
    let end = 0;
    const span = this.spans.find((candidate) => (end += candidate.textContent.length) > offset);
    span?.classList.add("differs");
    this.#unfold(span);
  }

  /** Open the thought that a token is in. */
  #unfold(span) {
    const around = span?.closest("details");
    if (around) around.open = true;
  }

  #point(target) {
    const token = this.tokens[this.spans.indexOf(target)];
    if (token?.source) tip.show(target, token);
    else tip.hide();
  }

  #pick(index) {
    this.spans[this.cursor]?.classList.remove("cursor");
    this.cursor = index;
    const span = this.spans[index];
    if (!span) return tip.hide();
    span.classList.add("cursor");
    this.#unfold(span);
    span.scrollIntoView({ block: "nearest" });
    this.#point(span);
    return this.onstep(this.tokens[index].step);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.spans.length) return;
    const last = this.spans.length - 1;
    const moves = { ArrowLeft: this.cursor - 1, ArrowRight: this.cursor + 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#pick(Math.min(last, Math.max(0, moves[event.key])));
  }
}

/** The one note that tells about a token, beside it. */
const tip = {
  element: document.getElementById("tip"),
  show(target, token) {
    const lines = [`${visible(token.token)}  id ${token.token_id}`, origin(token.source).words, `step ${token.step + 1}`];
    if (Number.isFinite(token.logprob)) {
      const logprob = token.logprob.toFixed(3).replace("-", "−");
      lines.splice(2, 0, `log probability ${logprob} (${percent(Math.exp(token.logprob))})`);
    }
    this.element.replaceChildren(
      ...lines.map((line) => {
        const element = document.createElement("span");
        element.textContent = line;
        return element;
      }),
    );
    this.element.hidden = false;
    const [at, own] = [target.getClientRects()[0] ?? target.getBoundingClientRect(), this.element.getBoundingClientRect()];
    const below = at.bottom + 6 + own.height <= innerHeight;
    this.element.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - own.height - 6)}px`;
    this.element.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - own.width - 8))}px`;
  },
  hide() {
    this.element.hidden = true;
  },
};
