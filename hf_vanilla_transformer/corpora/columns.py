"""The sentences of the rows of tables, datasets and translation memories: which columns or languages they are in."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple, TypeAlias

from ..text.language_codes import SAME_LANGUAGE, language_match
from ..text.language_tokens import CODES
from ..utils.errors import UserError
from .readers import (
    NEEDS_HEADER,
    TABLES_WITH_HEADER,
    BadRow,
    NumberedRow,
    Repairs,
    TableRow,
    file_format,
    is_readable,
    read_matches,
    read_rows,
    require_plain_text,
)
from .translation_memories import FORMATS, read_memory

SIDES = "source", "target"

#: Line or unit, the texts of the sides, not validated yet, and the other cells of the row.
RawRow: TypeAlias = tuple[int, list[Any], Mapping[str, Any]]

#: Values of `line_pattern` that have a name. `cmudict` leaves out numbers of pronunciations, and comments.
LINE_PATTERNS = {
    "cmudict": r"(?!;;;)(?P<source>\S+?)(?:\(\d+\))?\s+(?P<target>[^#]*[^#\s])\s*(?:#.*)?",
}


class Part(NamedTuple):
    """A cell in the text of a side."""

    key: str  #: its column, or "" if the text ends with `before`
    before: str = ""  #: text before the cell
    separator: str = ""  #: of the tags in the cell, each of which is put into brackets
    parent: str | None = None  #: the column with a {language: text} that the cell is in


def has_pairs(path: Path) -> bool:
    """Return whether a file has both sides of its pairs, by its suffix."""
    return is_readable(path) or file_format(path) in FORMATS


@dataclass(frozen=True)
class Columns:
    """The columns or languages of the source and the target that the user named.

    The `languages` of a model are used if nothing is named and there are no columns `source` and `target`.

    A column is a name, or a number from 1 in a table without a header. `{3:;}{1}` makes one text of several columns:
    the tags of the third, which ";" separates, each in brackets, and then the first. With numbers every text file is a
    table, with tabs if it is no CSV. With `line_pattern` its columns are the named groups of a regular expression.

    Raises:
        UserError: a number and a name, 0, or a malformed text of columns or pattern.
    """

    source_column: str | None = None
    target_column: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    languages: tuple[str, str] | None = None
    line_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.line_pattern is not None:
            _compiled(self.line_pattern)
        names = [part.key for side in SIDES for part in self._named_parts(side) if part.key]
        numbers = [name for name in names if name.isdecimal()]
        if "0" in numbers or 0 < len(numbers) < len(names):
            raise UserError(
                f"source_column, target_column: {', '.join(names)}: give names, or numbers from 1 for a table without "
                "a header"
            )

    @property
    def numbered(self) -> bool:
        """Whether tables have no header."""
        return any(part.key.isdecimal() for side in SIDES for part in self._named_parts(side))

    def are_in(self, path: Path) -> bool:
        """Return whether a file has columns or languages. Otherwise its lines are sentences."""
        return has_pairs(path) or self.of_lines

    @property
    def of_lines(self) -> bool:
        """Whether each line of a text file has columns, whatever its suffix."""
        return self.numbered or self.line_pattern is not None

    def _named_parts(self, side: str) -> list[Part]:
        """The columns that the user named for a side, and the text between them."""
        column = getattr(self, f"{side}_column")
        if column is None or "{" not in column:
            return [Part(column)] if column else []
        try:
            parsed = [*Formatter().parse(column)]
        except ValueError as error:
            raise UserError(f"{side}_column: {column}: {error}; such as {{3:;}}{{1}}") from None
        return [Part(key or "", before, separator or "") for before, key, separator, _ in parsed]

    def parts_in(self, side: str, columns: Sequence[str], where: str, hint: str = "") -> list[Part]:
        """The cells of one side's text in a table with these columns. `hint` ends errors."""
        parts = []
        for part in self._named_parts(side) or [Part("")]:
            if part.key or not part.before:
                parent, key = self.key_in(side, part.key or None, columns, where, hint)
                part = part._replace(key=key, parent=parent)
            parts.append(part)
        return parts

    def codes_in(self, columns: Collection[str]) -> dict[str, str]:
        """Names and values of columns with the languages of each row, if the table has them: read such rows only."""
        if not {*SIDES, *CODES} <= set(columns):
            return {}
        return {name: code for name in CODES if (code := getattr(self, name))}

    def key_in(
        self, side: str, column: str | None, columns: Sequence[str], where: str, hint: str = ""
    ) -> tuple[str | None, str]:
        """The key of a side, or of a column that it names, after the column with a {language: text} or None."""
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
        parts = [part for side in sides for part in self.parts_in(side, columns, where)]
        of_codes = (*SIDES, *CODES) if self.codes_in(columns) else ()
        keys = [part.parent or part.key for part in parts if part.key]
        return list(dict.fromkeys([*keys, *of_codes]))


def select_columns(
    rows: Iterable[NumberedRow],
    columns: Columns,
    where: str,
    hint: str,
    sides: Sequence[str] = SIDES,
) -> Iterator[RawRow]:
    """Extract the sentences of `sides` from each row. The first valid row determines the columns."""
    texts: list[list[Part]] = []
    used: set[str] = set()
    codes: dict[str, str] = {}
    for line, row in rows:
        if isinstance(row, BadRow):
            yield line, [row] * len(sides), {}
            continue
        if not texts:
            codes = columns.codes_in(row)
            if columns.numbered:
                hint = f"its first row is {', '.join(map(repr, row.values()))}"
            texts = [columns.parts_in(side, list(row), where, hint) for side in sides]
            parts = [part for text in texts for part in text]
            used = {part.parent or part.key for part in parts}
            _check_languages(row, parts, where)
        if unnamed := [name for name in codes if not row.get(name)]:
            yield line, [BadRow(f"missing {unnamed[0]}")] * len(sides), {}
            continue
        if any(language_match(code, row[name]) < SAME_LANGUAGE for name, code in codes.items()):
            continue
        others = {name: value for name, value in row.items() if name not in used}
        yield line, [_text(row, parts) for parts in texts], others


def _text(row: TableRow, parts: Sequence[Part]) -> Any:
    """The text of a side, a cell that is no text, or a `BadRow`."""
    if len(parts) == 1 and parts[0] == Part(parts[0].key, parent=parts[0].parent):
        return (_nested(row) if parts[0].parent else row).get(parts[0].key)
    text = ""
    for part in parts:
        cell = row.get(part.key) if part.key else ""
        if not isinstance(cell, str):
            return cell
        if part.separator:
            if "[" in cell or "]" in cell:
                return BadRow(f"bracket in the tags of column {part.key}")
            tags = map(str.strip, cell.split(part.separator))
            cell = "".join(f"[{tag}]" for tag in tags if tag)
        elif part.key and not cell.strip():
            return ""
        text += part.before + cell
    return text


def _nested(row: TableRow) -> Mapping[str, Any]:
    """The texts by language of the column "translation"."""
    texts = row.get("translation")
    if isinstance(texts, list) and all(isinstance(each, tuple) for each in texts):
        return dict(texts)  # a map of Parquet
    return texts if isinstance(texts, Mapping) else {}


def _compiled(line_pattern: str) -> re.Pattern[str]:
    """The regular expression of a `line_pattern`, or of its name."""
    try:
        pattern = re.compile(LINE_PATTERNS.get(line_pattern, line_pattern))
    except re.error as error:
        raise UserError(f"line_pattern: {line_pattern}: {error}") from None
    if not pattern.groupindex:
        raise UserError(
            f"line_pattern: {line_pattern}: name the columns, such as IN: (?P<source>.*) OUT: (?P<target>.*)"
        )
    return pattern


def _check_languages(row: TableRow, parts: Iterable[Part], where: str) -> None:
    nested = _nested(row)
    missing = [part.key for part in parts if part.parent and part.key not in nested]
    if missing:
        found = f"has the languages {', '.join(map(repr, nested))}, not {missing[0]!r}"
        if not nested:
            kind = type(row["translation"]).__name__
            found = f"is {kind}, not texts by language, such as that of {missing[0]!r}"
        raise UserError(
            f"{where}: its 'translation' {found}: set source_lang and target_lang, or source_column and target_column"
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
    if columns.line_pattern is not None:
        if has_pairs(path) and kind not in TABLES_WITH_HEADER:
            raise UserError(f"line_pattern: {path}: it reads lines of text, not {kind}")
        if kind not in TABLES_WITH_HEADER:
            require_plain_text(path)
        matches = read_matches(path, _compiled(columns.line_pattern), repairs)
        return select_columns(matches, columns, str(path), "", sides)
    if kind not in FORMATS:
        hint = NEEDS_HEADER if kind in TABLES_WITH_HEADER else ""
        used = None if with_cells else partial(columns.used_of, where=str(path), sides=sides)
        rows = read_rows(path, repairs, used, header=not columns.numbered)
        return select_columns(rows, columns, str(path), hint, sides)
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
