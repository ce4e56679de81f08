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
_NEGATIVE = regex.compile(r"(?<!\S)-(?=\d)")
_SIGN = b"\0"


def _ascii_apart() -> bytes:
    """For `bytes.translate`: letters in lower case, a space for what is in no word, `_SIGN` for compared signs."""
    table = bytearray(b" " * 256)
    for number in range(128):
        character = chr(number).lower()
        if _COMPARED.fullmatch(character):
            is_word = character.isalnum() or character == "_"
            table[number : number + 1] = character.encode() if is_word else _SIGN
    return bytes(table)


_ASCII_APART = _ascii_apart()


def stable_key(text: str) -> int:
    """A number of 64 bits that is the same in all processes, which Python's `hash` is not."""
    return _number(text.encode("utf-8", "surrogatepass"))


def _number(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big", signed=True)


def sentence_key(text: str) -> int:
    """A number that is the same for sentences that differ in case, composition, spaces and punctuation alone."""
    if text.isascii():  # the same words by bytes, in half the time
        apart = text.encode().translate(_ASCII_APART)
        if _SIGN not in apart and not ("-" in text and _NEGATIVE.search(text)):
            return _number(b" ".join(apart.split()))
    text = unicodedata.normalize("NFKC", text).casefold().replace(_MINUS, "-")
    return stable_key(" ".join(_COMPARED.findall(text)))


def text_key(task: str) -> TextKey:
    """The key of a task: `sentence_key` for "language". Sequences must be equal: `c1ccccc1` is not `C1CCCCC1`."""
    return sentence_key if task == "language" else stable_key
