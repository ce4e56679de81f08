"""Read untrusted input: the errors of libraries about damaged or malicious files become one-line `UserError`s."""

import json
import pickle
import re
import stat
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from .errors import UserError, missing_extra

#: What is said of a path that is neither a file nor a folder.
PIPE = "a pipe or a device: write its text to a file, and name that"
_MAX_CHARACTERS = 300  # of a library's message
_MAX_DEPTH = 50  # of nested lists and mappings in YAML, because parsers recurse
_MAX_ALIASES = 100  # in YAML: each repeats a part of the file
_MAX_PLAIN = 2000  # characters of a YAML scalar without quotes: numbers are slow to read
_MAX_OPTIONS = 2**20  # bytes of a YAML file of options
_POINTER = b"version https://git-lfs.github.com/spec/"
_AGAIN = "download or copy it again"
# Files of models that are never empty.
_OF_MODELS = {".json", ".safetensors", ".bin", ".pt", ".npz", ".spm", ".model"}
_ARCHIVES = {".bin", ".pt", ".npz"}
_UNSAFE = re.compile(r"(?:Unsupported (?:global|class)|GLOBAL)\W+(?:GLOBAL )?([A-Za-z_][\w.]+)")

# Raised by torch, safetensors and transformers for truncated or overwritten files, and for inconsistent settings.
_DAMAGE = (
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    OverflowError,
    TypeError,
    AssertionError,
    MemoryError,
    OSError,
    ImportError,
    SyntaxError,
    tokenize.TokenError,
    SafetensorError,
    StrictDataclassError,
    zipfile.BadZipFile,
    zlib.error,
)


def one_line(error: object) -> str:
    """A library's error message as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"


def require_file(path: Path, advice: str = "") -> Path:
    """Return `path` if it is a file, or raise a UserError that ends with `advice`."""
    if not path.is_file():
        reason = "this is a folder, a file is needed" if path.is_dir() else "no such file"
        if path.exists() and not path.is_dir():
            reason = PIPE
        raise UserError(f"{path}: {reason}" + (f"; {advice}" if advice else ""))
    return path


def refuse_damaged_files(source: str | Path) -> None:
    """Refuse what `check_files` refuses in a checkpoint, a file or a folder with all that lies in it."""
    source = Path(source)
    check_files((source, *(sorted(source.rglob("*")) if source.is_dir() else ())))


def check_files(paths: Iterable[Path]) -> None:
    """Refuse devices, pipes and sockets, also behind links, and files of models that did not arrive whole.

    Reading a pipe may never return. Missing files and links to nothing are left to the reader, because it knows which
    files it needs.
    """
    for path in paths:
        try:
            mode = path.stat().st_mode
        # Links in a circle are one or the other, depending on Python.
        except (OSError, RuntimeError):
            continue
        if stat.S_ISREG(mode):
            _require_whole(path)
        elif not stat.S_ISDIR(mode):
            raise UserError(
                f"{path}: neither a file nor a folder, nor a link to one: nothing was read"
            )


def _require_whole(path: Path) -> None:
    """Refuse a file of a model that is empty, the pointer of Git LFS to one, or the first part of one."""
    if path.suffix not in _OF_MODELS:
        return
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if not start:
        raise UserError(f"{path} is empty: {_AGAIN}")
    if start == _POINTER:
        raise UserError(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull")
    if path.suffix == ".safetensors":
        read_safetensors_header(path)
    if path.suffix in _ARCHIVES and start.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is incomplete (its archive has no end): {_AGAIN}")


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """The `shape` and the `dtype` of each tensor by name, if the file is whole.

    Raises:
        UserError: it is shorter than its header says, or has none.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 no mapping
            return {
                name: {"shape": tensor.get_shape(), "dtype": tensor.get_dtype()}
                for name, tensor in tensors.items()
            }
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or incomplete ({one_line(error)}): {_AGAIN}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise a UserError if the file is missing or contains something else."""
    _require_whole(require_file(path, "name the folder of a model"))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it contains no JSON object")
    return value


def parse_yaml_mapping(content: bytes, refusal: str, as_text: bool = False) -> dict[Any, Any]:
    """Parse a YAML mapping of plain data. Anything else is a UserError that starts with `refusal`.

    Args:
        as_text: keep every scalar as text, also `yes`, `null` and `1`, as a vocabulary needs, and permit any size.
    """
    if len(content) > _MAX_OPTIONS and not as_text:
        raise UserError(f"{refusal} ({len(content)} bytes are too many)")
    kind = "BaseLoader" if as_text else "SafeLoader"
    loader = getattr(yaml, f"C{kind}", getattr(yaml, kind))
    try:
        text = content.decode("utf-8")
        _check_nesting(text, loader, as_text)
        value = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{refusal} ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(refusal)
    return value


def _check_nesting(text: str, loader: Any, as_text: bool) -> None:
    """Raise a ValueError for YAML with deep nesting, aliases that multiply its size, or long numbers."""
    depth = 0
    aliases = 0
    anchor_depth = None
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if event.anchor and anchor_depth is None:
                anchor_depth = depth
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor_depth = None if depth == anchor_depth else anchor_depth
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if anchor_depth is not None or aliases > _MAX_ALIASES:
                raise ValueError("its aliases repeat other aliases, or are too many")
        elif (
            isinstance(event, yaml.ScalarEvent)
            and event.implicit[0]
            and len(event.value) > _MAX_PLAIN
            and not as_text
        ):
            raise ValueError(f"a scalar of {len(event.value)} characters has no quotes")
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def unsafe_name(error: pickle.UnpicklingError) -> str | None:
    """The class or function that made `torch.load` refuse a file, or None if it refused it for another reason."""
    match = _UNSAFE.search(str(error))
    return None if match is None else match[1] if "." in match[1] else f"builtins.{match[1]}"


@contextmanager
def reading_weights(path: str | Path) -> Iterator[None]:
    """Wrap code that loads weights from an untrusted file or folder, with loaders that run no code from it."""
    try:
        yield
    except pickle.UnpicklingError as error:
        unsafe = unsafe_name(error)
        if unsafe is None:
            raise UserError(
                f"{path}: damaged, or not written by torch.save. Nothing of it was run"
            ) from None
        raise UserError(
            f"{path}: it contains {unsafe}, neither a tensor nor plain data. Nothing of it was run. "
            f"If you trust the file, load it where it was made and save only its weights and options"
        ) from None
    except UserError:
        raise
    except _DAMAGE as error:
        refusal = UserError(f"{path}: damaged, or cannot be loaded ({one_line(error)})")
        raise missing_extra(error) or refusal from error
