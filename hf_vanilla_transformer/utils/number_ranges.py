"""Ranges of the numbers in dataclasses of arguments."""

import math
from collections.abc import Collection, Mapping

from .errors import UserError


def check_ranges(
    arguments: object,
    *,
    at_least_1: Collection[str] = (),
    at_least_0: Collection[str] = (),
    above_0: Collection[str] = (),
    shares: Collection[str] = (),
    finite: Collection[str] = (),
    at_most: Mapping[str, float] | None = None,
) -> None:
    """Refuse numbers out of their range, by the names of the fields. Missing fields and None are not checked."""
    for names, allowed, text in (
        (at_least_1, lambda number: number >= 1, "must be at least 1"),
        (at_least_0, lambda number: number >= 0, "must be at least 0"),
        (above_0, lambda number: number > 0, "must be above 0"),
        (shares, lambda number: 0 <= number < 1, "must be at least 0 and below 1"),
        (finite, lambda number: True, "must be a finite number"),
    ):
        for name in names:
            value = getattr(arguments, name, None)
            # Not a number is neither above nor below anything.
            if isinstance(value, int | float) and not (math.isfinite(value) and allowed(value)):
                raise UserError(f"{name}: {text}, not {value}")
    for name, most in (at_most or {}).items():
        if (getattr(arguments, name, None) or 0) > most:
            raise UserError(f"{name}: must be at most {most:,}, not {getattr(arguments, name):,}")
