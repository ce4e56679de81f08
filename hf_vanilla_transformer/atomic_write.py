"""A folder that appears when it is whole."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


@contextmanager
def new_folder(output: Path, overwrite: bool = False) -> Iterator[Path]:
    """A path beside `output` to write a folder to, which is put in its place when the block ends without an error.

    Raises:
        UserError: `output` is a file, or a folder that is not empty and `overwrite` is off.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; name a folder")
    if not overwrite and output.exists() and any(output.iterdir()):
        raise UserError(f"output {output} is there already; name a new folder, or give --overwrite")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as beside:
        folder = Path(beside) / "model"
        yield folder
        if not output.exists():
            os.replace(folder, output)
            return
        before = Path(beside) / "before"
        os.replace(output, before)
        try:
            os.replace(folder, output)
        except BaseException:
            os.replace(before, output)
            raise
