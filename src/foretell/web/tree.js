// One step as a picture: the tree of guesses, each with its probability, and the path that was kept.
"use strict";

const CHAR = 7.6; // px of a character of the labels' font, at most
const BOX = { height: 40, gap: 14, between: 40, pad: 10, most: 14 };
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]|\p{Emoji_Presentation}/u;
const BLANKS = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A token with its white space made visible; `most` characters of it. */
function visible(text, most = Infinity) {
  const shown = text === "" ? "∅" : text.replace(/[ \n\t\r]/g, (blank) => BLANKS[blank]);
  const characters = [...shown];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : shown;
}

function labelWidth(label) {
  return [...label].reduce((sum, character) => sum + (WIDE.test(character) ? 2 : 1), 0) * CHAR;
}

function percent(probability) {
  const value = 100 * probability;
  if (value > 0 && value < 0.1) return "<0.1 %";
  return `${value > 99.9 && value < 100 ? ">99.9" : value.toFixed(value < 10 ? 1 : 0)} %`;
}

/**
 * Boxes {label, note, kind, from, x, y, width} of a trace: columns are depths, and the kept path is the first line.
 * `trace.notes`, where given, stand in place of the probabilities.
 */
function layout(trace) {
  const kept = new Set(trace.path);
  const last = trace.path.at(-1);
  const boxes = trace.tokens.map((token, node) => ({
    label: visible(token, BOX.most),
    full: token,
    note: trace.notes?.[node] ?? (node === 0 ? "last token" : percent(trace.probability[node])),
    kind: node === 0 ? "root" : kept.has(node) ? "kept" : "dropped",
    probability: trace.probability[node],
    from: trace.parent[node],
    children: [],
  }));
  if (trace.bonus !== null) {
    const label = visible(trace.bonus, BOX.most);
    boxes.push({ label, full: trace.bonus, note: "own token", kind: "bonus", from: last, children: [] });
  }
  boxes.forEach((box, node) => {
    if (box.from >= 0) boxes[box.from].children.push(node);
  });
  const weight = (node) => (boxes[node].kind === "kept" ? 3 : boxes[node].kind === "bonus" ? 2 : boxes[node].probability);
  for (const box of boxes) box.children.sort((a, b) => weight(b) - weight(a));

  const columns = [];
  let rows = 0;
  const place = (node, depth) => {
    const box = boxes[node];
    Object.assign(box, { depth, row: rows });
    columns[depth] = Math.max(columns[depth] ?? 0, labelWidth(box.label), labelWidth(box.note) * 0.86 + 12);
    box.children.forEach((child, nth) => {
      if (nth > 0) rows += 1;
      place(child, depth + 1);
    });
  };
  place(0, 0);

  const left = [1];
  columns.forEach((width, depth) => left.push(left[depth] + width + 2 * BOX.pad + BOX.between));
  for (const box of boxes) {
    box.width = columns[box.depth] + 2 * BOX.pad;
    box.x = left[box.depth];
    box.y = 1 + box.row * (BOX.height + BOX.gap);
  }
  return { boxes, width: left.at(-1) - BOX.between + 1, height: (rows + 1) * (BOX.height + BOX.gap) - BOX.gap + 2 };
}

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** An edge from the right side of one box to the left side of another. */
function edge(from, to) {
  const [x0, y0, x1, y1] = [from.x + from.width, from.y + BOX.height / 2, to.x, to.y + BOX.height / 2];
  const bend = x0 + BOX.between / 2;
  return svg("path", { d: `M${x0} ${y0}C${bend} ${y0} ${bend} ${y1} ${x1} ${y1}`, class: `edge ${to.kind}` });
}

/** The picture of a step: an svg element. `summary` says the same in words. Of the trace, `bonus` is a text or null. */
function drawTree(trace, summary) {
  const { boxes, width, height } = layout(trace);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": summary });
  const order = { dropped: 0, bonus: 1, kept: 2, root: 3 }; // the kept path lies on top
  const drawn = [...boxes].sort((a, b) => order[a.kind] - order[b.kind]);
  for (const box of drawn) if (box.from >= 0) root.append(edge(boxes[box.from], box));
  const names = {
    root: "the last token before the step",
    kept: "accepted",
    dropped: "not accepted",
    bonus: "the model’s own token",
  };
  for (const box of drawn) {
    const group = svg("g", { class: `node ${box.kind}`, transform: `translate(${box.x} ${box.y})` });
    const chance = ["kept", "dropped"].includes(box.kind) ? `, probability ${percent(box.probability)}` : "";
    group.append(svg("title", {}, `${visible(box.full)}: ${names[box.kind]}${chance}`));
    group.append(svg("rect", { width: box.width, height: BOX.height, rx: box.kind === "bonus" ? BOX.height / 2 : 5 }));
    group.append(svg("text", { x: box.width / 2, y: 17, class: "label" }, box.label));
    const note = box.kind === "kept" ? `✓ ${box.note}`.trim() : box.note;
    group.append(svg("text", { x: box.width / 2, y: 32, class: "amount" }, note));
    root.append(group);
  }
  return root;
}
