"""What a check compares and what it reports."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .mistakes import MISTAKES, Mistake
from .reference import ALLOWED

TOLERANCE = 2e-5  # of the largest number
UNKNOWN = Mistake(
    "model", "§3", None, "the numbers differ, and no single known mistake explains it"
)

_DIFFERENCES = {
    ("norm position", "pre"): "pre-norm, where §3.1 has post-norm",
    ("positions", "split"): "sines first, then cosines, where §3.5 interleaves them",
    (
        "positions",
        "tensor2tensor",
    ): "sines first, then cosines, with exponents i / (d_model / 2 - 1), as in tensor2tensor",
    ("positions", "table"): "learned positions, for which §3.5 found nearly identical results",
    ("activation", "gelu"): "GELU, where Eq. 2 has ReLU",
    ("activation", "gelu by tanh"): "GELU, where Eq. 2 has ReLU",
    ("activation", "silu"): "SiLU, where Eq. 2 has ReLU",
    ("norm", "unbiased"): "LayerNorm divides by the unbiased standard deviation plus epsilon",
    ("norm", "rms"): "RMSNorm, where §3.1 has LayerNorm",
    ("heads", "strides"): "head h has the features h, h + H, …, not a block of them",
    ("inputs", "shifted inside"): "the model shifts the target itself, and starts it with zeros",
    ("output", "log-probabilities"): "the output is log-probabilities, whose loss is NLLLoss",
}


class Report(NamedTuple):
    """What a check found.

    Attributes:
        mistakes: none if the code is right.
        difference: the largest difference from the paper's numbers.
        notes: right differences, and what is left to the caller.
        formula: returns the output of `Reference` that equals the code's, with further choices.
    """

    mistakes: list[Mistake]
    difference: float
    notes: list[str]
    formula: Callable[[Mapping[str, Any]], Tensor] | None = None


def relative_difference(numbers: Tensor, expected: Tensor) -> float:
    """The largest difference, divided by the largest number if that is above 1."""
    return float((numbers - expected).abs().max() / expected.abs().max().clamp(min=1))


def right_choices(norms: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Choices of `Reference` that are right."""
    options = {**ALLOWED, **norms}
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def usual_choices(norms: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The right choices that occur together with mistakes."""
    options = {**ALLOWED, **norms}
    places = ("norm position", "norm", "activation", "epsilon")
    products = itertools.product(*(options[place] for place in places))
    return [dict(zip(places, values, strict=True)) for values in products]


def choices(
    places: Collection[str], norms: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[dict[str, Any], Mistake | None]]:
    """Choices of `Reference` at these places: right ones first, then each mistake with the usual right ones."""
    for choice in right_choices(norms):
        yield choice, None
    if "inputs" in places:
        for choice in right_choices(norms):
            yield choice | {"inputs": "shifted inside"}, None
    usual = usual_choices(norms)
    for mistake, choice in itertools.product(MISTAKES, usual):
        if mistake.place in places:
            yield choice | {mistake.place: mistake.option}, mistake


def notes_of(choice: Mapping[str, Any], mistake: Mistake | None, **more: Any) -> list[str]:
    """The right differences of a choice, but for the place of the mistake."""
    items = {**choice, **more}.items()
    return [
        _DIFFERENCES[item]
        for item in items
        if item in _DIFFERENCES and (not mistake or item[0] != mistake.place)
    ]
