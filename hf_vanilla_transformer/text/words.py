"""Words of every script: between white space and, in scripts without spaces, as the dictionaries of ICU split them."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeAlias

import regex

#: The texts of source and target.
TextPair: TypeAlias = tuple[str, str]

#: Characters of scripts without spaces: Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese and their marks.
UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff\U000e0100-\U000e01ef"
)

#: The least unit that is a word somewhere: one character of these scripts, or letters and signs between white space.
#: A space of no width ends words of Khmer, Thai and Burmese, and belongs to the word before it.
UNIT = re.compile(rf"[{UNSPACED}]\u200b*|[^\s{UNSPACED}]+")
_RUN = re.compile(rf"([{UNSPACED}]+)\u200b*|[^\s{UNSPACED}]+")
_GRAPHEME = regex.compile(r"\X")

Span = tuple[int, int]
#: A function from a text to the starts and ends of its words.
WordSplitter = Callable[[str], list[Span]]


def words(text: str) -> list[Span]:
    """The words of a text, with their punctuation in scripts with spaces.

    In scripts without spaces the words are ICU's (Unicode Standard Annex 29, with dictionaries) if the extra `words`
    is installed. Without it each letter is a word, with its vowel signs and tones.
    """
    spans: list[Span] = []
    for run in _RUN.finditer(text):
        start = run.start()
        for word in _dictionary_words()(run[1]) if run[1] else (run[0],):
            spans.append((start, start + len(word)))
            start += len(word)
        spans[-1] = (spans[-1][0], run.end())
    return spans


def graphemes(text: str) -> list[str]:
    """The letters of a text, each with its marks: the grapheme clusters of Unicode Standard Annex 29."""
    return _GRAPHEME.findall(text)


def white_space_words(text: str) -> list[Span]:
    """The words between white space, as files of alignments count them."""
    return [word.span() for word in re.finditer(r"\S+", text)]


def break_points(text: str) -> list[int]:
    """Positions where a line or a piece of a text may start: at words, but not between a word and its punctuation."""
    starts = (start for start, _ in words(text))
    return [start for start in starts if text[start].isalnum() or text[start - 1 : start].isspace()]


@cache
def _dictionary_words() -> Callable[[str], Iterable[str]]:
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        return graphemes
    breaker: Any = WordBreaker
    return lambda run: breaker(run, "und")
