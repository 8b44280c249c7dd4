// One step of decoding, taken apart and read page by page; and the game of the shared list.
"use strict";

/** An element with a class and children: elements, or texts. */
function made(tag, kind, ...children) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...children);
  return element;
}

const paragraphs = (texts) => texts.map((text) => made("p", "", text));

/** A token in its box. */
function tokenBox(text, kind = "") {
  return made("code", `piece ${kind}`, visible(text));
}

/** A probability: a bar, and percent. Null: not known. */
function bar(share, kind) {
  const cell = made("td", `share ${kind}`);
  if (share === null) return cell;
  const track = made("span", "track", made("span", "fill"));
  track.firstChild.style.width = `${100 * share}%`;
  cell.append(track, made("span", "amount", percent(share)));
  return cell;
}

function arrival(time, isFirst) {
  const words = time === null ? "never" : time < 10 ? time.toFixed(2) : time < 1000 ? time.toFixed(0) : "> 1000";
  return made("td", `time ${isFirst ? "first" : ""}`, words, ...(isFirst ? [made("span", "flag", " first")] : []));
}

/** The pages of a step: functions that return {title, nodes}. */
class Step {
  constructor(step) {
    this.step = step;
    const between = step.places.map((place, nth) => () => this.#place(place, step.words.verdicts[nth]));
    this.pages = [() => this.#before(), () => this.#guess(), () => this.#check(), ...between, () => this.#result()];
  }

  #before() {
    const { text, words } = this.step;
    const cut = text.length >= 400 ? "…" : "";
    const nodes = [made("pre", "quote", cut + text), ...paragraphs(words.before)];
    return { title: "The text so far", nodes: [...nodes, made("p", "note", "In the boxes of tokens · is a blank and ↵ a line break.")] };
  }

  /** The tree of guesses as `drawTree` reads it; `note(guess)` stands below a token. */
  #tree(note, bonus) {
    const { guesses, places } = this.step;
    const number = new Map([[0, 0], ...guesses.map((guess, nth) => [guess.node, nth + 1])]);
    const trace = {
      tokens: [places[0]?.after ?? "", ...guesses.map((guess) => guess.text)],
      parent: [-1, ...guesses.map((guess) => number.get(guess.parent))],
      probability: [1, ...guesses.map((guess) => guess.p)],
      notes: ["last token", ...guesses.map(note)],
      path: [0, ...guesses.filter((guess) => guess.kept).map((guess) => number.get(guess.node))],
      bonus,
    };
    const kept = guesses.filter((guess) => guess.kept).map((guess) => visible(guess.text));
    const said = `${guesses.length} guesses; kept: ${kept.join(", ") || "none"}`;
    const box = made("div", "scroll", drawTree(trace, said));
    Object.assign(box, { tabIndex: 0, role: "group", ariaLabel: "Tree of guesses" });
    return box;
  }

  #guess() {
    const { guesses, words } = this.step;
    const note = (guess) => (guess.q === null ? "" : `drafter: ${percent(guess.q)}`);
    const drawing = guesses.length ? [this.#tree(note, null)] : [];
    return { title: "Guess", nodes: [...paragraphs(words.guess), ...drawing] };
  }

  #check() {
    return { title: "Check", nodes: paragraphs(this.step.words.check) };
  }

  #place(place, verdict) {
    const { is_race: isRace, temperature } = this.step;
    const hasQ = place.runners.some((one) => one.q !== null);
    const hasTime = isRace && temperature > 0;
    const heads = ["token", "p, target", ...(hasQ ? ["q, drafter"] : []),
      ...(hasTime ? ["time, target"] : []), ...(hasTime && hasQ ? ["time, drafter"] : [])];
    const head = made("tr", "", ...heads.map((text) => {
      const cell = made("th", "", text);
      cell.scope = "col";
      return cell;
    }));
    const rows = place.runners.map((one) => {
      const won = one.token === place.winner_token;
      const token = made("th", "", tokenBox(one.text));
      token.scope = "row";
      return made("tr", won ? "won" : "", token, bar(one.p, "target"), ...(hasQ ? [bar(one.q, "draft")] : []),
        ...(hasTime ? [arrival(one.time_p, won)] : []),
        ...(hasTime && hasQ ? [arrival(one.time_q, place.guess_tokens.includes(one.token))] : []));
    });
    const title = place.node === 0 ? ["What comes after the text so far?"] : ["What comes after the guess ", tokenBox(place.after), "?"];
    const kind = place.was_guessed ? "kept" : place.guesses.length ? "dropped" : "bonus";
    const table = made("table", "runners", made("thead", "", head), made("tbody", "", ...rows));
    return { title, nodes: [table, made("p", `outcome ${kind}`, verdict)] };
  }

  #result() {
    const { words, emitted, num_kept: kept } = this.step;
    const text = made("p", "emitted", ...emitted.map((token, nth) => tokenBox(token, nth < kept ? "kept" : "own")));
    const bonus = emitted.length > kept ? emitted.at(-1) : null;
    const tree = this.#tree((guess) => `p ${percent(guess.p)}`, bonus);
    return { title: "What came of it", nodes: [made("p", "", words.kept), text, tree, ...paragraphs(words.result)] };
  }
}

/** Pages of steps, and the buttons that turn them. */
class Reader {
  constructor() {
    const by = (id) => document.getElementById(`apart-${id}`);
    [this.stage, this.moves, this.back, this.next, this.place] = ["stage", "moves", "back", "next", "place"].map(by);
    [this.choice, this.choiceField] = [by("step"), by("step-field")];
    this.back.addEventListener("click", () => this.turn(this.page - 1));
    this.next.addEventListener("click", () => this.turn(this.page + 1 < this.step.pages.length ? this.page + 1 : 0));
    this.choice.addEventListener("change", () => this.open(Number(this.choice.value)));
  }

  /** Show an answer of the server. */
  show(found) {
    this.steps = found.steps;
    this.choice.replaceChildren(...found.steps.map((step, nth) =>
      new Option(`${step.number}: ${step.num_kept} of ${step.guesses.length} kept`, nth)));
    this.choiceField.hidden = found.steps.length < 2;
    this.choice.value = String(found.chosen);
    this.open(found.chosen);
  }

  open(number) {
    this.step = new Step(this.steps[number]);
    this.stage.hidden = this.moves.hidden = false;
    this.turn(0);
  }

  turn(page) {
    if (page < 0) return;
    this.page = page;
    const count = this.step.pages.length;
    const { title, nodes } = this.step.pages[page]();
    this.stage.replaceChildren(made("h3", "", ...[title].flat()), ...nodes);
    this.place.textContent = `${page + 1} of ${count}`;
    this.back.setAttribute("aria-disabled", String(page === 0)); // it keeps the focus
    this.next.textContent = page + 1 < count ? "Next →" : "From the start";
  }

  hide() {
    this.stage.hidden = this.moves.hidden = this.choiceField.hidden = true;
  }
}

// ---- the game

/** Ten random delays, as independent exponentials. */
const delays = () => Array.from({ length: 10 }, () => -Math.log(1 - Math.random()));

class Game {
  constructor() {
    const by = (id) => document.getElementById(`toy-${id}`);
    [this.lists, this.said, this.likes] = ["lists", "said", "likes"].map(by);
    by("one").addEventListener("click", () => this.play(1));
    by("many").addEventListener("click", () => this.play(1000));
    this.likes.addEventListener("input", () => this.#reset());
    this.#reset();
  }

  #reset() {
    this.rounds = this.shared = this.separate = 0;
    const extra = this.likes.valueAsNumber / 100;
    this.law = Array.from({ length: 10 }, (_, nth) => 0.1 * (1 - extra) + (nth === 6 ? extra : 0));
    this.likes.setAttribute("aria-valuetext", `${Math.round(100 * this.law[6])} percent of the time`);
    this.play(0);
  }

  play(rounds) {
    for (let round = 0; round < rounds; round += 1) {
      const [list, mine, other] = [delays(), delays(), delays()];
      const me = list.map((delay) => delay / 0.1);
      const friend = list.map((delay, nth) => delay / this.law[nth]);
      const alone = mine.map((delay) => delay / 0.1);
      const apart = other.map((delay, nth) => delay / this.law[nth]);
      const first = (times) => times.indexOf(Math.min(...times));
      this.rounds += 1;
      this.shared += first(me) === first(friend);
      this.separate += first(alone) === first(apart);
      this.last = [["you", me], ["friend", friend], ["you", alone], ["friend", apart]];
    }
    const last = rounds ? this.last : [["you", null], ["friend", null], ["you", null], ["friend", null]];
    const drawn = last.map(([who, times]) => this.#list(who, times));
    this.lists.replaceChildren(
      made("section", "", made("h3", "", "One list for both"), made("div", "two", drawn[0], drawn[1])),
      made("section", "", made("h3", "", "A list each"), made("div", "two", drawn[2], drawn[3])),
    );
    const share = (count) => `${((100 * count) / this.rounds).toFixed(this.rounds < 100 ? 0 : 1)} %`;
    this.said.textContent = this.rounds
      ? `${this.rounds} ${this.rounds === 1 ? "round" : "rounds"}: with one list you agreed in ${share(this.shared)}, with a list each in ${share(this.separate)}.`
      : "No round was played yet.";
  }

  /** Ten arrival times as bars; the shortest wins. */
  #list(who, times) {
    const longest = times ? Math.max(...times.filter((time) => Number.isFinite(time))) : 1;
    const winner = times ? times.indexOf(Math.min(...times)) : -1;
    const rows = Array.from({ length: 10 }, (_, nth) => {
      const fill = made("span", "fill");
      const length = times ? Math.min(1, times[nth] / longest) : 0;
      fill.style.width = `${100 * length}%`;
      const row = made("li", nth === winner ? "won" : "", made("span", "number", String(nth + 1)), made("span", "track", fill));
      if (nth === winner) row.append(made("span", "flag", "first"));
      return row;
    });
    const picks = times ? `${who === "you" ? "You take" : "Your friend takes"} ${winner + 1}` : who === "you" ? "You" : "Your friend";
    return made("div", "list", made("p", "", picks), made("ol", "", ...rows));
  }
}
