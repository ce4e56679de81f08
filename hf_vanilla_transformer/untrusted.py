"""Reading untrusted input: what a library raises for a damaged or malicious file becomes a one-line `UserError`."""

import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from .errors import UserError

_MAX_CHARACTERS = 300  # of a library's message
_UNSAFE = re.compile(r"(?:Unsupported (?:global|class)|GLOBAL)\W+(?:GLOBAL )?([A-Za-z_][\w.]+)")

# What torch, safetensors and transformers raise for truncated or overwritten files, and for inconsistent settings.
_DAMAGE = (
    *(RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError),
    *(MemoryError, OSError, SafetensorError, StrictDataclassError, zipfile.BadZipFile),
)


def one_line(error: object) -> str:
    """A library's error message as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"


def require_file(path: Path, advice: str = "") -> Path:
    """`path`, if it is a file; otherwise a UserError that ends with `advice`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file" + (f"; {advice}" if advice else ""))
    return path


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object; a UserError if it is missing or holds something else."""
    require_file(path, "name the folder of a model")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


def parse_yaml_mapping(content: bytes, refusal: str) -> dict[str, Any]:
    """A YAML mapping of plain data; a UserError that begins with `refusal` for anything else."""
    try:
        value = yaml.safe_load(content.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{refusal} ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(refusal)
    return value


@contextmanager
def reading_weights(path: str | Path) -> Iterator[None]:
    """Wraps code that loads weights from an untrusted file or folder, with loaders that run no code from it.

    Raises:
        UserError: the weights are damaged, or reading them would need more than tensors and plain data.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        unsafe = _UNSAFE.search(str(error))
        if unsafe is None:
            raise UserError(f"{path}: damaged, or not written by torch.save; nothing of it was run") from None
        raise UserError(
            f"{path}: it holds {unsafe[1]}, which is neither tensor nor plain data; nothing of it was run. "
            f"If you trust the file, load it where it was made and save only its weights and options"
        ) from None
    except _DAMAGE as error:
        raise UserError(f"{path}: damaged, or cannot be loaded ({one_line(error)})") from None
