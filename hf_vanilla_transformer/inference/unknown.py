"""Lines with symbols that a tokenizer does not know, and one warning for all of them."""

import logging
from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..data.token_kinds import has_closed_vocabulary, unknown_symbols

logger = logging.getLogger(__name__)


class UnknownSymbols:
    """Counts lines with symbols that tokenizers with closed vocabularies read as `<unk>`, and invalid hypotheses."""

    def __init__(self) -> None:
        # by side: the first line, from 1, and its first symbol
        self._first: dict[str, tuple[int, str]] = {}
        self._lines: Counter[str] = Counter()
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
            self._lines[side] += 1
            self._see(side, (line, symbols[0]))

    def add(self, other: "UnknownSymbols") -> None:
        """Add the lines of another count."""
        self._lines += other._lines
        for side, first in other._first.items():
            self._see(side, first)
        self.hypotheses += other.hypotheses
        self.invalid += other.invalid

    def _see(self, side: str, first: tuple[int, str]) -> None:
        self._first[side] = min(first, self._first.get(side, first))

    def warnings(self) -> list[str]:
        """A line for each side that has unknown symbols, and one for invalid hypotheses."""
        warnings = []
        for side, (line, symbol) in self._first.items():
            have = "line has" if self._lines[side] == 1 else "lines have"
            warnings.append(
                f"{side}: {self._lines[side]:,} {have} symbols that the model does not know, read as <unk>; the first "
                f"is {symbol!r} in line {line:,}"
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
