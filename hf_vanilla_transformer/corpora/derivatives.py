"""The corpus `derivatives`: random expressions of x and their derivatives, by sympy, which torch installs."""

from functools import lru_cache
from random import Random
from typing import Any

from datasets import DatasetDict

from ..utils.errors import check_at_least_one
from .numbers import split_pairs

_FUNCTIONS = ("sin", "cos", "exp", "log", "sqrt")
_LONGEST = 60  # characters of either side
_DEPTH = 3


@lru_cache(maxsize=2)
def derivative_pairs(size: int, seed: int, held_out: int = 500) -> DatasetDict:
    """Differentiate random expressions: "x*sin(3*x)", "3*x*cos(3*x) + sin(3*x)".

    Both sides are printed by sympy, so that equal expressions have one form. Each expression occurs once.

    Args:
        size: number of training pairs.
        seed: determines the corpus.
        held_out: number of pairs in each of `validation` and `test`.

    Returns:
        Splits `train`, `validation`, `test` with the columns `source` and `target`.

    Source: the task is one of Lample and Charton 2020 (arXiv 1912.01412).
    """
    import sympy

    check_at_least_one(numbers_size=size)
    draw = Random(f"derivatives {seed}")
    x = sympy.Symbol("x")
    pairs: dict[str, str] = {}
    while len(pairs) < size + 2 * held_out:
        expression = _draw_expression(draw, x, sympy, _DEPTH)
        source = str(expression)
        if len(source) > _LONGEST or "x" not in source or "zoo" in source or "I" in source:
            continue
        target = str(sympy.diff(expression, x))
        if len(target) <= _LONGEST:
            pairs[source] = target
    rows = list(pairs.items())
    draw.shuffle(rows)
    return split_pairs(rows, held_out)


def _draw_expression(draw: Random, x: Any, sympy: Any, depth: int) -> Any:
    """A random expression whose tree has at most `depth` levels of operators."""
    kind = draw.random()
    if depth == 0 or kind < 0.2:
        return x if draw.random() < 0.7 else sympy.Integer(draw.randint(1, 9))
    first = _draw_expression(draw, x, sympy, depth - 1)
    if kind < 0.45:
        return getattr(sympy, draw.choice(_FUNCTIONS))(first)
    if kind < 0.55:
        return first ** draw.randint(2, 4)
    second = _draw_expression(draw, x, sympy, depth - 1)
    return first + second if kind < 0.78 else first * second
