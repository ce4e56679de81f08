"""The recipes that come with the command, by name."""

from pathlib import Path


def installed_recipes() -> dict[str, Path]:
    """name -> file. They lie in this package in a wheel, and beside it, in scripts/recipes, in a clone."""
    here = Path(__file__).parent
    files = [*(here / "recipes").glob("*.yaml"), *(here.parent / "recipes").glob("*.yaml")]
    return {path.stem: path for path in sorted(files) if not path.stem.startswith("accelerate_")}


def recipe_path(recipe: str) -> str:
    """The file of a recipe that is given by its name; anything else is a path and is returned as it is."""
    return str(installed_recipes().get(recipe, recipe))
