"""Measure this package against its peers, with the same weights, on this machine.

  python -m scripts.benchmarks decode --model runs/numbers_en_de --source test.en --reference test.de \\
    --engines ours_fp32 ours_bf16 marian_fp32 marian_bf16 ctranslate2_fp32 ctranslate2_int8 --output benchmark.json

Engines take turns, each in a separate process. A Markdown table has for each engine the median of the rounds, their
spread (fastest less slowest, over the median), how many times its target tokens per second ours reaches in the same
precision (the fastest of ours if none has it), the peak memory of its process, and the size of the KV caches.

  python -m scripts.benchmarks train --source train.en --target train.de --preset base --tokens 4096 \\
    --engines ours_fp32 marian_fp32 marian_grouped_fp32 --output benchmark.json

trains untrained models: this package with batches of --tokens padded tokens, and MarianMTModel with transformers'
Seq2SeqTrainer, with pairs drawn at random (marian_) or by length (marian_grouped_). All engines have the same initial
weights, tokenizer, pairs, optimizer, dropout and label smoothing, and on average as many pairs per batch and update.
Only target tokens without padding count, after start-up and --warm_up updates. To compare memory leave out --source.
Random pairs of 32 tokens per side, without padding, then give every update as many tokens.

  python -m scripts.benchmarks gpu OUT

measures everything that needs a GPU, with a JSON file for each section. After a time limit the same command continues.

Ctrl-C, and the SIGTERM of `timeout`, end a benchmark early: the rounds finished by then are printed and written.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from vanilla_transformer_cli.main import run_module
from vanilla_transformer_cli.parsing import Parser


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, add_arguments, text in (
        ("decode", add_decode, "translate the same sentences with every engine"),
        ("train", add_train, "train the same model with every engine"),
        ("gpu", add_gpu, "all measurements that need a GPU, in nine minutes"),
    ):
        form = argparse.RawDescriptionHelpFormatter
        add_arguments(
            commands.add_parser(name, help=text, description=__doc__, formatter_class=form)
        )
    return parser.parse_args(arguments)


def add_gpu(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output", metavar="OUT", help="folder for a JSON file per section; existing ones are kept")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    add(
        "--source",
        metavar="F",
        help="text to train on and to translate (default: generated number words)",
    )
    add("--target", metavar="F", help="its translations, line by line")
    add(
        "--peak",
        type=float,
        default=989.0,
        metavar="X",
        help="bf16 TFLOP/s of the GPU (default: %(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="tiny sizes, to try the command on a CPU; the figures say nothing",
    )
    add(
        "--sections",
        nargs="+",
        metavar="NAME",
        help="measure only these: fixed, training, model, decoding (after model), kernels, loader, which needs no GPU "
        "(default: all)",
    )


def add_decode(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder of a trained model")
    add("--source", required=True, metavar="F", help="text to translate, .gz too")
    add("--reference", metavar="F", help="reference translations, for the BLEU of each engine")
    add("--sentences", type=int, metavar="N", help="only the first N lines")
    add(
        "--engines",
        nargs="+",
        default=["ours_fp32", "marian_fp32"],
        metavar="NAME",
        help="ours_, marian_ or ctranslate2_ with fp32, bf16 or (not marian_) int8; ours_workers_ and "
        "ctranslate2_workers_ run one search per thread; the output of the others is compared with that of the first "
        "(default: %(default)s)",
    )
    add("--batch_sizes", nargs="+", type=int, default=[1, 64], metavar="N")
    add("--num_beams", nargs="+", type=int, default=[1, 4], metavar="N")
    add("--shortlist", metavar="F", help="file of the command shortlist, for all engines")
    add("--bleu_tokenize", metavar="NAME", help="sacreBLEU's tokenizer (default: by script)")
    add("--bleu_lowercase", action="store_true", help="case-insensitive BLEU")
    add_common(parser)


def add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--source", metavar="F", help="raw text to train on, .gz too (default: random pairs)")
    add("--target", metavar="F", help="its translations, line by line")
    add(
        "--engines",
        nargs="+",
        default=["ours_fp32", "marian_fp32", "marian_grouped_fp32"],
        metavar="NAME",
        help="ours_, marian_ or marian_grouped_ with fp32 or bf16 (default: %(default)s)",
    )
    add(
        "--preset",
        nargs="+",
        default=["base"],
        metavar="NAME",
        help="tiny (Multi30k's), or rows of Table 3 (default: base)",
    )
    add("--vocab_size", type=int, default=16_000, metavar="N", help="(default: %(default)s)")
    add(
        "--tokens",
        type=int,
        default=4096,
        metavar="N",
        help="max_tokens_per_batch of ours (default: %(default)s)",
    )
    add(
        "--tokens_per_update",
        type=int,
        metavar="N",
        help="about (default: one batch in each process)",
    )
    add("--updates", type=int, default=5, metavar="N", help="per turn (default: %(default)s)")
    add("--warm_up", type=int, default=2, metavar="N", help="updates before the first turn")
    add(
        "--processes",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="measure every engine in N processes of --threads each: 1 2 compares (default: 1)",
    )
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="turns of each engine, after a warm-up")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each process")
    add(
        "--device",
        default="cpu",
        help='"cpu", "cuda", or with decode also "cuda:1" (default: %(default)s)',
    )
    add("--output", metavar="F", help="JSON file with all figures")


def decode(arguments: argparse.Namespace) -> Iterator[Any]:
    """Read the text and translate it with every engine."""
    from hf_vanilla_transformer.evaluation.bleu_tokenizers import check_tokenizer
    from hf_vanilla_transformer.inference.sentences import read_sentences

    from .decoding import compare

    if arguments.bleu_tokenize:
        check_tokenizer(arguments.bleu_tokenize)
    sentences = list(read_sentences(arguments.source))[: arguments.sentences]
    references = (
        list(read_sentences(arguments.reference, "target"))[: arguments.sentences]
        if arguments.reference
        else None
    )
    yield from compare(
        arguments.model,
        sentences,
        arguments.engines,
        arguments.batch_sizes,
        arguments.num_beams,
        arguments.rounds,
        arguments.threads,
        references=references,
        device=arguments.device,
        shortlist=arguments.shortlist,
        tokenize=arguments.bleu_tokenize,
        lowercase=arguments.bleu_lowercase,
    )


def check_gpu(arguments: argparse.Namespace) -> int:
    """Measure, section by section, and print the tables."""
    from pathlib import Path

    from . import gpu_check

    check = gpu_check.Check(
        output=Path(arguments.output),
        device=arguments.device,
        source=arguments.source,
        target=arguments.target,
        quick=arguments.quick,
        peak=arguments.peak,
        chosen=arguments.sections,
    )
    print(gpu_check.report(gpu_check.run(check)))
    return 0


def main(arguments: argparse.Namespace) -> int:
    from hf_vanilla_transformer.inference.text_io import line_writer
    from hf_vanilla_transformer.utils.system_info import describe_hardware, versions

    # The signal of `timeout` ends a benchmark like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.command == "gpu":
        return check_gpu(arguments)
    from hf_vanilla_transformer.utils.errors import check_at_least_one

    from . import report, training

    for name, values in vars(arguments).items():
        numbers = [
            value
            for value in (values if isinstance(values, list) else [values])
            if type(value) is int
        ]
        check_at_least_one(**{name: min(numbers, default=None)})
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("command", "output")
    }
    results: list[Any] = []
    status = 0
    with line_writer(arguments.output) if arguments.output else nullcontext() as write:
        try:
            # `extend` keeps the measurements before an interrupt
            results.extend(
                decode(arguments) if arguments.command == "decode" else training.compare(**settings)
            )
        except KeyboardInterrupt:
            if not results:
                raise
            status = 130
            print(
                "interrupted: the figures are those of the rounds finished by then", file=sys.stderr
            )
        if write:
            machine = {"hardware": describe_hardware(), **versions("ctranslate2")}
            measurements = [one.as_dict() for one in results]
            write(
                json.dumps(
                    {"machine": machine, "settings": settings, "measurements": measurements},
                    indent=2,
                )
            )
    print(report.table(results))
    return status


if __name__ == "__main__":
    run_module(sys.modules[__name__], sys.argv[1:], "python -m scripts.benchmarks")
