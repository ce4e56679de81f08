// The visible page, and its reactions to input. All text reaches the page as text nodes, never as HTML.

import { drawHeads, drawWeights, weightsOf } from "./attention.js";
import { drawTree, treeOf } from "./beam_tree.js";

const byId = (id) => document.getElementById(id);
const TYPING_PAUSE = 120; // milliseconds without a key before a translation starts
const FRAME = 40; // milliseconds between two drawings of the growing tree

const state = {
  site: null,
  engine: null,
  translation: null,
  prefix: [], // token ids that the user fixed
  token: null, // index of the chosen token
  pinned: false, // it was clicked, so that it stays when the pointer leaves
  head: "mean", // or [layer, head]
  running: null, // AbortController of the search
  settled: Promise.resolve(), // when the last search has ended
};

start().catch(showError);

async function start() {
  const site = await readJSON("site.json");
  state.site = site;
  describe(site);
  connect();
  await load(site.dtypes && Object.keys(site.dtypes)[0]);
}

/** Load the engine, in a browser with the weights of `dtype`. */
async function load(dtype) {
  const source = byId("source");
  source.disabled = true;
  try {
    if (state.site.engine === "server") {
      state.engine = await (await import("./server_engine.js")).createEngine();
    } else {
      const { loadEngine } = await import("./browser_runtime.js");
      byId("progress").hidden = false;
      state.engine = await loadEngine(state.site, dtype, showProgress);
    }
  } finally {
    byId("progress").hidden = true;
  }
  byId("error").hidden = true;
  source.disabled = false;
  showFacts();
  translate();
}

function describe(site) {
  const language = (code) => code && new Intl.DisplayNames(["en"], { type: "language" }).of(code);
  const [from, to] = [language(site.source_language), language(site.target_language)];
  const title = from && to ? `${from} → ${to}` : site.title;
  document.title = byId("title").textContent = title;
  if (from) byId("source-language").textContent = from;
  if (to) byId("target-language").textContent = to;
  if (site.source_language) byId("source").lang = site.source_language;
  if (site.target_language) byId("tokens").lang = site.target_language;
  byId("where").textContent =
    site.engine === "server" ? "Computed by the server of this page." : "Computed in this tab: your text stays here.";
  byId("beams").value = site.search.num_beams;
  const dtypes = Object.entries(site.dtypes ?? {});
  byId("dtype-choice").hidden = dtypes.length < 2;
  for (const [name, { bytes }] of dtypes) byId("dtype").append(new Option(`${name}, ${megabytes(bytes)}`, name));
  for (const text of site.examples ?? []) {
    byId("examples").append(element("button", { type: "button", textContent: text, onclick: () => setText(text) }));
  }
}

function connect() {
  let timer;
  byId("source").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => ((state.prefix = []), translate()), TYPING_PAUSE);
  });
  byId("beams").addEventListener("change", translate);
  byId("dtype").addEventListener("change", (event) => load(event.target.value).catch(showError));
  byId("release").addEventListener("click", () => ((state.prefix = []), translate()));
  byId("tokens").addEventListener("keydown", moveBetweenTokens);
  document.addEventListener("keydown", (event) => event.key === "Escape" && look(null));
}

function setText(text) {
  byId("source").value = text;
  state.prefix = [];
  translate();
}

// Translating

async function translate() {
  state.running?.abort();
  const controller = (state.running = new AbortController());
  const { signal } = controller;
  await state.settled; // onnxruntime runs one search at a time
  if (signal.aborted || !state.engine) return;
  byId("tokens").classList.add("busy");
  let drawn = 0;
  const onStep = async (nodes) => {
    await new Promise((resume) => setTimeout(resume)); // let the page react to keys
    if (performance.now() - drawn > FRAME && !signal.aborted) {
      drawTree(byId("tree"), nodes);
      drawn = performance.now();
    }
  };
  const started = performance.now();
  const beams = Math.min(Math.max(Math.trunc(Number(byId("beams").value)) || 1, 1), 8);
  const search = state.engine.translate(byId("source").value, { num_beams: beams, prefix: state.prefix, signal, onStep });
  state.settled = search.then(ignore, ignore);
  try {
    const translation = await search;
    if (signal.aborted) return;
    byId("error").hidden = true;
    show(translation);
    showFacts((performance.now() - started) / Math.max(translation.tokens.length, 1));
  } catch (error) {
    if (!signal.aborted) showError(error);
  } finally {
    if (!signal.aborted) byId("tokens").classList.remove("busy");
  }
}

function ignore() {}

function show(translation) {
  state.translation = translation;
  byId("spoken").textContent = translation.text;
  byId("source-tokens").replaceChildren(
    ...translation.source.map((token, i) => {
      const span = tokenElement(token);
      span.addEventListener("pointerenter", () => showColumn(i));
      span.addEventListener("pointerleave", () => showToken());
      return span;
    }),
  );
  byId("tokens").replaceChildren(...translation.tokens.map(targetToken));
  byId("prefix").hidden = state.prefix.length === 0;
  const empty = translation.tokens.length === 0;
  for (const id of ["attention", "search", "legend"]) byId(id).hidden = empty;
  state.pinned = false;
  state.token = null;
  showToken();
  if (empty) return;
  drawHeads(byId("heads"), translation.attention, state.head, chooseHead);
  showWeights();
  drawTree(byId("tree"), treeOf(translation));
  byId("hypotheses").replaceChildren(...translation.hypotheses.map(hypothesisElement));
}

// Tokens

function tokenElement({ text }, tag = "span") {
  const special = /^<.*>$/.test(text) || text === "";
  return element(tag, { className: special ? "token special" : "token", textContent: shortened(text || "·") });
}

function targetToken(token, i) {
  const { probabilities } = state.translation;
  const span = tokenElement(token);
  span.style.setProperty("--doubt-share", 1 - probabilities[i]);
  span.classList.toggle("fixed", i < state.prefix.length);
  span.tabIndex = i === 0 ? 0 : -1; // the arrow keys reach the others
  span.setAttribute("role", "button");
  span.setAttribute("aria-label", `${shortened(token.text)}, probability ${percent(probabilities[i])}`);
  span.addEventListener("pointerenter", () => state.pinned || look(i));
  span.addEventListener("focus", () => state.pinned || look(i));
  span.addEventListener("click", () => pin(i));
  return span;
}

function moveBetweenTokens(event) {
  const spans = [...byId("tokens").children];
  const at = spans.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pin(at);
    byId("alternatives").querySelector("button")?.focus();
  } else if (spans[to]) {
    event.preventDefault();
    spans[at].tabIndex = -1;
    spans[to].tabIndex = 0;
    state.pinned = false;
    spans[to].focus();
  }
}

function pin(i) {
  const again = state.pinned && state.token === i;
  look(i);
  state.pinned = !again;
}

/** Choose token `i` and show its attention and alternatives. null chooses none. */
function look(i) {
  state.token = i;
  if (i === null) state.pinned = false;
  showToken();
}

function showToken() {
  const { translation, token } = state;
  const row = token === null ? null : weightsOf(translation.attention, state.head)[token];
  [...byId("source-tokens").children].forEach((span, i) => span.style.setProperty("--weight", row?.[i] ?? 0));
  [...byId("tokens").children].forEach((span, i) => span.classList.toggle("chosen", i === token));
  [...(byId("weights").tBodies[0]?.rows ?? [])].forEach((each, i) => each.classList.toggle("chosen", i === token));
  byId("alternatives").hidden = token === null;
  if (token !== null) showAlternatives(token);
}

/** Mark the target tokens that attend to source token `i`. */
function showColumn(i) {
  const weights = weightsOf(state.translation.attention, state.head);
  [...byId("source-tokens").children].forEach((span, j) => span.style.setProperty("--weight", i === j ? 1 : 0));
  [...byId("tokens").children].forEach((span, j) => span.classList.toggle("chosen", weights[j]?.[i] >= 0.25));
}

function showAlternatives(position) {
  const { tokens, alternatives } = state.translation;
  byId("alternatives-title").querySelector("bdi").textContent = `“${shortened(tokens[position].text.trim() || "·")}”`;
  byId("alternatives").querySelector("ol").replaceChildren(
    ...alternatives[position].map(({ id, text, probability }) => {
      const button = element("button", { type: "button", onclick: () => goOn(position, id) });
      button.append(element("bdi", { textContent: shortened(text || "·") }), element("span", { textContent: percent(probability) }));
      button.style.setProperty("--share", probability);
      if (id === tokens[position].id) button.setAttribute("aria-current", "true");
      const item = element("li");
      item.append(button);
      return item;
    }),
  );
}

/** Translate again with the tokens before `position` and this one. */
function goOn(position, id) {
  const { tokens } = state.translation;
  const prefix = [...tokens.slice(0, position).map((token) => token.id), id];
  const ends = state.site.search.eos_token_ids ?? [tokens.at(-1).id];
  state.prefix = ends.includes(id) ? prefix.slice(0, -1) : prefix;
  translate();
}

// Attention, hypotheses, facts

function chooseHead(head) {
  state.head = head;
  showWeights();
  showToken();
}

function showWeights() {
  const { source, tokens, attention } = state.translation;
  drawWeights(byId("weights"), weightsOf(attention, state.head), tokens, source, (i) => state.pinned || look(i));
}

function hypothesisElement({ text, score }) {
  const item = element("li");
  item.append(element("bdi", { textContent: text }), " ");
  if (score !== null) item.append(element("span", { textContent: `score ${score.toFixed(3)}` }));
  return item;
}

function showFacts(milliseconds) {
  const { site } = state;
  const { bytes, dtype } = site.dtypes ? { ...site.dtypes[byId("dtype").value], dtype: byId("dtype").value } : site;
  const parts = [`${count(site.parameters)} parameters`, `${megabytes(bytes)} (${dtype})`, `${site.layers} layers × ${site.heads} heads`];
  if (milliseconds !== undefined && state.translation.tokens.length) parts.push(`${milliseconds.toFixed(1)} ms a token`);
  byId("facts").textContent = parts.join(" · ");
}

function showProgress(loaded, total) {
  byId("loaded").value = loaded / total;
  byId("progress").querySelector("span").textContent = `Loading ${megabytes(loaded)} of ${megabytes(total)}`;
}

function showError(error) {
  byId("error").textContent = error.message || String(error);
  byId("error").hidden = false;
}

async function readJSON(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path} is missing (status ${response.status}): export the site again.`);
  return response.json();
}

function element(tag, properties = {}) {
  return Object.assign(document.createElement(tag), properties);
}

const shortened = (text) => (text.length > 60 ? `${text.slice(0, 57)}…` : text);
const percent = (probability) => `${(100 * probability).toFixed(probability < 0.0995 ? 1 : 0)} %`;
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
const count = (number) => (number < 1e6 ? `${Math.round(number / 1e3)} thousand` : `${(number / 1e6).toFixed(1)} million`);
