"""The input of a conversion as files: a file or folder, a zip archive, or a name on the Hub."""

import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..utils.atomic_write import report_full_disk
from ..utils.errors import UserError, shown
from ..utils.untrusted import one_line, read_json_object, refuse_special_files
from .converted import Tensors
from .options import Options
from .state_dicts import STACKS, find_weights, read_torch_file, without_prefix

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: The embeddings in the files of transformers' classes.
EMBEDDINGS = ("model.shared.weight", *(f"model.{stack}.embed_tokens.weight" for stack in STACKS))
_MODEL_FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.safetensors")
_OTHER_WEIGHTS = ("pytorch_model*.bin", "adapter_model.bin")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PARAMETER = re.compile(r".*(weight|bias)")
# Of a zip archive. Weights hardly shrink.
_MAX_EXPANSION = 20
_MAX_MEMBERS = 1000


@contextmanager
def local_files(source: str | Path) -> Iterator[Path]:
    """The file or folder to read: `source` itself, or a temporary folder with its content."""
    path = Path(source)
    refuse_special_files(path)
    with TemporaryDirectory() as folder:
        if path.is_file() and path.suffix == ".zip":
            path = _unzipped(path, Path(folder))
        elif not path.exists() and _HUB_NAME.fullmatch(str(source)):
            path = from_hub(str(source))
        yield path


def from_hub(name: str, argument: str = "", revision: str | None = None) -> Path:
    """The folder of a model on the Hub, in the cache of `huggingface_hub`. `argument` is put before messages."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with report_full_disk(constants.HF_HUB_CACHE):
            folder = Path(
                snapshot_download(name, revision=revision, allow_patterns=list(_MODEL_FILES))
            )
            if not any(folder.glob("*.safetensors")):
                snapshot_download(name, revision=revision, allow_patterns=list(_OTHER_WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            f"there is no such folder, and the Hub has none that can be fetched ({one_line(error)})"
        )
        raise UserError(f"{argument}{name}: {reason}") from None
    return folder


def _unzipped(archive: Path, folder: Path) -> Path:
    """Extract an archive into `folder`, but never more data than weights need.

    zipfile writes plain files only, and none outside of `folder`.
    """
    try:
        with report_full_disk(folder), zipfile.ZipFile(archive) as file:
            members = file.infolist()
            size = sum(member.file_size for member in members)
            if size > _MAX_EXPANSION * archive.stat().st_size or len(members) > _MAX_MEMBERS:
                raise UserError(
                    f"{archive}: {len(members)} files of {size} bytes are too many; unzip it and look"
                )
            file.extractall(folder)
    except UserError:
        raise
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, OSError) as error:
        raise UserError(
            f"{archive}: a damaged or encrypted zip archive ({one_line(error)})"
        ) from None
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


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
