"""Lines of text in and out: files, `.gz` files and pipes, UTF-8 whatever the locale says."""

import gzip
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..atomic_write import atomic_file
from ..data import readers
from ..errors import UserError


def read_lines(path: str | Path | None = None) -> Iterator[str]:
    """Read lines of text as they arrive; only a line feed ends a line.

    Args:
        path: a file, packed by gzip or not, or a named pipe; None or "-" is standard input.

    Yields:
        The lines without their ends, as `data.readers.read_lines` gives them.

    Raises:
        UserError: no such file, bytes that are no UTF-8, with their line, or a damaged gzip file.
    """
    if path is None or str(path) == "-":
        yield from _decode(sys.stdin.buffer, "standard input")
    elif Path(path).is_fifo():  # `<(zcat file)` of the shell: what is read to look at it is gone
        with open(path, "rb") as stream:
            yield from _decode(stream, str(path))
    else:
        yield from readers.read_lines(path)


@contextmanager
def line_writer(path: str | Path | None = None) -> Iterator[Callable[[str], None]]:
    """Open a place for lines of text; give a function that writes one line.

    A file is written beside its place and moved there at the end, so that what stands there before stays whole
    until then, and may even be what is being read. Whoever fills a folder's disk or interrupts loses nothing.

    Args:
        path: a file, packed if its name ends in `.gz`; None or "-" is standard output. While that is in use,
            everything else that is printed goes to standard error.

    Yields:
        A function that writes a line, given without its end.

    Raises:
        UserError: the path is a folder.
        OSError: the file cannot be written.
    """
    if path is None or str(path) == "-":
        with _standard_output() as stream:
            yield _line_writer(stream, flush=True)
        return
    target = Path(path).resolve()
    if target.is_dir():
        raise UserError(f"{path}: this is a folder; give the name of a file")
    opened = gzip.open if target.suffix == ".gz" else open
    with atomic_file(target) as temporary, opened(temporary, "wb") as stream:
        yield _line_writer(stream)


def _decode(stream: BinaryIO, name: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}, byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8: "
                "put `iconv -f latin1 -t utf-8 |` before, if latin1 is its encoding"
            ) from None


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    printed, sys.stdout = sys.stdout, sys.stderr
    try:
        yield printed.buffer
    finally:
        sys.stdout = printed


def _line_writer(stream: BinaryIO | gzip.GzipFile, flush: bool = False) -> Callable[[str], None]:
    def write(line: str) -> None:
        stream.write(line.encode("utf-8") + b"\n")
        if flush:
            stream.flush()

    return write
