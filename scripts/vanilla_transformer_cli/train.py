"""Train a translation model from a recipe. Every recipe field is also a command-line flag.

vanilla-transformer train numbers_en_de --output_dir runs/numbers --max_steps 500
"""

import shlex
import sys

from .installed_recipes import recipe_path


def parse_arguments(arguments: list[str] | None, prog: str | None) -> list[str]:
    """The arguments as given: the fields of a recipe are parsed by the package, which defines them."""
    return sys.argv[1:] if arguments is None else arguments


def main(arguments: list[str]) -> None:
    from hf_vanilla_transformer.training.recipes import parse_recipe
    from hf_vanilla_transformer.training.run import run_training

    given = list(arguments)
    if given and not given[0].startswith("-"):
        given[0] = recipe_path(given[0])
    run_training(*parse_recipe(given), command=shlex.join(["vanilla-transformer", "train", *arguments]))
