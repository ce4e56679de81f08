"""The languages of a model folder, as codes of ISO 639 such as `en`."""

from collections.abc import Sequence
from pathlib import Path

from ..inference.languages import language_code, model_directions, model_languages
from ..text.language_codes import CodePair
from ..utils.errors import UserError
from ..utils.model_folder import require_model_folder


def model_folders(arguments: Sequence[str]) -> dict[tuple[str, str], Path]:
    """(source, target) -> folder.

    Args:
        arguments: `en-de=FOLDER`, or `FOLDER` if its model card or its tokenizer names two languages
            (`model_languages`). The folder of a model of many languages stands for the directions of its training.
    """
    folders: dict[tuple[str, str], Path] = {}
    for argument in arguments:
        name, _, rest = argument.partition("=")
        pairs = _pairs_in(name) if rest else []
        if len(pairs) > 1:
            listed = " or ".join(f"{source} to {target}" for source, target in pairs)
            raise UserError(
                f"--model: {name}= may be {listed}: write subtags in capitals, as in pt-BR-en={rest}"
            )
        folder = Path(rest if pairs else argument)
        for pair in pairs or _pairs_of(folder):
            if pair in folders:
                both = f"{folders[pair]} and {folder} both translate {'-'.join(pair)}"
                raise UserError(f"--model: {both}: give one of them")
            folders[pair] = folder
    return folders


def _pairs_of(folder: Path) -> list[CodePair]:
    """The pairs that a folder translates."""
    if directions := model_directions(folder):
        codes = [(language_code(source), language_code(target)) for source, target in directions]
        return [(source, target) for source, target in codes if source and target]
    if languages := model_languages(folder):
        return [languages]
    require_model_folder(folder)
    raise UserError(
        f"--model: {folder}: its languages are unknown: name them, as in en-de={folder}"
    )


def _pairs_in(name: str) -> list[CodePair]:
    """The pairs of codes that a name such as `en-de` can mean."""
    hyphens = [index for index, character in enumerate(name) if character == "-"]
    pairs = [(language_code(name[:index]), language_code(name[index + 1 :])) for index in hyphens]
    return [(source, target) for source, target in pairs if source and target]
