"""`vanilla-transformer SUBCOMMAND`: import the module of one subcommand, parse its arguments, run it.

Each subcommand's module has `add_arguments(parser)` and `main(parsed)`. The first imports neither torch nor
transformers. The second returns the exit status or None.
"""

import argparse
import gc
import importlib
import io
import os
import sys
from types import ModuleType
from typing import Any

from .models import use_model_code, use_shipped_models
from .parsing import Parser, did_you_mean, output_that_is_input, output_that_is_no_file

# subcommand and name of its module -> description
SUBCOMMANDS = {
    "train": "train a translation model from a recipe",
    "prepare": "read and encode training text once, for several runs or processes",
    "translate": "translate text, line by line",
    "predict": "predict sequences that are no languages, line by line",
    "merge": "join the shards of a translation or a prediction",
    "serve": "serve models over HTTP, with a page",
    "distil": "translate training text for a student with a teacher",
    "clean": "drop damaged pairs from training text",
    "evaluate": "score a model, or existing translations (BLEU, chrF)",
    "convert": "convert a checkpoint of a different toolkit",
    "export": "export a model to the format of a different library",
    "publish": "upload a model folder to the Hugging Face Hub",
    "average": "average the weights of several checkpoints",
    "attention": "plot the cross-attention of one sentence",
    "shortlist": "build a table of candidate tokens, for faster translation",
    "tokenizer": "train a tokenizer alone",
    "recipes": "list the recipes, or print one",
}

# Subcommands whose output is a folder. They make the folders above it.
WRITE_FOLDERS = ("convert", "export", "average")

# Subcommands whose result is what they print.
PRINT_RESULTS = ("evaluate", "recipes")

# Subcommands in which the warnings and bars of transformers are shown, or that do not need it.
NOT_SILENT = ("train", "prepare", "recipes", "merge", "clean")

# oneDNN compiles kernels for every shape of a product, and almost every batch has a new one. Its default is to keep
# 1,024: 150 MB after 10,000 sentences of a tiny model. In training they also divide the heap into small pieces.
KERNELS_KEPT = {
    **dict.fromkeys(("translate", "predict", "serve", "distil", "evaluate"), 128),
    "train": 64,
}


def main(arguments: list[str] | None = None) -> None:
    """The console command. Always raises SystemExit, with the status of the subcommand, or 2 if there is none."""
    _escape_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in SUBCOMMANDS:
        name, *own = arguments
        module = importlib.import_module(f".{name}", __package__)
        run_module(module, own, f"vanilla-transformer {name}")
    width = max(map(len, SUBCOMMANDS))
    parser = Parser(
        prog="vanilla-transformer",
        usage="vanilla-transformer SUBCOMMAND [ARGUMENT ...]",
        description="subcommands:\n"
        + "\n".join(f"  {name:{width}}  {text}" for name, text in SUBCOMMANDS.items()),
        epilog="vanilla-transformer SUBCOMMAND --help lists the arguments of one.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("subcommand", nargs="?", help=argparse.SUPPRESS)
    if arguments and arguments[0].startswith("-"):
        later = next((word for word in arguments if word in SUBCOMMANDS), None)
        if later is not None:
            parser.exit(
                2, f"error: {later}: the subcommand comes first: vanilla-transformer {later} …\n"
            )
    parsed = parser.parse_args(arguments[:1])
    if parsed.version:
        from importlib.metadata import version

        print(version("hf_vanilla_transformer"))
        sys.exit(0)
    if parsed.subcommand is None:
        parser.print_help()
        sys.exit(0)
    hint = did_you_mean(parsed.subcommand, SUBCOMMANDS) or f"choose from {', '.join(SUBCOMMANDS)}"
    parser.exit(2, f"error: {parsed.subcommand}: no such subcommand; {hint}\n")


def _escape_output() -> None:
    """Let standard output escape the characters that its encoding lacks, as standard error does.

    The code pages of Windows and the locale C have few characters, and a report must not end the work it reports.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def parse_arguments(module: ModuleType, arguments: list[str], prog: str) -> Any:
    """Parse the words of a command line for the `main` of a module.

    A module with its own `parse_arguments(arguments, prog)` does it itself. `check_arguments(parser, parsed)` refuses
    what the parser cannot.
    """
    if hasattr(module, "parse_arguments"):
        return module.parse_arguments(arguments, prog)
    parser = Parser(prog, module.__doc__)
    module.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if hasattr(module, "check_arguments"):
        module.check_arguments(parser, parsed)
    return parsed


def run_module(module: ModuleType, arguments: list[str], prog: str) -> None:
    """Run the `main` of a module as a command. Always raises SystemExit, with 2 for wrong arguments.

    Args:
        module: has `main(parsed)`, and what `parse_arguments` needs.
        arguments: words of the command line.
        prog: the command, for its help.
    """
    name = prog.split()[-1]
    try:
        os.getcwd()
    except FileNotFoundError:  # oneMKL would abort the process
        print("error: the current folder was deleted: cd to another one", file=sys.stderr)
        sys.exit(2)
    # parsed before the package is imported: importing torch takes seconds
    parsed = parse_arguments(module, arguments, prog)
    if name != "train" and int(os.environ.get("RANK", "0")) > 0:  # of torchrun or accelerate
        sys.exit(0)
    # `train` leaves its arguments to the package.
    is_parsed = isinstance(parsed, argparse.Namespace)
    refusal = output_that_is_input(parsed) if is_parsed else None
    if is_parsed and name not in WRITE_FOLDERS:
        refusal = refusal or output_that_is_no_file(parsed)
    if name in PRINT_RESULTS and sys.stdout is None:
        refusal = "standard output is closed: redirect it to a file"
    if refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
    if name in KERNELS_KEPT:  # read at the first product, the second variable by torch
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT[name]))
    if name == "train":
        os.environ.setdefault("LRU_CACHE_CAPACITY", str(KERNELS_KEPT[name]))

    try:
        from torch import distributed

        from hf_vanilla_transformer.utils.errors import run_command
    except KeyboardInterrupt:  # `run_command` reports a later one
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)

    def command() -> int | None:
        use_shipped_models(parsed)
        if name not in NOT_SILENT:
            from hf_vanilla_transformer.inference.text_io import silence_transformers

            silence_transformers()
        if hasattr(parsed, "model_class"):
            use_model_code(parsed)
        status = module.main(parsed)
        # A thread of gloo that frees its last tensor while Python shuts down would abort the process. The trainer
        # holds the group in reference cycles, so that gloo's threads end only after a collection.
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
            gc.collect()
        return status

    run_command(command)
