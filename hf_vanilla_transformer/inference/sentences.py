"""Sentences from plain text, from a column of a table or from a language of a translation memory."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, tee, zip_longest
from pathlib import Path
from typing import Any

from ..corpora.columns import Columns, cell_text, read_sides
from ..corpora.inputs import Input
from ..corpora.readers import BLANK, BadRow, is_zipped
from ..text.cells import text_of
from ..text.language_tokens import CODES
from ..utils.errors import UserError
from ..utils.system_info import counted
from .text_io import input_lines, on_one_line

logger = logging.getLogger(__name__)

Cells = Mapping[str, Any]


def read_sentences(
    path: str | Path | None = None,
    side: str = "source",
    columns: Columns | None = None,
    one_line: bool = True,
) -> Iterator[str]:
    """Read sentences, one per line, per row of a table or per unit of a translation memory.

    Args:
        path: as of `text_io.input_lines`, or a file of `parse_inputs` with pairs, by its suffix.
        side: source or target, in a file with pairs.
        columns: its columns or languages.
        one_line: whether a line break within a cell becomes a space. Models were trained on cells as they are.
    """
    rows = _sentences_with_cells(path, side, columns, one_line, with_cells=False)
    return (text for text, _ in rows)


def file_of_lines(path: str | Path | None, columns: Columns) -> Path | None:
    """Return the file whose lines are the sentences, if it can be read from any byte: no pipe, table or gzip file."""
    if path is None or not Path(path).is_file() or columns.are_in(Path(path)):
        return None
    return None if is_zipped(Path(path)) else Path(path)


def _sentences_with_cells(
    path: str | Path | None,
    side: str,
    columns: Columns | None,
    one_line: bool,
    with_cells: bool = True,
) -> Iterator[tuple[str, Cells]]:
    """Yield sentences, each with the other cells of its row."""
    columns = columns or Columns()
    if path is None or not columns.are_in(Path(path)):
        yield from ((line, {}) for line in input_lines(path))
        return
    from ..corpora.pairs import defect

    rows = read_sides(Path(path), columns, {}, [side], with_cells)
    for line, (text,), cells in rows:
        if text is BLANK:
            text = ""
        if not isinstance(text, BadRow):
            text = text_of(text, f"{path}, line {line}: {side}")
        if text is None and side == "source":  # it has no translation. A reference must be there
            text = ""
        reason = defect(side, text)
        if reason and not (isinstance(text, str) and not text.strip()):
            raise UserError(f"{path}, line {line}: {reason}; mend it, or remove the row")
        yield on_one_line(text) if one_line else text, cells


def read_directed_sentences(
    path: str | Path | None,
    columns: Columns | None = None,
    one_line: bool = True,
    target: str | Path | None = None,
) -> tuple[Iterator[str], dict[str, Iterator[str | None]]]:
    """Read sources as `read_sentences`, and by name what belongs to each.

    These are the languages, the columns `source_lang` and `target_lang` if the file has them, and `targets`, the text
    in a file `target`. The iterators are to be read together.
    """
    rows = stream_sentence_pairs(path, target, columns, one_line)
    read: list[tuple[str, str, Cells]] = []
    for row in rows:  # up to the first that is no blank line, which has no cells
        read.append(row)
        if row[0] or row[2]:
            break
    names = [name for name in CODES if read and name in read[-1][2]]
    sources, *copies = tee(chain(read, rows), 1 + len(names))
    found = {name: _cells_of(copy, name) for name, copy in zip(names, copies, strict=True)}
    if target is not None:
        sources, targets = tee(sources)
        found["targets"] = (translation for _, translation, _ in targets)
    return (text for text, _, _ in sources), found


def _cells_of(rows: Iterator[tuple[str, str, Cells]], name: str) -> Iterator[str | None]:
    return (cells.get(name) or None for _, _, cells in rows)


def codes_in(cells: Sequence[Cells]) -> dict[str, list[str | None]]:
    """The languages of rows, by the names of the columns `source_lang` and `target_lang` that there are."""
    first = _first_cells(cells)
    names = [name for name in CODES if name in first]
    return {name: [row.get(name) or None for row in cells] for name in names}


def _first_cells(cells: Sequence[Cells]) -> Cells:
    """The cells of the first row that has some, which a blank line has not."""
    return next(filter(None, cells), {})


def labels_in(cells: Sequence[Cells], column: str, path: str | Path) -> list[str]:
    """The cells of a column as text. `path` is the table, for messages."""
    first = _first_cells(cells)
    if column not in first:
        names = ", ".join(map(repr, first)) or "none"
        raise UserError(f"{path} has no column {column!r} beside its text; it has {names}")
    return [on_one_line(cell_text(row.get(column))) for row in cells]


def read_sentence_pairs(
    source: str | Path | None,
    target: str | Path,
    columns: Columns | None = None,
    one_line: bool = True,
) -> tuple[list[str], list[str], list[Cells]]:
    """Read sentences, their translations, and the other cells of the source, as `stream_sentence_pairs`."""
    rows = list(stream_sentence_pairs(source, target, columns, one_line))
    sources, targets, cells = map(list, zip(*rows, strict=True)) if rows else ([], [], [])
    return sources, targets, cells


def stream_sentence_pairs(
    source: str | Path | None,
    target: str | Path | None,
    columns: Columns | None = None,
    one_line: bool = True,
) -> Iterator[tuple[str, str, Cells]]:
    """Yield sentences, their translations, and the other cells of the rows of the source.

    If both are one file with pairs, its incomplete rows and blank lines are dropped and counted in warnings, as in
    training.

    Args:
        source, target: as `path` of `read_sentences`. Without a target, translations are empty.
        columns, one_line: as of `read_sentences`.

    Raises:
        UserError: one has more lines, at its end.
    """
    if target is None:
        sources = _sentences_with_cells(source, "source", columns, one_line)
        yield from ((text, "", cells) for text, cells in sources)
        return
    columns = columns or Columns()
    if source is not None and columns.are_in(Path(source)) and _are_one_file(source, target):
        yield from _pairs_of_rows(Path(source), columns, one_line)
        return
    rows = _sentences_with_cells(source, "source", columns, one_line)
    targets = read_sentences(target, "target", columns, one_line)
    for line, (row, translation) in enumerate(zip_longest(rows, targets), start=1):
        if row is None or translation is None:
            # The count is of all lines, so that the error says how many are missing.
            longer = line + sum(1 for _ in (targets if row is None else rows))
            counts = (line - 1, longer) if row is None else (longer, line - 1)
            name = source or "standard input"
            raise UserError(
                f"{name} has {counts[0]} lines, {target} has {counts[1]}: each needs its other"
            )
        text, cells = row
        yield text, translation, cells


def _pairs_of_rows(
    path: Path, columns: Columns, one_line: bool
) -> Iterator[tuple[str, str, Cells]]:
    """The pairs of a table or a translation memory, and the other cells."""
    from ..corpora.pairs import PairReport, Source, checked_pairs

    report = PairReport(str(path))
    for reason, (_, texts, cells) in checked_pairs(
        Source(Input(str(path), (path,)), columns), report
    ):
        if reason is None:
            source, target = map(on_one_line, texts) if one_line else texts
            yield source, target, cells
    if report.dropped:
        logger.warning("%s: %s", path, report.summary())
    if report.blank:
        logger.warning("%s: %s left out, as in training", path, counted(report.blank, "blank line"))


def _are_one_file(source: str | Path, target: str | Path) -> bool:
    return Path(source).resolve() == Path(target).resolve()
