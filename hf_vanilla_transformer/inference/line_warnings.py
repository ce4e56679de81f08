"""Lines with symbols that a tokenizer does not know, or with other faults, and one warning for all of a fault."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from ..text.token_kinds import has_closed_vocabulary, unknown_symbols

_RANGES = 100  # of line numbers in a warning

logger = logging.getLogger(__name__)


@dataclass
class _Lines:
    """Numbers of lines, mostly in their order, as ranges. Beyond `_RANGES` ranges they are only counted.

    The range after these is the one of the last lines, so that no line is counted again.
    """

    count: int = 0
    left_out: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    symbols: dict[int, str] = field(default_factory=dict)  # of the first lines that have one

    def add(self, first: int, last: int, symbol: str = "") -> None:
        """Add the lines from `first` to `last`. The last one of before is not counted again."""
        if symbol and len(self.symbols) < _RANGES:
            self.symbols.setdefault(first, symbol)
        start, end = self.ranges[-1] if self.ranges else (first, first - 2)
        if start <= first <= end + 1:
            added = max(last - end, 0)
            self.ranges[-1] = start, max(end, last)
        else:
            added = last - first + 1
            del self.ranges[_RANGES:]
            self.ranges.append((first, last))
        self.count += added
        if len(self.ranges) > _RANGES:
            self.left_out += added

    def __str__(self) -> str:
        ranges = [
            f"{first}" if first == last else f"{first}-{last}"
            for first, last in sorted(self.ranges[:_RANGES])
        ]
        more = f" and {self.left_out:,} more" if self.left_out else ""
        return ", ".join(ranges) + more


class LineWarnings:
    """Counts lines with symbols that closed vocabularies read as `<unk>`, other faults, and invalid hypotheses."""

    def __init__(self) -> None:
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
            fault = f"{side}: symbols that the model does not know, read as <unk>"
            self.add_fault(fault, line, symbols[0])

    def add_fault(self, fault: str, line: int, symbol: str = "") -> None:
        """Count a line with a fault, and the symbol that is one. `fault` starts the warning."""
        self._faults.setdefault(fault, _Lines()).add(line, line, symbol)

    def add(self, other: "LineWarnings", lines_before: Callable[[], int] | None = None) -> None:
        """Add the lines of another count. `lines_before` is asked how many lines it left out, if it has any."""
        before = lines_before() if lines_before is not None and other._faults else 0
        for fault, lines in other._faults.items():
            mine = self._faults.setdefault(fault, _Lines())
            for start, end in lines.ranges[:_RANGES]:
                mine.add(start + before, end + before)
            mine.count += lines.left_out
            mine.left_out += lines.left_out
            mine.symbols |= {line + before: symbol for line, symbol in lines.symbols.items()}
        self.hypotheses += other.hypotheses
        self.invalid += other.invalid

    def warnings(self) -> list[str]:
        """A line for each fault, and one for invalid hypotheses."""
        warnings = []
        for fault, lines in self._faults.items():
            first = min(lines.symbols, default=None)
            example = f", such as {lines.symbols[first]!r}" if first else ""
            numbers = f"line {lines}" if lines.count == 1 else f"{lines.count:,} lines: {lines}"
            warnings.append(f"{fault}{example} ({numbers})")
        if self.invalid:
            warnings.append(
                f"normalize: {self.invalid} of {self.hypotheses} hypotheses are invalid"
            )
        return warnings

    def warn(self) -> None:
        """Log the warnings."""
        for warning in self.warnings():
            logger.warning("%s", warning)
