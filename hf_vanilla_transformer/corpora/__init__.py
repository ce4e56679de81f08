"""Sentence pairs from files, mixtures and built-in corpora, with the lines that they come from."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .inputs import Input, parse_inputs
    from .mixtures import MixtureReport, load_pairs
    from .numbers import number_pairs
    from .pairs import PairReport
    from .readers import read_lines

__all__ = [
    "Input",
    "MixtureReport",
    "PairReport",
    "load_pairs",
    "number_pairs",
    "parse_inputs",
    "read_lines",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Input": ".inputs",
        "MixtureReport": ".mixtures",
        "PairReport": ".pairs",
        "load_pairs": ".mixtures",
        "number_pairs": ".numbers",
        "parse_inputs": ".inputs",
        "read_lines": ".readers",
    },
)
