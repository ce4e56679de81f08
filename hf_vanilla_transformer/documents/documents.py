"""Text with a layout as sentences to translate, and as a text again.

A line of the text is a paragraph. Its sentences are split by sentencex (extra `documents`): rules and lists of
abbreviations for some 300 languages, without data to download. They rather do not split than split wrongly.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ..inference.alignment import Link
from ..inference.placement import TranslatedPart
from ..inference.protected import BLOCK_TAG, has_words, spans_in
from ..inference.translator import TOKENIZER_LOCK, Translator
from ..text.language_codes import base_language
from ..text.source_text import source_text
from ..text.words import UNIT, break_points, words
from ..utils.errors import naming_extras

logger = logging.getLogger(__name__)

#: Bullets, numbers, letters with a parenthesis, Markdown headings and quotations, at the beginning of a line.
_LIST_MARK = re.compile(
    r"\s*(?:(?:[-*+•‣⁃◦·–—→✓✔☐☑\u25a0-\u25ff➢❖>]|#{1,6}|\(?\d{1,3}[.)]|\(?[a-zA-Z]\))[^\S\n]+)*"
)

#: Ends of lines, cells and blocks, and a byte order mark: where a reader sees a sentence end, or sees nothing.
_SEPARATORS = re.compile(
    rf"((?:\r\n|[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029\ufeff]|{BLOCK_TAG})+)", re.IGNORECASE
)

#: Languages that write ordinal numbers with a full stop: "3. Oktober".
_DOTTED_ORDINALS = re.compile("bs|cs|da|de|et|fi|fo|hr|hu|is|lb|lv|mk|nb|nn|no|pl|sk|sl|sq|sr|tr")
_NUMBER_MARK = re.compile(r"\d{1,3}\.")
_ENDS_WITH_ORDINAL = re.compile(r"(?:^|\s)\d{1,3}\.\s*$")

#: Languages without a space between sentences.
_UNSPACED = frozenset(["zh", "ja", "yue", "wuu", "lzh"])

#: Marks that end a clause.
_CLAUSE_END = re.compile(r"[;:,.!?—–][\"'”’»)\]]*\s+|\s+(?=[—–(])|[，；：、。！？]")

#: Without a limit in the tokenizer: the default of the recipes' `max_source_length`.
_TRAINED_TOKENS = 256

_LINES_AHEAD = 256


@dataclass(frozen=True)
class Part:
    """A part of a text: a sentence without surrounding white space, or layout, kept as it is."""

    text: str
    is_sentence: bool


Splitter = Callable[[str], list[str]]  # a line -> its sentences, with the white space between them


def sentence_splitter(language: str | None) -> Splitter:
    """Split a line into sentences. Their concatenation is the line. Languages without rules share some."""
    with naming_extras():
        from sentencex import segment

    def split(line: str) -> list[str]:
        try:
            return segment(language or "en", line)
        except BaseException as error:
            # A panic of Rust code is no Exception. 1.0.32 fails on some mixed separators.
            if type(error).__name__ != "PanicException":
                raise
            return [line]

    return split


def split_text(
    text: str,
    split: Splitter,
    language: str | None = None,
    cut: Splitter = lambda sentence: [sentence],
) -> list[Part]:
    """Split a text into sentences and layout. Their concatenation is the text.

    Layout is what a model must not translate: line and cell ends, white space, list marks (in German "3. Oktober" does
    not start with one), and pieces without a letter outside addresses, placeholders and markup. `cut` cuts a long
    sentence.
    """
    parts: list[Part] = []
    ordinals = _DOTTED_ORDINALS.fullmatch(base_language(language)) is not None
    for line in _SEPARATORS.split(text):
        mark = _LIST_MARK.match(line)
        start = mark.end() if mark else 0
        if ordinals and (number := _NUMBER_MARK.search(line[:start])):
            start = number.start()
        parts.append(Part(line[:start], False))
        sentences = split(line[start:]) if line[start:].strip() else [line[start:]]
        for sentence in _rejoined(sentences, spans_in(line[start:]), ordinals):
            stripped = sentence.strip()
            before, _, after = sentence.partition(stripped) if stripped else (sentence, "", "")
            parts.append(Part(before, False))
            for piece in cut(stripped):
                kept = piece.rstrip()
                parts += [Part(kept, has_words(kept)), Part(piece[len(kept) :], False)]
            parts.append(Part(after, False))
    return [part for part in parts if part.text]


class SentenceCutter:
    """Cuts sentences that are longer than any in training, at a clause mark near the middle or between two words.

    `limit` is the tokens of the longest sentence in training, or without a record of it of the tokenizer or the
    recipes. `lengths` has the tokens of the sentences that were cut, or that cannot be cut.
    """

    def __init__(self, translator: Translator):
        self._tokenizer = translator.source_tokenizer
        trained = getattr(getattr(translator.model, "config", None), "trained_source_length", None)
        default = min(
            getattr(self._tokenizer, "model_max_length", _TRAINED_TOKENS), _TRAINED_TOKENS
        )
        self.limit = min(trained or default, translator.position_limit() or sys.maxsize)
        self.lengths: list[int] = []

    def __call__(self, sentence: str) -> list[str]:
        """The pieces of a sentence. Their concatenation is the sentence."""
        if (length := self._length(sentence)) <= self.limit:
            return [sentence]
        self.lengths.append(length)
        return self._pieces(sentence)

    def _pieces(self, sentence: str) -> list[str]:
        if self._length(sentence) <= self.limit:
            return [sentence]
        margin = len(sentence) // 4
        for found in (
            [
                clause.end()
                for clause in _CLAUSE_END.finditer(sentence, margin, len(sentence) - margin)
            ],
            break_points(sentence),
            [unit.start() for unit in UNIT.finditer(sentence)],  # a word that is too long
        ):
            if ends := [end for end in found if 0 < end < len(sentence)]:
                middle = min(ends, key=lambda end: abs(end - len(sentence) / 2))
                return self._pieces(sentence[:middle]) + self._pieces(sentence[middle:])
        return [sentence]

    def _length(self, sentence: str) -> int:
        if len(sentence.encode()) < self.limit:  # a token has at least one byte
            return 0
        with TOKENIZER_LOCK:
            return len(
                self._tokenizer(source_text(sentence, self._tokenizer), verbose=False)["input_ids"]
            )


def _rejoined(sentences: Iterable[str], spans: list[tuple[int, int]], ordinals: bool) -> list[str]:
    """Sentences without the cuts within a protected span, and after an ordinal number, as in "Der 1. FC Köln"."""
    whole = list[str]()
    end = 0
    inside = {position for start, stop in spans for position in range(start + 1, stop)}
    for sentence in sentences:
        if whole and (end in inside or (ordinals and _ENDS_WITH_ORDINAL.search(whole[-1][-16:]))):
            whole[-1] += sentence
        else:
            whole.append(sentence)
        end += len(sentence)
    return whole


def join_text(
    parts: Sequence[Part],
    translations: Iterable[str],
    source: str | None = None,
    target: str | None = None,
) -> str:
    """Replace the sentences of a text, in their order, by their translations."""
    joined = translated_parts(parts, ((text, None) for text in translations), source, target)
    return "".join(part.target for part in joined)


def translated_parts(
    parts: Sequence[Part],
    translations: Iterable[tuple[str, Sequence[Link] | None]],
    source: str | None = None,
    target: str | None = None,
) -> list[TranslatedPart]:
    """The parts of `join_text`, with the links between the words of each sentence and its translation."""
    spaced_source, spaced_target = (
        base_language(language) not in _UNSPACED for language in (source, target)
    )
    following = iter(translations)
    joined: list[TranslatedPart] = []
    for index, part in enumerate(parts):
        after_sentence = index > 0 and parts[index - 1].is_sentence
        before_sentence = index + 1 < len(parts) and parts[index + 1].is_sentence
        if part.is_sentence:
            if after_sentence and spaced_target and not spaced_source:
                joined.append(TranslatedPart("", " "))
            joined.append(TranslatedPart(part.text, *next(following)))
        elif (
            after_sentence
            and before_sentence
            and part.text.isspace()
            and spaced_source
            and not spaced_target
        ):
            joined.append(
                TranslatedPart(part.text, part.text if _SEPARATORS.search(part.text) else "")
            )
        else:
            joined.append(TranslatedPart(part.text, part.text))
    return joined


def text_translator(
    translator: Translator,
    source: str | None = None,
    target: str | None = None,
    *,
    aligned: bool = True,
    **settings: Any,
) -> Callable[..., list[list[TranslatedPart]]]:
    """A function that splits texts into sentences, and translates them.

    Args:
        source, target: languages of the texts and the translations, or None.
        aligned: link the words of each sentence with those of its translation.
        settings: as in `Translator.translate`.

    Returns:
        A function of texts, and of the line number of the first one if they are lines. With it a warning names the
        line of a sentence that is longer than any in training.
    """
    split = sentence_splitter(source)
    cut = SentenceCutter(translator)
    usual: dict[str, Any] = {"scores": False}
    if aligned:
        usual |= {"alignment": True, "alignment_words": words}
    settings = usual | settings

    def translate(texts: Sequence[str], first_line: int = 0) -> list[list[TranslatedPart]]:
        of_texts = list[list[Part]]()
        numbers = list[int]()
        for number, text in enumerate(texts, first_line or 1):
            parts = split_text(text, split, source, cut)
            of_texts.append(parts)
            numbers += [number] * len(sentences_of(parts))
            for tokens in cut.lengths if first_line else ():
                logger.warning(
                    "line %d: a sentence of %d tokens is longer than any in training: cut",
                    number,
                    tokens,
                )
            cut.lengths.clear()
        sentences = [sentence for parts in of_texts for sentence in sentences_of(parts)]
        found = translator.translate_nbest(sentences, first_line=numbers, **settings)
        following = ((best.text.replace("\n", " "), best.alignment) for best, *_ in found)
        return [translated_parts(parts, following, source, target) for parts in of_texts]

    return translate


def translate_documents(
    translator: Translator,
    lines: Iterable[str],
    language: str | None = None,
    first_line: int = 1,
    target_language: str | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Translate paragraphs, one per line. Blank lines, indentation, list marks and the space between sentences stay.

    A sentence that is longer than any in training is cut, and a warning is logged.

    Args:
        language: of the text. Its rules split the sentences (`sentence_splitter`).
        first_line: the line number of the first line, for messages.
        target_language: of the translations. It decides the space between sentences (`join_text`).
        settings: as in `Translator.translate`.

    Returns:
        An iterator of as many lines. Up to `_LINES_AHEAD` lines are read ahead, and none where `batch_size` is 1.

    Raises:
        UserError: as in `Translator.translate` and `sentence_splitter`.
    """
    translate = text_translator(translator, language, target_language, aligned=False, **settings)
    translate([])  # checks the arguments before anything is read
    lines = iter(lines)
    ahead = 1 if settings.get("batch_size") == 1 else _LINES_AHEAD
    windows = iter(lambda: list(islice(lines, ahead)), [])
    starts = count(first_line, ahead)
    return (
        "".join(part.target for part in parts)
        for start, window in zip(starts, windows, strict=False)
        for parts in translate(window, start)
    )


def sentences_of(parts: Sequence[Part]) -> list[str]:
    return [part.text for part in parts if part.is_sentence]
