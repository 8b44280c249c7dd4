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
 * [text, token] pairs: `text` cut into the tokens' own texts. A token alone may read without the blank it has in the text;
 * of characters that take several tokens, and of what was held back, the last token has all.
 */
function portions(text, provenance) {
  let rest = text;
  return provenance.map((token, nth) => {
    const isLast = nth === provenance.length - 1;
    const found = token.token ? rest.slice(0, token.token.length + 1).indexOf(token.token) : -1;
    const part = isLast ? rest : rest.slice(0, found < 0 ? 0 : found + token.token.length);
    rest = rest.slice(part.length);
    return [part, token];
  });
}

/**
 * An element of a token's text, which follows `before`. Indentation stays outside the inner element, the one that is
 * underlined: lines under nothing are noise.
 */
function tokenSpan(text, kind, before) {
  const [outer, inner] = [document.createElement("span"), document.createElement("span")];
  const [blank] = (/(?:^|\s)$/.test(before) ? /^\s*/ : /^(?:\s{2,}|[\n\t])?/).exec(text);
  outer.className = `token ${kind}`;
  inner.textContent = text.slice(blank.length);
  outer.append(blank, inner);
  return outer;
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
    this.text = "";
    this.spans = []; // one a token, or one a chunk where the server does not tell tokens
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
      const text = choice.text ?? `${delta.reasoning_content ?? delta.reasoning ?? ""}${delta.content ?? ""}`;
      const provenance = choice.provenance ?? [];
      if (text || provenance.length) this.#write(text, provenance);
      for (const trace of choice.trace ?? []) this.#step(this.numTraced++).trace = trace;
      if (choice.finish_reason) this.finish = choice.stop_reason ?? choice.finish_reason;
    }
    if (chunk.usage) {
      this.numTokens = chunk.usage.completion_tokens;
      const cached = chunk.usage.prompt_tokens_details?.cached_tokens;
      if (cached) this.known = `; ${cached} of the prompt’s ${chunk.usage.prompt_tokens} were known from an earlier run, so its first token came sooner`;
    }
  }

  /** Nothing here may ask for the layout: the tokens a second would be those of the drawing. */
  #write(text, provenance) {
    this.lastAt = performance.now();
    const parts = provenance.length ? portions(text, provenance) : [[text, null]];
    for (const [part, token] of parts) {
      const { kind } = origin(token?.source ?? "plain");
      const span = tokenSpan(part, kind, this.text.slice(-1));
      this.text += part;
      this.#step(this.numClosed).spans.push(span);
      this.spans.push(span);
      this.tokens.push({ ...token, step: this.numClosed });
      if (kind !== "draft") this.numClosed += 1; // the model's own token is a step's last
      this.fresh.append(span);
    }
    this.numTokens += parts.length;
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.numFirst = this.numTokens;
    }
  }

  #show() {
    if (!this.fresh.hasChildNodes()) return;
    const box = this.output;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
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
