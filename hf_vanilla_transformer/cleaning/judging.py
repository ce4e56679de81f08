"""Find damaged sentence pairs in a text of one language pair or of many.

A pair has one reason at most: the first rule that it breaks, in the order of `RULES`. Limits are those of its
direction, or of its input if the text names no languages.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TypeAlias

from datasets import Dataset

from ..corpora.directions import CodePair
from ..text.text_keys import TextKey, sentence_key, text_key
from ..utils.errors import UserError
from .rules import (
    RULES,
    SEQUENCE_RULES,
    FittingLimits,
    TextPair,
    broken_rule,
    flaws,
    repaired_entities,
)

SAMPLE = 10_000  # pairs of each direction that its limits are taken from
EXAMPLES = 10

# pairs of a sample, and the number and share of damaged ones that are not worth a warning
_CHECKED = 2000
_FEW = 5
_WARNED = 0.02

_MARK = re.compile(r"\s*>>(\S+)<<")
Group: TypeAlias = tuple[int, CodePair]


class PairRow(NamedTuple):
    """A sentence pair with its place."""

    line: int
    source: str
    target: str
    direction: CodePair = ("", "")  #: codes of the languages, if the text names them
    part: int = 0  #: the number of the input
    cells: Mapping[str, Any] = {}  #: the other cells of the row
    defect: str | None = None  #: why loading leaves the pair out

    @property
    def pair(self) -> TextPair:
        """Source and target."""
        return self.source, self.target

    @property
    def language(self) -> CodePair:
        """The codes, with the mark of the target language at the start of the source, `>>de<< …`."""
        mark = _MARK.match(self.source)
        return (self.direction[0], mark[1]) if mark else self.direction

    @property
    def group(self) -> Group:
        """Rows that have their limits in common."""
        language = self.language
        return (0, language) if language != ("", "") else (self.part, language)


class Judged(NamedTuple):
    """A row, repaired, and the rule that it breaks or None."""

    rule: str | None
    row: PairRow


@dataclass
class CleaningReport:
    """Counts and examples."""

    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  #: by rule
    repaired: int = 0  #: pairs that are kept with characters instead of entities
    #: line, source and target, by rule
    examples: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)

    def count(self, rule: str | None, row: PairRow, repaired: bool) -> None:
        """Count a judged row."""
        self.seen += 1
        if rule is None:
            self.repaired += repaired
            return
        self.dropped[rule] += 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append((row.line, row.source, row.target))

    def summary(self) -> str:
        """One line, such as `kept 9 of 12 pairs; dropped 3: 2 copy, 1 numbers`."""
        rules = ", ".join(f"{count:,} {rule}" for rule, count in self.dropped.most_common())
        dropped = f"; dropped {self.dropped.total():,}: {rules}" if rules else ""
        repaired = (
            f"; {self.repaired:,} with characters instead of entities (&amp;)"
            if self.repaired
            else ""
        )
        return (
            f"kept {self.seen - self.dropped.total():,} of {self.seen:,} pairs{repaired}{dropped}"
        )


def judge_pairs(
    rows: Iterable[PairRow],
    rules: Sequence[str] | None = None,
    excluded: Iterable[str] = (),
    detect: bool = False,
    one_direction: bool = False,
    task: str = "language",
    **limits: object,
) -> tuple[Iterator[Judged], CleaningReport]:
    """Judge pairs one by one.

    Args:
        rows: the pairs. They are read two or three times: for the limits, for the best of near duplicates, and to be
            judged. An iterator, which can be read once, is kept in memory.
        rules: names of `RULES`. None is all, or `SEQUENCE_RULES` if `task` is "sequence".
        excluded: sentences of validation and test sets. A pair with one of them on a side is dropped.
        detect: detect the languages that the rows name.
        one_direction: whether an input that names no languages has one direction.
        task: "language" compares sentences by their words, "sequence" by all of their characters.
        limits: fields of `PairLimits`, for all directions. The rest is taken from pairs of each direction.

    Returns:
        An iterator of the judged rows, and the report that it fills. Rows with a defect have no rule and are not
        counted.

    Raises:
        UserError: an unknown rule.
    """
    if rules is None:
        rules = tuple(RULES) if task == "language" else SEQUENCE_RULES
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise UserError(f"rules: {unknown[0]!r} is unknown; choose from {', '.join(RULES)}")
    again = list(rows) if isinstance(rows, Iterator) else rows
    report = CleaningReport()
    key = text_key(task)
    judge = _Judge(
        rules=tuple(rules),
        excluded=frozenset(map(key, excluded)),
        detect=detect,
        one_direction=one_direction,
        given=limits,
        report=report,
        key=key,
    )
    return judge.judged(again), report


@dataclass
class _Judge:
    rules: tuple[str, ...]
    # Hashes, because a set of the sentences themselves would not fit into memory.
    excluded: frozenset[int]
    detect: bool
    one_direction: bool
    given: dict[str, object]
    report: CleaningReport
    key: TextKey
    limits: dict[Group, FittingLimits] = field(default_factory=dict)

    def judged(self, rows: Iterable[PairRow]) -> Iterator[Judged]:
        repeated = self._survey(rows)
        best = self._best_of_near_duplicates(rows, repeated)
        seen: set[int] = set()
        for number, row in enumerate(rows):
            if row.defect is not None:
                yield Judged(None, row)
                continue
            repaired = self._repaired(row)
            rule = self._rule(repaired)
            if rule is None and "duplicate" in self.rules:
                key = hash((row.language, repaired.pair))
                rule = "duplicate" if key in seen else None
                seen.add(key)
            if rule is None and best and best.get(_key(repaired), (0, number))[1] != number:
                rule = "near_duplicate"
            self.report.count(rule, row, repaired is not row)
            yield Judged(rule, repaired)

    def _survey(self, rows: Iterable[PairRow]) -> set[int]:
        """Take the limits from the text, and return the keys that occur more than once."""
        samples: dict[Group, list[TextPair]] = {}
        counts: Counter[Group] = Counter()
        draw = Random(0)
        seen: set[int] = set()
        repeated: set[int] = set()
        compares = "near_duplicate" in self.rules
        for _, row in self._sound(rows):
            group = row.group
            counts[group] += 1
            sample = samples.setdefault(group, [])
            if len(sample) < SAMPLE:
                sample.append(row.pair)
            elif (place := draw.randrange(counts[group])) < SAMPLE:
                sample[place] = row.pair
            if compares:
                key = _key(row)
                (repeated if key in seen else seen).add(key)
        for group, sample in samples.items():
            _, languages = group
            given = dict(self.given)
            if self.detect and all(languages):
                given["languages"] = languages
            one_direction = self.one_direction or any(languages)
            self.limits[group] = FittingLimits(sample, one_direction, **given)
        return repeated

    def _best_of_near_duplicates(
        self, rows: Iterable[PairRow], repeated: set[int]
    ) -> dict[int, tuple[int, int]]:
        """The flaws and the number of the row to keep, by key."""
        best: dict[int, tuple[int, int]] = {}
        if not repeated:
            return best
        for number, row in self._sound(rows):
            key = _key(row)
            if key in repeated and self._rule(row) is None:
                candidate = flaws(row.pair), number
                best[key] = min(best.get(key, candidate), candidate)
        return best

    def _sound(self, rows: Iterable[PairRow]) -> Iterator[tuple[int, PairRow]]:
        """The rows without a defect, repaired, and their numbers."""
        return (
            (number, self._repaired(row)) for number, row in enumerate(rows) if row.defect is None
        )

    def _repaired(self, row: PairRow) -> PairRow:
        """The row without entities on one side, if tags are compared."""
        if "markup" not in self.rules or ("&" not in row.source and "&" not in row.target):
            return row
        source, target = repaired_entities(row.pair)
        return row if (source, target) == row.pair else row._replace(source=source, target=target)

    def _rule(self, row: PairRow) -> str | None:
        """The rule that a pair breaks without other pairs of the text."""
        rule = broken_rule(row.pair, self.rules, self.limits[row.group].of(row.pair))
        if rule is not None or not self.excluded or "overlap" not in self.rules:
            return rule
        return None if self.excluded.isdisjoint(map(self.key, row.pair)) else "overlap"


def _key(row: PairRow) -> int:
    """A number that near duplicates of one direction have in common."""
    return hash((row.language, sentence_key(row.source), sentence_key(row.target)))


def sample_warnings(pairs: Dataset) -> Iterator[str]:
    """Return a line for each rule that more than 2 % of a sample break. Rules that need other text are left out."""
    sample = pairs.select(range(0, len(pairs), max(1, len(pairs) // _CHECKED)))
    rules = [name for name, (_, test) in RULES.items() if test and name != "language"]
    parts = sample["part"] if "part" in sample.column_names else [0] * len(sample)
    columns = (sample["line"], sample["source"], sample["target"], parts)
    rows = [
        PairRow(line, source, target, part=part)
        for line, source, target, part in zip(*columns, strict=True)
    ]
    judged, report = judge_pairs(rows, rules, one_direction=True)
    deque(judged, maxlen=0)
    remedy = "vanilla-transformer clean shows and drops them"
    for rule, count in report.dropped.most_common():
        if count > max(_FEW, _WARNED * report.seen):
            lines = ", ".join(str(line) for line, *_ in report.examples[rule][:3])
            share = f"{count / report.seen:.0%}"
            yield f"warning: about {share} of the training pairs: {RULES[rule][0]} (lines {lines}, …); {remedy}"
    if report.repaired > max(_FEW, _WARNED * report.seen):
        share = f"{report.repaired / report.seen:.0%}"
        yield (
            f"warning: about {share} of the training pairs: entities such as &amp; on one side; "
            "vanilla-transformer clean replaces them by their characters"
        )
