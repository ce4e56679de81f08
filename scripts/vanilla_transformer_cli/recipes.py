"""List the recipes that are installed, or print one of them.

  vanilla-transformer recipes
  vanilla-transformer recipes numbers_en_de > mine.yaml

`vanilla-transformer train` takes the name of a recipe, or the path of a file.
"""

import argparse
import re
from itertools import takewhile

from .parsing import Parser, did_you_mean, installed_recipes


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="RECIPE", help="print this one")


def check_arguments(parser: Parser, parsed: argparse.Namespace) -> None:
    if parsed.name is not None and parsed.name not in installed_recipes():
        recipes = installed_recipes()
        hint = did_you_mean(parsed.name, recipes) or f"choose from {', '.join(recipes)}"
        parser.error(f"{parsed.name}: no such recipe; {hint}")


def main(arguments: argparse.Namespace) -> None:
    recipes = installed_recipes()
    if arguments.name is not None:
        print(recipes[arguments.name].read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, recipes))
    for name, path in recipes.items():
        print(f"{name:{width}}  {_first_sentence(path.read_text(encoding='utf-8'))}")


def _first_sentence(recipe: str) -> str:
    """The first sentence of the comment at the top of a recipe."""
    # an indented line is a command
    paragraph = takewhile(re.compile(r"# \S").match, recipe.splitlines())
    text = " ".join(line.removeprefix("# ") for line in paragraph)
    return re.split(r"(?<=\.) (?=\D)", text)[0]
