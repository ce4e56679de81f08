"""Keys of texts that count as the same: of duplicates, of held-out pairs, and of text that is in a test set too."""

import unicodedata
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeAlias

import regex

#: A function from a text to a number that texts have in common if they count as the same.
TextKey: TypeAlias = Callable[[str], int]

# Words, with the vowel signs, tones and points of their script, and signs that change what a sentence says: C++ is no
# C#, $5 is not 5 €, and -5 is not 5.
_COMPARED = regex.compile(r"[\w\p{M}]+|(?<!\S)-(?=\d)|[\p{Sm}\p{Sc}\p{So}#%&@]")
_MINUS = "\u2212"


def stable_key(text: str) -> int:
    """A number of 64 bits that is the same in all processes, which Python's `hash` is not."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def sentence_key(text: str) -> int:
    """A number that is the same for sentences that differ in case, composition, spaces and punctuation alone."""
    text = unicodedata.normalize("NFKC", text).casefold().replace(_MINUS, "-")
    return stable_key(" ".join(_COMPARED.findall(text)))


def text_key(task: str) -> TextKey:
    """The key of a task: `sentence_key` for "language". Sequences must be equal: `c1ccccc1` is not `C1CCCCC1`."""
    return sentence_key if task == "language" else stable_key
