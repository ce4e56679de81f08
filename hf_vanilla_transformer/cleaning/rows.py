"""Rows of an input to clean, with all of their cells and with those that loading would leave out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..corpora.columns import SIDES, Columns, cell_text
from ..corpora.mixtures import MixtureReport, open_sources
from ..corpora.pairs import PairReport, Source, checked_pairs
from ..corpora.readers import file_format
from ..text.language_codes import CodePair
from ..text.language_tokens import CODES
from .judging import PairRow


@dataclass
class CleaningInput:
    """One or several inputs, one after the other. They are read again by every iteration."""

    sources: list[Source]
    reports: list[PairReport]
    columns: Columns
    #: of other columns, complete after the first iteration
    names: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, inputs: Sequence[str], columns: Columns) -> "CleaningInput":
        """Open inputs, as of `load_pairs`."""
        sources = [replace(source, with_cells=True) for source in open_sources(inputs, columns)]
        return cls(sources, [PairReport(source.input.name) for source in sources], columns)

    def __iter__(self) -> Iterator[PairRow]:
        last_line = 0
        names = dict.fromkeys(self.names)
        for part, (source, report) in enumerate(zip(self.sources, self.reports, strict=True)):
            first_line = last_line
            languages = self._languages(source)
            for defect, (line, (text, translation), cells) in checked_pairs(source, report):
                last_line = first_line + line
                if not cells.keys() <= names.keys():
                    names.update(dict.fromkeys(cells))
                    self.names = list(names)
                yield PairRow(
                    line=last_line,
                    source=_side_text(text),
                    target=_side_text(translation),
                    direction=_direction(cells) or languages,
                    part=part,
                    cells=cells,
                    defect=defect,
                )

    def _languages(self, source: Source) -> CodePair:
        """The languages of an input whose rows do not name them: those of the flags, or of two names of files."""
        files = source.input.files
        if self.columns.source_lang and self.columns.target_lang:
            return self.columns.source_lang, self.columns.target_lang
        if len(files) == 2:
            return file_format(files[0]), file_format(files[1])
        return ("", "")

    def header(self) -> list[str]:
        """The names of the columns of the output: both sides, then the others."""
        sides = list(SIDES)
        if not set(sides).isdisjoint(self.names):  # a column "source" names where a pair is from
            for place, side in enumerate(SIDES):
                requested = getattr(self.columns, f"{side}_column") or getattr(
                    self.columns, f"{side}_lang"
                )
                sides[place] = requested or side
        return [*sides, *self.names]

    def record(self, row: PairRow) -> list[str]:
        """The cells of a row in the order of `header`."""
        return [row.source, row.target, *(cell_text(row.cells.get(name)) for name in self.names)]

    def summary(self) -> str:
        """The counts of what was read, as of `load_pairs`."""
        if len(self.reports) == 1:
            return self.reports[0].summary()
        return MixtureReport(self.reports, [1] * len(self.reports)).summary()


def _side_text(value: object) -> str:
    """A side as text that can be written, also of a row with a defect."""
    if not isinstance(value, str):
        return ""
    return value.encode("utf-8", "replace").decode() if not value.isascii() else value


def _direction(cells: Any) -> CodePair | None:
    """The codes of a row, if its table has them."""
    source, target = (cell_text(cells.get(name)) for name in CODES)
    return (source, target) if source or target else None
