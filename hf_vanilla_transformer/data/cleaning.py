"""Rules that find damaged sentence pairs: in one pass over a stream, with limits taken from its first pairs.

A pair has one reason at most: the first rule that it breaks, in the order of `RULES`.
"""

import math
import re
import statistics
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import TypeAlias

from datasets import Dataset

from ..utils.errors import UserError
from .language_detection import likely_language
from .words import UNSPACED, words

Pair: TypeAlias = tuple[str, str]

SAMPLE = 20_000  # pairs that the limits are taken from
EXAMPLES = 10
_SMOOTHING = 5  # characters, so that the ratio of short sentences varies less
_SCRIPT_SHARE = 0.5  # of the letters that must be in the script of their side
_MIN_LETTERS = 20  # of a sentence whose language can be detected

# pairs of a sample, and the number and share of damaged ones that are not worth a warning
_CHECKED, _FEW, _WARNED = 2000, 5, 0.02

_NUMBER = re.compile(r"\d+(?:[.,:' \u00a0]\d+)*")
_ADDRESS = re.compile(
    rf"(?:https?://|www\.)[^\s<>\"{UNSPACED}\u3000-\u303f\uff00-\uffef]+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|&(?:#\d+|[A-Za-z]+);")
_FOREIGN = re.compile(r"[^\x00-\x7f]{2,}")
_REPEATED = re.compile(r"(?:^|(?<=\s))(\S+(?:\s\S+){0,4})(?:\s\1){2,}(?=\s|$)|(\w{2,12}?)\2{3,}")
_NO_LETTERS = re.compile(rf"[^\w{UNSPACED}]+|[\d_]+")
_SIGNS = re.compile(r"[^\w]+")


@dataclass
class Limits:
    """What still counts as a translation. `of_sample` takes `ratio` and `scripts` from the text."""

    max_characters: int = 1000  #: of a side
    #: median of log(target / source) in characters, and the largest distance from it
    ratio: tuple[float, float] = (0.0, math.inf)
    scripts: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  #: of each side. Empty allows any
    languages: tuple[str, str] | None = None  #: to detect; None does not

    @classmethod
    def of_sample(cls, pairs: Sequence[Pair], **values: object) -> "Limits":
        """Limits that fit the pairs: ratios within five deviations, and the scripts of a fifth of all letters."""
        ratios = [_log_ratio(*pair) for pair in pairs] or [0.0]
        middle = statistics.median(ratios)
        deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)  # of a normal distribution
        scripts = []
        for texts in zip(*pairs, strict=True) if pairs else ((), ()):
            counts = Counter(map(_script, filter(str.isalpha, chain.from_iterable(texts))))
            scripts.append(frozenset(name for name, count in counts.items() if 5 * count >= counts.total()))
        sampled = {"ratio": (middle, max(5 * deviation, math.log(1.5))), "scripts": tuple(scripts)}
        return cls(**(sampled | values))  # type: ignore[arg-type]


def _log_ratio(source: str, target: str) -> float:
    return math.log((len(target) + _SMOOTHING) / (len(source) + _SMOOTHING))


@cache
def _script(letter: str) -> str:
    """The script of a letter. Kana and Chinese characters are one, because Japanese has both."""
    name = unicodedata.name(letter, "?").partition(" ")[0]
    return "CJK" if name in ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA") else name


def _length(pair: Pair, limits: Limits) -> bool:
    return max(map(len, pair)) > limits.max_characters


def _ratio(pair: Pair, limits: Limits) -> bool:
    middle, distance = limits.ratio
    return abs(_log_ratio(*pair) - middle) > distance


def _wrong_script(pair: Pair, limits: Limits) -> bool:
    for text, scripts in zip(pair, limits.scripts, strict=True):
        letters = [_script(letter) in scripts for letter in text if letter.isalpha()]
        if scripts and letters and sum(letters) < _SCRIPT_SHARE * len(letters):
            return True
    return False


def _wrong_language(pair: Pair, limits: Limits) -> bool:
    return limits.languages is not None and any(
        sum(map(str.isalpha, text)) >= _MIN_LETTERS and not likely_language(text, language)
        for text, language in zip(pair, limits.languages, strict=True)
    )


def _copy(pair: Pair, limits: Limits) -> bool:
    """Most words are the same as in the source. Names may be, so that short pairs pass."""
    letters = [_NO_LETTERS.sub(" ", _ADDRESS.sub(" ", text).casefold()) for text in pair]
    source, target = (Counter(text[start:end] for start, end in words(text)) for text in letters)
    common, longer = (source & target).total(), max(source.total(), target.total())
    return (longer >= 4 and common >= 0.8 * longer) or (source == target and len(pair[0]) >= _MIN_LETTERS)


def _repetition(pair: Pair, limits: Limits) -> bool:
    first, second = (_REPEATED.search(text) is not None for text in pair)
    return first != second


def _numbers(pair: Pair, limits: Limits) -> bool:
    """Each side has a number that the other lacks. "3 dogs" may be "drei Hunde"."""
    source, target = ({re.sub(r"\D", "", number) for number in _NUMBER.findall(text)} for text in pair)
    return bool(source - target and target - source)


def _addresses(pair: Pair, limits: Limits) -> bool:
    source, target = ({address.rstrip(".,;:!?)") for address in _ADDRESS.findall(text)} for text in pair)
    return source != target


def _markup(pair: Pair, limits: Limits) -> bool:
    source, target = (Counter(re.split(r"[\s>]", tag)[0] for tag in _TAG.findall(text)) for text in pair)
    return source != target


def _mojibake(pair: Pair, limits: Limits) -> bool:
    """UTF-8 that was read as a different encoding."""
    return any("\ufffd" in text or any(map(_is_misread, _FOREIGN.findall(text))) for text in pair)


def _is_misread(run: str) -> bool:
    for encoding in ("cp1252", "latin-1"):
        try:
            return run.encode(encoding).decode() != run
        except UnicodeError:
            continue
    return False


#: Rule -> description and predicate. Duplicates and overlap compare with other pairs.
RULES: dict[str, tuple[str, Callable[[Pair, Limits], bool] | None]] = {
    "length": ("a side is too long", _length),
    "mojibake": ("characters of a wrong encoding", _mojibake),
    "markup": ("the sides have different tags or entities", _markup),
    "addresses": ("the sides have different URLs or e-mail addresses", _addresses),
    "copy": ("the target is the source", _copy),
    "script": ("letters of a different script", _wrong_script),
    "repetition": ("one side repeats itself", _repetition),
    "numbers": ("the sides have different numbers", _numbers),
    "ratio": ("the sides have unusually different lengths", _ratio),
    "language": ("a side is in a different language", _wrong_language),
    "overlap": ("a side is in the excluded text", None),
    "duplicate": ("the same pair again", None),
    "near_duplicate": ("the same pair but for case, spaces and punctuation", None),
}


@dataclass
class CleaningReport:
    """Counts and examples."""

    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  #: by rule
    examples: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)  #: line, source and target, by rule

    def count(self, rule: str | None, line: int, pair: Pair) -> None:
        self.seen += 1
        if rule is not None:
            self.dropped[rule] += 1
            examples = self.examples.setdefault(rule, [])
            if len(examples) < EXAMPLES:
                examples.append((line, *pair))

    def summary(self) -> str:
        """One line, such as `kept 9 of 12 pairs; dropped 3: 2 copy, 1 numbers`."""
        rules = ", ".join(f"{count:,} {rule}" for rule, count in self.dropped.most_common())
        dropped = f"; dropped {self.dropped.total():,}: {rules}" if rules else ""
        return f"kept {self.seen - self.dropped.total():,} of {self.seen:,} pairs{dropped}"


def judge_pairs(
    rows: Iterable[tuple[int, str, str]],
    rules: Sequence[str] = tuple(RULES),
    excluded: Iterable[str] = (),
    **limits: object,
) -> tuple[Iterator[tuple[str | None, int, Pair]], CleaningReport]:
    """Judge pairs one by one.

    Args:
        rows: line, source and target.
        rules: names of `RULES`.
        excluded: sentences of validation and test sets. A pair with one of them on a side is dropped.
        limits: fields of `Limits`. The rest is taken from the first 20,000 pairs.

    Returns:
        An iterator of the rule that a pair breaks or None, its line and the pair, and the report that it fills.

    Raises:
        UserError: an unknown rule.
    """
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise UserError(f"rules: {unknown[0]!r} is unknown; choose from {', '.join(RULES)}")
    report = CleaningReport()

    def judge() -> Iterator[tuple[str | None, int, Pair]]:
        # hashes, because a set of the sentences themselves would not fit into memory
        known, seen = {_key(text) for text in excluded}, {"duplicate": set[int](), "near_duplicate": set[int]()}
        stream = iter(rows)
        sample = list(islice(stream, SAMPLE))
        fitting = Limits.of_sample([pair for _, *pair in sample], **limits)  # type: ignore[misc]
        for line, *sides in chain(sample, stream):
            pair: Pair = (sides[0], sides[1])
            rule = next((name for name in rules if (test := RULES[name][1]) and test(pair, fitting)), None)
            if rule is None and "overlap" in rules and known and not known.isdisjoint(map(_key, pair)):
                rule = "overlap"
            for name, key in (("duplicate", hash(pair)), ("near_duplicate", hash(tuple(map(_key, pair))))):
                if rule is None and name in rules and key in seen[name]:
                    rule = name
                elif rule is None and name in rules:
                    seen[name].add(key)
            report.count(rule, line, pair)
            yield rule, line, pair

    return judge(), report


def sample_warnings(pairs: Dataset) -> Iterator[str]:
    """Return a line for each rule that more than 2 % of a sample break. Rules that need other text are left out."""
    sample = pairs.select(range(0, len(pairs), max(1, len(pairs) // _CHECKED)))
    rules = [name for name, (_, test) in RULES.items() if test and name != "language"]
    judged, report = judge_pairs(zip(sample["line"], sample["source"], sample["target"], strict=True), rules)
    deque(judged, maxlen=0)
    for rule, count in report.dropped.most_common():
        if count > max(_FEW, _WARNED * report.seen):
            lines = ", ".join(str(line) for line, *_ in report.examples[rule][:3])
            share = f"{count / report.seen:.0%}"
            yield (
                f"warning: about {share} of the training pairs: {RULES[rule][0]} (lines {lines}, …); "
                "vanilla-transformer clean shows and drops them"
            )


def _key(text: str) -> int:
    """A number that is the same for sentences that differ in case, composition, spaces and punctuation alone."""
    return hash(_SIGNS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip())
