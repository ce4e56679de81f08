"""Perturbations of sentence pairs: augmentation of training text, and tests of robustness.

A perturbation changes both sides, so that the pair stays a translation. OpusTrainer (Bogoychev et al. 2023,
arXiv 2311.14838) has the same kinds.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import TypeAlias

import regex

from ..utils.errors import UserError
from .language_codes import base_language
from .words import UNSPACED, graphemes

Pair: TypeAlias = tuple[str, str]

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
_WORD = 5  # letters of a text without spaces, where a sentence looks like a word
_MIN_LETTERS = 4  # of a stretch of a text without spaces that can have a typo
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
#: A word of letters. It may have apostrophes and hyphens, and the marks in Armenian words, between two letters.
_LETTERS = regex.compile(r"(?:\p{L}\p{M}*[\u200c\u200d]*(?:['’՛՜՞-](?=\p{L}))?)+")
_SYLLABLES = regex.compile(r"\p{Ethiopic}")
_UNSPACED = regex.compile(rf"(?:(?=[{UNSPACED}])\p{{L}}\p{{M}}*)+")
_JOINED = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff9f]")
# Its capitals are for whole words of headlines, and few fonts have them.
_GEORGIAN = re.compile("[\u10d0-\u10ff]")
_TURKIC = ("tr", "az", "crh", "gag", "tur", "aze", "azj")

Languages: TypeAlias = tuple[str | None, str | None]


def upper(pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)) -> Pair:
    """Both sides in capitals, but for words that contain more than letters, such as addresses and placeholders.

    A pair whose source has no capitals, such as a Chinese one, stays as it is.
    """
    return _cased(pair, languages, _capitals)


def title(pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)) -> Pair:
    """The first letter of every word in capitals, on both sides, unless the source has no capitals."""
    return _cased(pair, languages, _capitalised)


def _cased(pair: Pair, languages: Languages, change: Callable[[str, str | None], str]) -> Pair:
    source, target = (
        _map_words(text, change, language) for text, language in zip(pair, languages, strict=True)
    )
    # the same source with another target would teach a contradiction
    return pair if source == pair[0] else (source, target)


def _map_words(text: str, change: Callable[[str, str | None], str], language: str | None) -> str:
    """The text with its words of letters changed. Spaces separate words."""
    return " ".join(
        change(word, language) if _LETTERS.fullmatch(word.strip(_PUNCTUATION)) else word
        for word in text.split(" ")
    )


def _capitals(word: str, language: str | None) -> str:
    if _GEORGIAN.search(word):
        return word
    return _dotted(word, language).upper()


def _capitalised(word: str, language: str | None) -> str:
    start = next((index for index, letter in enumerate(word) if letter.isalpha()), 0)
    first = _dotted(word[start : start + 1], language)
    return word[:start] + first.title() + word[start + 1 :]


def _dotted(text: str, language: str | None) -> str:
    """The text with the capital of "i" that Turkish has."""
    return text.replace("i", "İ") if base_language(language) in _TURKIC else text


def typos(pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)) -> Pair:
    """Letters of the source that are exchanged, doubled, missing or replaced by one of their word.

    A letter keeps its vowel signs and tones. Some letters are a word of a script without spaces.
    """
    source = pair[0]
    spans = list(_words_with_typos(source))
    if not spans:
        return pair
    for start, end in sorted(draw.sample(spans, max(1, round(_TYPOS * len(spans)))), reverse=True):
        source = source[:start] + _misspell(graphemes(source[start:end]), draw) + source[end:]
    return source, pair[1]


def _words_with_typos(text: str) -> Iterator[tuple[int, int]]:
    """Starts and ends of words of letters alone, and of stretches of letters in scripts without spaces."""
    for word in re.finditer(r"[^ ]+", text):
        runs = list(_UNSPACED.finditer(text, word.start(), word.end()))
        for run in runs:
            yield from _pieces(run[0], run.start())
        core = word[0].strip(_PUNCTUATION)
        if not runs and _can_have_typo(core):
            start = text.index(core, word.start())
            yield start, start + len(core)


def _pieces(run: str, start: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of stretches of a few letters. The run is at `start`."""
    letters = graphemes(run)
    for first in range(0, len(letters) - _MIN_LETTERS + 1, _WORD):
        length = sum(map(len, letters[first : first + _WORD]))
        yield start, start + length
        start += length


def _can_have_typo(word: str) -> bool:
    return (
        _LETTERS.fullmatch(word) is not None
        and _signs(word) >= _MIN_SIGNS
        and len(graphemes(word)) > 1
    )


def _signs(word: str) -> int:
    """The number of signs that a word is composed of. A syllable of Korean or Amharic has several."""
    return len(unicodedata.normalize("NFD", word)) + len(_SYLLABLES.findall(word))


def end_punctuation(
    pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)
) -> Pair:
    """Without the mark at the end, on both sides, or with the full stop of its script if there was none.

    A pair with a side in a script without a full stop, such as Thai, stays without.
    """
    source, target = (text.rstrip() for text in pair)
    if _ends_with_mark(source) and _ends_with_mark(target):
        return _without_mark(source), _without_mark(target)
    if not (_ends_with_letter(source) and _ends_with_letter(target)):
        return pair
    stops = [_full_stop(text) for text in (source, target)]
    return (source + stops[0], target + stops[1]) if all(stops) else pair


def _marks(text: str) -> str:
    """The marks that end a sentence of this script. A question in Greek ends with a semicolon."""
    return f"{_MARKS};" if _last_script(text) == "GREEK" else _MARKS


def _ends_with_mark(text: str) -> bool:
    return bool(text) and text[-1] in _marks(text)


def _without_mark(text: str) -> str:
    shorter = text.rstrip(_marks(text)).rstrip()
    # "¿" opens the question that has lost its end, unless another question stands before it
    start = max(shorter.rfind(mark) for mark in _INVERTED)
    if start < 0 or not set(_MARKS).isdisjoint(shorter[start:]):
        return shorter
    return shorter[:start] + shorter[start + 1 :]


def _ends_with_letter(text: str) -> bool:
    return bool(text) and unicodedata.category(text[-1])[0] in "LMN"


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


def merge(pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)) -> Pair:
    """Two pairs as one. No space stands between Chinese or Japanese sentences."""
    source, target = (_joined(*texts) for texts in zip(pair, other, strict=True))
    return source, target


def _joined(first: str, second: str) -> str:
    ends = first[-1:] + second[:1]
    space = "" if len(ends) == 2 and all(map(_JOINED.match, ends)) else " "
    return f"{first}{space}{second}".strip()


def copy(pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)) -> Pair:
    """The target as the source: text that is in the right language already stays as it is."""
    return pair[1], pair[1]


def noise(pair: Pair, other: Pair, draw: Random, languages: Languages = (None, None)) -> Pair:
    """The pair with a word of random foreign letters in it, the same on both sides."""
    own = {_script(letter) for text in pair for letter in text if letter.isalpha()}
    first = draw.choice([start for script, start in _BLOCKS.items() if script not in own])
    word = "".join(chr(first + draw.randrange(20)) for _ in range(draw.randint(2, 8)))
    if draw.random() < 0.5:
        return f"{word} {pair[0]}", f"{word} {pair[1]}"
    return f"{pair[0]} {word}", f"{pair[1]} {word}"


PERTURBATIONS: dict[str, Callable[[Pair, Pair, Random, Languages], Pair]] = {
    each.__name__: each for each in (upper, title, typos, end_punctuation, merge, copy, noise)
}


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
    name: str, pairs: list[Pair], languages: Sequence[Languages] | Languages = (None, None)
) -> list[Pair]:
    """Return all pairs with one of `PERTURBATIONS`, drawn from its name and the number of the pair.

    `languages` are those of all pairs, or of each. A pair is merged with the next one in the same languages.
    """
    of_each: list[Languages] = (
        [languages] * len(pairs) if isinstance(languages, tuple) else list(languages)
    )
    rows: dict[Languages, list[int]] = {}
    for row, codes in enumerate(of_each):
        rows.setdefault(codes, []).append(row)
    following = {
        row: after
        for group in rows.values()
        for row, after in zip(group, group[1:] + group[:1], strict=True)
    }
    perturbed = []
    for row, (pair, codes) in enumerate(zip(pairs, of_each, strict=True)):
        draw = Random(f"{name} {row}")
        perturbed.append(PERTURBATIONS[name](pair, pairs[following[row]], draw, codes))
    return perturbed


def _misspell(letters: list[str], draw: Random) -> str:
    index = draw.randrange(len(letters) - 1)
    letter = letters[index]
    following = letters[index + 1]
    changed = draw.choice(
        (following + letter, letter, letter * 2 + following, draw.choice(letters) + following)
    )
    return "".join(letters[:index]) + changed + "".join(letters[index + 2 :])
