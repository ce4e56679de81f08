// The visible page, and its reactions to input. All text reaches the page as text nodes, never as HTML.

import { drawHeads, drawWeights, weightsOf } from "./attention.js";
import { drawTree, treeOf } from "./beam_tree.js";
import { chooseInside, connectInside, drawInside } from "./inside.js";
import { sentenceAt } from "./sentences.js";
import { alternativeLabel, chip, direction, languageName, nameOf, percent, wordsOf } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const TYPING_PAUSE = 120; // milliseconds without a key before a translation starts
const MOST_BEAMS = 8; // that can be chosen, unless the search has more
const FRAME = 40; // milliseconds between two drawings of the growing tree

const state = {
  site: null,
  engine: null,
  text: "", // that is translated
  translation: null,
  choices: new Map(), // sentence -> {prefix, text}: the tokens that the user fixed, and the translation with them
  withInside: false, // whether the translation was asked for with the view of the inside
  token: null, // index of the chosen token
  focus: null, // index of the token that gets the focus after the next translation
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
      state.engine = await (await import("./server_engine.js")).createEngine(() => sessionStorage.getItem("key"));
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
  if (site.task === "sequence") {
    for (const each of document.querySelectorAll("[data-sequence]")) each.textContent = each.dataset.sequence;
  }
  const { source_language: from, target_language: to } = site;
  const title = from && to ? `${languageName(from)} → ${languageName(to)}` : site.title;
  document.title = byId("title").textContent = title;
  if (from) byId("source-language").textContent = languageName(from);
  if (to) byId("target-language").textContent = languageName(to);
  const ofSource = ["source", "source-tokens", "examples"].map(byId);
  const ofTarget = [...["translation", "tokens", "hypotheses"].map(byId), byId("alternatives").querySelector("ol")];
  for (const [elements, code] of [[ofSource, from], [ofTarget, to]]) {
    for (const each of elements) {
      if (code) each.lang = code.replaceAll("_", "-");
      each.dir ||= direction(code);
    }
  }
  byId("where").textContent =
    site.engine === "server" ? "Computed by the server of this page." : "Computed in this tab: your text stays here.";
  byId("source").maxLength = site.max_characters ?? 10000;
  byId("beams").max = Math.max(MOST_BEAMS, site.search.num_beams);
  byId("beams").value = site.search.num_beams;
  byId("key").hidden = !site.key_required || sessionStorage.getItem("key") !== null;
  byId("source").value = sessionStorage.getItem("text") ?? "";
  sessionStorage.removeItem("text");
  const dtypes = Object.entries(site.dtypes ?? {});
  byId("dtype-choice").hidden = dtypes.length < 2;
  for (const [name, { bytes }] of dtypes) byId("dtype").append(new Option(`${name}, ${megabytes(bytes)}`, name));
  for (const text of site.examples ?? []) {
    byId("examples").append(element("button", { type: "button", textContent: text, onclick: () => setText(text) }));
  }
  offerLanguages(site);
  addEventListener("hashchange", openNamed);
  for (const details of document.querySelectorAll("details")) {
    const stored = localStorage.getItem(details.id);
    if (stored) details.open = stored === "open";
    details.addEventListener("toggle", () => localStorage.setItem(details.id, details.open ? "open" : "closed"));
  }
  openNamed();
}

/** Open the part of the page that its address names, such as #inside. */
function openNamed() {
  const part = byId(location.hash.slice(1));
  if (part?.tagName === "DETAILS") part.open = true;
}

/** The languages of the server's other pages, and the way there. */
function offerLanguages({ source_language: from, target_language: to, pages = [] }) {
  if (pages.length === 0) return;
  byId("languages").hidden = false;
  const unique = (codes) => [...new Set(codes)];
  const options = (codes, own) => codes.map((code) => new Option(languageName(code), code, false, code === own));
  byId("source-choice").append(...options(unique(pages.map((page) => page.source)), from));
  byId("target-choice").append(...options(pages.filter((page) => page.source === from).map((page) => page.target), to));
  const open = (page, text) => {
    sessionStorage.setItem("text", text);
    location.href = page.path;
  };
  const text = () => byId("source").value;
  byId("source-choice").addEventListener("change", ({ target }) => {
    const others = pages.filter((page) => page.source === target.value);
    open(others.find((page) => page.target === to) ?? others[0], text());
  });
  byId("target-choice").addEventListener("change", ({ target }) => {
    open(pages.find((page) => page.source === from && page.target === target.value), text());
  });
  const reverse = pages.find((page) => page.source === to && page.target === from);
  byId("swap").disabled = !reverse;
  byId("swap").addEventListener("click", () => open(reverse, byId("translation").textContent));
}

function connect() {
  let timer;
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(translate, TYPING_PAUSE);
  };
  byId("source").addEventListener("input", () => (setStale(true), soon()));
  document.addEventListener("selectionchange", () => {
    const { translation, text } = state;
    if (document.activeElement !== byId("source") || byId("source").value !== text) return;
    if (translation && sentenceAt(translation.parts, byId("source").selectionStart) !== translation.sentence) soon();
  });
  byId("beams").addEventListener("change", () => (state.choices.clear(), translate()));
  byId("dtype").addEventListener("change", (event) => load(event.target.value).catch(showError));
  byId("release").addEventListener("click", () => {
    state.choices.delete(sentence());
    state.focus = 0;
    translate();
  });
  byId("copy").addEventListener("click", copy);
  byId("tokens").addEventListener("keydown", moveBetweenTokens);
  byId("alternatives").addEventListener("toggle", (event) => event.newState === "closed" && look(null));
  byId("key").addEventListener("submit", useKey);
  byId("inside").addEventListener("toggle", () => lacksInside() && translate());
  connectInside();
}

/** Whether the view of the inside is open and an engine has not been asked for it. */
function lacksInside() {
  return byId("inside").open && state.translation?.tokens.length > 0 && !state.withInside;
}

function useKey(event) {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key-text").value.trim());
  byId("key").hidden = true;
  byId("source").focus();
  translate();
}

function setText(text) {
  byId("source").value = text;
  byId("source").focus();
  translate();
}

async function copy() {
  await navigator.clipboard.writeText(byId("translation").textContent);
  byId("copy").textContent = "Copied";
  setTimeout(() => (byId("copy").textContent = "Copy"), 1500);
}

// Translating

/** The sentence that is shown in detail. */
function sentence() {
  const { parts = [], sentence: index } = state.translation ?? {};
  return parts[index]?.source;
}

async function translate() {
  state.running?.abort();
  const controller = (state.running = new AbortController());
  const { signal } = controller;
  await state.settled; // onnxruntime runs one search at a time
  if (signal.aborted || !state.engine) return;
  setStale(true);
  let drawn = 0;
  const onStep = async (nodes) => {
    await new Promise((resume) => setTimeout(resume)); // let the page react to keys
    if (performance.now() - drawn > FRAME && !signal.aborted) {
      drawTree(byId("tree"), nodes);
      drawn = performance.now();
    }
  };
  const started = performance.now();
  const beams = Math.min(Math.max(Math.trunc(Number(byId("beams").value)) || 1, 1), Number(byId("beams").max));
  const text = byId("source").value, caret = byId("source").selectionStart;
  const { parts } = state.translation ?? {};
  const at = text === state.text && parts ? parts[sentenceAt(parts, caret)]?.source : undefined;
  const prefix = state.choices.get(at)?.prefix ?? [];
  const inside = byId("inside").open;
  const search = state.engine.translate(text, { caret, num_beams: beams, prefix, inside, signal, onStep });
  state.settled = search.then(ignore, ignore);
  try {
    const translation = await search;
    if (signal.aborted) return;
    byId("error").hidden = true;
    Object.assign(state, { text, withInside: inside });
    show(translation, prefix);
    showFacts((performance.now() - started) / Math.max(translation.tokens.length, 1));
  } catch (error) {
    if (!signal.aborted) showError(error);
  }
}

function ignore() {}

/** Dim the translation while it does not belong to the text. */
function setStale(stale) {
  byId("translation").classList.toggle("stale", stale);
  byId("tokens").classList.toggle("stale", stale);
}

function show(translation, prefix) {
  state.translation = translation;
  const { parts, tokens, sentence: index } = translation;
  if (prefix.length) state.choices.set(sentence(), { prefix, text: parts[index].target });
  else state.choices.delete(sentence());
  byId("alternatives").hidePopover();
  showTranslation();
  setStale(false);
  byId("spoken").textContent = byId("translation").textContent;
  byId("source-tokens").replaceChildren(...translation.source.map(sourceToken));
  byId("tokens").replaceChildren(...tokens.map((token, i) => targetToken(token, i, prefix)));
  byId("prefix").hidden = prefix.length === 0;
  byId("note").hidden = !translation.note;
  byId("note").textContent = translation.note ?? "";
  const empty = tokens.length === 0;
  for (const id of ["attention", "inside", "search"]) byId(id).hidden = empty;
  for (const id of ["examples", "hint"]) byId(id).hidden = byId("source").value !== "";
  byId("copy").hidden = byId("translation").textContent.trim() === "" || !navigator.clipboard;
  look(null);
  if (empty) return;
  drawHeads(byId("heads"), translation.attention, state.head, chooseHead);
  showWeights();
  drawInside(translation);
  drawTree(byId("tree"), treeOf(translation));
  byId("search-note").textContent = translation.tree
    ? "Every hypothesis that the search kept, step by step. The best one is bold."
    : "The hypotheses with which the search ended. The best one is bold.";
  const listed = translation.predictions ?? translation.hypotheses;
  byId("hypotheses").replaceChildren(...listed.map(hypothesisElement));
  if (state.focus !== null) byId("tokens").children[Math.min(state.focus, tokens.length - 1)]?.focus();
  state.focus = null;
}

/** The whole translation as text that can be read and copied. The words of one sentence can be pointed at. */
function showTranslation() {
  const { parts, sentence: index, tokens, probabilities } = state.translation;
  let start = 0;
  const nodes = parts.flatMap(({ source, target, is_sentence }, i) => {
    const from = start;
    start += source.length;
    if (i !== index && is_sentence) {
      const text = state.choices.get(source)?.text ?? target;
      return [element("span", { textContent: text, className: "sentence", onclick: () => isClick() && moveCaret(from) })];
    }
    if (i !== index || tokens.length === 0) return [target];
    return wordsOf(target, tokens).map(([text, token]) => (token === null ? text : wordElement(text, token, probabilities)));
  });
  byId("translation").replaceChildren(...nodes);
}

function wordElement(text, i, probabilities) {
  const span = element("span", { className: "word", textContent: text });
  span.dataset.token = i;
  span.style.setProperty("--doubt-share", 1 - probabilities[i]);
  span.addEventListener("pointerenter", () => isOpen() || look(i));
  span.addEventListener("pointerleave", () => isOpen() || look(null));
  span.addEventListener("click", () => isClick() && openAlternatives(i, span));
  return span;
}

/** A click, and not the end of a selection with the pointer. */
function isClick() {
  return getSelection().isCollapsed;
}

function moveCaret(position) {
  byId("source").focus();
  byId("source").setSelectionRange(position, position);
  translate();
}

// Tokens

function sourceToken(token, i) {
  const span = chip(token, "span");
  span.addEventListener("pointerenter", () => isOpen() || showColumn(i));
  span.addEventListener("pointerleave", () => isOpen() || look(null));
  span.addEventListener("click", () => chooseInside("source", i));
  return span;
}

function targetToken(token, i, prefix) {
  const { probabilities, attention, source } = state.translation;
  const button = chip(token, "button");
  button.type = "button";
  button.classList.toggle("fixed", i < prefix.length);
  button.tabIndex = i === 0 ? 0 : -1; // the arrow keys reach the others
  button.style.setProperty("--doubt-share", 1 - probabilities[i]);
  const row = weightsOf(attention, "mean")[i];
  const seen = nameOf(source[row.indexOf(Math.max(...row))]);
  button.setAttribute("aria-label", `${nameOf(token)}, probability ${percent(probabilities[i])}, looks at ${seen}`);
  button.addEventListener("pointerenter", () => isOpen() || look(i));
  button.addEventListener("pointerleave", () => isOpen() || look(null));
  button.addEventListener("focus", () => isOpen() || look(i));
  button.addEventListener("click", () => openAlternatives(i, button));
  return button;
}

function moveBetweenTokens(event) {
  const buttons = [...byId("tokens").children];
  const at = buttons.indexOf(event.target);
  const [back, forward] = byId("tokens").dir === "rtl" ? ["ArrowRight", "ArrowLeft"] : ["ArrowLeft", "ArrowRight"];
  const to = { [forward]: at + 1, [back]: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (!buttons[to]) return;
  event.preventDefault();
  buttons[at].tabIndex = -1;
  buttons[to].tabIndex = 0;
  buttons[to].focus();
}

/** Choose token `i` and show its attention. null chooses none. */
function look(i) {
  state.token = i;
  const { translation } = state;
  const row = i === null ? null : weightsOf(translation.attention, state.head)[i];
  [...byId("source-tokens").children].forEach((span, j) => span.style.setProperty("--weight", row?.[j] ?? 0));
  mark((j) => j === i);
  [...(byId("weights").tBodies[0]?.rows ?? [])].forEach((line, j) => line.classList.toggle("chosen", j === i));
}

/** Mark the target tokens that attend to source token `i`. */
function showColumn(i) {
  const weights = weightsOf(state.translation.attention, state.head);
  [...byId("source-tokens").children].forEach((span, j) => span.style.setProperty("--weight", i === j ? 1 : 0));
  mark((j) => weights[j]?.[i] >= 0.25);
}

function mark(isChosen) {
  [...byId("tokens").children].forEach((button, j) => button.classList.toggle("chosen", isChosen(j)));
  for (const span of byId("translation").querySelectorAll(".word")) span.classList.toggle("chosen", isChosen(Number(span.dataset.token)));
}

// Alternatives

function isOpen() {
  return byId("alternatives").matches(":popover-open");
}

/** Open the alternatives to a token next to its element. */
function openAlternatives(position, anchor) {
  const { tokens, alternatives } = state.translation;
  const popover = byId("alternatives");
  popover.querySelector("bdi").textContent = nameOf(tokens[position]);
  popover.querySelector("ol").replaceChildren(
    ...alternatives[position].map(({ id, text, probability }) => {
      const button = element("button", { type: "button", onclick: () => goOn(position, id) });
      button.append(...alternativeLabel(text), element("span", { textContent: percent(probability), dir: "ltr" }));
      button.style.setProperty("--share", probability);
      if (id === tokens[position].id) button.setAttribute("aria-current", "true");
      const item = element("li");
      item.append(button);
      return item;
    }),
  );
  if (!isOpen()) popover.showPopover();
  look(position);
  chooseInside("translation", position);
  const box = anchor.getClientRects()[0];
  const below = box.bottom + 8 + popover.offsetHeight < innerHeight || box.top < popover.offsetHeight + 8;
  popover.style.left = `${scrollX + Math.max(8, Math.min(box.left, document.documentElement.clientWidth - popover.offsetWidth - 8))}px`;
  popover.style.top = `${scrollY + (below ? box.bottom + 8 : box.top - popover.offsetHeight - 8)}px`;
  (popover.querySelector("[aria-current]") ?? popover.querySelector("button")).focus({ preventScroll: true });
}

/** Translate again with the tokens before `position` and this one. After an end token nothing follows. */
function goOn(position, id) {
  const { tokens, parts, sentence: index } = state.translation;
  const prefix = [...tokens.slice(0, position).map((token) => token.id), id];
  state.choices.set(parts[index].source, { prefix, text: parts[index].target });
  state.focus = position;
  byId("alternatives").hidePopover();
  translate();
}

// Attention, hypotheses, facts

function chooseHead(head) {
  state.head = head;
  showWeights();
  look(state.token);
}

function showWeights() {
  const { source, tokens, attention } = state.translation;
  drawWeights(byId("weights"), weightsOf(attention, state.head), tokens, source, (i) => isOpen() || look(i));
}

function hypothesisElement({ text, score, probability }) {
  const item = element("li");
  item.append(element("bdi", { textContent: text }), " ");
  const facts = score === null ? [] : [`score ${score.toFixed(3)}`];
  if (probability !== undefined) facts.push(percent(probability));
  item.append(element("span", { textContent: facts.join(" · "), dir: "ltr" }));
  return item;
}

function showFacts(milliseconds) {
  const { site } = state;
  const { bytes, dtype } = site.dtypes ? { ...site.dtypes[byId("dtype").value], dtype: byId("dtype").value } : site;
  const millions = site.parameters / 1e6;
  const parts = [
    `${millions.toFixed(millions < 10 ? 2 : 0)} M parameters`,
    `${megabytes(bytes)} (${dtype})`,
    `${site.layers} layers × ${site.heads} heads`,
  ];
  if (milliseconds !== undefined && state.translation.tokens.length) parts.push(`${Math.ceil(milliseconds)} ms a token`);
  byId("facts").textContent = parts.join(" · ");
}

function showProgress(loaded, total) {
  byId("loaded").value = loaded / total;
  byId("progress").querySelector("span").textContent = `Loading ${megabytes(loaded)} of ${megabytes(total)}`;
}

function showError(error) {
  byId("error").textContent = error.message || String(error);
  byId("error").hidden = false;
  if (error.needsKey && state.site.key_required) byId("key").hidden = false;
}

async function readJSON(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path} is missing (status ${response.status}): export the site again.`);
  return response.json();
}

function element(tag, properties = {}) {
  return Object.assign(document.createElement(tag), properties);
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
