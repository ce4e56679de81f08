"""Perturbations of sentence pairs: augmentation of training text, and tests of robustness.

A perturbation changes both sides, so that the pair stays a translation. OpusTrainer (Bogoychev et al. 2023,
arXiv 2311.14838) has the same kinds.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import regex

from ..utils.errors import UserError
from .language_codes import base_language
from .language_tokens import Direction
from .words import UNSPACED, TextPair, graphemes

#: Marks that end a sentence, in all scripts. A Greek question mark looks like a semicolon.
_MARKS = ".!?…。！？．｡।॥؟۔።፧፨։՜՞။၊។៕།᠃᱾߹\u037e"
#: Script, by the start of the name of a letter -> its full stop. Thai and Lao have none.
_FULL_STOPS = {
    "CJK": "。",
    "HIRAGANA": "。",
    "KATAKANA": "。",
    "DEVANAGARI": "।",
    "BENGALI": "।",
    "GURMUKHI": "।",
    "ORIYA": "।",
    "ETHIOPIC": "።",
    "ARMENIAN": "։",
    "MYANMAR": "။",
    "KHMER": "។",
    "TIBETAN": "།",
    "MONGOLIAN": "᠃",
    "OL": "᱾",  # Ol Chiki of Santali
    "THAI": "",
    "LAO": "",
}
_URDU = re.compile("[ٹڈڑںےۓ]")
_URDU_FULL_STOP = "۔"
_INVERTED = "¿¡"  # Spanish sentences start with these
# Words with their punctuation at the ends
_PUNCTUATION = f"{_MARKS}{_INVERTED},;:'\"()«»„“”‘’‹›،؛、，：；「」『』（）՝፣፤፥"
_TYPOS = 0.15  # of the words, at least one in each sentence
_MIN_SIGNS = 4  # the parts of letters, such as vowel signs and jamo, of a word that can have a typo
#: First letters of blocks of foreign letters, by the start of their names.
_BLOCKS = {
    "GREEK": 0x3B1,
    "CYRILLIC": 0x430,
    "ARMENIAN": 0x561,
    "GEORGIAN": 0x10D0,
    "HANGUL": 0xAC00,
    "HIRAGANA": 0x3042,
    "DEVANAGARI": 0x915,
}
#: Letters between white space, but for punctuation. They may have apostrophes and hyphens, and the marks in Armenian
#: words, between two letters.
_WORD = (
    rf"(?<=(?<!\S)[{_PUNCTUATION}]*)(?:\p{{L}}\p{{M}}*[\u200c\u200d]*(?:['’՛՜՞-](?=\p{{L}}))?)+"
    rf"(?=[{_PUNCTUATION}]*(?!\S))"
)
_WORDS = regex.compile(_WORD)
#: Some letters of a script without spaces, where a sentence looks like a word, or a word of another script.
_WITH_TYPOS = regex.compile(rf"(?:(?=[{UNSPACED}])(?=\p{{L}})\X){{4,5}}|{_WORD}")
_ENDS_WITH_LETTER = regex.compile(r"[\p{L}\p{M}\p{N}]\Z")
_SYLLABLES = regex.compile(r"\p{Ethiopic}")
_JOINED = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff9f]")
# Its capitals are for whole words of headlines, and few fonts have them.
_GEORGIAN = re.compile("[\u10d0-\u10ff]")
_TURKIC = ("tr", "az", "crh", "gag", "tur", "aze", "azj")


class Context(NamedTuple):
    """A pair, and what its perturbation may use."""

    pair: TextPair
    other: TextPair  #: another pair of the text
    draw: Random
    languages: Direction  #: for capitals


def upper(context: Context) -> TextPair:
    """Both sides in capitals, but for words that contain more than letters, such as addresses and placeholders.

    A pair whose source has no capitals, such as a Chinese one, stays as it is.
    """
    return _cased(context, _capitals)


def title(context: Context) -> TextPair:
    """The first letter of every word in capitals, on both sides, unless the source has no capitals."""
    return _cased(context, _capitalised)


def _cased(context: Context, change: Callable[..., str]) -> TextPair:
    pair = context.pair
    source, target = (
        _WORDS.sub(partial(change, language=language), text)
        for text, language in zip(pair, context.languages, strict=True)
    )
    # the same source with another target would teach a contradiction
    return pair if source == pair[0] else (source, target)


def _capitals(match: regex.Match[str], language: str | None) -> str:
    word = match[0]
    return word if _GEORGIAN.search(word) else _dotted(word, language).upper()


def _capitalised(match: regex.Match[str], language: str | None) -> str:
    word = match[0]
    return _dotted(word[0], language).title() + word[1:]


def _dotted(text: str, language: str | None) -> str:
    """The text with the capital of "i" that Turkish has."""
    return text.replace("i", "İ") if base_language(language) in _TURKIC else text


def typos(context: Context) -> TextPair:
    """Letters of the source that are exchanged, doubled, missing or replaced by one of their word.

    A letter keeps its vowel signs and tones. Some letters are a word of a script without spaces.
    """
    source, target = context.pair
    draw = context.draw
    words = [word.span() for word in _WITH_TYPOS.finditer(source) if _can_have_typo(word[0])]
    if not words:
        return context.pair
    for start, end in sorted(draw.sample(words, max(1, round(_TYPOS * len(words)))), reverse=True):
        source = source[:start] + _misspell(graphemes(source[start:end]), draw) + source[end:]
    return source, target


def _can_have_typo(word: str) -> bool:
    return _signs(word) >= _MIN_SIGNS and len(graphemes(word)) > 1


def _signs(word: str) -> int:
    """The number of signs that a word is composed of. A syllable of Korean or Amharic has several."""
    return len(unicodedata.normalize("NFD", word)) + len(_SYLLABLES.findall(word))


def end_punctuation(context: Context) -> TextPair:
    """Without the mark at the end, on both sides, or with the full stop of its script if there was none.

    A pair with a side in a script without a full stop, such as Thai, stays without.
    """
    pair = context.pair
    texts = [text.rstrip() for text in pair]
    if all(text.endswith(tuple(_marks(text))) for text in texts):
        source, target = map(_without_mark, texts)
        return source, target
    stops = [_full_stop(text) for text in texts]
    if all(stops) and all(map(_ENDS_WITH_LETTER.search, texts)):
        return texts[0] + stops[0], texts[1] + stops[1]
    return pair


def _marks(text: str) -> str:
    """The marks that end a sentence of this script. A question in Greek ends with a semicolon."""
    return f"{_MARKS};" if _last_script(text) == "GREEK" else _MARKS


def _without_mark(text: str) -> str:
    shorter = text.rstrip(_marks(text)).rstrip()
    # "¿" opens the question that has lost its end, unless another question stands before it
    start = max(shorter.rfind(mark) for mark in _INVERTED)
    if start < 0 or not set(_MARKS).isdisjoint(shorter[start:]):
        return shorter
    return shorter[:start] + shorter[start + 1 :]


def _full_stop(text: str) -> str:
    """The full stop of the script of the last letter. A text with letters of Urdu has its own."""
    if _URDU.search(text):
        return _URDU_FULL_STOP
    return _FULL_STOPS.get(_last_script(text), ".")


def _last_script(text: str) -> str:
    """The script of the last letter."""
    return _script(next(filter(str.isalpha, reversed(text)), "a"))


def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").split(" ")[0]


def merge(context: Context) -> TextPair:
    """Two pairs as one. No space stands between Chinese or Japanese sentences."""
    source, target = (_joined(*texts) for texts in zip(context.pair, context.other, strict=True))
    return source, target


def _joined(first: str, second: str) -> str:
    ends = first[-1:] + second[:1]
    space = "" if len(ends) == 2 and all(map(_JOINED.match, ends)) else " "
    return f"{first}{space}{second}".strip()


def copy(context: Context) -> TextPair:
    """The target as the source: text that is in the right language already stays as it is."""
    _, target = context.pair
    return target, target


def noise(context: Context) -> TextPair:
    """The pair with a word of random foreign letters in it, the same on both sides."""
    source, target = context.pair
    draw = context.draw
    own = {_script(letter) for letter in source + target if letter.isalpha()}
    first = draw.choice([start for script, start in _BLOCKS.items() if script not in own])
    word = "".join(chr(first + draw.randrange(20)) for _ in range(draw.randint(2, 8)))
    if draw.random() < 0.5:
        return f"{word} {source}", f"{word} {target}"
    return f"{source} {word}", f"{target} {word}"


PERTURBATIONS: dict[str, Callable[[Context], TextPair]] = {
    each.__name__: each for each in (upper, title, typos, end_punctuation, merge, copy, noise)
}


def parse_augment(items: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=PROBABILITY` for names of `PERTURBATIONS`."""
    shares = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            shares[name] = float(text)
        except ValueError:
            raise UserError(
                f"augment: {item}: NAME=PROBABILITY is needed, such as typos=0.03"
            ) from None
        if name not in PERTURBATIONS or not 0 <= shares[name] <= 1:
            raise UserError(
                f"augment: {item}: give a probability to one of {', '.join(PERTURBATIONS)}"
            )
    if sum(shares.values()) > 1:
        raise UserError(
            f"augment: the probabilities add up to {sum(shares.values()):g}: each pair has one at most"
        )
    return shares


def perturbation_names(names: Iterable[str]) -> list[str]:
    """Return the names of perturbations, all of them for "all". Raises a UserError for an unknown one."""
    chosen = dict.fromkeys(
        name for each in names for name in (PERTURBATIONS if each == "all" else [each])
    )
    for name in chosen:
        if name not in PERTURBATIONS:
            raise UserError(
                f"perturbation {name!r} is unknown; choose from {', '.join(PERTURBATIONS)}, all"
            )
    return list(chosen)


def perturb_all(
    name: str, pairs: list[TextPair], languages: Direction = (None, None)
) -> list[TextPair]:
    """Return all pairs with one of `PERTURBATIONS`, drawn from its name and the number of the pair.

    A pair is merged with the next one.
    """
    perturb = PERTURBATIONS[name]
    following = [*pairs[1:], *pairs[:1]]
    return [
        perturb(Context(pair, other, Random(f"{name} {row}"), languages))
        for row, (pair, other) in enumerate(zip(pairs, following, strict=True))
    ]


def perturb_test_set(
    name: str,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    languages: Direction = (None, None),
) -> tuple[list[str], list[list[str]]]:
    """Return sources and as many lists of references with one of `PERTURBATIONS`.

    The first list determines the sources. A reference of another stays as it is where it would need another source.
    """
    perturbed = []
    columns: list[list[str]] = []
    for column in references:
        pairs = perturb_all(name, list(zip(sources, column, strict=True)), languages)
        if not columns:
            perturbed = [source for source, _ in pairs]
        rows = zip(perturbed, pairs, column, strict=True)
        columns.append([target if new == source else text for source, (new, target), text in rows])
    return perturbed, columns


def _misspell(letters: list[str], draw: Random) -> str:
    index = draw.randrange(len(letters) - 1)
    letter = letters[index]
    following = letters[index + 1]
    changed = draw.choice(
        (following + letter, letter, letter * 2 + following, draw.choice(letters) + following)
    )
    return "".join(letters[:index]) + changed + "".join(letters[index + 2 :])
