"""Text with a layout as sentences to translate, and as a text again.

A line of the text is a paragraph. Its sentences are split by sentencex (extra `documents`): rules and lists of
abbreviations for some 300 languages, without data to download, which rather do not split than split wrongly.
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

from ..errors import UserError
from .translator import Translator

logger = logging.getLogger(__name__)

#: Bullets, numbers, letters with a parenthesis, Markdown headings and quotations, at the beginning of a line.
_LIST_MARK = re.compile(r"\s*(?:(?:[-*+•‣◦–—>]|#{1,6}|\(?\d{1,3}[.)]|\(?[a-zA-Z]\))[^\S\n]+)*")

#: Without another limit in the tokenizer: the default of the recipes' `max_source_length`.
_TRAINED_TOKENS = 256

_LINES_AHEAD = 256


@dataclass(frozen=True)
class Part:
    """A part of a text: a sentence without white space around it, or layout, which stays as it is."""

    text: str
    is_sentence: bool


Splitter = Callable[[str], list[str]]  # a line -> its sentences, with the white space between them


def sentence_splitter(language: str | None) -> Splitter:
    """Split a line into sentences, whose concatenation is the line.

    Args:
        language: a code such as "en"; None, or one without rules, takes the rules that most languages share.

    Raises:
        UserError: sentencex is not installed.
    """
    try:
        from sentencex import segment
    except ImportError as error:
        raise UserError("sentencex, which splits sentences, is missing; install the extra `documents`") from error
    return partial(_segment, segment, language or "en")


def _segment(segment: Callable[[str, str], list[str]], language: str, line: str) -> list[str]:
    """The sentences of a line; the whole line where sentencex fails, as 1.0.32 does on some mixed separators."""
    try:
        return segment(language, line)
    except BaseException as error:  # a panic of Rust code is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return [line]


def split_text(text: str, split: Splitter) -> list[Part]:
    """Sentences and layout (line feeds, blank lines, indentation, list marks), whose concatenation is the text."""
    parts: list[Part] = []
    for line in re.split(r"(\r?\n)", text):
        mark = _LIST_MARK.match(line)
        start = mark.end() if mark else 0
        parts.append(Part(line[:start], False))
        for sentence in split(line[start:]) if line[start:].strip() else [line[start:]]:
            stripped = sentence.strip()
            before, _, after = sentence.partition(stripped) if stripped else (sentence, "", "")
            parts += [Part(before, False), Part(stripped, bool(stripped)), Part(after, False)]
    return [part for part in parts if part.text]


def join_text(parts: Sequence[Part], translations: Sequence[str]) -> str:
    """The text with its sentences, in their order, replaced by these."""
    following = iter(translations)
    return "".join(next(following) if part.is_sentence else part.text for part in parts)


def translate_documents(
    translator: Translator,
    lines: Iterable[str],
    language: str | None = None,
    first_line: int = 1,
    **settings: Any,
) -> Iterator[str]:
    """Translate paragraphs, one per line; blank lines, indentation, list marks and the space between sentences stay.

    A sentence that is longer than any in training is logged as a warning.

    Args:
        language: of the text, for its sentences; see `sentence_splitter`.
        first_line: the line number of the first line, for messages.
        settings: those of `Translator.translate`.

    Returns:
        An iterator of as many lines. Up to `_LINES_AHEAD` lines are read ahead, and none where `batch_size` is 1.

    Raises:
        UserError: what `Translator.translate` and `sentence_splitter` raise.
    """
    split = sentence_splitter(language)
    translator.translate([], **settings)  # checks the arguments before anything is read
    ahead = 1 if settings.get("batch_size") == 1 else _LINES_AHEAD
    return _translate_windows(translator, iter(lines), split, first_line, ahead, settings)


def _translate_windows(
    translator: Translator, lines: Iterator[str], split: Splitter, number: int, ahead: int, settings: dict[str, Any]
) -> Iterator[str]:
    while window := list(islice(lines, ahead)):
        paragraphs = [split_text(line, split) for line in window]
        sentences: list[str] = []
        for line_number, parts in enumerate(paragraphs, start=number):
            sentences += sentences_of(parts)
            for tokens in too_long(translator.source_tokenizer, sentences_of(parts)):
                logger.warning("line %d: a sentence of %d tokens is longer than any in training", line_number, tokens)
        number += len(window)
        translations = translator.translate(sentences, **settings)
        for parts in paragraphs:
            following = islice(translations, len(sentences_of(parts)))
            yield join_text(parts, [text.replace("\n", " ") for text in following])


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
    """`language` of the metadata in a model card: source and target in the cards of this package.

    Returns:
        An empty list if there is no card, or no list of languages in it.
    """
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        metadata = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    languages = metadata.get("language") if isinstance(metadata, dict) else None
    return [str(code) for code in languages] if isinstance(languages, list) else []
