"""Lines with symbols that a tokenizer does not know, and one warning for all of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..data.token_kinds import has_closed_vocabulary, unknown_symbols

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Lines:
    """The lines of one side that have an unknown symbol."""

    number: int
    first: int  # line, from 1
    symbol: str  # the first one of this line

    def __add__(self, other: "_Lines") -> "_Lines":
        earliest = min(self, other, key=lambda lines: lines.first)
        return _Lines(self.number + other.number, earliest.first, earliest.symbol)


class UnknownSymbols:
    """Counts lines with symbols that tokenizers with closed vocabularies read as `<unk>`, and invalid hypotheses."""

    def __init__(self) -> None:
        self._sides: dict[str, _Lines] = {}
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
            self._add(side, _Lines(1, line, symbols[0]))

    def add(self, other: "UnknownSymbols") -> None:
        """Add the lines of another count."""
        for side, lines in other._sides.items():
            self._add(side, lines)
        self.hypotheses += other.hypotheses
        self.invalid += other.invalid

    def _add(self, side: str, lines: _Lines) -> None:
        known = self._sides.get(side)
        self._sides[side] = lines if known is None else known + lines

    def warnings(self) -> list[str]:
        """A line for each side that has unknown symbols, and one for invalid hypotheses."""
        warnings = []
        for side, lines in self._sides.items():
            have = "line has" if lines.number == 1 else "lines have"
            warnings.append(
                f"{side}: {lines.number:,} {have} symbols that the model does not know, read as <unk>; the first is "
                f"{lines.symbol!r} in line {lines.first:,}"
            )
        if self.invalid:
            warnings.append(
                f"normalize: {self.invalid} of {self.hypotheses} hypotheses are invalid"
            )
        return warnings

    def warn(self) -> None:
        """Log the warnings."""
        for warning in self.warnings():
            logger.warning("%s", warning)
