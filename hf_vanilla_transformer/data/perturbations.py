"""Perturbations of sentence pairs: augmentation of training text, and tests of robustness.

A perturbation changes both sides, so that the pair stays a translation. OpusTrainer (Bogoychev et al. 2023,
arXiv 2311.14838) has the same kinds.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import TypeAlias

from ..utils.errors import UserError

Pair: TypeAlias = tuple[str, str]

_MARKS = ".!?。！？"
_TYPOS = 0.15  # of the words, at least one in each sentence
# First letters of blocks of foreign letters: Greek, Cyrillic, Armenian, Georgian, Hangul, Hiragana, Devanagari.
_BLOCKS = 0x3B1, 0x430, 0x561, 0x10D0, 0xAC00, 0x3042, 0x915


def upper(pair: Pair, other: Pair, draw: Random) -> Pair:
    """Both sides in capitals, but for words that contain more than letters, such as addresses and placeholders."""
    source, target = (_map_words(text, str.upper) for text in pair)
    return source, target


def title(pair: Pair, other: Pair, draw: Random) -> Pair:
    """The first letter of every word in capitals, on both sides."""
    source, target = (_map_words(text, lambda word: word[:1].upper() + word[1:]) for text in pair)
    return source, target


def typos(pair: Pair, other: Pair, draw: Random) -> Pair:
    """Letters of the source that are exchanged, doubled, missing or replaced by one of their word."""
    words = pair[0].split(" ")
    candidates = [index for index, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if candidates:
        for index in draw.sample(candidates, max(1, round(_TYPOS * len(candidates)))):
            words[index] = _misspell(words[index], draw)
    return " ".join(words), pair[1]


def end_punctuation(pair: Pair, other: Pair, draw: Random) -> Pair:
    """Without the mark at the end, on both sides, or with a full stop if there was none."""
    source, target = (text.rstrip() for text in pair)
    if source[-1:] in _MARKS and target[-1:] in _MARKS:
        return source.rstrip(_MARKS).rstrip(), target.rstrip(_MARKS).rstrip()
    return (f"{source}.", f"{target}.") if source[-1:].isalnum() and target[-1:].isalnum() else pair


def merge(pair: Pair, other: Pair, draw: Random) -> Pair:
    """Two pairs as one."""
    return f"{pair[0]} {other[0]}".strip(), f"{pair[1]} {other[1]}".strip()


def copy(pair: Pair, other: Pair, draw: Random) -> Pair:
    """The target as the source: text that is in the right language already stays as it is."""
    return pair[1], pair[1]


def noise(pair: Pair, other: Pair, draw: Random) -> Pair:
    """The pair with a word of random foreign letters in it, the same on both sides."""
    first = draw.choice(_BLOCKS)
    word = "".join(chr(first + draw.randrange(20)) for _ in range(draw.randint(2, 8)))
    if draw.random() < 0.5:
        return f"{word} {pair[0]}", f"{word} {pair[1]}"
    return f"{pair[0]} {word}", f"{pair[1]} {word}"


PERTURBATIONS: dict[str, Callable[[Pair, Pair, Random], Pair]] = {
    each.__name__: each for each in (upper, title, typos, end_punctuation, merge, copy, noise)
}


def perturbation_names(names: Iterable[str]) -> list[str]:
    """Return the names of perturbations, all of them for "all". Raises a UserError for an unknown one."""
    chosen = dict.fromkeys(name for each in names for name in (PERTURBATIONS if each == "all" else [each]))
    for name in chosen:
        if name not in PERTURBATIONS:
            raise UserError(f"perturbation {name!r} is unknown; choose from {', '.join(PERTURBATIONS)}, all")
    return list(chosen)


def perturb_all(name: str, pairs: list[Pair]) -> list[Pair]:
    """Return all pairs with one of `PERTURBATIONS`, drawn from its name and the number of the pair."""
    others = pairs[1:] + pairs[:1]
    rows = enumerate(zip(pairs, others, strict=True))
    return [PERTURBATIONS[name](pair, other, Random(f"{name} {number}")) for number, (pair, other) in rows]


def _map_words(text: str, change: Callable[[str], str]) -> str:
    return " ".join(change(word) if word.strip(".,;:!?'\"()«»„“”").isalpha() else word for word in text.split(" "))


def _misspell(word: str, draw: Random) -> str:
    index = draw.randrange(len(word) - 1)
    before, letter, following, after = word[:index], word[index], word[index + 1], word[index + 2 :]
    return (
        before
        + draw.choice((following + letter, letter, letter * 2 + following, draw.choice(word) + following))
        + after
    )
