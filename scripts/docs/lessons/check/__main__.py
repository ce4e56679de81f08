"""Compare your own implementation of the Transformer with the paper, and name the first mistake.

  python -m scripts.docs.lessons.check mine.py:Transformer
  python -m scripts.docs.lessons.check mine.py:make_model --set N=2
  python -m scripts.docs.lessons.check mine.py:MultiHeadAttention

It builds the class, or calls the function, with small sizes, gives it random weights, and compares its output with the
paper's formulas for the same weights. PositionalEncoding, MultiHeadAttention, LayerNorm, EncoderLayer, a loss and
shift_right are checked alone. The file runs in a separate process, which may not write files, open connections or
start programs, and ends after --seconds. Status 1 means a mistake.
"""

import argparse
import json
import sys
from typing import Any

from vanilla_transformer_cli.main import run_module
from vanilla_transformer_cli.parsing import Parser, name_and_value


def _setting(text: str) -> tuple[str, Any]:
    name, value = name_and_value(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, {"True": True, "False": False, "None": None}.get(value, value)


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    parser.add_argument(
        "code", metavar="FILE.py:NAME", help="a class or a function that returns the model"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        help="arguments of the constructor",
    )
    parser.add_argument(
        "--role",
        nargs="+",
        type=name_and_value,
        default=[],
        metavar="ROLE=MODULE",
        help="name a module that is not found: output_layer=NAME",
    )
    parser.add_argument(
        "--seconds", type=int, default=60, metavar="N", help="time limit (default: %(default)s)"
    )
    parsed = parser.parse_args(arguments)
    if not all(parsed.code.rpartition(":")[::2]):
        parser.error(f"{parsed.code}: give the file and the name, such as mine.py:Transformer")
    return parsed


def main(arguments: argparse.Namespace) -> int:
    from hf_vanilla_transformer.utils.errors import check_at_least_one

    from .report import TOLERANCE
    from .sandbox import check_file

    check_at_least_one(seconds=arguments.seconds)
    file, _, name = arguments.code.rpartition(":")
    report = check_file(file, name, dict(arguments.set), arguments.seconds, dict(arguments.role))
    for mistake in report["mistakes"]:
        print(f"mistake: {mistake}")
    for note in report["notes"]:
        print(f"note: {note}")
    verdict = "differs from the paper" if report["mistakes"] else "equals the paper"
    if report["mistakes"] and report["difference"] < TOLERANCE:
        verdict += " by that alone"
    print(f"{arguments.code} {verdict}: the largest difference is {report['difference']:.1e}")
    return 1 if report["mistakes"] else 0


if __name__ == "__main__":
    run_module(sys.modules[__name__], sys.argv[1:], "python -m scripts.docs.lessons.check")
