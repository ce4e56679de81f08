// The numbers on the way to a token: scores and weights of an attention, the residual stream, the position vector.

import { drawHeads, drawWeights, map, softmax } from "./attention.js";
import { nameOf, shownText } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const START = { text: "<start>" }; // the decoder's first input
const choice = { token: 0, head: [0, 0] };
let shown; // the translation
let view; // of it, the chosen attention

const number = (value) => value.toFixed(5);
const short = (value) => value.toFixed(3); // scores of a model in bfloat16 have no more digits

/** Draw the inside of a translation. Without `translation.inside` only say that it is missing. */
export function drawInside(translation) {
  shown = translation;
  byId("inside-missing").hidden = Boolean(translation.inside);
  byId("inside-body").hidden = !translation.inside;
  if (translation.inside) draw();
}

/** Choose a token of the "source" or the "translation". */
export function chooseInside(side, token) {
  const kind = byId("inside-kind");
  if ((kind.value === "encoder") !== (side === "source")) kind.value = side === "source" ? "encoder" : "decoder";
  choice.token = token;
  if (shown?.inside) draw();
}

export function connectInside() {
  const chooseToken = (token) => ((choice.token = token), drawNumbers());
  byId("inside-kind").addEventListener("change", draw);
  byId("inside-token").addEventListener("change", ({ target }) => chooseToken(target.selectedIndex));
  byId("inside-weights").addEventListener("click", ({ target }) => {
    const line = target.closest("tbody tr");
    if (line) chooseToken(line.sectionRowIndex);
  });
}

/** The chosen attention: its scores (layers × heads × queries × keys), the tokens, and the stack that computes it. */
function chosenAttention() {
  const { source, tokens, inside } = shown;
  const { encoder, decoder, cross } = inside;
  const read = [START, ...tokens.slice(0, -1)];
  return {
    encoder: { scores: encoder.scores, queries: source, keys: source, stack: encoder },
    decoder: { scores: decoder.scores, queries: tokens, keys: read, stack: decoder, causal: true },
    cross: { scores: cross, queries: tokens, keys: source, stack: decoder },
  }[byId("inside-kind").value];
}

/** Draw another attention, or that of another translation. */
function draw() {
  view = chosenAttention();
  const { scores, queries } = view;
  choice.token = Math.min(choice.token, queries.length - 1);
  if (!scores[choice.head[0]]?.[choice.head[1]]) choice.head = [0, 0];
  const weightsOf = (row, t) => [...softmax(visible(row, t)), ...row.slice(t + 1).fill(0)].slice(0, row.length);
  view.weights = scores.map((heads) => heads.map((rows) => rows.map(weightsOf)));
  byId("inside-token").replaceChildren(...queries.map((token, i) => new Option(`${i + 1}. ${nameOf(token)}`)));
  drawHeads(byId("inside-heads"), view.weights, choice.head, (head) => ((choice.head = head), drawNumbers()), false);
  drawNumbers();
}

/** The scores of query `t` that the softmax sees: in the decoder those of itself and of earlier positions. */
const visible = (row, t) => (view.causal ? row.slice(0, t + 1) : row);

/** Draw the numbers of the chosen token and head. */
function drawNumbers() {
  const { scores, weights, queries, keys, stack } = view;
  const { token, head: [layer, head] } = choice;
  byId("inside-token").selectedIndex = token;
  drawWeights(byId("inside-weights"), weights[layer][head], queries, keys);
  byId("inside-weights").tBodies[0]?.rows[token].classList.add("chosen");
  byId("inside-head").textContent = `Layer ${layer + 1}, head ${head + 1}`;
  byId("inside-row").replaceChildren(
    ...visible(scores[layer][head][token], token).map((score, k) => {
      const weight = weights[layer][head][token][k];
      return line(shownText(keys[k].text), [short(score), number(weight)], weight);
    }),
  );
  const norms = stack.norms.map((lengths) => lengths[token]);
  const longest = Math.max(...norms);
  byId("inside-norms").replaceChildren(
    ...norms.map((norm, i) => line(i ? `layer ${i}` : "embedding + position", [number(norm)], norm / longest)),
  );
  drawPositions(stack.positions, token);
}

/** A row of a table: its name, and numbers, the last of them with a bar. */
function line(name, numbers, share) {
  const row = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  head.append(Object.assign(document.createElement("bdi"), { textContent: name }));
  row.append(head);
  for (const text of numbers) row.insertCell().textContent = text;
  row.lastChild.className = "bar";
  row.lastChild.style.setProperty("--share", share);
  return row;
}

/** A map of all positions, and the numbers of one. */
function drawPositions(positions, token) {
  byId("inside-positions").replaceChildren(map(positions.map((vector) => vector.map((value) => (value + 1) / 2))));
  byId("inside-positions").style.setProperty("--at", (token + 0.5) / positions.length);
  const [dimensions, values] = byId("inside-position").rows;
  const fill = (row, texts) => {
    row.replaceChildren(row.cells[0]);
    for (const text of texts) row.insertCell().textContent = text;
  };
  fill(dimensions, positions[token].keys());
  fill(values, positions[token].map(number));
  byId("inside-at").textContent = `Position ${token}`;
}
