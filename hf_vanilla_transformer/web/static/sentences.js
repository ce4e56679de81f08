// Sentences and layout of a text, with the browser's rules for sentences. A server splits its texts itself.

const SEPARATORS = /((?:\r\n|[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029\ufeff])+)/;
const LIST_MARK = /^\s*(?:(?:[-*+•–—>]|#{1,6}|\(?\d{1,3}[.)])\s+)*/;
const ADDRESS = /(?:https?:\/\/|www\.)\S+|\S+@\S+\.\S+|\{+[^{}]*\}+|%(?:\d+\$)?[a-z]|<[^<>]*>|&#?\w+;/giu; // or placeholder
const UNSPACED = new Set(["zh", "ja", "yue", "wuu", "lzh"]); // no space between sentences

/** Split a text into parts {text, is_sentence}. Their texts joined are the text. */
export function splitText(text, language) {
  const parts = [];
  for (const line of text.split(SEPARATORS)) {
    const mark = line.match(LIST_MARK)[0];
    parts.push({ text: mark, is_sentence: false });
    for (const sentence of sentencesOf(line.slice(mark.length), language)) {
      const inner = sentence.trim();
      const start = sentence.indexOf(inner);
      parts.push(
        { text: sentence.slice(0, start), is_sentence: false },
        { text: inner, is_sentence: /\p{L}/u.test(inner.replace(ADDRESS, "")) },
        { text: sentence.slice(start + inner.length), is_sentence: false },
      );
    }
  }
  return parts.filter(({ text }) => text !== "");
}

/** Split a text into lines and their ends, for sequences that are no language. */
export function splitLines(text) {
  const parts = text.split(/(\r?\n)/).map((part, i) => ({ text: part, is_sentence: i % 2 === 0 && part.trim() !== "" }));
  return parts.filter((part) => part.text !== "");
}

function sentencesOf(line, language) {
  if (!Intl.Segmenter) return [line];
  const segmenter = new Intl.Segmenter(language?.replace("_", "-") ?? "en", { granularity: "sentence" });
  return Array.from(segmenter.segment(line), ({ segment }) => segment);
}

/** The index of the sentence at a position of the text, among parts {text or source, is_sentence}, or null. */
export function sentenceAt(parts, caret) {
  let found = null, start = 0;
  parts.forEach(({ text, source = text, is_sentence }, i) => {
    if (is_sentence && (found === null || start <= caret)) found = i;
    start += source.length;
  });
  return found;
}

/** Replace the sentences of parts by translations, with the spaces of the target language. */
export function translatedParts(parts, translations, source, target) {
  const [sourceSpaced, targetSpaced] = [source, target].map((code) => !UNSPACED.has((code ?? "").split(/[-_]/)[0]));
  let next = 0;
  return parts.map(({ text, is_sentence }, i) => {
    const after = parts[i - 1]?.is_sentence;
    if (is_sentence) return (after && targetSpaced && !sourceSpaced ? " " : "") + translations[next++];
    const between = after && parts[i + 1]?.is_sentence && text.trim() === "" && !SEPARATORS.test(text);
    return between && sourceSpaced && !targetSpaced ? "" : text;
  });
}
