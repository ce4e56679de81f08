// How tokens, languages and probabilities are written.

const LONGEST = 60; // characters of a token
const RIGHT_TO_LEFT = new Set(["ar", "arc", "ckb", "dv", "fa", "he", "nqo", "ps", "sd", "syr", "ug", "ur", "yi"]);

export const direction = (code) => (code ? (RIGHT_TO_LEFT.has(code.split(/[-_]/)[0]) ? "rtl" : "ltr") : "auto");

/** The English name of a language, or its code. */
export function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code.replaceAll("_", "-"));
  } catch {
    return code;
  }
}

export const percent = (probability) =>
  probability < 0.0005 ? "< 0.1 %" : `${(100 * probability).toFixed(probability < 0.0995 ? 1 : 0)} %`;

export const isSpecial = ({ text }) => /^<.*>$/.test(text);

/** A token for a screen reader, and in a sentence. */
export function nameOf({ text }) {
  return shortened(text.trim()) || (text ? "space" : "part of a character");
}

/** The text of a token, with a space and a part of a character made visible. */
export const shownText = (text) => shortened(text.trim()) || (text ? "␣" : "·");

/** A token as a small box. A wider gap stands where its text starts with a space. */
export function chip(token, tag) {
  const box = document.createElement(tag);
  box.className = "token";
  box.classList.toggle("special", isSpecial(token));
  box.classList.toggle("apart", /^\s/.test(token.text));
  box.textContent = shownText(token.text);
  return box;
}

/** The text of an alternative, with its space made visible. */
export function alternativeLabel(text) {
  const space = document.createElement("i");
  space.textContent = /^\s/.test(text) && text.trim() ? "␣" : "";
  space.setAttribute("aria-hidden", "true");
  const label = document.createElement("bdi");
  label.textContent = shownText(text);
  label.prepend(space);
  return [label];
}

/** Split a text into [text, index of its token or null]. Joined, the texts are the text. */
export function wordsOf(text, tokens) {
  const pieces = [];
  let at = 0;
  tokens.forEach((token, i) => {
    const word = isSpecial(token) ? "" : token.text.trim();
    const found = word ? text.indexOf(word, at) : -1;
    if (found < 0) return;
    pieces.push([text.slice(at, found), null], [word, i]);
    at = found + word.length;
  });
  return [...pieces, [text.slice(at), null]].filter(([piece]) => piece !== "");
}

const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 3)}…` : text);
