"""Measure this package against its peers, with the same weights, on this machine.

  python scripts/benchmark.py decode --model runs/numbers_en_de --source test.en --output benchmark.json

Engines work in turn; printed is a Markdown table with the median of the rounds and their spread.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    decode = commands.add_parser("decode", help="translate the same sentences with every engine")
    decode.add_argument("--model", required=True, metavar="DIR", help="folder of a trained model")
    decode.add_argument("--source", required=True, metavar="F", help="text to translate, .gz too")
    decode.add_argument("--sentences", type=int, metavar="N", help="only the first N lines")
    decode.add_argument(
        "--engines", nargs="+", default=["ours_fp32", "marian_fp32"], metavar="NAME",
        help="ours_, marian_ or ctranslate2_ with fp32, bf16 or (ctranslate2 only) int8 (default: %(default)s)",
    )  # fmt: skip
    decode.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 64], metavar="N")
    decode.add_argument("--num_beams", nargs="+", type=int, default=[1, 4], metavar="N")
    decode.add_argument("--rounds", type=int, default=3, metavar="N", help="measured, after one that is not")
    decode.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each engine")
    decode.add_argument("--output", metavar="F", help="JSON file with every figure")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation.decoding_benchmark import compare
    from hf_vanilla_transformer.evaluation.text_lines import read_lines
    from hf_vanilla_transformer.hub.card import describe_hardware, versions

    sentences = list(read_lines(arguments.source))[: arguments.sentences]
    found = compare(
        arguments.model,
        sentences,
        arguments.engines,
        arguments.batch_sizes,
        arguments.num_beams,
        arguments.rounds,
        arguments.threads,
    )
    print(table(found))
    if arguments.output:
        machine = {"hardware": describe_hardware(), "threads": arguments.threads, **versions()}
        if any(name.startswith("ctranslate2") for name in arguments.engines):
            machine["ctranslate2"] = importlib.metadata.version("ctranslate2")
        results = {"machine": machine, "measurements": [vars(one) for one in found]}
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


def table(found: list[Any]) -> str:
    """One row a measurement, as Markdown."""
    lines = [
        "| engine | batch | beams | target tokens/s | spread | ms a sentence | peak MiB | same output |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        median = statistics.median(one.seconds)
        spread = (max(one.seconds) - min(one.seconds)) / median
        lines.append(
            f"| {one.engine} | {one.batch_size} | {one.num_beams} | {one.tokens_per_second:,.0f} | {spread:.0%} "
            f"| {1000 * median / one.sentences:.1f} | {one.peak_mib:,.0f} | {one.same_output:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
