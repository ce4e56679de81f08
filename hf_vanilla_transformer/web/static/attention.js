// Pictures of attention. `attention` is layers × heads × T × S weights. A head is "mean" or [layer, head].

import { shownText } from "./tokens.js";

const MOST_CELLS = 6000; // of the table. Longer sentences have only the small maps

/** The weights (T × S) of a head, or their mean over all layers and heads. */
export function weightsOf(attention, head) {
  if (head !== "mean") return attention[head[0]]?.[head[1]] ?? weightsOf(attention, "mean");
  const heads = attention.flat();
  return heads[0].map((row, t) => row.map((_, s) => heads.reduce((sum, each) => sum + each[t][s], 0) / heads.length));
}

/** The weights of a row of scores. */
export function softmax(scores) {
  const top = Math.max(...scores);
  const exponentials = scores.map((score) => Math.exp(score - top));
  const sum = exponentials.reduce((total, each) => total + each, 0);
  return exponentials.map((each) => each / sum);
}

/** Draw a small map for each head, in a row for each layer, and a button for their mean. A click calls `choose(head)`. */
export function drawHeads(container, attention, chosen, choose, withMean = true) {
  const mean = document.createElement("button");
  mean.textContent = "mean of all";
  mean.className = "mean";
  const buttons = withMean ? [[mean, "mean"]] : [];
  const rows = attention.flatMap((heads, layer) => {
    const label = document.createElement("span");
    label.textContent = `layer ${layer + 1}`;
    return [label, ...heads.map((weights, head) => {
      const button = document.createElement("button");
      button.setAttribute("aria-label", `layer ${layer + 1}, head ${head + 1}`);
      button.append(map(weights));
      buttons.push([button, [layer, head]]);
      return button;
    })];
  });
  const check = (head) => {
    for (const [button, each] of buttons) {
      button.setAttribute("aria-checked", String(each) === String(head));
      button.tabIndex = String(each) === String(head) ? 0 : -1;
    }
  };
  for (const [button, head] of buttons) {
    button.type = "button";
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => (check(head), choose(head)));
  }
  container.onkeydown = (event) => {
    const at = buttons.findIndex(([button]) => button === event.target);
    const step = { ArrowRight: 1, ArrowDown: attention[0].length, ArrowLeft: -1, ArrowUp: -attention[0].length }[event.key];
    if (!step || at < 0) return;
    event.preventDefault();
    const to = buttons[Math.min(Math.max(at + step, 0), buttons.length - 1)][0];
    to.click();
    to.focus();
  };
  container.style.setProperty("--head-count", attention[0].length);
  container.replaceChildren(...(withMean ? [document.createElement("span"), mean] : []), ...rows);
  check(chosen);
}

/** A canvas with a pixel for each weight, in a colour that suits light and dark. */
export function map(weights) {
  const canvas = document.createElement("canvas");
  canvas.width = weights[0].length;
  canvas.height = weights.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  weights.flat().forEach((weight, i) => image.data.set([90, 115, 230, Math.round(255 * weight)], 4 * i));
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Draw the weights of one head as a table with a row for each target token. Pointing at it calls `look(row)`. */
export function drawWeights(table, weights, tokens, source, look) {
  table.replaceChildren();
  if (weights.length * source.length > MOST_CELLS) return;
  const head = table.createTHead().insertRow();
  head.append(document.createElement("td"), ...source.map(({ text }) => heading(text, "col")));
  const body = table.createTBody();
  weights.forEach((row, t) => {
    const line = body.insertRow();
    line.append(heading(tokens[t].text, "row"));
    for (const [s, weight] of row.entries()) {
      const cell = line.insertCell();
      cell.style.setProperty("--weight", weight);
      cell.title = `${(100 * weight).toFixed(0)} % on “\u2068${source[s].text.trim().slice(0, 60)}\u2069”`;
    }
    line.addEventListener("pointerenter", () => look?.(t));
  });
}

function heading(text, scope) {
  const cell = document.createElement("th");
  cell.scope = scope;
  cell.textContent = shownText(text).slice(0, 20);
  return cell;
}
