"""Text with a layout as sentences to translate, and as a text again.

A line of the text is a paragraph. Its sentences are split by sentencex (extra `documents`): rules and lists of
abbreviations for some 300 languages, without data to download. They rather do not split than split wrongly.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from ..errors import naming_extras
from .alignment import Link
from .placement import TranslatedPart
from .protected import has_words
from .translator import Translator

logger = logging.getLogger(__name__)

#: Bullets, numbers, letters with a parenthesis, Markdown headings and quotations, at the beginning of a line.
_LIST_MARK = re.compile(r"\s*(?:(?:[-*+•‣◦–—>]|#{1,6}|\(?\d{1,3}[.)]|\(?[a-zA-Z]\))[^\S\n]+)*")

#: Line ends, cell ends and a byte order mark: what a reader sees as the end of a sentence, or does not see.
_SEPARATORS = re.compile(r"((?:\r\n|[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029\ufeff])+)")

#: Languages that write ordinal numbers with a full stop: "3. Oktober".
_DOTTED_ORDINALS = frozenset(
    ("bs", "cs", "da", "de", "et", "fi", "fo", "hr", "hu", "is", "lb", "lv", "mk", "nb", "nn", "no", "pl", "sk", "sl")
    + ("sq", "sr", "tr")
)
_NUMBER_MARK, _ENDS_WITH_ORDINAL = re.compile(r"\d{1,3}\."), re.compile(r"(?:^|\s)\d{1,3}\.\s*$")

#: Languages without a space between sentences.
_UNSPACED = frozenset(["zh", "ja", "yue", "wuu", "lzh"])

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
    """Split a line into sentences, whose concatenation is the line. Languages without rules share some."""
    with naming_extras():
        from sentencex import segment
    return partial(_segment, segment, language or "en")


def _segment(segment: Callable[[str, str], list[str]], language: str, line: str) -> list[str]:
    """The sentences of a line, or the whole line if sentencex fails, as 1.0.32 does on some mixed separators."""
    try:
        return segment(language, line)
    except BaseException as error:  # a panic of Rust code is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return [line]


def split_text(text: str, split: Splitter, language: str | None = None) -> list[Part]:
    """Split a text into sentences and layout. Their concatenation is the text.

    Layout is what a model must not translate: line and cell ends, white space, list marks, and pieces without a letter
    outside addresses, placeholders and markup, such as rules, numbers, times and emoji.

    Args:
        language: of the text. In German, for example, "3. Oktober" does not start with a list mark.
    """
    parts: list[Part] = []
    ordinals = _base(language) in _DOTTED_ORDINALS
    for line in _SEPARATORS.split(text):
        mark = _LIST_MARK.match(line)
        start = mark.end() if mark else 0
        if ordinals and (number := _NUMBER_MARK.search(line[:start])):
            start = number.start()
        parts.append(Part(line[:start], False))
        sentences = split(line[start:]) if line[start:].strip() else [line[start:]]
        for sentence in _rejoined(sentences) if ordinals else sentences:
            stripped = sentence.strip()
            before, _, after = sentence.partition(stripped) if stripped else (sentence, "", "")
            parts += [Part(before, False), Part(stripped, has_words(stripped)), Part(after, False)]
    return [part for part in parts if part.text]


def _rejoined(sentences: Iterable[str]) -> list[str]:
    """Sentences without the cuts after an ordinal number, as in "Der 1. FC Köln"."""
    whole: list[str] = []
    for sentence in sentences:
        if whole and _ENDS_WITH_ORDINAL.search(whole[-1]):
            whole[-1] += sentence
        else:
            whole.append(sentence)
    return whole


def _base(language: str | None) -> str:
    """The language of a code such as "zh-Hans" or "pt_BR"."""
    return re.split("[-_]", (language or "").lower())[0]


def join_text(
    parts: Sequence[Part], translations: Iterable[str], source: str | None = None, target: str | None = None
) -> str:
    """Replace the sentences of a text, in their order, by their translations.

    Args:
        source, target: languages. A target that writes a space between sentences gets one where the source has none.
    """
    joined = translated_parts(parts, ((text, None) for text in translations), source, target)
    return "".join(part.target for part in joined)


def translated_parts(
    parts: Sequence[Part],
    translations: Iterable[tuple[str, Sequence[Link] | None]],
    source: str | None = None,
    target: str | None = None,
) -> list[TranslatedPart]:
    """The parts of `join_text`, with the links between the words of each sentence and its translation."""
    spaced_source, spaced_target = (_base(language) not in _UNSPACED for language in (source, target))
    following = iter(translations)
    joined: list[TranslatedPart] = []
    for index, part in enumerate(parts):
        after_sentence = index > 0 and parts[index - 1].is_sentence
        before_sentence = index + 1 < len(parts) and parts[index + 1].is_sentence
        if part.is_sentence:
            if after_sentence and spaced_target and not spaced_source:
                joined.append(TranslatedPart("", " "))
            joined.append(TranslatedPart(part.text, *next(following)))
        elif after_sentence and before_sentence and part.text.isspace() and spaced_source and not spaced_target:
            joined.append(TranslatedPart(part.text, part.text if _SEPARATORS.search(part.text) else ""))
        else:
            joined.append(TranslatedPart(part.text, part.text))
    return joined


def translate_documents(
    translator: Translator,
    lines: Iterable[str],
    language: str | None = None,
    first_line: int = 1,
    target_language: str | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Translate paragraphs, one per line. Blank lines, indentation, list marks and the space between sentences stay.

    A sentence that is longer than any in training is logged as a warning.

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
    split, settings = sentence_splitter(language), {"protect": True} | settings
    translator.translate([], **settings)  # checks the arguments before anything is read
    lines = iter(lines)
    ahead = 1 if settings.get("batch_size") == 1 else _LINES_AHEAD
    windows = iter(lambda: list(islice(lines, ahead)), [])
    return _translate_windows(translator, windows, split, first_line, (language, target_language), settings)


def _translate_windows(
    translator: Translator,
    windows: Iterator[list[str]],
    split: Splitter,
    number: int,
    languages: tuple[str | None, str | None],
    settings: dict[str, Any],
) -> Iterator[str]:
    for window in windows:
        paragraphs = [split_text(line, split, languages[0]) for line in window]
        sentences: list[str] = []
        for line_number, parts in enumerate(paragraphs, start=number):
            sentences += sentences_of(parts)
            for tokens in too_long(translator.source_tokenizer, sentences_of(parts)):
                logger.warning("line %d: a sentence of %d tokens is longer than any in training", line_number, tokens)
        number += len(window)
        translations = translator.translate(sentences, **settings)
        for parts in paragraphs:
            following = islice(translations, len(sentences_of(parts)))
            yield join_text(parts, [text.replace("\n", " ") for text in following], *languages)


def sentences_of(parts: Sequence[Part]) -> list[str]:
    return [part.text for part in parts if part.is_sentence]


def too_long(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> list[int]:
    """Lengths in tokens of the sentences that are longer than those in training."""
    limit = min(tokenizer.model_max_length, _TRAINED_TOKENS)
    # a token has at least one byte, so that short sentences need not be tokenized here
    long = [sentence for sentence in sentences if len(sentence.encode()) >= limit]
    lengths = [len(tokenizer(sentence)["input_ids"]) for sentence in long]
    return [length for length in lengths if length > limit]


def card_languages(folder: Path) -> list[str]:
    """Read the languages in the metadata of a model card: source and target in the cards of this package.

    `language_bcp47` has the codes with their subtags, such as pt-BR, that the Hub refuses in `language`.

    Returns:
        An empty list if there is no card, or no list of languages in it.
    """
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        # all values as strings: `no` is Norwegian, not false
        metadata = yaml.load(text.split("---")[1], yaml.BaseLoader) if text.startswith("---") else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    metadata = metadata if isinstance(metadata, dict) else {}
    languages = metadata.get("language_bcp47") or metadata.get("language")
    return [str(code).replace("_", "-") for code in languages] if isinstance(languages, list) else []
