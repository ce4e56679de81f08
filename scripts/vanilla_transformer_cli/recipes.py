"""List the recipes that are installed, or print one of them.

  vanilla-transformer recipes
  vanilla-transformer recipes numbers_en_de > mine.yaml

`vanilla-transformer train` takes the name of a recipe, or the path of a file.
"""

import argparse

from .parsing import Parser, did_you_mean, installed_recipes


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    parser.add_argument("name", nargs="?", metavar="RECIPE", help="print this one")
    parsed = parser.parse_args(arguments)
    if parsed.name is not None and parsed.name not in installed_recipes():
        recipes = installed_recipes()
        hint = did_you_mean(parsed.name, recipes) or f"choose from {', '.join(recipes)}"
        parser.error(f"{parsed.name}: no such recipe; {hint}")
    return parsed


def main(arguments: argparse.Namespace) -> None:
    recipes = installed_recipes()
    if arguments.name is not None:
        print(recipes[arguments.name].read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, recipes))
    for name, path in recipes.items():
        description = path.read_text(encoding="utf-8").partition("\n")[0]  # a comment
        print(f"{name:{width}}  {description.removeprefix('#').strip()}")
