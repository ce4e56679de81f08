"""Measure this package against its peers, with the same weights, on this machine.

  python scripts/benchmark.py decode --model runs/numbers_en_de --source test.en --reference test.de \\
    --engines ours_fp32 ours_bf16 marian_fp32 marian_bf16 ctranslate2_fp32 ctranslate2_int8 \\
    --output benchmark.json --plot benchmark.png

Engines work in turn, each in a process of its own. Printed are Markdown tables: for each engine the median of the
rounds, their spread (slowest less fastest, over the median), how many times its target tokens per second ours writes
in the same precision (against int8: the fastest of ours), and the most memory its process held; then how time grows
with four times as many sentences or beams in a batch, where --batch_sizes and --num_beams have such pairs; then the
bytes in the caches of keys and values.
"""

import argparse
import importlib.metadata
import json
import os
from contextlib import nullcontext
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    decode = commands.add_parser(
        "decode", help="translate the same sentences with every engine",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    decode.add_argument("--model", required=True, metavar="DIR", help="folder of a trained model")
    decode.add_argument("--source", required=True, metavar="F", help="text to translate, .gz too")
    decode.add_argument("--reference", metavar="F", help="the right translations, for the BLEU of each engine")
    decode.add_argument("--sentences", type=int, metavar="N", help="only the first N lines")
    decode.add_argument(
        "--engines", nargs="+", default=["ours_fp32", "marian_fp32"], metavar="NAME",
        help="ours_, marian_ or ctranslate2_ with fp32, bf16 or (ctranslate2 only) int8; the first is the one whose "
        "output the others are compared with (default: %(default)s)",
    )  # fmt: skip
    decode.add_argument(
        "--order", choices=["sorted", "file", "both"], default="sorted",
        help="sentences of like length in a batch, or as the file has them; CTranslate2 always gets the whole file "
        "and sorts for itself (default: %(default)s)",
    )  # fmt: skip
    decode.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 64], metavar="N")
    decode.add_argument("--num_beams", nargs="+", type=int, default=[1, 4], metavar="N")
    decode.add_argument("--rounds", type=int, default=3, metavar="N", help="measured, after one that is not")
    decode.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each engine")
    decode.add_argument("--device", default="cpu", help='of each engine, such as "cuda:0" (default: %(default)s)')
    decode.add_argument(
        "--cache_beams", type=int, default=8, metavar="N",
        help="count the bytes in the caches with N beams and the largest batch; 0 does not (default: %(default)s)",
    )  # fmt: skip
    decode.add_argument("--tokenize", default="13a", metavar="NAME", help="sacreBLEU's tokenizer (default: 13a)")
    decode.add_argument("--lowercase", action="store_true", help="BLEU without regard to case")
    decode.add_argument("--output", metavar="F", help="JSON file with every figure")
    decode.add_argument("--plot", metavar="F", help="picture of the tokens per second: .png, .pdf or .svg")
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    """Find what can be wrong before the engines work for an hour."""
    from hf_vanilla_transformer.errors import UserError
    from hf_vanilla_transformer.evaluation.attention_maps import figures
    from hf_vanilla_transformer.evaluation.metrics import check_tokenizer

    check_tokenizer(arguments.tokenize)
    for name in ("sentences", "rounds", "threads", "batch_sizes", "num_beams"):
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, not {value}")
    if arguments.plot:
        with figures() as figure_class:
            kind = os.path.splitext(arguments.plot)[1][1:]
            if kind not in figure_class().canvas.get_supported_filetypes():
                raise UserError(
                    f"{arguments.plot}: matplotlib cannot write this kind of picture; name it .png or .svg"
                )


def measure(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, int]]:
    """The measurements, and the bytes in the caches."""
    from hf_vanilla_transformer.evaluation.decoding_benchmark import ORDERS, cache_bytes, compare
    from hf_vanilla_transformer.evaluation.text_lines import read_lines

    sentences = list(read_lines(arguments.source))[: arguments.sentences]
    references = list(read_lines(arguments.reference))[: arguments.sentences] if arguments.reference else None
    found = compare(
        arguments.model,
        sentences,
        arguments.engines,
        arguments.batch_sizes,
        arguments.num_beams,
        arguments.rounds,
        arguments.threads,
        orders=ORDERS if arguments.order == "both" else [arguments.order],
        references=references,
        device=arguments.device,
        tokenize=arguments.tokenize,
        lowercase=arguments.lowercase,
    )
    caches: dict[str, int] = {}
    if arguments.cache_beams > 0:
        batch, engines = sentences[: max(arguments.batch_sizes)], arguments.engines
        caches = cache_bytes(
            arguments.model, batch, engines, arguments.cache_beams, arguments.threads, arguments.device
        )
    return found, caches


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation.decoding_report import plot, ratios, report, scaling
    from hf_vanilla_transformer.evaluation.text_lines import line_writer
    from hf_vanilla_transformer.hub.card import describe_hardware, versions

    check(arguments)
    with line_writer(arguments.output) if arguments.output else nullcontext() as write:
        found, caches = measure(arguments)
        if write:
            machine = {"hardware": describe_hardware(), "device": arguments.device, "threads": arguments.threads}
            machine |= versions()
            if any(name.startswith("ctranslate2") for name in arguments.engines):
                machine["ctranslate2"] = importlib.metadata.version("ctranslate2")
            results = {
                "machine": machine,
                "measurements": [vars(one) | {"tokens_per_second": one.tokens_per_second} for one in found],
                "ratios": [vars(one) for one in ratios(found)],
                "scaling": [vars(one) for one in scaling(found)],
                "cache_bytes": {"num_beams": arguments.cache_beams, **caches},
            }
            write(json.dumps(results, indent=2))
    print(report(found, caches, arguments.cache_beams))
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
