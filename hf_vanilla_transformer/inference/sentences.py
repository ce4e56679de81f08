"""Sentences from plain text, from a column of a table or from a language of a translation memory."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..data.columns import SIDES, Columns, read_sides
from ..data.corpora import PairReport, defect
from ..data.inputs import has_pairs
from ..data.language_tokens import CODES
from ..data.mixtures import load_pairs
from ..data.readers import is_readable, read_rows
from ..utils.errors import UserError
from .text_io import read_lines

logger = logging.getLogger(__name__)


def read_sentences(
    path: str | Path | None = None, side: str = "source", columns: Columns | None = None
) -> Iterator[str]:
    """Read sentences, one per line, per row of a table or per unit of a translation memory.

    Args:
        path: as of `text_io.read_lines`, or a file of `parse_inputs` with pairs, by its suffix.
        side: source or target, in a file with pairs.
        columns: its columns or languages.

    Yields:
        The sentences. A line break within a cell becomes a space.
    """
    if path is None or not has_pairs(Path(path)):
        yield from read_lines(path)
        return
    for line, (text,), _ in read_sides(Path(path), columns or Columns(), {}, [side]):
        reason = defect(side, text)
        if reason and not (isinstance(text, str) and not text.strip()):
            raise UserError(f"{path}, line {line}: {reason}; mend it, or remove the row")
        yield _on_one_line(text)


def read_codes(path: str | Path | None) -> dict[str, Iterator[str | None]]:
    """The columns `source_lang` and `target_lang` of a table, those that it has: the direction of each row."""
    if path is None or not is_readable(Path(path)):
        return {}
    first = next((row for _, row in read_rows(Path(path), {})), None)
    names = [name for name in CODES if isinstance(first, Mapping) and name in first]
    return {name: _column(Path(path), name) for name in names}


def _column(path: Path, name: str) -> Iterator[str | None]:
    return (
        row.get(name) or None if isinstance(row, Mapping) else None
        for _, row in read_rows(path, {})
    )


def read_sentence_pairs(
    source: str | Path | None, target: str | Path, columns: Columns | None = None
) -> tuple[list[str], list[str]]:
    """Read sentences and their translations.

    If both are one file with pairs, its incomplete rows are dropped and counted in a warning, as in training.

    Args:
        source, target: as `path` of `read_sentences`.
    """
    columns = columns or Columns()
    if (
        source is not None
        and Path(source).resolve() == Path(target).resolve()
        and has_pairs(Path(target))
    ):
        pairs, report = load_pairs(source, **asdict(columns))
        if isinstance(report, PairReport) and report.dropped:
            logger.warning("%s: %s", source, report.summary())
        sources, targets = ([_on_one_line(text) for text in pairs[side]] for side in SIDES)
    else:
        sources = list(read_sentences(source, "source", columns))
        targets = list(read_sentences(target, "target", columns))
    if len(sources) != len(targets):
        name = source or "standard input"
        raise UserError(
            f"{name} has {len(sources)} lines, {target} has {len(targets)}: each needs its other"
        )
    return sources, targets


def _on_one_line(text: Any) -> str:
    return " ".join(text.split()) if "\n" in text or "\r" in text else str(text)
