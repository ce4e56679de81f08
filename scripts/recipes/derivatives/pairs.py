"""Write random expressions of x and their derivatives, by sympy, which torch installs.

  python scripts/recipes/derivatives/pairs.py --output_dir data

`data` gets tables `train.tsv`, `validation.tsv` and `test.tsv`. Both sides are printed by sympy, so that equal
expressions have one form: "x*sin(3*x)", "3*x*cos(3*x) + sin(3*x)". Each expression occurs once.

Source: the task is one of Lample and Charton 2020 (arXiv 1912.01412).
"""

import argparse
from pathlib import Path
from random import Random

import sympy

FUNCTIONS = (sympy.sin, sympy.cos, sympy.exp, sympy.log, sympy.sqrt)
LONGEST = 60  # characters of either side
DEPTH = 3
X = sympy.Symbol("x")


def derivative_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Expressions and their derivatives. `seed` determines them."""
    draw = Random(f"derivatives {seed}")
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        expression = draw_expression(draw, DEPTH)
        source = str(expression)
        if len(source) > LONGEST or "x" not in source or "zoo" in source or "I" in source:
            continue
        target = str(sympy.diff(expression, X))
        if len(target) <= LONGEST:
            pairs[source] = target
    rows = list(pairs.items())
    draw.shuffle(rows)
    return rows


def draw_expression(draw: Random, depth: int) -> sympy.Expr:
    """A random expression whose tree has at most `depth` levels of operators."""
    kind = draw.random()
    if depth == 0 or kind < 0.2:
        return X if draw.random() < 0.7 else sympy.Integer(draw.randint(1, 9))
    first = draw_expression(draw, depth - 1)
    if kind < 0.45:
        return draw.choice(FUNCTIONS)(first)
    if kind < 0.55:
        return first ** draw.randint(2, 4)
    second = draw_expression(draw, depth - 1)
    return first + second if kind < 0.78 else first * second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=20_000, help="for training")
    parser.add_argument(
        "--held_out", type=int, default=500, help="for validation, and for the test"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    held_out = arguments.held_out
    pairs = derivative_pairs(arguments.pairs + 2 * held_out, arguments.seed)
    parts = {
        "test": pairs[:held_out],
        "validation": pairs[held_out : 2 * held_out],
        "train": pairs[2 * held_out :],
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        lines = ["source\ttarget", *map("\t".join, rows)]
        (arguments.output_dir / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
