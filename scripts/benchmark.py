"""Measure this package against its peers, with the same weights, on this machine.

  python scripts/benchmark.py decode --model runs/numbers_en_de --source test.en --reference test.de \\
    --engines ours_fp32 ours_bf16 marian_fp32 marian_bf16 ctranslate2_fp32 ctranslate2_int8 \\
    --output benchmark.json --plot benchmark.png

Engines work in turn, each in a process of its own. Printed are Markdown tables: for each engine the median of the
rounds, their spread (slowest less fastest, over the median), how many times its target tokens per second ours writes
in the same precision (the fastest of ours where there is none), and the most memory its process held; then how time
grows with four times as many sentences or beams in a batch, where --batch_sizes and --num_beams have such pairs; then
the bytes in the caches of keys and values.

  python scripts/benchmark.py train --source train.en --target train.de --preset base --tokens 4096 \\
    --engines ours_fp32 marian_fp32 marian_grouped_fp32 --output benchmark.json --plot benchmark.png

trains fresh models: this package with batches of --tokens padded tokens, and MarianMTModel with the stock
Seq2SeqTrainer, which draws its pairs at random (marian_) or by length (marian_grouped_). All have the same weights at
the start, tokenizer, pairs, optimizer, dropout and label smoothing, and on average as many pairs in a batch and in an
update, so that an update means as much to all. Only target tokens that are no padding count, after start-up and
--warm_up updates. Memory is that of one update of as many tokens for all without --source: the pairs are then
invented, of 32 tokens each side, and nothing is padded.
"""

import argparse
import importlib.metadata
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_decode(commands)
    add_train(commands)
    return parser.parse_args()


def add_decode(commands: Any) -> None:
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
        help="ours_, marian_ or ctranslate2_ with fp32, bf16 or (not marian_) int8; ours_workers_ and "
        "ctranslate2_workers_ run a search in each thread, ours_compiled_ (bf16, int8) has programs for single "
        "sentences; the first is the one whose output the others are compared "
        "with (default: %(default)s)",
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


def add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train", help="train the same model with every engine",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    train.add_argument("--source", metavar="F", help="raw text to train on, .gz too; without: invented pairs")
    train.add_argument("--target", metavar="F", help="its translations, line by line")
    train.add_argument(
        "--engines", nargs="+", default=["ours_fp32", "marian_fp32", "marian_grouped_fp32"], metavar="NAME",
        help="ours_, marian_ or marian_grouped_ with fp32 or bf16 (default: %(default)s)",
    )  # fmt: skip
    train.add_argument("--preset", default="base", metavar="NAME", help="tiny (Multi30k's), or a row of Table 3")
    train.add_argument("--vocab_size", type=int, default=16_000, metavar="N", help="(default: %(default)s)")
    train.add_argument("--dropout", type=float, metavar="P", help="in place of the preset's")
    train.add_argument("--label_smoothing", type=float, metavar="E", help="in place of the preset's")
    train.add_argument(
        "--tokens", type=int, default=4096, metavar="N",
        help="padded tokens of a batch of ours, each side (default: %(default)s)",
    )  # fmt: skip
    train.add_argument(
        "--tokens_per_update", type=int, metavar="N",
        help="target tokens of an update, about (default: one batch in each process)",
    )  # fmt: skip
    train.add_argument("--updates", type=int, default=5, metavar="N", help="of one turn (default: %(default)s)")
    train.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each engine")
    train.add_argument("--warm_up", type=int, default=2, metavar="N", help="updates before the first turn")
    train.add_argument(
        "--processes", nargs="+", type=int, default=[1], metavar="N",
        help="measure every engine in so many processes of --threads each: 1 2 compares (default: 1)",
    )  # fmt: skip
    train.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each process")
    train.add_argument("--device", default="cpu", help='"cpu" or "cuda" (default: %(default)s)')
    train.add_argument("--output", metavar="F", help="JSON file with every figure")
    train.add_argument("--plot", metavar="F", help="picture of the tokens per second: .png, .pdf or .svg")


#: numbers that must be at least 1
COUNTS = {
    "decode": ("sentences", "rounds", "threads", "batch_sizes", "num_beams"),
    "train": ("vocab_size", "tokens", "tokens_per_update", "updates", "rounds", "warm_up", "processes", "threads"),
}


def check(arguments: argparse.Namespace) -> None:
    """Find what can be wrong before the engines work for an hour."""
    from hf_vanilla_transformer.errors import UserError
    from hf_vanilla_transformer.plotting import check_figure_path

    for name in COUNTS[arguments.command]:
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, not {value}")
    if arguments.plot:
        check_figure_path(arguments.plot)


def measure_decoding(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, int]]:
    """The measurements, and the bytes in the caches."""
    from hf_vanilla_transformer.benchmarks.decoding import ORDERS, cache_bytes, compare
    from hf_vanilla_transformer.evaluation.metrics import check_tokenizer
    from hf_vanilla_transformer.inference.text_io import read_lines

    check_tokenizer(arguments.tokenize)
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


def decode(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, Callable[[str], Any]]:
    """What goes into the JSON file, what is printed, and what draws."""
    from hf_vanilla_transformer.benchmarks.decoding_report import plot, ratios, report, scaling

    found, caches = measure_decoding(arguments)
    results = {
        "measurements": [vars(one) | {"tokens_per_second": one.tokens_per_second} for one in found],
        "ratios": [vars(one) for one in ratios(found)],
        "scaling": [vars(one) for one in scaling(found)],
        "cache_bytes": {"num_beams": arguments.cache_beams, **caches},
    }
    return results, report(found, caches, arguments.cache_beams), lambda path: plot(found, path)


def train(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, Callable[[str], Any]]:
    """As `decode`."""
    from hf_vanilla_transformer.benchmarks.training import compare
    from hf_vanilla_transformer.benchmarks.training_report import plot, ratios, report, scaling

    settings = {name: value for name, value in vars(arguments).items() if name not in ("command", "output", "plot")}
    found = compare(**settings)
    results = {
        "settings": settings,
        "measurements": [
            vars(one) | {"tokens_per_second": one.tokens_per_second, "spread": one.spread} for one in found
        ],
        "ratios": [vars(one) for one in ratios(found)],
        "scaling": [vars(one) for one in scaling(found)],
    }
    return results, report(found), lambda path: plot(found, path)


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the figures belong to."""
    from hf_vanilla_transformer.system_info import describe_hardware, versions

    known = {"hardware": describe_hardware(), "device": arguments.device, "threads": arguments.threads, **versions()}
    if any(name.startswith("ctranslate2") for name in arguments.engines):
        known["ctranslate2"] = importlib.metadata.version("ctranslate2")
    return known


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.text_io import line_writer

    check(arguments)
    with line_writer(arguments.output) if arguments.output else nullcontext() as write:
        results, tables, draw = (decode if arguments.command == "decode" else train)(arguments)
        if write:
            write(json.dumps({"machine": machine(arguments), **results}, indent=2))
    print(tables)
    if arguments.plot:
        draw(arguments.plot)


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
