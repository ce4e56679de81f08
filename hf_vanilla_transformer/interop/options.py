"""The options in a toolkit's files: values of untrusted types, checked when they are read."""

import math
from collections.abc import Mapping
from typing import Any

from ..utils.errors import UserError, shown
from .converted import Fields

#: Names of options: the supported values, the default first, and what a model with a different value does.
Unsupported = Mapping[str, tuple[tuple, str]]

_MAX_BITS = 63  # of a whole number


class Options:
    """Named options. None counts as missing. Messages put `where`, such as "model.pt: --", before a name."""

    def __init__(self, values: object, where: str = ""):
        self.values: Fields = dict(values) if isinstance(values, Mapping) else {}
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def section(self, name: str) -> "Options":
        """The options under this name, or none if it is missing."""
        values = self.values.get(name)
        if values is not None and not isinstance(values, Mapping):
            raise self.error(name, "options are needed, not one value")
        return Options(values, f"{self.where}{name}.")

    def integer(self, name: str, default: int | None = None, least: int | None = None) -> Any:
        value = self._read(name, default, int, "a whole number is needed")
        if value is not None and least is not None and value < least:
            raise self.error(name, f"{least} is the least")
        return value

    def number(self, name: str, default: float = 0.0, least: float = -math.inf) -> float:
        value = self._read(name, default, (int, float), "a number is needed")
        if not math.isfinite(value) or value < least:
            bound = "" if math.isinf(least) else f", at least {least}"
            raise self.error(name, f"a number is needed{bound}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool | int):
            raise self.error(name, "true or false is needed")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        return self._read(name, default, str, "text is needed")

    def texts(self, name: str) -> list[str]:
        """A list of texts, or none if it is missing."""
        values = self._read(name, [], (list, tuple), "a list is needed")
        if not all(isinstance(value, str) for value in values):
            raise self.error(name, "a list of texts is needed")
        return list(values)

    def refuse(self, unsupported: Unsupported, neutral: tuple = (None, "")) -> None:
        """Raise a UserError for an option of a different architecture. `neutral` values count as missing."""
        for name, (supported, reason) in unsupported.items():
            value = self.values.get(name, supported[0])
            if value not in (*supported, *neutral):
                raise self.error(name, f"such a model {reason}")

    def dropped(self, neutral: Fields) -> list[str]:
        """A note that names the options of a search that `generate` lacks, or no note if all have `neutral` values."""
        changed = [
            name for name, value in neutral.items() if self.values.get(name) not in (None, value)
        ]
        names = ", ".join(self._spelt(name).rpartition(" ")[2] for name in changed)
        return [f"`generate` has no {names}, so it is dropped"] if names else []

    def error(self, name: str, reason: str) -> UserError:
        """The error for the value of an option, spelt as on the command line if it is a flag there."""
        return UserError(f"{self._spelt(name)}={shown(self.values.get(name))}: {reason}")

    def _spelt(self, name: str) -> str:
        return self.where + (name.replace("_", "-") if self.where.endswith("--") else name)

    def _read(self, name: str, default: object, kinds: type | tuple[type, ...], needed: str) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.error(name, needed)
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise self.error(name, f"more than {_MAX_BITS} bits")
        return value
