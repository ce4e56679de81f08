"""Lines of text in and out: files, `.gz` files and pipes, in UTF-8 whatever the locale is."""

import gzip
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any, cast

from transformers.utils import logging

from ..corpora import readers
from ..utils.atomic_write import atomic_file
from ..utils.errors import UserError


def silence_transformers() -> None:
    """Turn off the progress bars and warnings of transformers, for commands that print translations or one error."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def input_lines(path: str | Path | None = None) -> Iterator[str]:
    """Read lines of text as they arrive. Only a line feed ends a line.

    Args:
        path: a file, gzipped or not, or a named pipe. None or "-" is standard input.

    Yields:
        The lines without their ends, as `corpora.readers.read_lines` yields them.

    Raises:
        UserError: no such file, bytes that are not UTF-8 (with the line number), or a damaged gzip file.
    """
    if path is None or str(path) == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed: name a file")
        yield from _decode(sys.stdin.buffer, "standard input")
    elif Path(path).is_fifo():
        # Such as the shell's `<(zcat file)`: testing for gzip would consume its first bytes.
        with open(path, "rb") as stream:
            yield from _decode(stream, str(path))
    else:
        yield from readers.read_lines(path)


@contextmanager
def line_writer(path: str | Path | None = None) -> Iterator[Callable[[str], None]]:
    """A function that writes one line of text, given without its line feed, to a file or to standard output.

    A file is written atomically: an existing one stays intact until the end, and may even be the input. It is
    compressed if its name ends in `.gz`. None or "-" is standard output. While that is in use, everything else that is
    printed goes to standard error.
    """
    to_stdout = path is None or str(path) == "-"
    stdout = sys.stdout
    if to_stdout and stdout is None:
        raise UserError("standard output is closed: name a file")
    opened: Any = redirect_stdout(sys.stderr) if to_stdout else open_to_write(cast(Path, path))
    with opened as file:
        stream = stdout.buffer if to_stdout else file

        def write(line: str) -> None:
            stream.write(line.encode("utf-8") + b"\n")
            if to_stdout:
                stream.flush()

        yield write


@contextmanager
def open_to_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for bytes that replaces `path` when the block ends without an error, gzipped if it ends in `.gz`."""
    target = Path(path).resolve()
    if target.is_dir():
        raise UserError(f"output {path} is a folder: name a file")
    if target.is_symlink():  # Python before 3.13 does not resolve it
        raise UserError(f"output {path} is a link that leads to itself: name a file")
    with atomic_file(target) as temporary, open(temporary, "wb") as stream:
        if target.suffix.lower() != ".gz":
            yield stream
            return
        # Without a name and a time: the same text gives the same file.
        with gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as zipped:
            yield cast(IO[bytes], zipped)


def on_one_line(text: str) -> str:
    """The text. If it has line breaks, as a cell of a table may, its words with one space between two."""
    return " ".join(text.split()) if "\n" in text or "\r" in text else text


def _decode(stream: IO[bytes], name: str) -> Iterator[str]:
    lines = enumerate(stream, start=1)
    yield from readers.decoded_lines(lines, name, "put `iconv -f {} -t utf-8 |` before")
