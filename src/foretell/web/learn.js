// Acceptance over requests, and when learned weights were swapped in or taken back: a line in an SVG.
"use strict";

const PLOT = { least: 260, height: 150, pad: 28, left: 42, smooth: 12 };
const MARKS = { swap: "swap", revert: "revert", refused: "refused", drift: "drift" };

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** Running share of first guesses kept, over the last few requests: [{number, rate}]. */
function smoothed(history) {
  return history.map((one, index) => {
    const last = history.slice(Math.max(0, index - PLOT.smooth + 1), index + 1);
    const sum = (key) => last.reduce((total, each) => total + each[key], 0);
    return { number: one.number, rate: sum("kept") / Math.max(1, sum("guessed")) };
  });
}

/** The plot of GET /v1/foretell/learner, as wide as its place (px): a picture that is scaled has text that nobody can read. */
function drawLearning(state, place = 640) {
  const points = smoothed(state.history);
  const { height, pad, left } = PLOT;
  const width = Math.max(PLOT.least, place);
  const first = points[0]?.number ?? 0;
  const range = Math.max(1, (points.at(-1)?.number ?? 1) - first);
  const x = (number) => left + ((number - first) / range) * (width - left - pad);
  const y = (rate) => height - pad - rate * (height - 2 * pad);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const last = points.at(-1);
  const said = last ? `${(100 * last.rate).toFixed(0)} % of the first guesses are kept` : "no guesses yet";
  const { num_swaps: swaps, num_refused: refused, num_reverts: reverts } = state.figures;
  svg.append(shape("title", {}, `${said}; ${swaps} swaps, ${refused} refused, ${reverts} reverts`));
  for (const rate of [0, 0.5, 1]) {
    svg.append(shape("line", { x1: left, x2: width - pad, y1: y(rate), y2: y(rate), class: "grid" }));
    svg.append(shape("text", { x: 2, y: y(rate) + 4, class: "axis" }, `${100 * rate} %`));
  }
  for (const event of state.events) {
    const kind = MARKS[event.event];
    if (!kind || event.request < first) continue;
    const at = x(Math.min(event.request, first + range));
    const mark = shape("line", { x1: at, x2: at, y1: pad / 2, y2: height - pad, class: `mark ${kind}` });
    mark.append(shape("title", {}, `${event.event} at request ${event.request}`));
    svg.append(mark);
  }
  svg.append(shape("polyline", { points: points.map((one) => `${x(one.number)},${y(one.rate)}`).join(" "), class: "rate" }));
  svg.append(shape("text", { x: width - pad, y: height - 8, "text-anchor": "end", class: "axis" }, "requests"));
  const still = state.failure ? `. Learning has ended: ${state.failure}` : state.paused ? ". Learning is paused" : "";
  return { svg, said: `${said}; ${swaps} swapped in, ${refused} refused, ${reverts} taken back${still}` };
}

/** Show it, or hide the section where the server does not learn. */
async function showLearning(section, key, learns) {
  if (!learns) {
    section.hidden = true;
    return;
  }
  try {
    const state = await (await request("v1/foretell/learner", { headers: headers(key) })).json();
    section.hidden = false; // what is hidden has no width
    const plot = section.querySelector(".plot");
    const { svg, said } = drawLearning(state, plot.clientWidth);
    plot.replaceChildren(svg);
    section.querySelector(".note").textContent = said;
  } catch {
    section.hidden = true;
  }
}
