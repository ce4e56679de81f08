"""Rows of files, one reader per format; errors name the file and the line.

Only "\\n" ends a line of text: a sentence may contain U+2028, a form feed or a lone "\\r", and splitting there
would misalign a parallel corpus silently.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, cast

from ..errors import UserError

Row = Mapping[str, Any]

_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

CONVERT_FILE = "convert it: iconv -f {} -t utf-8 OLD > NEW"


class BadRow(str):
    """Replaces a row that cannot be read; its text is the reason."""


def read_lines(path: str | Path) -> Iterator[str]:
    """Read UTF-8 text, plain or gzip (recognised by its first bytes), line by line.

    Yields:
        Each line without its "\\n" or "\\r\\n", and without a byte order mark at the start of the file.

    Raises:
        UserError: no such file, not UTF-8, or a damaged gzip file.
    """
    path = Path(path)
    with open_binary(path) as handle:
        lines = enumerate(handle, start=1)
        while True:
            try:
                number, raw = next(lines)
            except StopIteration:
                return
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(f"{path} is a damaged gzip file ({error}): copy or compress it again") from None
            yield decode_line(raw, path, number)


def require_file(path: Path) -> None:
    """Raises UserError: `path` is a folder, or does not exist."""
    if not path.is_file():
        raise UserError(f"{path} is {'a folder, not a file' if path.is_dir() else 'not there: no such file'}")


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed if its first bytes are those of gzip."""
    require_file(path)
    with path.open("rb") as handle:
        zipped = handle.read(2) == _GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")


def decode_line(raw: bytes, name: str | Path, number: int, remedy: str = CONVERT_FILE) -> str:
    """The text of a line without its end; `remedy` is the advice about a line that is not UTF-8."""
    try:
        text = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if number == 1 and raw.startswith(_UTF16_MARKS) else "latin1"
        raise UserError(
            f"{name}, line {number}, byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8: "
            f"{remedy.format(encoding)} (if {encoding} is its encoding)"
        ) from None
    return text.removeprefix("\ufeff") if number == 1 else text


def read_parallel(source_file: Path, target_file: Path) -> Iterator[tuple[int, str, str]]:
    """Read two files whose n-th lines are translations of each other.

    Yields:
        (line number from 1, source line, target line).

    Raises:
        UserError: as `read_lines`; or the files have different numbers of lines.
    """
    sources, targets = read_lines(source_file), read_lines(target_file)
    for line, (source, target) in enumerate(zip_longest(sources, targets), start=1):
        if source is None or target is None:
            shorter, longer = line - 1, line + sum(1 for _ in (targets if source is None else sources))
            counts = (shorter, longer) if source is None else (longer, shorter)
            raise UserError(
                f"{source_file} has {counts[0]:,} lines and {target_file} has {counts[1]:,}: "
                "line n of one must translate line n of the other"
            )
        yield line, source, target


def read_json(path: Path) -> Iterator[tuple[int, Row]]:
    """Read JSON lines, or one JSON array of objects. Yields (line or element number from 1, object)."""
    lines = ((line, text) for line, text in enumerate(read_lines(path), start=1) if text.strip())
    first = None
    for line, text in lines:
        first = first or line
        if line == first and text.lstrip().startswith("["):
            document = "\n".join([text, *(rest for _, rest in lines)])
            for number, row in enumerate(_parse(document, path, line), start=1):
                yield number, _object(row, f"{path}, element {number}")
            return
        yield line, _object(_parse(text, path, line), f"{path}, line {line}")


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise UserError(f"{path}, {where}: {error.msg}; one JSON object per line is expected") from None


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where} is a JSON {type(row).__name__}, not an object with columns")
    return row


def read_csv(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Read comma-separated values with a header and quoting as in RFC 4180.

    Cells are never converted: "null", "NA" and "007" are text.

    Yields:
        (line number on which the record starts, row), or a `BadRow` for a record with too many cells.
    """
    # a quoted cell may contain line breaks, so each line needs its end
    return _table(path, csv.reader((f"{line}\n" for line in read_lines(path)), strict=True))


def read_tsv(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Read tab-separated values with a header. A quotation mark is text: this format has no quoting."""
    return _table(path, csv.reader(read_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE))


def _table(path: Path, records: Any) -> Iterator[tuple[int, Row | BadRow]]:
    csv.field_size_limit(2**31 - 1)  # the caller limits the length of a sentence
    header: list[str] | None = None
    while True:
        line = records.line_num + 1
        try:
            cells = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}, line {line}: {error}") from None
        if not cells:
            continue
        if header is None:
            header = cells
        elif len(cells) > len(header):
            yield line, BadRow("more cells than the header")
        else:
            yield line, dict(zip(header, cells, strict=False))


def read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """Read a Parquet file in record batches. Yields (row number from 1, row)."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    require_file(path)
    line = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                line += 1
                yield line, row
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a readable Parquet file: {' '.join(str(error).split())}") from None


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Row | BadRow]]]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}


def read_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Read a file of rows in the format of its suffix; all but Parquet may also be gzipped, with the suffix `.gz`.

    Raises:
        UserError: an unknown suffix, or a malformed file.
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix not in _READERS:
        raise UserError(f"{path}: unknown file format {suffix!r}; known are {', '.join(sorted(_READERS))}")
    return _READERS[suffix](path)
