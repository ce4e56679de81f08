"""Tell what an item to translate is: a cell of a table, an element of a list or a value of a request."""

from numbers import Real
from typing import Any

from ..utils.errors import UserError

_MISSING = frozenset(["NAType", "NaTType"])  # of pandas, which need not be installed


def text_of(cell: Any, where: str) -> str | None:
    """Return the text of a cell, or None if it has no value: None, NaN, or pandas' NA or NaT.

    Raises:
        UserError: it is something else. The message starts with `where`.
    """
    if cell is None or isinstance(cell, str):
        return cell
    is_nan = isinstance(cell, Real) and cell != cell
    if is_nan or type(cell).__name__ in _MISSING:
        return None
    raise UserError(
        f"{where} is {cell!r:.60} ({type(cell).__name__}), not text; mend it, or remove it"
    )
