"""Files that others wrote may be damaged or malicious: what reading them raises becomes one line with their name."""

import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from .errors import UserError

_LONGEST = 300  # characters of what a library says
_UNSAFE = re.compile(r"(?:Unsupported (?:global|class)|GLOBAL)\W+(?:GLOBAL )?([A-Za-z_][\w.]+)")

# What cut or overwritten bytes, or settings that do not fit together, lead to inside of torch, safetensors and
# transformers.
_DAMAGE = (
    *(RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError),
    *(MemoryError, OSError, SafetensorError, StrictDataclassError, zipfile.BadZipFile),
)


def one_line(error: object) -> str:
    """What an error of a library says, short enough for a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        UserError: it is not there, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; name the folder of a model")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


@contextmanager
def reading_weights(path: str | Path) -> Iterator[None]:
    """Around the lines that read weights, without running code, from a file or folder that somebody gave.

    Raises:
        UserError: instead of what they raise where the weights are damaged, or where more than tensors and plain data
            would have to be read.
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
