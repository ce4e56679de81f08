"""Find damaged sentence pairs in a text of one language pair or of many.

A pair has one reason at most: the first rule that it breaks, in the order of `RULES`. Limits are those of its
direction, or of its input if the text names no languages.
"""

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..text.language_codes import CodePair
from ..text.language_detection import is_known
from ..text.text_keys import TextKey, stable_key, text_key
from ..utils.atomic_write import report_full_disk
from ..utils.dataset_cache import batches_of
from ..utils.errors import UserError, check_at_least_one
from ..utils.process_pool import in_order
from .duplicates import RECORD, open_duplicates
from .rules import (
    RULES,
    SEQUENCE_RULES,
    FittingLimits,
    TextPair,
    broken_rule,
    flaws,
    repaired_entities,
)

if TYPE_CHECKING:  # its import would take seconds in each worker
    from datasets import Dataset

SAMPLE = 10_000  # pairs of each direction that its limits are taken from
BLOCK = 5000  # pairs that a worker judges at a time
EXAMPLES = 10

# pairs of a sample, and the number and share of damaged ones that are not worth a warning
_CHECKED = 2000
_ROWS_READ = 200
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
    workers: int = 1,
    folder: Path | None = None,
    **limits: Any,
) -> tuple[Iterator[Judged], CleaningReport]:
    """Judge pairs one by one.

    Args:
        rows: the pairs. They are read three times: for the limits, to be judged, and to be returned, with a byte for
            each in memory. An iterator, which can be read once, is kept in memory.
        rules: names of `RULES`. None is all, or `SEQUENCE_RULES` if `task` is "sequence".
        excluded: sentences of validation and test sets. A pair with one of them on a side is dropped.
        detect: detect the languages that the rows name.
        one_direction: whether an input that names no languages has one direction.
        task: "language" compares sentences by their words, "sequence" by all of their characters.
        workers: processes that judge blocks of pairs. The result is the same for any number.
        folder: for temporary files of 28 bytes a pair. None is the folder of the system.
        limits: fields of `PairLimits`, for all directions. The rest is taken from pairs of each direction.

    Returns:
        An iterator of the judged rows, and the report that it fills. Rows with a defect have no rule and are not
        counted.

    Raises:
        UserError: an unknown rule, or a text that changes meanwhile.
    """
    check_at_least_one(workers=workers)
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
        excluded=np.sort(np.fromiter(map(key, excluded if "overlap" in rules else ()), np.int64)),
        detect=detect,
        one_direction=one_direction,
        given=limits,
        key=key,
    )
    return judge.judged(again, report, workers, folder), report


@dataclass
class _Judge:
    rules: tuple[str, ...]
    excluded: np.ndarray  # keys of sentences, sorted. A set has ten times their bytes
    detect: bool
    one_direction: bool
    given: dict[str, Any]
    key: TextKey
    limits: dict[Group, FittingLimits] = field(default_factory=dict)

    def judged(
        self, rows: Iterable[PairRow], report: CleaningReport, workers: int, folder: Path | None
    ) -> Iterator[Judged]:
        verdicts = self._verdicts(rows, workers, folder)
        names = (None, *self.rules)
        for row in rows:
            if row.defect is not None:
                yield Judged(None, row)
                continue
            rule = names[verdicts[report.seen]] if report.seen < len(verdicts) else None
            repaired = self._repaired(row)
            report.count(rule, row, repaired is not row)
            yield Judged(rule, repaired)
        if report.seen != len(verdicts):
            raise UserError("the text changed while it was read: start again")

    def _verdicts(self, rows: Iterable[PairRow], workers: int, folder: Path | None) -> bytearray:
        """The verdict of each row without a defect."""
        place = str(folder or gettempdir())
        blocks = -(-self._survey(rows) // BLOCK)
        verdicts = bytearray()
        with report_full_disk(place), open_duplicates(place) as duplicates:
            work = self._blocks(rows)
            for block, records in in_order(self, work, min(workers, blocks), __name__):
                records["row"] += len(verdicts)
                verdicts += block
                duplicates.add(records)
            changed = np.frombuffer(verdicts, np.uint8)
            for rule, dropped in duplicates.rows():
                if rule in self.rules:
                    changed[dropped] = self._verdict(rule)
        return verdicts

    def _survey(self, rows: Iterable[PairRow]) -> int:
        """Take the limits from the text, and return the number of its rows without a defect."""
        samples: dict[Group, list[TextPair]] = {}
        counts: Counter[Group] = Counter()
        draw = Random(0)
        for row in self._sound(rows):
            group = row.group
            counts[group] += 1
            sample = samples.setdefault(group, [])
            if len(sample) < SAMPLE:
                sample.append(row.pair)
            elif (place := draw.randrange(counts[group])) < SAMPLE:
                sample[place] = row.pair
        for group, sample in samples.items():
            _, languages = group
            given = dict(self.given)
            if self.detect and all(languages):
                given["languages"] = languages
            for language in given.get("languages") or ():  # a warning here, and none in each worker
                is_known(language)
            one_direction = self.one_direction or any(languages)
            self.limits[group] = FittingLimits(sample, one_direction, **given)
        return counts.total()

    def _blocks(self, rows: Iterable[PairRow]) -> Iterator[tuple[list[PairRow]]]:
        # The other cells, which may be long, are not for the workers.
        judged = (row._replace(cells={}) for row in self._sound(rows))
        while block := list(islice(judged, BLOCK)):
            yield (block,)

    def _sound(self, rows: Iterable[PairRow]) -> Iterator[PairRow]:
        """The rows without a defect, repaired."""
        return (self._repaired(row) for row in rows if row.defect is None)

    def _repaired(self, row: PairRow) -> PairRow:
        """The row without entities on one side, if tags are compared."""
        if "markup" not in self.rules or ("&" not in row.source and "&" not in row.target):
            return row
        source, target = repaired_entities(row.pair)
        return row if (source, target) == row.pair else row._replace(source=source, target=target)

    def __call__(self, rows: Sequence[PairRow]) -> tuple[bytes, np.ndarray]:
        """Judge pairs without the others, in any process. Return their verdicts, and the records of those to keep."""
        compares = any(RULES[rule][1] is None for rule in self.rules)
        verdicts = bytearray()
        records = []
        for row in rows:
            rule = broken_rule(row.pair, self.rules, self.limits[row.group].of(row.pair))
            if rule is None and compares:
                keys = tuple(map(self.key, row.pair))
                if any(map(self._is_excluded, keys)):
                    rule = "overlap"
                else:
                    exact = stable_key("\0".join((*row.language, *row.pair)))
                    is_by_words = "near_duplicate" in self.rules
                    near = stable_key(f"{row.language} {keys}") if is_by_words else exact
                    records.append((near, exact, flaws(row.pair), len(verdicts)))
            verdicts.append(self._verdict(rule))
        return bytes(verdicts), np.array(records, RECORD)

    def _verdict(self, rule: str | None) -> int:
        """The number of a rule, from 1, or 0."""
        return 0 if rule is None else 1 + self.rules.index(rule)

    def _is_excluded(self, key: int) -> bool:
        place = bisect_left(self.excluded, key)
        return place < len(self.excluded) and bool(self.excluded[place] == key)


def sample_warnings(pairs: "Dataset") -> Iterator[str]:
    """Return a line for each rule that more than 2 % of a sample break. Rules that need other text are left out."""
    sample = pairs.select(range(0, len(pairs), max(1, len(pairs) // _CHECKED)))
    rules = [name for name, (_, test) in RULES.items() if test and name != "language"]
    rows = []
    for batch in batches_of(sample, _ROWS_READ, mapped_rows=_ROWS_READ):
        lines = batch["line"]
        parts = batch.get("part", [0] * len(lines))
        columns = (lines, batch["source"], batch["target"], parts)
        for line, source, target, part in zip(*columns, strict=True):
            rows.append(PairRow(line, source, target, part=part))
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
