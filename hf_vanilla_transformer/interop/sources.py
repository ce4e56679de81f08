"""The input of a conversion as files: a file or folder, or a name on the Hub."""

import re
from collections.abc import Iterable
from pathlib import Path

from ..utils.errors import UserError, shown
from ..utils.hub_folders import from_hub
from ..utils.untrusted import read_json_object, refuse_damaged_files
from .converted import Tensors
from .options import Options
from .state_dicts import STACKS, find_weights, read_torch_file, without_prefix

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: The embeddings in the files of transformers' classes.
EMBEDDINGS = ("model.shared.weight", *(f"model.{stack}.embed_tokens.weight" for stack in STACKS))
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PARAMETER = re.compile(r".*(weight|bias)")


def local_files(source: str | Path) -> Path:
    """The file or folder to read: `source` itself, or a folder with the files of a model on the Hub."""
    path = Path(source)
    refuse_damaged_files(path)
    if path.is_file() and path.suffix == ".zip":
        raise UserError(f"{path}: unzip it, and name its folder")
    is_on_hub = not path.exists() and _HUB_NAME.fullmatch(str(source))
    return from_hub(str(source)) if is_on_hub else path


def weight_files(folder: Path) -> list[Path]:
    """One file of weights, or those that an index names."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            entries = Options(read_json_object(index), f"{index}: ").section("weight_map")
            names = {Path(entries.text(entry)).name for entry in entries.values}
            return [folder / part for part in sorted(names)]
    raise UserError(f"{folder}: no weights: there is none of {', '.join(WEIGHTS)}")


def read_parts(files: Iterable[Path], *known: str) -> Tensors:
    """The tensors of several files. `known` names are as in `require_tensors`."""
    tensors: Tensors = {}
    for file in files:
        part = find_weights(
            read_torch_file(file), lambda names: any(map(_PARAMETER.fullmatch, names)), str(file)
        )
        if twice := sorted(tensors.keys() & part.keys()):
            raise UserError(f"{file}: {shown(twice[0])} is also in a file before it")
        tensors |= part
    return without_prefix(tensors, known)
