"""Lines with symbols that a tokenizer does not know, or with other faults, and one warning for all of a fault."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from ..text.token_kinds import has_closed_vocabulary, unknown_symbols

_RANGES = 100  # of line numbers in a warning

logger = logging.getLogger(__name__)


@dataclass
class _Lines:
    """Numbers of lines, mostly in their order, as ranges. Beyond `_RANGES` ranges they are only counted."""

    count: int = 0
    left_out: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, first: int, last: int) -> None:
        """Add the lines from `first` to `last`. The last one of before is not counted again."""
        start, end = self.ranges[-1] if self.ranges else (first, first - 2)
        if start <= first <= end + 1:
            added = max(last - end, 0)
            self.ranges[-1] = start, max(end, last)
        else:
            added = last - first + 1
            if len(self.ranges) < _RANGES:
                self.ranges.append((first, last))
            else:
                self.left_out += added
        self.count += added

    def __str__(self) -> str:
        ranges = [
            f"{first}" if first == last else f"{first}-{last}"
            for first, last in sorted(self.ranges)
        ]
        more = f" and {self.left_out:,} more" if self.left_out else ""
        return ", ".join(ranges) + more


class LineWarnings:
    """Counts lines with symbols that closed vocabularies read as `<unk>`, other faults, and invalid hypotheses."""

    def __init__(self) -> None:
        # by side: the first line, from 1, and its first symbol
        self._first: dict[str, tuple[int, str]] = {}
        self._unknown: dict[str, _Lines] = {}
        self._faults: dict[str, _Lines] = {}
        self.hypotheses = 0  # that a normaliser has read
        self.invalid = 0  # of them

    def check(
        self,
        side: str,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        token_ids: Sequence[int],
        line: int,
    ) -> None:
        """Count a line if it has an unknown symbol.

        Args:
            side: names the text in the warning: "source", "target" or "prefix".
            tokenizer: has encoded the text.
            text: of the line.
            token_ids: of the text.
            line: number of the line, from 1.
        """
        if tokenizer.unk_token_id not in token_ids or not has_closed_vocabulary(tokenizer):
            return
        symbols = unknown_symbols(tokenizer, text)
        if symbols:
            self._unknown.setdefault(side, _Lines()).add(line, line)
            self._see(side, (line, symbols[0]))

    def add_fault(self, fault: str, line: int) -> None:
        """Count a line with a fault. `fault` starts the warning."""
        self._faults.setdefault(fault, _Lines()).add(line, line)

    def add(self, other: "LineWarnings") -> None:
        """Add the lines of another count."""
        for own, added in ((self._unknown, other._unknown), (self._faults, other._faults)):
            for name, lines in added.items():
                mine = own.setdefault(name, _Lines())
                for each in lines.ranges:
                    mine.add(*each)
                mine.count += lines.left_out
                mine.left_out += lines.left_out
        for side, first in other._first.items():
            self._see(side, first)
        self.hypotheses += other.hypotheses
        self.invalid += other.invalid

    def _see(self, side: str, first: tuple[int, str]) -> None:
        self._first[side] = min(first, self._first.get(side, first))

    def warnings(self) -> list[str]:
        """A line for each side that has unknown symbols, for each other fault, and for invalid hypotheses."""
        warnings = []
        for side, (line, symbol) in self._first.items():
            lines = self._unknown[side]
            have = "line has" if lines.count == 1 else "lines have"
            all_lines = f"; lines {lines}" if lines.count > 1 else ""
            warnings.append(
                f"{side}: {lines.count:,} {have} symbols that the model does not know, read as <unk>; the first "
                f"is {symbol!r} in line {line:,}{all_lines}"
            )
        for fault, lines in self._faults.items():
            numbers = f"line {lines}" if lines.count == 1 else f"{lines.count:,} lines: {lines}"
            warnings.append(f"{fault} ({numbers})")
        if self.invalid:
            warnings.append(
                f"normalize: {self.invalid} of {self.hypotheses} hypotheses are invalid"
            )
        return warnings

    def warn(self) -> None:
        """Log the warnings."""
        for warning in self.warnings():
            logger.warning("%s", warning)
