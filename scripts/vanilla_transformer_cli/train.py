"""Train a translation model, or fine-tune one.

  vanilla-transformer train numbers_en_de --output_dir runs/numbers
  vanilla-transformer train small_corpus --train train.en train.de --output_dir runs/mine
  vanilla-transformer train --model_name_or_path opus-mt-en-de --train train.en train.de --output_dir runs/tuned

A recipe is a YAML file of fields. Each field is also a flag, and flags win. The common fields are below. --help-all
lists every field with its default.
"""

import shlex
import sys

from .installed_recipes import recipe_path
from .parsing import Parser
from .train_fields import COMMON_FIELDS


def parse_arguments(arguments: list[str] | None, prog: str | None) -> list[str]:
    """Return the arguments unparsed, because the package defines the fields. `--help` is answered here."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        help_parser(prog).print_help()
        sys.exit(0)
    return arguments


def help_parser(prog: str | None) -> Parser:
    """A parser that only prints the help on the common fields."""
    parser = Parser(prog, __doc__, usage="%(prog)s [RECIPE] [--FIELD VALUE ...]")
    parser.add_argument(
        "RECIPE", nargs="?", help="name (`vanilla-transformer recipes` lists them), or path of a YAML file"
    )
    parser.add_argument("--help-all", action="store_true", help="list every field and exit")
    for title, fields in COMMON_FIELDS.items():
        group = parser.add_argument_group(title)
        for name, (placeholder, text) in fields.items():
            group.add_argument(f"--{name}", metavar=placeholder, help=text)
    return parser


def main(arguments: list[str]) -> None:
    from hf_vanilla_transformer.training.recipes import parse_recipe
    from hf_vanilla_transformer.training.report import hide_bars_without_terminal
    from hf_vanilla_transformer.training.run import run_training

    hide_bars_without_terminal()

    flags = ["--help" if argument == "--help-all" else argument for argument in arguments]
    if not flags[0].startswith("-"):
        flags[0] = recipe_path(flags[0])
    run_training(*parse_recipe(flags), command=shlex.join(["vanilla-transformer", "train", *arguments]))
