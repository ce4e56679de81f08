"""The pairs of the recipe `derivatives`: slopes by differences equal the derivatives."""

import subprocess
import sys
from pathlib import Path

import sympy

SCRIPT = Path(__file__).parents[2] / "scripts" / "recipes" / "derivatives" / "pairs.py"


def test_derivatives_are_right(tmp_path):
    flags = ["--pairs", "60", "--held_out", "10", "--output_dir", tmp_path]
    subprocess.run([sys.executable, SCRIPT, *flags], check=True)
    tables = {
        name: (tmp_path / f"{name}.tsv").read_text().splitlines()
        for name in ("train", "validation", "test")
    }
    assert {lines.pop(0) for lines in tables.values()} == {"source\ttarget"}
    assert [len(lines) for lines in tables.values()] == [60, 10, 10]
    pairs = [line.split("\t") for lines in tables.values() for line in lines]
    assert len(dict(pairs)) == len(pairs)
    x = sympy.Symbol("x", positive=True)
    point = sympy.Rational(13, 10)
    step = sympy.Rational(1, 10**6)
    for source, target in pairs[:20]:
        function = sympy.sympify(source, locals={"x": x})
        slope = (function.subs(x, point + step) - function.subs(x, point - step)).evalf(40) / (
            2 * step
        )
        derivative = sympy.sympify(target, locals={"x": x}).subs(x, point).evalf(40)
        assert abs(slope - derivative) <= 1e-6 * (1 + abs(derivative)), (source, target)
