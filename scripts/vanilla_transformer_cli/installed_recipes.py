"""The recipes that come with the command, by name."""

from pathlib import Path


def installed_recipes() -> dict[str, Path]:
    """name -> file. A wheel has the recipes in this package, a clone next to it, in scripts/recipes."""
    here = Path(__file__).parent
    files = [*(here / "recipes").glob("*.yaml"), *(here.parent / "recipes").glob("*.yaml")]
    return {path.stem: path for path in sorted(files) if not path.stem.startswith("accelerate_")}


def recipe_path(recipe: str) -> str:
    """The file of a recipe with this name. Anything else is a path and is returned unchanged."""
    return str(installed_recipes().get(recipe, recipe))
