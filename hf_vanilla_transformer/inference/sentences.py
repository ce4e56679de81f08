"""Sentences from plain text, from a column of a table or from a language of a translation memory."""

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from ..data.cleaning_input import cell_text
from ..data.columns import Columns, RawRow, read_sides
from ..data.corpora import PairReport, Source, checked_pairs, defect
from ..data.inputs import Input, has_pairs
from ..data.language_tokens import CODES
from ..data.readers import is_readable, read_rows
from ..utils.errors import UserError
from .text_io import on_one_line, read_lines

logger = logging.getLogger(__name__)


def read_sentences(
    path: str | Path | None = None,
    side: str = "source",
    columns: Columns | None = None,
    one_line: bool = True,
) -> Iterator[str]:
    """Read sentences, one per line, per row of a table or per unit of a translation memory.

    Args:
        path: as of `text_io.read_lines`, or a file of `parse_inputs` with pairs, by its suffix.
        side: source or target, in a file with pairs.
        columns: its columns or languages.
        one_line: whether a line break within a cell becomes a space. Models were trained on cells as they are.
    """
    if path is None or not has_pairs(Path(path)):
        yield from read_lines(path)
        return
    for line, (text,), _ in read_sides(Path(path), columns or Columns(), {}, [side]):
        reason = defect(side, text)
        if reason and not (isinstance(text, str) and not text.strip()):
            raise UserError(f"{path}, line {line}: {reason}; mend it, or remove the row")
        yield on_one_line(text) if one_line else text


def read_codes(
    path: str | Path | None, lines: Collection[int] | None = None
) -> dict[str, Iterator[str | None]]:
    """The columns `source_lang` and `target_lang` of a table, those that it has: the direction of each row.

    `lines` are those of the rows to read. None reads all.
    """
    if path is None or not is_readable(Path(path)):
        return {}
    first = next((row for _, row in read_rows(Path(path), {})), None)
    names = [name for name in CODES if isinstance(first, Mapping) and name in first]
    return {name: _column(Path(path), name, lines) for name in names}


def _column(path: Path, name: str, lines: Collection[int] | None) -> Iterator[str | None]:
    return (
        row.get(name) or None if isinstance(row, Mapping) else None
        for line, row in read_rows(path, {})
        if lines is None or line in lines
    )


def read_labels(path: str | Path, column: str, lines: Collection[int] | None = None) -> list[str]:
    """Read the cells of a column of a table as text. `lines` as of `read_codes`."""
    if not is_readable(Path(path)):
        raise UserError(f"{path} is no table, so that it has no column {column!r}")
    rows = read_sides(Path(path), Columns(source_column=column), {}, ["source"])
    return [
        on_one_line(cell_text(value))
        for line, (value,), _ in rows
        if lines is None or line in lines
    ]


def lines_of_pairs(
    source: str | Path | None, target: str | Path, columns: Columns
) -> set[int] | None:
    """The lines of the rows that `read_sentence_pairs` keeps of one file with pairs. None: all lines of two files."""
    if source is None or not _are_one_file(source, target):
        return None
    return {line for line, _, _ in _complete_rows(source, columns, PairReport(str(source)))}


def _are_one_file(source: str | Path, target: str | Path) -> bool:
    return has_pairs(Path(source)) and Path(source).resolve() == Path(target).resolve()


def _complete_rows(path: str | Path, columns: Columns, report: PairReport) -> list[RawRow]:
    source = Source(Input(str(path), (Path(path),)), columns)
    return [row for defect_of_row, row in checked_pairs(source, report) if defect_of_row is None]


def read_sentence_pairs(
    source: str | Path | None,
    target: str | Path,
    columns: Columns | None = None,
    one_line: bool = True,
) -> tuple[list[str], list[str]]:
    """Read sentences and their translations.

    If both are one file with pairs, its incomplete rows are dropped and counted in a warning, as in training.

    Args:
        source, target: as `path` of `read_sentences`.
        columns, one_line: as of `read_sentences`.
    """
    columns = columns or Columns()
    if source is not None and _are_one_file(source, target):
        report = PairReport(str(source))
        rows = _complete_rows(source, columns, report)
        if report.dropped:
            logger.warning("%s: %s", source, report.summary())
        sources, targets = map(list, zip(*(texts for _, texts, _ in rows), strict=True))
        if one_line:
            sources = list(map(on_one_line, sources))
            targets = list(map(on_one_line, targets))
    else:
        sources = list(read_sentences(source, "source", columns, one_line))
        targets = list(read_sentences(target, "target", columns, one_line))
    if len(sources) != len(targets):
        name = source or "standard input"
        raise UserError(
            f"{name} has {len(sources)} lines, {target} has {len(targets)}: each needs its other"
        )
    return sources, targets
