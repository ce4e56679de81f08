"""Rules that find damaged sentence pairs, and the limits that they take from undamaged text."""

import html
import math
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TypeAlias

import regex

from ..text.language_detection import likely_language
from ..text.words import UNSPACED, TextPair, words
from .damaged_characters import has_damaged_characters
from .number_values import numbers_of

Scripts: TypeAlias = tuple[str, str]

_SMOOTHING = 5  # characters, so that the ratio of short sentences varies less
_SCRIPT_SHARE = 0.5  # of the letters that must be in the script of their side
# Shares of the pairs of one direction, and of a text that may have several: two scripts that are no damage
_FREQUENT_SCRIPTS = 0.2
_FREQUENT_SCRIPTS_OF_SEVERAL = 0.05
_FEW_PAIRS = 5
# The ratios of few sentences vary less than those of the text that they are taken from.
_ALL_RATIOS = 1000
_SMALLEST_LIMIT = 1.5
_SMALLEST_LIMIT_OF_FEW = 2.0
_MIN_LETTERS = 20  # of a sentence whose language, or whose capitals, can be judged
_LONGEST_WORD = 40  # letters
# Share of the texts of a side that have longer words, as numbers in German do, if that is no damage
_FREQUENT_LONG_WORDS = 0.05
# Of two languages that are close, such as Danish and Norwegian, most sentences have as many words in common.
_SHARE_OF_CLOSE_LANGUAGES = 0.3
_SHARE_OF_COPY = 0.8
_COMPARED_PAIRS = 1000  # that tell whether languages are close

_ADDRESS = re.compile(
    rf"(?:https?://|www\.)[^\s<>\"{UNSPACED}\u3000-\u303f\uff00-\uffef]+"
    r"|[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
)
_SCHEME = re.compile("^https?://")
_SIGNS_OF_ADDRESS = ("@", "://", "www.")
# Endings that Korean, Turkish and other languages attach to an address
_ENDING = re.compile("['\u2019]|[^!-~]")
_AFTER_ADDRESS = ".,;:!?)]}*/"
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_TAG_NAME = re.compile(r"</?[a-z][^\s/>]*")
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9A-Fa-f]+|[A-Za-z][A-Za-z0-9]*);")
# Words, one to five of them three times, or parts of a word four times. ". . ." and "1000000000" are none.
_REPEATED = re.compile(
    r"(?:^|(?<=\s))(?=\S*[^\W_])(\S+(?:\s\S+){0,4})(?:\s\1){2,}(?=\s|$)|([^\W\d_]{2,12}?)\2{3,}"
)
# Scripts whose sentences start with a capital. Georgian has none there, and Cherokee has little else.
_CASED = regex.compile(r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Armenian}]")
_LONG_WORD = regex.compile(
    rf"[\p{{Latin}}\p{{Greek}}\p{{Cyrillic}}\p{{Armenian}}]{{{_LONGEST_WORD + 1},}}"
)
_NO_LETTERS = re.compile(rf"[^\w{UNSPACED}]+|[\d_]+")
# "..." is none
_LOUD_MARKS = re.compile(r"[!?]{2,}|(?<![.,])(?!\.{3}(?![.,]))[.,]{2,}|\s{2,}")


@dataclass
class PairLimits:
    """The limits of a translation. `of_sample` takes those from the text that are not given."""

    max_characters: int = 1000  #: of a side
    #: median of log(target / source) in characters, and the largest distance from it
    ratio: tuple[float, float] = (0.0, math.inf)
    #: of each side. Empty allows any
    scripts: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    languages: tuple[str, str] | None = None  #: to detect. None does not
    long_words: tuple[bool, bool] = (False, False)  #: whether words of over 40 letters are usual
    close_languages: bool = False  #: whether many words are the same in both

    @classmethod
    def of_sample(cls, pairs: Sequence[TextPair], **values: object) -> "PairLimits":
        """Limits that fit the pairs: ratios within five deviations, and the scripts of a fifth of all letters."""
        sides = list(zip(*pairs, strict=True)) or [(), ()]
        sampled = {
            "ratio": _ratios_of(pairs),
            "scripts": tuple(map(_scripts_of, sides)),
            "long_words": tuple(map(_has_long_words, sides)),
            "close_languages": _are_close(pairs[:: max(1, len(pairs) // _COMPARED_PAIRS)]),
        }
        return cls(**(sampled | values))  # type: ignore[arg-type]


def _ratios_of(pairs: Sequence[TextPair]) -> tuple[float, float]:
    """The median of the ratios, and the largest distance from it."""
    ratios = [_log_ratio(*pair) for pair in pairs] or [0.0]
    middle = statistics.median(ratios)
    # Of a normal distribution.
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    smallest = _SMALLEST_LIMIT if len(pairs) >= _ALL_RATIOS else _SMALLEST_LIMIT_OF_FEW
    return middle, max(5 * deviation, math.log(smallest))


def _scripts_of(texts: Sequence[str]) -> frozenset[str]:
    """The scripts of a fifth of all letters."""
    counts = Counter(map(_script, filter(str.isalpha, chain.from_iterable(texts))))
    return frozenset(name for name, count in counts.items() if 5 * count >= counts.total())


def _has_long_words(texts: Sequence[str]) -> bool:
    """Return whether words of over 40 letters are usual in a language: German writes a number as one word."""
    return sum(map(_has_long_word, texts)) > _FREQUENT_LONG_WORDS * len(texts)


def _are_close(pairs: Sequence[TextPair]) -> bool:
    """Return whether two languages are so close that a translation has many words of its source.

    Copies do not count. A text may have many of them.
    """
    shares = [share for share in map(_common_words, pairs) if share < _SHARE_OF_COPY]
    return bool(shares) and statistics.median(shares) > _SHARE_OF_CLOSE_LANGUAGES


class FittingLimits:
    """The limits of one direction, apart for each combination of scripts that is frequent in it.

    A text of several languages without codes has several such combinations, and so has Serbian.
    """

    def __init__(
        self, pairs: Sequence[TextPair], one_direction: bool = True, **values: object
    ) -> None:
        share = _FREQUENT_SCRIPTS if one_direction else _FREQUENT_SCRIPTS_OF_SEVERAL
        frequent = max(_FEW_PAIRS, share * len(pairs))
        self.others = PairLimits.of_sample(pairs, **values)
        self.by_scripts: dict[Scripts, PairLimits] = {}
        groups: dict[Scripts, list[TextPair]] = {}
        for pair in pairs:
            groups.setdefault(main_scripts(pair), []).append(pair)
        for scripts, members in groups.items():
            if all(scripts) and len(members) >= frequent:
                self.by_scripts[scripts] = PairLimits.of_sample(members, **values)

    def of(self, pair: TextPair) -> PairLimits:
        """The limits for a pair."""
        return self.by_scripts.get(main_scripts(pair), self.others)


def main_scripts(pair: TextPair) -> Scripts:
    """The most frequent script of the letters of each side, "" without letters."""
    return _main_script(pair[0]), _main_script(pair[1])


def _main_script(text: str) -> str:
    if text.isascii():
        return "LATIN" if any(map(str.isalpha, text)) else ""
    counts = Counter(map(_script, filter(str.isalpha, text)))
    return max(counts, key=lambda name: counts[name], default="")


def _log_ratio(source: str, target: str) -> float:
    return math.log((len(target) + _SMOOTHING) / (len(source) + _SMOOTHING))


@cache
def _script(letter: str) -> str:
    """The script of a letter. Kana and Chinese characters are one, because Japanese has both."""
    name = unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "?").partition(" ")[0]
    return "CJK" if name in ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC") else name


def _length(pair: TextPair, limits: PairLimits) -> bool:
    return max(map(len, pair)) > limits.max_characters


def _ratio(pair: TextPair, limits: PairLimits) -> bool:
    middle, distance = limits.ratio
    return abs(_log_ratio(*pair) - middle) > distance


def _wrong_script(pair: TextPair, limits: PairLimits) -> bool:
    for text, scripts in zip(pair, limits.scripts, strict=True):
        letters = [_script(letter) in scripts for letter in text if letter.isalpha()]
        if scripts and letters and sum(letters) < _SCRIPT_SHARE * len(letters):
            return True
    return False


def _wrong_language(pair: TextPair, limits: PairLimits) -> bool:
    return limits.languages is not None and any(
        sum(map(str.isalpha, text)) >= _MIN_LETTERS and not likely_language(text, language)
        for text, language in zip(pair, limits.languages, strict=True)
    )


def _copy(pair: TextPair, limits: PairLimits) -> bool:
    """Most words are the same as in the source. Names may be, so that short pairs pass."""
    if limits.close_languages:
        return False
    source, target = map(_word_counts, pair)
    if source == target and len(pair[0]) >= _MIN_LETTERS:
        return True
    return max(source.total(), target.total()) >= 4 and _share(source, target) >= _SHARE_OF_COPY


def _common_words(pair: TextPair) -> float:
    """The share of the words of the longer side that both sides have."""
    return _share(*map(_word_counts, pair))


def _share(source: Counter[str], target: Counter[str]) -> float:
    return (source & target).total() / max(source.total(), target.total(), 1)


def _word_counts(text: str) -> Counter[str]:
    text = _NO_LETTERS.sub(" ", without_addresses(text).casefold())
    return Counter(text[start:end] for start, end in words(text))


def _repetition(pair: TextPair, limits: PairLimits) -> bool:
    first, second = (_REPEATED.search(text) is not None for text in pair)
    return first != second


def _numbers(pair: TextPair, limits: PairLimits) -> bool:
    """Each side has a number that the other lacks. "3 dogs" may be "drei Hunde"."""
    source, target = map(numbers_of, pair)
    return source.lacks_one_of(target) and target.lacks_one_of(source)


def _capitals(pair: TextPair, limits: PairLimits) -> bool:
    """One side is in capitals, and most letters of the other are not."""
    loud = [text.isupper() for text in pair]
    if loud[0] == loud[1]:
        return False
    letters = list(map(_cased_letters, pair))
    if min(map(len, letters)) < _MIN_LETTERS:
        return False
    other = letters[loud.index(False)]
    return 2 * sum(map(str.islower, other)) > len(other)


def _cased_letters(text: str) -> str:
    """The letters of scripts with capitals, "" if most letters are of other scripts, as in Chinese with acronyms."""
    letters = "".join(_CASED.findall(text))
    return letters if 2 * len(letters) > sum(map(str.isalpha, text)) else ""


def _spaces(pair: TextPair, limits: PairLimits) -> bool:
    """A word has so many letters that the spaces of a sentence must be missing."""
    return any(
        _has_long_word(text) and not usual
        for text, usual in zip(pair, limits.long_words, strict=True)
    )


def _has_long_word(text: str) -> bool:
    if max(map(len, text.split()), default=0) <= _LONGEST_WORD:
        return False
    return _LONG_WORD.search(without_addresses(text)) is not None


def _addresses(pair: TextPair, limits: PairLimits) -> bool:
    source, target = map(_addresses_of, pair)
    return source != target


def _addresses_of(text: str) -> set[str]:
    """The addresses of a text in lower case, without http(s) and what follows them.

    Letters that are not ASCII end them, too.
    """
    if not _may_have_address(text):
        return set()
    addresses = (_ENDING.split(address)[0].lower() for address in _ADDRESS.findall(text))
    return {_SCHEME.sub("", address).rstrip(_AFTER_ADDRESS) for address in addresses}


def without_addresses(text: str) -> str:
    """The text with a space in the place of each URL and e-mail address."""
    return _ADDRESS.sub(" ", text) if _may_have_address(text) else text


def _may_have_address(text: str) -> bool:
    return any(sign in text for sign in _SIGNS_OF_ADDRESS)


def _markup(pair: TextPair, limits: PairLimits) -> bool:
    """The sides have different tags. `<br/>`, `<br>` and `<BR />` are one."""
    source, target = (Counter(map(_tag_name, _TAG.findall(text))) for text in pair)
    return source != target


def _tag_name(tag: str) -> str:
    match = _TAG_NAME.match(tag.lower())
    return match[0] if match else tag


def _mojibake(pair: TextPair, limits: PairLimits) -> bool:
    return any(has_damaged_characters(without_addresses(text)) for text in pair)


#: Rule -> description and predicate. Duplicates and overlap compare with other pairs.
RULES: dict[str, tuple[str, Callable[[TextPair, PairLimits], bool] | None]] = {
    "length": ("a side is too long", _length),
    "mojibake": ("characters of a wrong encoding or alphabet", _mojibake),
    "markup": ("the sides have different tags", _markup),
    "addresses": ("the sides have different URLs or e-mail addresses", _addresses),
    "copy": ("the target is the source", _copy),
    "script": ("letters of a different script", _wrong_script),
    "repetition": ("one side repeats itself", _repetition),
    "numbers": ("the sides have different numbers", _numbers),
    "capitals": ("one side is in capitals", _capitals),
    "spaces": ("a side lacks the spaces between its words", _spaces),
    "ratio": ("the sides have unusually different lengths", _ratio),
    "language": ("a side is in a different language", _wrong_language),
    "overlap": ("a side is in the excluded text", None),
    "duplicate": ("the same pair again", None),
    "near_duplicate": ("the same pair but for case, spaces and punctuation", None),
}


#: Those of sequences that are no language. They compare whole sequences.
SEQUENCE_RULES = ("length", "overlap", "duplicate")


def broken_rule(pair: TextPair, rules: Iterable[str], limits: PairLimits) -> str | None:
    """The first rule that a pair breaks by itself, or None."""
    for name in rules:
        test = RULES[name][1]
        if test is not None and test(pair, limits):
            return name
    return None


def repaired_entities(pair: TextPair) -> TextPair:
    """The pair with characters instead of entities, such as "&amp;", if the sides have different ones."""
    entities = [Counter(_ENTITY.findall(text)) for text in pair]
    if entities[0] == entities[1]:
        return pair
    return _unescaped(pair[0]), _unescaped(pair[1])


def _unescaped(text: str) -> str:
    while (plain := _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)) != text:
        # "&amp;amp;".
        text = plain
    return text


def flaws(pair: TextPair) -> int:
    """How much is wrong with a pair that has near duplicates: capitals, no capital at all, spaces, marks."""
    total = 0
    for text in pair:
        total += 2 * text.isupper() + text.islower() + len(_LOUD_MARKS.findall(text))
    return total
