"""The sentences of the rows of tables, datasets and translation memories: which columns or languages they are in."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..text.language_codes import SAME_LANGUAGE, language_match
from ..text.language_tokens import CODES
from ..utils.errors import UserError
from .readers import (
    NEEDS_HEADER,
    TABLES_WITH_HEADER,
    BadRow,
    Repairs,
    TableRow,
    file_format,
    read_rows,
)
from .translation_memories import FORMATS, read_memory

SIDES = "source", "target"

#: Line or unit, the texts of the sides, not validated yet, and the other cells of the row.
RawRow: TypeAlias = tuple[int, list[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Columns:
    """The columns or languages of the source and the target that the user named.

    The `languages` of a model are used if nothing is named and there are no columns `source` and `target`.
    """

    source_column: str | None = None
    target_column: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    languages: tuple[str, str] | None = None

    def codes_in(self, columns: Collection[str]) -> dict[str, str]:
        """Names and values of columns with the languages of each row, if the table has them: read such rows only."""
        if not {*SIDES, *CODES} <= set(columns):
            return {}
        return {name: code for name in CODES if (code := getattr(self, name))}

    def key_in(
        self, side: str, columns: Sequence[str], where: str, hint: str = ""
    ) -> tuple[str | None, str]:
        """One side's key in the columns, after the column with a {language: text} or None. `hint` ends errors."""
        column = getattr(self, f"{side}_column")
        language = None if self.codes_in(columns) else getattr(self, f"{side}_lang")
        requested = column or language
        keys = [requested or side]
        if not requested and self.languages:
            keys.append(self.languages[SIDES.index(side)])
        for key in keys:
            if key in columns:
                return None, key
            spelled = [name for name in columns if name.strip().lower() == key.lower()]
            if len(spelled) > 1:
                names = " and ".join(map(repr, spelled))
                raise UserError(f"{where} has the columns {names}: name one by {side}_column")
            if spelled:
                return None, spelled[0]
        if "translation" in columns and column is None and keys != [side]:
            return "translation", keys[-1]
        raise UserError(
            f"{where} has the columns {', '.join(map(repr, columns))}, not {' or '.join(map(repr, keys))}: "
            f"name the {side} by {side}_column, or by {side}_lang" + (f"; {hint}" if hint else "")
        )

    def used_of(
        self, columns: Sequence[str], where: str, sides: Sequence[str] = SIDES
    ) -> list[str]:
        """The columns that `select_columns` needs. The others may be large."""
        keys = [self.key_in(side, columns, where) for side in sides]
        of_codes = (*SIDES, *CODES) if self.codes_in(columns) else ()
        return list(dict.fromkeys([*(parent or key for parent, key in keys), *of_codes]))


def select_columns(
    rows: Iterable[tuple[int, TableRow | BadRow]],
    columns: Columns,
    where: str,
    hint: str,
    sides: Sequence[str] = SIDES,
) -> Iterator[RawRow]:
    """Extract the sentences of `sides` from each row. The first valid row determines the columns."""
    keys: list[tuple[str | None, str]] = []
    codes: dict[str, str] = {}
    for line, row in rows:
        if isinstance(row, BadRow):
            yield line, [row] * len(sides), {}
            continue
        if not keys:
            codes = columns.codes_in(row)
            keys = [columns.key_in(side, list(row), where, hint) for side in sides]
            _check_languages(row, keys, where)
        if unnamed := [name for name in codes if not row.get(name)]:
            yield line, [BadRow(f"missing {unnamed[0]}")] * len(sides), {}
            continue
        if any(language_match(code, row[name]) < SAME_LANGUAGE for name, code in codes.items()):
            continue
        texts = [(_nested(row) if parent else row).get(key) for parent, key in keys]
        used = {parent or key for parent, key in keys}
        yield line, texts, {name: value for name, value in row.items() if name not in used}


def _nested(row: TableRow) -> Mapping[str, Any]:
    """The texts by language of the column "translation"."""
    texts = row.get("translation")
    return texts if isinstance(texts, Mapping) else {}


def _check_languages(row: TableRow, keys: Iterable[tuple[str | None, str]], where: str) -> None:
    nested = _nested(row)
    missing = [key for parent, key in keys if parent and key not in nested]
    if missing:
        raise UserError(
            f"{where}: its 'translation' has the languages {', '.join(map(repr, nested)) or 'none'}, "
            f"not {missing[0]!r}: set source_lang and target_lang, or source_column and target_column"
        )


def read_sides(
    path: Path,
    columns: Columns,
    repairs: Repairs,
    sides: Sequence[str] = SIDES,
    with_cells: bool = True,
) -> Iterator[RawRow]:
    """Read `sides` of a table or a translation memory. Without the other cells, Parquet decodes no other column."""
    kind = file_format(path)
    if kind not in FORMATS:
        hint = NEEDS_HEADER if kind in TABLES_WITH_HEADER else ""
        used = None if with_cells else partial(columns.used_of, where=str(path), sides=sides)
        return select_columns(read_rows(path, repairs, used), columns, str(path), hint, sides)
    named = columns.source_lang, columns.target_lang
    if named == (None, None) and columns.languages:
        named = columns.languages
    places = [1 + SIDES.index(side) for side in sides]
    units = read_memory(path, *named)
    return ((unit[0], [unit[place] for place in places], {}) for unit in units)


def cell_text(value: object) -> str:
    """A cell as text: None is empty, and what is no text is JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
