"""What happens to the files of a cache: they are deleted, cut off or overwritten."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa


def _replace(file: Path, content: bytes) -> None:
    """A process that has mapped the old file keeps it."""
    file.unlink()
    file.write_bytes(content)


def _halve(file: Path) -> None:
    content = file.read_bytes()
    _replace(file, content[: len(content) // 2])


def _lose_rows(file: Path) -> None:
    """Cut a table after its schema. For Arrow it is complete."""
    with pa.OSFile(str(file)) as source:
        schema = pa.ipc.open_stream(source).schema
    file.unlink()
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema):
        pass


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda file: _replace(file, b""),
    "half": _halve,
    "other": lambda file: _replace(file, b"{}"),
}
#: of files of Arrow
DAMAGES_OF_TABLES = {**DAMAGES, "fewer rows": _lose_rows}
