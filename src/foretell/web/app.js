// The form, the two runs, and what is said about them.
"use strict";

const at = (id) => document.getElementById(id);
const [form, runButton, stopButton] = [at("form"), at("run"), at("stop")];
const guessed = new Pane(at("guessed"), (step) => {
  follows = false;
  showStep(step);
});
const plain = new Pane(at("plain"));
const EXAMPLES = {
  text: 'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n',
  chat: "Explain in three sentences how speculative decoding works.",
};
let running = null; // the AbortController of the runs in progress
let follows = true; // whether the tree shows the newest step
let drawn = null; // the trace that is on the screen
let lastAsked; // the speculation of the run on the screen
let drawingMs = 0; // what the last refresh took

// ---- the step's tree

/** Draw a step of the run with speculation, if it is not on the screen already, and tint its tokens. */
function showStep(number) {
  const step = guessed.steps[number];
  if (!step?.trace) return;
  guessed.mark(number);
  at("step").value = number + 1;
  at("tree-title").textContent = titleOf(number); // changes while later steps come
  if (drawn === step.trace) return;
  drawn = step.trace;
  const trace = guessed.tree(number);
  const [guesses, kept] = [trace.tokens.length - 1, trace.path.length - 1];
  const words = guesses ? `${guesses} ${guesses === 1 ? "guess" : "guesses"}, ${kept} accepted` : "nothing guessed";
  const path = trace.path.slice(1).map((node) => visible(trace.tokens[node]));
  const own = trace.bonus === null ? "" : `; the model’s own token: ${visible(trace.bonus)}`;
  const then = own && ", then the model’s own token";
  at("tree-caption").textContent = `Step ${number + 1} of ${lastTraced() + 1}: ${words}${then}.`;
  const box = at("tree-scroll");
  box.replaceChildren(drawTree(trace, `Step ${number + 1}: ${words}${path.length ? `: ${path.join(", ")}` : ""}${own}`));
  box.style.minHeight = `${Math.max(parseFloat(box.style.minHeight) || 0, box.scrollHeight)}px`; // no jumping between steps
}

function titleOf(number) {
  if (number === lastTraced()) return "The last step";
  return number === lastGuessed() ? "The last step that guessed" : `Step ${number + 1}`;
}

/** The last step with a guess; the last step of all where nothing was guessed. -1: none yet. */
function lastGuessed() {
  const found = guessed.steps.findLastIndex((step) => step.trace?.tokens.length > 1);
  return found < 0 ? lastTraced() : found;
}

function lastTraced() {
  return guessed.steps.findLastIndex((step) => step.trace);
}

function refresh() {
  const begun = performance.now();
  guessed.refresh();
  plain.refresh();
  const last = lastTraced();
  at("step").max = Math.max(1, last + 1);
  at("step-field").hidden = last < 1;
  if (last >= 0 && follows) showStep(lastGuessed());
  drawingMs = performance.now() - begun;
}

// ---- requests

/** The path and body of the request that the form describes, without `speculative`. */
function requestOf() {
  const isChat = form.elements.mode.value === "chat";
  const number = (id) => at(id).valueAsNumber;
  const fresh = crypto.getRandomValues(new Uint32Array(1))[0];
  const seed = at("seed").value === "" ? fresh : number("seed"); // one for both runs
  const body = {
    ...(at("model").value && { model: at("model").value }),
    ...(isChat ? { messages: [{ role: "user", content: at("prompt").value }] } : { prompt: at("prompt").value }),
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed,
    ...(isChat && thoughts()),
    stream: true,
    stream_options: { include_usage: true },
    provenance: true,
    logprobs: isChat ? true : 1, // as OpenAI's two schemas have it
  };
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
}

/** The fields that bound a thought, where the model has thoughts. */
function thoughts() {
  const most = at("thought").valueAsNumber;
  if (at("thought-field").hidden || Number.isNaN(most)) return {};
  return most ? { thinking_budget: most } : { enable_thinking: false };
}

/** The `speculative` field that the form asks for; undefined leaves it to the server. */
function speculation() {
  const method = at("method").value;
  if (method === "none") return { method };
  const [guesses, shape, verify] = [at("guesses").valueAsNumber, at("shape").value, at("verify").value];
  const asked = {
    ...(method && { method }),
    ...(guesses >= 1 && { num_speculative_tokens: guesses }),
    ...(shape && { shape }),
    ...(verify && { verify }),
    ...(at("always").checked && { always: true }),
  };
  return Object.keys(asked).length ? asked : undefined;
}

/** What a verifier says of texts that differ. */
function whyOther(verifier) {
  const option = [...at("verify").options].find(({ value }) => value && value === verifier?.split("/")[0]);
  const promise = option?.closest("optgroup")?.label ?? "";
  if (promise === "The same distribution") return `${verifier} keeps the distribution, not the text.`;
  if (promise.startsWith("Lossy")) return `${verifier} is lossy: it changes the distribution.`;
  return "The default rule keeps the text up to rounding.";
}

/** Why the run guessed nothing, as the server says it, else as far as the page can tell; "" where it did, or was not meant to. */
function whyNothing(asked) {
  if (!guessed.numTokens || asked?.method === "none" || guessed.numGuesses !== 0) return "";
  const told = guessed.final?.plain_reason; // the server's own words
  const hint = asked?.always ? "" : " “Guess in every step”, in the settings, shows guesses at once.";
  if (told) return ` Nothing was guessed: ${told}.${hint}`;
  const method = asked?.method ?? served.method ?? "the method";
  if (method === "none") return " Nothing was guessed: this server has no method of its own. Choose one in the form.";
  if (!asked?.always) return ` Nothing was guessed: the server expects no gain from ${method} here.${hint}`;
  const others = "or other requests shared the passes";
  return ` Nothing was guessed: ${method} found nothing to propose in this text, ${others}.`;
}

const ENDINGS = { stop: "ended by itself", length: "cut at the limit", timeout: "cut when its time was up", context: "cut where the model’s context is full" };

async function streamInto(pane, path, body) {
  pane.clear();
  pane.section.classList.add("live");
  let words = "cut off";
  let waits = false;
  try {
    for await (const chunk of chunks(path, body, theKey(), running.signal)) {
      pane.take(chunk);
      if (!waits) {
        waits = true;
        setTimeout(() => { // a long text takes long to draw: a tenth of the time at most, or the drawing sets the pace
          waits = false;
          refresh();
        }, Math.max(50, 9 * drawingMs));
      }
    }
    words = ENDINGS[pane.finish] ?? `ended: ${pane.finish}`;
  } catch (error) {
    if (error.name === "AbortError") words = "stopped";
    throw error;
  } finally {
    pane.section.classList.remove("live");
    pane.close(words);
    refresh();
  }
}

async function run() {
  keepKey(); // the field tells of a change only when it is left
  const method = speculation();
  const isCompared = at("compare").checked && method?.method !== "none";
  lastAsked = method;
  begin(isCompared, method);
  let body;
  try {
    await unlessStopped(loading); // the model's name
    let path;
    ({ path, body } = requestOf());
    say(method?.method === "none" ? "Running without speculation…" : "Running with speculation…");
    await streamInto(guessed, path, { ...body, trace: true, ...(method && { speculative: method }) });
    if (isCompared) {
      say("Now the same without speculation…"); // after the other, so that neither takes the other's cores
      await streamInto(plain, path, { ...body, speculative: { method: "none" } });
    }
    say(conclude(isCompared, body?.seed));
  } catch (error) {
    if (error.name === "AbortError") {
      say(`Stopped. ${conclude(isCompared, body?.seed)}`);
    } else {
      conclude(isCompared, body?.seed);
      fail(error);
    }
  } finally {
    finish();
    if (listed.some(({ status }) => status && status.value !== "loaded")) loading = loadModels(); // the run loaded one
  }
}

/** What a promise comes to; AbortError where the user stops the run before. */
function unlessStopped(promise) {
  const { signal } = running;
  const stopped = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  return Promise.race([promise, stopped]);
}

function begin(isCompared, method) {
  running = new AbortController();
  follows = true;
  drawn = null;
  guessed.clear();
  plain.clear();
  at("tree-scroll").replaceChildren();
  at("tree-title").textContent = "The last step";
  at("tree-caption").textContent = "";
  at("tree-scroll").style.minHeight = "";
  hideMessages();
  at("verdict").hidden = false;
  at("guessed-title").textContent = method?.method === "none" ? "Without speculation" : "With speculation";
  at("plain").hidden = !isCompared;
  at("panes").classList.toggle("single", !isCompared);
  stopButton.disabled = false;
  if (document.activeElement === runButton) stopButton.focus({ preventScroll: true });
  runButton.disabled = true;
  if (at("results").getBoundingClientRect().top > innerHeight * 0.7) at("results").scrollIntoView();
}

function hideMessages() {
  at("error").hidden = at("ask").hidden = true;
}

function finish() {
  running = null;
  runButton.disabled = false;
  if (document.activeElement === stopButton) runButton.focus({ preventScroll: true });
  stopButton.disabled = true;
}

function say(words) {
  at("status").textContent = words;
  if (words.endsWith("…")) verdict(words, "");
}

function verdict(line, note) {
  at("verdict-line").textContent = line;
  at("verdict-note").textContent = note;
}

/** Compare the two texts, show the outcome, and return it in one sentence. */
function conclude(isCompared, seed) {
  const [a, b] = [guessed.text, plain.text];
  const seedWords = `Seed ${seed}.${whyNothing(lastAsked)}`;
  if (!isCompared || !b) {
    const line = guessed.numTokens ? `${guessed.numTokens} tokens in ${guessed.steps.length} steps.` : "No text.";
    verdict(line, guessed.numTokens ? seedWords : "");
    return line;
  }
  const isWhole = Boolean(guessed.finish && plain.finish);
  const common = Math.min(a.length, b.length);
  let offset = 0;
  while (offset < common && a[offset] === b[offset]) offset += 1;
  const isSame = isWhole ? a === b : offset === common;
  const isPlain = guessed.numGuesses === 0; // both runs did the same
  const ratio = isPlain ? NaN : guessed.rate / plain.rate;
  const figure = Number.isFinite(ratio) ? `, ${ratio.toFixed(2)} × the tokens per second in one run each.` : ".";
  const times = isPlain && isSame ? ", as nothing was guessed." : figure;
  const same = isWhole ? "Identical texts" : "Identical as far as both go";
  const place = [...a.slice(0, offset)].length + 1; // characters, where JavaScript counts halves of some
  const line = isSame ? `${same}${times}` : `The texts differ from character ${place} on${times}`;
  const figures = ` ${guessed.rate.toFixed(1)} tokens/s against ${plain.rate.toFixed(1)}, after the first token.`;
  const rates = Number.isFinite(ratio) ? figures : "";
  const isAsked = ratio < 1 && lastAsked?.always && guessed.numGuesses > 0;
  const loss = isAsked ? " Guessed in every step, as asked; by itself the server guesses where that pays." : "";
  const why = isSame ? "" : ` ${whyOther(lastAsked?.verify ?? served.verify)}`;
  if (!isSame) for (const pane of [guessed, plain]) pane.markDifference(offset);
  verdict(line, `${seedWords}${rates}${loss}${why}`);
  return line;
}

function fail(error) {
  const box = at(error.asks ? "ask" : "error");
  box.textContent = error instanceof Refusal ? error.message : `The page failed: ${error.message}`;
  box.hidden = false;
  at("status").textContent = error.asks ? "" : "Failed: see the message.";
  at("verdict").hidden = running !== null && !guessed.numTokens; // the message says it all
  if (error.status === 401 || error.status === 403) {
    at("key-details").open = true;
    at("key").focus();
  }
  box.scrollIntoView({ block: "nearest" });
}

// ---- one step, taken apart

const reader = new Reader();
new Game();

/** Ask for steps of the form's prompt, and open the one that shows most. */
async function takeApart() {
  keepKey();
  if (!form.reportValidity() || at("apart-run").getAttribute("aria-disabled") === "true") return;
  at("apart-run").setAttribute("aria-disabled", "true");
  at("apart-error").hidden = true;
  at("apart-status").textContent = "Decoding a few steps…";
  reader.hide();
  try {
    await loading;
    const { body, path } = requestOf();
    const prompt = body.prompt ?? body.messages[0].content;
    const { temperature, top_p, seed } = body;
    const asked = { prompt, chat: path.includes("chat"), temperature, top_p, seed };
    const { always, ...speculative } = speculation() ?? {};
    const found = await steps({
      ...asked,
      ...(body.model && { model: body.model }),
      ...(Object.keys(speculative).length && { speculative }),
    }, theKey());
    at("apart-status").textContent = found.steps.length ? `Seed ${found.seed}.` : "The text ended at once: there is no step.";
    if (found.steps.length) reader.show(found);
  } catch (error) {
    at("apart-status").textContent = "";
    at("apart-error").textContent = error instanceof Refusal ? error.message : `The page failed: ${error.message}`;
    at("apart-error").hidden = false;
    if (error.status === 401) at("key-details").open = true;
  } finally {
    at("apart-run").removeAttribute("aria-disabled");
  }
}

at("apart-run").addEventListener("click", takeApart);

// ---- what the server tells about itself

let served = {}; // how the server guesses where a request does not say
let listed = []; // of /v1/models
let wish = ""; // the kind of prompt that the user has chosen
const METHODS = [...at("method").options];

async function loadModels() {
  try {
    listed = await models(theKey());
  } catch (error) {
    if (error.status === 401 || error.status === 403) fail(error);
    return; // whatever else is wrong, a run will say
  }
  const kept = at("model").value;
  at("model").replaceChildren(...listed.map(({ id, parent, status }) => {
    const more = parent ? `, adapter of ${parent}` : status && status.value !== "loaded" ? ", loaded when it is asked" : "";
    return new Option(id + more, id);
  }));
  if (listed.some(({ id }) => id === kept)) at("model").value = kept;
  at("model-field").hidden = !listed.length;
  hideMessages();
  if (listed.length) await chooseModel();
}

/** The chosen model: its kinds of prompt, how it guesses, whether it thinks. */
async function chooseModel() {
  const one = listed.find(({ id }) => id === at("model").value);
  document.title = `${one.id} · foretell`;
  served = one.speculative ?? {};
  const methods = one.methods?.length ? one.methods : null; // those a request may ask for, where the server tells
  const names = METHODS.map(({ value }) => value);
  const others = (methods ?? []).filter((name) => !names.includes(name) && name !== "prediction"); // that needs a text
  const known = METHODS.filter(({ value }) => !methods || !value || value === "none" || methods.includes(value));
  const kept = at("method").value;
  at("method").replaceChildren(...known.slice(0, -1), ...others.map((name) => new Option(name, name)), known.at(-1));
  if ([...at("method").options].some(({ value }) => value === kept)) at("method").value = kept;
  const told = await about(one.id, theKey());
  if (one.id !== at("model").value) return; // another was chosen meanwhile
  at("thought-field").hidden = !told?.capabilities?.includes("thinking");
  const [chat] = form.elements.mode;
  chat.disabled = told?.template === "";
  chat.parentElement.title = chat.disabled ? "The model has no chat template" : "";
  setMode(told?.template === "" ? "text" : wish || "chat");
  showDefaults();
}

/** Chat or plain text, with an example where the user wrote nothing. */
function setMode(mode) {
  form.elements.mode.value = mode;
  at("prompt-label").textContent = mode === "chat" ? "Message" : "Text to continue";
  if (["", ...Object.values(EXAMPLES)].includes(at("prompt").value)) at("prompt").value = EXAMPLES[mode];
}

/** Name what is used where nothing is chosen. */
function showDefaults() {
  at("method").options[0].textContent = served.method ? `default: ${served.method}` : "default";
  const isDefault = ["", served.method].includes(at("method").value);
  at("guesses").placeholder = String((isDefault && served.num_speculative_tokens) || "default");
  for (const id of ["shape", "verify"]) {
    at(id).options[0].textContent = isDefault && served[id] ? `default: ${served[id]}` : "default";
  }
  const method = at("method").value || served.method || "default";
  at("settings-told").textContent =
    `Settings: method ${method}, temperature ${at("temperature").value}, ${at("max_tokens").value} tokens at most`;
}

async function poll() {
  if (document.hidden) return;
  const mine = polling;
  let found = null;
  let mayCome = false;
  try {
    const one = listed.find(({ id }) => id === at("model").value);
    found = await gauges(theKey(), one?.status && one.id); // of several models the chosen one's
  } catch (error) {
    mayCome = !error.status || error.status === 429 || error.status >= 500; // else not served, or not to us
  }
  if (mine !== polling) return; // an answer to another key
  at("gauges").hidden = !found;
  showLearning(at("learning"), theKey(), found !== null && "learn_version" in found);
  showPlan(found ? found.plan : []);
  if (!found) {
    if (!mayCome) clearInterval(mine);
    return;
  }
  for (const cell of document.querySelectorAll("[data-gauge]")) {
    const value = found[cell.dataset.gauge];
    const isSpeedup = cell.dataset.gauge.startsWith("speedup");
    const isKnown = Number.isFinite(value);
    cell.parentElement.hidden = !isKnown && !isSpeedup;
    cell.textContent = !isKnown ? "unknown" : isSpeedup ? `${value.toFixed(2)} ×${lost(found, cell.dataset.gauge)}` : value;
  }
}

/** Of the speedup that is possible, what each part costs. */
function lost(found, gauge) {
  if (gauge !== "speedup_possible") return "";
  const parts = ["guesses", "shape", "time", "width"].map((part) => `${part} −${found[`speedup_lost_${part}`].toFixed(2)}`);
  return ` (${parts.join(", ")})`;
}

/** What auto would do, by length of text (rows) and requests at once (columns): a table for each method. */
function showPlan(cells) {
  at("plan").hidden = !cells.length;
  const tables = [...new Set(cells.map((cell) => cell.method))].map((method) => {
    const mine = cells.filter((cell) => cell.method === method);
    const columns = [...new Set(mine.map((cell) => cell.concurrency))];
    const table = document.createElement("table");
    table.createCaption().textContent = `${method}: guesses, and the speedup expected of them`;
    const head = table.createTHead().insertRow();
    for (const name of ["tokens of text", ...columns.map((count) => `${count} at once`)]) {
      head.append(Object.assign(document.createElement("th"), { textContent: name, scope: "col" }));
    }
    for (const context of new Set(mine.map((cell) => cell.context))) {
      const row = (table.tBodies[0] || table.createTBody()).insertRow();
      row.append(Object.assign(document.createElement("th"), { textContent: context, scope: "row" }));
      for (const count of columns) {
        const cell = mine.find((one) => one.context === context && one.concurrency === count);
        row.insertCell().textContent = !cell ? "" : cell.guesses ? `${cell.guesses} (${cell.speedup.toFixed(2)} ×)` : "none";
      }
    }
    return table;
  });
  at("plan-tables").replaceChildren(...tables);
}

/** The key as it was meant: a copied one often has blanks around it. */
const theKey = () => at("key").value.trim();

/** Remember the key for this tab; a new one may see what the old one could not. */
function keepKey() {
  const key = theKey();
  if (key === keptKey) return;
  keptKey = key;
  stored(() => sessionStorage.setItem("foretell-key", key));
  watchServer();
}

let keptKey = "";
let loading = Promise.resolve();
let polling = 0;
function watchServer() {
  clearInterval(polling);
  polling = setInterval(poll, 5000);
  poll();
  loading = loadModels();
}

// ---- theme: the system's, until the user wants the other

const system = matchMedia("(prefers-color-scheme: dark)");
const stored = (store) => { // storage may be forbidden
  try {
    return store();
  } catch {
    return null;
  }
};

function applyTheme() {
  const theme = stored(() => localStorage.getItem("foretell-theme")) ?? (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  const other = theme === "dark" ? "light" : "dark";
  at("theme").textContent = other === "dark" ? "Dark" : "Light";
  at("theme").setAttribute("aria-label", `Switch to the ${other} theme`);
  at("theme").dataset.other = other;
}

at("theme").addEventListener("click", () => {
  const { other } = at("theme").dataset;
  const isSystems = other === (system.matches ? "dark" : "light");
  stored(() => (isSystems ? localStorage.removeItem("foretell-theme") : localStorage.setItem("foretell-theme", other)));
  applyTheme();
  document.documentElement.dataset.theme = other; // also where nothing can be stored
});
system.addEventListener("change", applyTheme);

// ---- the form

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) run();
});
form.addEventListener("invalid", () => (at("settings").open = true), true); // what is folded cannot be pointed at
stopButton.addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!running) form.requestSubmit();
  } else if (event.key === "Escape") {
    tip.hide();
    running?.abort();
  }
});
form.addEventListener("change", (event) => {
  if (event.target.name === "mode") setMode((wish = form.elements.mode.value));
  if (event.target.id === "model") loading = chooseModel();
  const method = at("method").value;
  for (const id of ["guesses", "shape", "verify", "always"]) at(id).disabled = method === "none";
  showDefaults();
  at("compare").disabled = method === "none";
});
at("step").addEventListener("input", () => {
  const number = at("step").valueAsNumber - 1;
  follows = number === lastGuessed();
  showStep(number);
});
at("key").addEventListener("change", keepKey);

at("key").value = keptKey = stored(() => sessionStorage.getItem("foretell-key")) ?? "";
if (/Mac|iPhone|iPad/.test(navigator.platform)) runButton.querySelector("kbd").textContent = "⌘ ↵";
const wide = matchMedia("(min-width: 62rem)"); // as in style.css: there the form has a column of its own
const fold = () => (at("settings").open = at("toy").open = wide.matches);
wide.addEventListener("change", fold);
fold();
applyTheme();
setMode("chat");
watchServer();
