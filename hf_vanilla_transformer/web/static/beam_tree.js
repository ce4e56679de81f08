// The tree of a beam search: a column for each step, the best hypothesis of a step at the top.

import { shownText } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 30, GAP = 26, PADDING = 9, CHARACTER = 7.2; // pixels
const LONGEST = 14; // characters of a label

/** The tree of a translation, made of its hypotheses if the engine gives none. */
export function treeOf({ tree, hypotheses }) {
  if (tree) return tree;
  const nodes = [];
  hypotheses.forEach((hypothesis, rank) => {
    let parent = -1;
    hypothesis.tokens.forEach((id, i) => {
      const last = i === hypothesis.tokens.length - 1;
      let at = last ? -1 : nodes.findIndex((node) => node.parent === parent && node.id === id && node.state === "running");
      if (at < 0) {
        const state = last ? (rank === 0 ? "best" : "ended") : "running";
        at = nodes.push({ parent, id, text: hypothesis.token_texts[i], state }) - 1;
      }
      parent = at;
    });
  });
  return nodes;
}

/** Draw nodes {parent, text, state}. Each comes after its parent. */
export function drawTree(svg, nodes) {
  const { columns, best } = arrange(nodes);
  const widths = columns.map((column) => 2 * PADDING + CHARACTER * Math.max(...column.map((i) => label(nodes[i]).length)));
  const lefts = widths.map((_, i) => 1 + widths.slice(0, i).reduce((sum, width) => sum + width + GAP, 0));
  const height = ROW * Math.max(1, ...columns.map((column) => column.length));
  svg.setAttribute("width", (lefts.at(-1) ?? 0) + (widths.at(-1) ?? 0) + 2);
  svg.setAttribute("height", height);
  const lines = [], boxes = [], position = new Map();
  columns.forEach((column, step) => {
    column.forEach((i, row) => {
      const y = ROW * row + ROW / 2;
      position.set(i, { x: lefts[step], right: lefts[step] + widths[step], y });
      const group = node("g", { class: best.has(i) ? "best" : nodes[i].state });
      group.append(
        node("rect", { x: lefts[step], y: y - 11, width: widths[step], height: 22, rx: nodes[i].state === "running" ? 6 : 11 }),
        node("text", { x: lefts[step] + widths[step] / 2, y }, label(nodes[i])),
      );
      boxes.push(group);
      const from = position.get(nodes[i].parent);
      if (!from) return;
      const middle = (from.right + lefts[step]) / 2;
      const d = `M${from.right} ${from.y}C${middle} ${from.y} ${middle} ${y} ${lefts[step]} ${y}`;
      lines.push(node("path", { d, class: best.has(i) ? "best" : "" }));
    });
  });
  lines.sort((a, b) => a.classList.contains("best") - b.classList.contains("best"));
  svg.replaceChildren(...lines, ...boxes);
}

/** The nodes of each step, siblings next to each other, and the nodes of the best hypothesis. */
function arrange(nodes) {
  const columns = [], steps = [], rows = [];
  nodes.forEach((each, i) => {
    steps[i] = each.parent < 0 ? 0 : steps[each.parent] + 1;
    (columns[steps[i]] ??= []).push(i);
  });
  for (const column of columns) {
    column.sort((a, b) => (rows[nodes[a].parent] ?? 0) - (rows[nodes[b].parent] ?? 0) || a - b);
    column.forEach((i, row) => (rows[i] = row));
  }
  const best = new Set();
  for (let i = nodes.findIndex(({ state }) => state === "best"); i >= 0; i = nodes[i].parent) best.add(i);
  return { columns, best };
}

function label({ text }) {
  const shown = shownText(text);
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

function node(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
