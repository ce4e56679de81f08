"""Keys of texts that count as the same: of duplicates, of held-out pairs, and of text that is in a test set too."""

import unicodedata
from collections.abc import Callable
from typing import TypeAlias

import regex

#: A function from a text to a number that texts have in common if they count as the same.
TextKey: TypeAlias = Callable[[str], int]

# Vowel signs, tones and points belong to the words of their script.
_NO_WORDS = regex.compile(r"[^\w\p{M}]+")


def sentence_key(text: str) -> int:
    """A number that is the same for sentences that differ in case, composition, spaces and punctuation alone."""
    return hash(_NO_WORDS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip())


def text_key(task: str) -> TextKey:
    """The key of a task: `sentence_key` for "language". Sequences must be equal: `c1ccccc1` is not `C1CCCCC1`."""
    return sentence_key if task == "language" else hash
