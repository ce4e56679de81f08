"""Tell what an item to translate is: a cell of a table, an element of a list or a value of a request."""

import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from ..utils.errors import UserError

_MISSING = frozenset(["NAType", "NaTType"])  # of pandas, which need not be installed
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # which JSON permits, and UTF-8 lacks


def check_items(name: str, items: Any) -> None:
    """Refuse an argument whose items are no texts: letters of a string, or columns of a dictionary or a frame."""
    if isinstance(items, str):
        raise UserError(
            f"{name}: an iterable of strings is needed, not one string; put it in a list"
        )
    is_batch = isinstance(items, Mapping) and not all(
        isinstance(value, str) for value in items.values()
    )
    if is_batch or hasattr(items, "columns"):
        kind = type(items).__name__
        raise UserError(
            f"{name}: an iterable of strings is needed, not a {kind}; give one of its columns"
        )


def text_of(cell: Any, where: str) -> str | None:
    """Return the text of a cell, or None if it has no value: None, NaN, or pandas' NA or NaT.

    Raises:
        UserError: it is something else. The message starts with `where`.
    """
    if cell is None:
        return None
    if isinstance(cell, str):
        if not cell.isascii() and _SURROGATE.search(cell):
            raise UserError(f"{where} is {cell!a:.60}, not valid Unicode; mend it, or remove it")
        return cell
    is_nan = isinstance(cell, Real) and cell != cell
    if is_nan or type(cell).__name__ in _MISSING:
        return None
    raise UserError(
        f"{where} is {cell!r:.60} ({type(cell).__name__}), not text; mend it, or remove it"
    )
