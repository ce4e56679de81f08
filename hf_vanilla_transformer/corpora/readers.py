"""Rows of files, with a reader for each format. Errors name the file and the line.

Only "\\n" ends a line of text: a sentence may contain U+2028, a form feed or a lone "\\r", and splitting there
would misalign a parallel corpus silently.
"""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from ..utils.errors import UserError
from ..utils.untrusted import one_line, require_file

TableRow = Mapping[str, Any]
#: repair -> number of lines that it was made in
Repairs = dict[str, int]
UsedColumns = Callable[[list[str]], list[str]]  # of the columns of a file
_CARRIAGE_RETURN = "carriage return at the line end"
# A cell as spreadsheets write it: quotation marks around it, doubled within it.
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_MANY_QUOTED = 0.5  # of the lines

_GZIP_MAGIC = b"\x1f\x8b"
_COMPRESSED = {
    _GZIP_MAGIC: "gzip -d",
    b"BZh": "bzip2 -d",
    b"\xfd7zXZ": "xz -d",
    b"(\xb5/\xfd": "zstd -d",
    b"PK\3\4": "unzip",
}
_COMPRESSED_SUFFIXES = {".bz2": "bzip2 -d", ".xz": "xz -d", ".zst": "zstd -d", ".zip": "unzip"}
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BYTE_ORDER_MARK = "\ufeff"

#: documents, spreadsheets, archives and markup: no plain text with one sentence per line
_DOCUMENTS = re.compile(
    r"\.([sx]?html?|xml|tmx|xlf|xliff|sgml?|vtt|po|docx|odt|rtf|pdf|epub|xlsx?|ods|pptx|odp|ssa|ttml|sbv|ya?ml"
    r"|strings|properties|resx|rst|tgz|7z)"
)
#: Suffixes of documents that are codes of languages in ISO 639, too: what the start of the document contains. Standard
#: Arabic is `arb` in FLORES, and Cook Islands Maori is `rar`.
_DOCUMENTS_BY_CONTENT = {
    ".arb": rb"\A\s*\{",
    ".ass": rb"\[Script Info\]",
    ".doc": rb"\0|^\{\\rtf",
    ".pot": rb"^msgid ",
    ".ppt": rb"\0",
    ".rar": rb"^Rar!",
    ".srt": rb"\d --> \d",
    ".sub": rb"^\{\d+\}\{\d+\}|\d\d:\d\d\.\d\d,|\0",
    ".tar": rb"\0",
    ".tex": rb"\\[a-z]+",
}
_START = 10_000  # bytes
_ROWS_PER_BATCH = 4096  # of Parquet: as Python objects, a row may have thousands of numbers

CONVERT_FILE = "convert it: iconv -f {} -t utf-8 OLD > NEW"
#: advice for a table without the requested columns
NEEDS_HEADER = (
    "the first line of a CSV or TSV file names its columns: if it is missing, give their numbers, such as "
    "source_column=1 and target_column=2"
)


@dataclass(frozen=True)
class BadRow:
    """Replaces a row or a text that cannot be read. It is no text, so that nothing can be trained on the reason."""

    reason: str


#: A blank line. In training it is left out, and in translating it stays empty.
BLANK = BadRow("blank line")

#: The number of a line, and its row or cells.
NumberedRow: TypeAlias = tuple[int, TableRow | BadRow]
NumberedCells: TypeAlias = tuple[int, list[str] | BadRow]


def read_lines(path: str | Path) -> Iterator[str]:
    """Read UTF-8 text, plain or gzip (recognised by its first bytes), line by line.

    Yields:
        Each line without its "\\n" or "\\r\\n", and without a byte order mark at the start of the file.

    Raises:
        UserError: no such file, not plain text by its suffix, not UTF-8, or a damaged gzip file.
    """
    require_plain_text(Path(path))
    yield from lines_of(Path(path))


def lines_of(path: Path) -> Iterator[str]:
    """As `read_lines`, for a file of any suffix."""
    yield from decoded_lines(_raw_lines(path), path)


def decoded_lines(
    raw_lines: Iterable[tuple[int, bytes]], name: str | Path, remedy: str = CONVERT_FILE
) -> Iterator[str]:
    """The text of numbered lines without their ends. `remedy` is as of `decode_line`."""
    texts = (decode_line(raw, name, number, remedy) for number, raw in raw_lines)
    yield from _with_line_feeds(texts, name)


def _with_line_feeds(lines: Iterable[str], name: str | Path) -> Iterator[str]:
    """Yield the lines. Refuse one that is alone and has carriage returns in the place of line ends."""
    count = 0
    for line in lines:
        count += 1
        yield line
    if count == 1:
        require_line_feeds(line, name)


def require_line_feeds(line: str, name: str | Path) -> None:
    """Refuse the only line of a text if it has carriage returns in the place of line ends."""
    if (inside := line.count("\r")) > 1:
        raise UserError(
            f"{name} is one line with {inside:,} carriage returns, the line ends of old programs: "
            f"convert it with tr '\\r' '\\n'"
        )


def require_plain_text(path: Path) -> None:
    """Refuse a file of a format that is not one sentence per line, by its suffix."""
    suffix = file_format(path)
    if suffix in _COMPRESSED_SUFFIXES:
        raise UserError(_decompress(path, _COMPRESSED_SUFFIXES[suffix]))
    if _DOCUMENTS.fullmatch(suffix) or is_readable(path) or _is_document(path, suffix):
        need = "plain text with one sentence per line, or a table"
        raise UserError(
            f"{path}: {suffix} is not {need}: save its text as .txt, or its cells as .csv"
        )


def _decompress(name: str | Path, program: str) -> str:
    return f"{name} is compressed: decompress it with {program}"


def _is_document(path: Path, suffix: str) -> bool:
    """Return whether the content of a file, whose suffix may also be a language, is that of a document."""
    if suffix not in _DOCUMENTS_BY_CONTENT:
        return False
    if not path.is_file():
        return True
    with open_binary(path) as handle:
        start = handle.read(_START).removeprefix(_BYTE_ORDER_MARK.encode())
    return re.search(_DOCUMENTS_BY_CONTENT[suffix], start, re.MULTILINE) is not None


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_binary(path) as handle:
        try:
            yield from enumerate(handle, start=1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is a damaged gzip file ({error}): copy or compress it again"
            ) from None


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed if it starts with the bytes of gzip."""
    require_file(path)
    return cast(IO[bytes], gzip.open(path, "rb")) if is_zipped(path) else path.open("rb")


def is_zipped(path: Path) -> bool:
    """Return whether a file starts with the bytes of gzip."""
    with path.open("rb") as handle:
        return handle.read(2) == _GZIP_MAGIC


def decode_line(raw: bytes, name: str | Path, number: int, remedy: str = CONVERT_FILE) -> str:
    """The text of a line without its end. `remedy` is the advice about a line that is not UTF-8."""
    try:
        text = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        for start, program in _COMPRESSED.items():
            if number == 1 and raw.startswith(start):
                raise UserError(_decompress(name, program)) from None
        encoding = "utf-16" if number == 1 and raw.startswith(_UTF16_MARKS) else "latin1"
        raise UserError(
            f"{name}, line {number}, byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8: "
            f"{remedy.format(encoding)} (if {encoding} is its encoding)"
        ) from None
    return text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text


def repaired_lines(path: Path, repairs: Repairs) -> Iterator[str]:
    """As `read_lines`, for text that may contain defects.

    Byte order marks at the start of any line (concatenated files have several) and carriage returns at line ends are
    removed and counted. Bytes that are not UTF-8 become lone surrogates, so that the caller can drop their sentences.

    Raises:
        UserError: the file has UTF-16, or carriage returns in the place of line ends, or is compressed, but by gzip.
    """
    yield from _with_line_feeds(_repaired(path, repairs), path)


def _repaired(path: Path, repairs: Repairs) -> Iterator[str]:
    for number, raw in _raw_lines(path):
        if number == 1 and raw.startswith((*_UTF16_MARKS, *_COMPRESSED)):
            decode_line(raw, path, number)
        text = raw.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        if text.endswith("\r"):
            _count(repairs, _CARRIAGE_RETURN)
            text = text[:-1]
        if text.startswith(_BYTE_ORDER_MARK):
            _count(repairs, "byte order mark")
            text = text[1:]
        yield text


def _count(repairs: Repairs, repair: str) -> None:
    repairs[repair] = repairs.get(repair, 0) + 1


def read_parallel(
    source_file: Path, target_file: Path, repairs: Repairs
) -> Iterator[tuple[int, str, str]]:
    """Yield (line number from 1, source line, target line) of two files with as many lines."""
    sources = repaired_lines(source_file, repairs)
    targets = repaired_lines(target_file, repairs)
    for line, (source, target) in enumerate(zip_longest(sources, targets), start=1):
        if source is None or target is None:
            shorter = line - 1
            longer = line + sum(1 for _ in (targets if source is None else sources))
            counts = (shorter, longer) if source is None else (longer, shorter)
            raise UserError(
                f"{source_file} has {counts[0]:,} lines and {target_file} has {counts[1]:,}: "
                "line n of one must translate line n of the other"
            )
        yield line, source, target


def read_json(path: Path, repairs: Repairs) -> Iterator[NumberedRow]:
    """Read JSON lines, or one JSON array of objects. Yields (line or element number from 1, object or `BLANK`)."""
    lines = enumerate(repaired_lines(path, repairs), start=1)
    read: list[tuple[int, str]] = []  # up to the first line that is not blank
    for line, text in lines:
        read.append((line, text))
        if text.strip():
            break
    if read and read[-1][1].lstrip().startswith("["):
        line, text = read[-1]
        document = "\n".join([text, *(rest for _, rest in lines)])
        for number, row in enumerate(_parse(document, path, line), start=1):
            yield number, _object(row, f"{path}, element {number}")
        return
    for line, text in chain(read, lines):
        if text.strip():
            yield line, _object(_parse(text, path, line), f"{path}, line {line}")
        else:
            yield line, BLANK


def _parse(text: str, path: Path, line: int) -> Any:
    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if (name := _repeated([name for name, _ in items])) is not None:
            raise UserError(
                f"{path}, line {line}: its object has {name!r} twice; give each a different name"
            )
        return dict(items)

    try:
        # Not strict: control characters in a string are counted later.
        return json.loads(text, strict=False, parse_int=_parse_int, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise UserError(
            f"{path}, {where}: {error.msg}; one JSON object per line is expected"
        ) from None
    except RecursionError:
        raise UserError(
            f"{path}, line {line}: nested too deeply; an object with two sentences is expected"
        ) from None


def _parse_int(digits: str) -> int | float:
    """A whole number. Python refuses to read integers of more than 4,300 digits."""
    return int(digits) if len(digits) < 4000 else float(digits)


def _repeated(names: list[str]) -> str | None:
    """A name that occurs twice, or None. Empty names may."""
    return next(
        (name for number, name in enumerate(names) if name and name in names[:number]), None
    )


def _require_unique(names: list[str], path: Path) -> None:
    if (name := _repeated(names)) is not None:
        raise UserError(f"{path} has two columns {name!r}; give each a different name")


def _object(row: Any, where: str) -> TableRow:
    if not isinstance(row, dict):
        is_number = isinstance(row, int | float) and not isinstance(row, bool)
        kind = "number" if is_number else type(row).__name__
        raise UserError(f"{where} is a JSON {kind}, not an object with columns")
    return row


def read_csv(path: Path, repairs: Repairs, header: bool = True) -> Iterator[NumberedRow]:
    """Yield (line number, row), or a `BadRow`, of a file as in RFC 4180. Cells are never converted.

    Spreadsheets of some countries write semicolons or tabs in the place of commas. The first line has most of these.
    """
    csv.field_size_limit(2**31 - 1)  # the caller limits the length of a sentence
    found: Repairs = {}
    lines = repaired_lines(path, found)
    first = next(lines, "")
    unquoted = _QUOTED.sub("", first)
    delimiter = max(",;\t", key=unquoted.count)
    # a quoted cell may contain line breaks, so each line needs its end
    records = csv.reader(
        (f"{line}\n" for line in chain([first], lines)), delimiter=delimiter, strict=True
    )

    def cells() -> Iterator[NumberedCells]:
        while True:
            line = records.line_num + 1
            try:
                yield line, next(records)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" in str(error):
                    # An open quotation mark has taken in the rest of the file.
                    raise UserError(
                        f"{path}, line {line}: {error}; a quotation mark is not closed"
                    ) from None
                yield line, BadRow("malformed CSV: " + str(error).split(" - ")[0])

    yield from _rows(cells(), path, header)
    found.pop(_CARRIAGE_RETURN, None)  # the line ends of RFC 4180
    for repair, count in found.items():
        repairs[repair] = repairs.get(repair, 0) + count


def read_tsv(path: Path, repairs: Repairs, header: bool = True) -> Iterator[NumberedRow]:
    """Yield (line number, row), or a `BadRow` for a line with too many tabs. A quotation mark is text.

    Spreadsheets put cells into quotation marks. If most lines have such cells, a warning says so.
    """
    quoted = 0
    total = 0

    def cells() -> Iterator[NumberedCells]:
        nonlocal quoted, total
        for line, text in enumerate(repaired_lines(path, repairs), start=1):
            row = text.split("\t") if text else []
            total += 1
            quoted += any(map(_QUOTED.fullmatch, row))
            yield line, row

    yield from _rows(cells(), path, header)
    if quoted > _MANY_QUOTED * total:
        logging.getLogger(__name__).warning(
            "%s: %s of %s lines have cells in quotation marks, which are text in a TSV: if a spreadsheet wrote them, "
            "save the table as .csv",
            path,
            f"{quoted:,}",
            f"{total:,}",
        )


def _rows(records: Iterator[NumberedCells], path: Path, has_header: bool) -> Iterator[NumberedRow]:
    """Name the cells of each record by the first record, or by their numbers from 1 without a header."""
    header: list[str] = []
    names: list[str] = []
    for line, cells in records:
        if isinstance(cells, BadRow):
            yield line, cells
            continue
        if not cells:
            if names or not has_header:
                yield line, BLANK
            continue
        if not names and has_header:
            header = cells
            _require_unique([name.strip() for name in header], path)
            names = [name or f"column {number}" for number, name in enumerate(header, start=1)]
            continue
        if not names:
            names = [str(number) for number in range(1, len(cells) + 1)]
        if cells == header:
            yield line, BadRow("the header again")
        elif len(cells) > len(names):
            yield line, BadRow(f"more cells than the {'header' if has_header else 'first line'}")
        else:
            missing = [None] * (len(names) - len(cells))
            yield line, dict(zip(names, [*cells, *missing], strict=True))


def read_matches(path: Path, pattern: re.Pattern[str], repairs: Repairs) -> Iterator[NumberedRow]:
    """Yield (line number, named groups of the pattern), or a `BadRow` for a line that is blank or does not match."""
    for line, text in enumerate(repaired_lines(path, repairs), start=1):
        if match := pattern.fullmatch(text):
            yield line, match.groupdict()
        else:
            yield line, BadRow("no match of line_pattern") if text else BLANK


def read_parquet(
    path: Path, repairs: Repairs, used: UsedColumns | None = None
) -> Iterator[NumberedRow]:
    """Read a Parquet file in record batches. Yields (row number from 1, row, or a `BadRow` if it is not UTF-8)."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    require_file(path)
    line = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            _require_unique(names, path)
            columns = None if used is None else used(names)
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=columns):
                for row in _batch_rows(batch):
                    line += 1
                    yield line, row
    # damaged pages raise OSError without a number, damaged sizes MemoryError or OverflowError
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        if isinstance(error, UserError) or getattr(error, "errno", None):
            raise
        raise UserError(f"{path} is not a readable Parquet file: {one_line(error)}") from None


def _batch_rows(batch: Any) -> Iterator[TableRow | BadRow]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield BadRow("not UTF-8")


_READERS: dict[str, Callable[..., Iterator[NumberedRow]]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
TABLES_WITH_HEADER = (".csv", ".tsv")


def file_format(path: Path) -> str:
    """The suffix that determines a file's format, in lower case and without `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_readable(path: Path) -> bool:
    """Return whether `read_rows` knows the format of a file, by its suffix."""
    return file_format(path) in _READERS


def read_rows(
    path: Path, repairs: Repairs, used: UsedColumns | None = None, header: bool = True
) -> Iterator[NumberedRow]:
    """Read a file of rows in the format of its suffix. All but Parquet may also be gzipped, with the suffix `.gz`.

    `used` chooses the columns of Parquet, whose rows have no others. None: all. Without a `header` the columns of text
    have numbers, and a file of any other suffix is a TSV.
    """
    suffix = file_format(path)
    if not header and suffix not in _READERS:
        require_plain_text(path)
        suffix = ".tsv"
    if suffix not in _READERS:
        raise UserError(
            f"{path}: unknown file format {suffix!r}; known are {', '.join(sorted(_READERS))}"
        )
    if suffix in TABLES_WITH_HEADER:
        return _READERS[suffix](path, repairs, header)
    options = (used,) if suffix == ".parquet" else ()
    return _READERS[suffix](path, repairs, *options)
