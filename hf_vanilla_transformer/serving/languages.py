"""The languages of a model folder, as codes of ISO 639 such as `en`."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..inference.languages import model_languages

_CODE = r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*"
_PAIR = re.compile(rf"(?P<source>{_CODE}?)-(?P<target>{_CODE})=(?P<folder>.+)")


def model_folders(arguments: Sequence[str]) -> dict[tuple[str, str], Path]:
    """(source, target) -> folder.

    Args:
        arguments: `en-de=FOLDER`, or `FOLDER` if its model card names two languages or its name ends in two codes,
            such as `runs/numbers_en_de` and `opus-mt-en-de`, or its tokenizer names them (`model_languages`).
    """
    folders: dict[tuple[str, str], Path] = {}
    for argument in arguments:
        match = _PAIR.fullmatch(argument)
        folder = Path(match["folder"] if match else argument)
        pair = (match["source"], match["target"]) if match else _pair_of(folder)
        if pair in folders:
            raise UserError(f"--model: {folders[pair]} and {folder} both translate {'-'.join(pair)}: give one of them")
        folders[pair] = folder
    return folders


def _pair_of(folder: Path) -> tuple[str, str]:
    if (languages := model_languages(folder)) is None:
        raise UserError(f"--model: {folder}: its languages are unknown: name them, as in en-de={folder}")
    return languages
