"""Read inputs: sentence pairs are validated row by row, and become a memory-mapped table or a stream."""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, Value

from ..utils.atomic_write import atomic_file
from ..utils.dataset_cache import cache_file, open_table, read_cached, remove_leftovers
from ..utils.errors import UserError
from ..utils.untrusted import one_line
from .columns import Columns, RawRow, read_sides, select_columns
from .inputs import Input
from .readers import BLANK, BadRow, Repairs, TableRow, is_readable, read_parallel

FEATURES = Features({"source": Value("string"), "target": Value("string"), "line": Value("int64")})

# part of every cached table's name: increase it when the same input would give a different table
_CACHE_VERSION = 6
_ROWS_PER_WRITE = 10_000
REPORTED_LINES = 5

#: A larger share of rows that are not UTF-8 means a different encoding. Checked after 1,000 rows, and at the end of an
#: input that is read completely before training.
_OTHER_ENCODING = 0.1
_ROWS_FOR_ENCODING = 1000
_NOT_UTF8 = "not UTF-8"


@dataclass
class PairReport:
    """Counts of the kept and dropped rows of an input."""

    name: str  #: the input, as the user named it
    seen: int = 0  #: numbers of rows
    kept: int = 0
    #: reason -> number of rows dropped for it
    dropped: dict[str, int] = field(default_factory=dict)
    #: reason -> the first few of their line numbers, from 1
    first_lines: dict[str, list[int]] = field(default_factory=dict)
    repaired: Repairs = field(default_factory=dict)  #: repair -> number of lines that had it
    #: of a whole table: hash of the kept pairs in their order, independent of the file format
    fingerprint: str = ""
    blank: int = 0  #: number of blank lines, which are no rows

    def drop(self, reason: str, line: int) -> None:
        """Count a dropped row."""
        self.seen += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        lines = self.first_lines.setdefault(reason, [])
        if len(lines) < REPORTED_LINES:
            lines.append(line)

    def restore(self, other: "PairReport") -> None:
        """Copy the counts of a report."""
        vars(self).update(vars(other) | {"name": self.name})

    def summary(self) -> str:
        """One line, such as `kept 998 of 1,000 pairs; dropped 2: empty target (lines 7, 31)`."""
        text = f"kept {self.kept:,} of {self.seen:,} pairs"
        if self.repaired:
            text += "; removed " + ", ".join(
                f"{count:,} × {repair}" for repair, count in self.repaired.items()
            )
        if not self.dropped:
            return text
        several = len(self.dropped) > 1
        reasons = ", ".join(
            (f"{count:,} " if several else "")
            + describe_dropped(reason, count, self.first_lines[reason])
            for reason, count in self.dropped.items()
        )
        return f"{text}; dropped {self.seen - self.kept:,}: {reasons}"


def describe_dropped(reason: str, count: int, lines: Sequence[int]) -> str:
    """A reason with the first lines that it applies to, such as `empty target (lines 7, 31, …)`."""
    numbers = ", ".join(map(str, lines)) + (", …" if count > len(lines) else "")
    return f"{reason} (line{'s' if count > 1 else ''} {numbers})"


def defect(side: str, text: Any) -> str | None:
    """The reason to drop a pair because of one side, or None."""
    if isinstance(text, BadRow):
        return text.reason
    if text is None:
        return f"missing {side}"
    if not isinstance(text, str):
        return f"{side} is not text"
    if not any(map(_is_visible, text)):
        return f"empty {side}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # "surrogateescape" reads a byte as one of these. JSON can also contain lone surrogates such as "\ud83d".
        byte = 0xDC80 <= ord(text[error.start]) <= 0xDCFF
        return f"{side} is {_NOT_UTF8 if byte else 'not valid Unicode'}"
    if "\0" in text:
        return f"NUL character in the {side}"
    return None


def _is_visible(character: str) -> bool:
    """Return whether a character is neither white space nor a mark without a width, such as U+200B."""
    return not character.isspace() and unicodedata.category(character) != "Cf"


def _valid_pairs(source: "Source", report: PairReport) -> Iterator[tuple[int, str, str]]:
    """Yield line, source and target of the valid pairs. The report counts every row, and gets the fingerprint."""
    digest = hashlib.blake2b(digest_size=16)
    for reason, (line, (text, translation), _) in checked_pairs(source, report):
        if reason is None:
            # the lengths make the bytes of every list of pairs unique
            digest.update(f"{len(text)} {len(translation)}\0{text}{translation}".encode())
            yield line, text, translation
    report.fingerprint = digest.hexdigest()


def checked_pairs(source: "Source", report: PairReport) -> Iterator[tuple[str | None, RawRow]]:
    """Yield each row after its defect or None, and count it in the report."""
    report.restore(PairReport(report.name))  # of an earlier reading
    for row in source.rows(report.repaired):
        if report.seen == _ROWS_FOR_ENCODING:
            _check_encoding(report)
        line, (text, translation), _ = row
        if text is BLANK:
            report.blank += 1
            continue
        reason = defect("source", text) or defect("target", translation)
        if reason is None:
            report.seen += 1
            report.kept += 1
        else:
            report.drop(reason, line)
        yield reason, row
    if report.seen < _ROWS_FOR_ENCODING:
        _check_encoding(report)
    if not report.kept:
        raise UserError(f"{report.name} contains no usable pair: {report.summary()}")


def _check_encoding(report: PairReport) -> None:
    """Refuse an input in a different encoding. Only its sentences without accents would be kept."""
    wrong = {
        reason: count for reason, count in report.dropped.items() if reason.endswith(_NOT_UTF8)
    }
    if sum(wrong.values()) > _OTHER_ENCODING * report.seen:
        reason = max(wrong, key=lambda name: wrong[name])
        where = describe_dropped(reason, wrong[reason], report.first_lines[reason])
        raise UserError(
            f"{report.name}: {sum(wrong.values()):,} of {report.seen:,} rows are not UTF-8, {where}: "
            "convert it: iconv -f latin1 -t utf-8 OLD > NEW (if latin1 is its encoding)"
        )


@dataclass
class Source:
    """An input with its columns, and the dataset or the data files of a folder if it is one."""

    input: Input
    columns: Columns
    data: Dataset | tuple[Path, ...] | None = None
    with_cells: bool = False  #: whether `rows` has the other cells, too

    def rows(self, repairs: Repairs) -> Iterator[RawRow]:
        """Read from the start and count repairs. Raises UserError if the input is malformed."""
        files = self.input.files
        if isinstance(self.data, tuple):
            return self._rows_of_files(self.data, repairs)
        if self.data is not None:
            return select_columns(self._rows_of(self.data), self.columns, self.input.name, "")
        if len(files) == 2:
            lines = read_parallel(files[0], files[1], repairs)
            return ((line, [text, translation], {}) for line, text, translation in lines)
        return read_sides(files[0], self.columns, repairs, with_cells=self.with_cells)

    def _rows_of_files(self, files: tuple[Path, ...], repairs: Repairs) -> Iterator[RawRow]:
        """The rows of several files, whose lines count on from one to the next."""
        before = 0
        for file in files:
            line = 0
            for line, texts, cells in read_sides(
                file, self.columns, repairs, with_cells=self.with_cells
            ):
                yield before + line, texts, cells
            before += line

    def _rows_of(self, data: Dataset) -> Iterator[tuple[int, TableRow]]:
        name = self.input.name
        if not self.with_cells:
            # decode no other columns: they may be images
            data = data.select_columns(self.columns.used_of(data.column_names, name))
        line = 0
        try:
            for batch in data.iter(batch_size=1000):
                for values in zip(*batch.values(), strict=True):
                    line += 1
                    yield line, dict(zip(batch, values, strict=True))
        except (pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"{name}: damaged after row {line:,}: {one_line(error.__cause__ or error)}"
            ) from None

    def identity(self) -> str:
        """Hash of the input's content and of the columns."""
        digest = hashlib.blake2b(repr((_CACHE_VERSION, self.columns)).encode(), digest_size=16)
        files = self.data if isinstance(self.data, tuple) else self.input.files
        for path in files:
            # it determines the format: with `.gz`, and a language of parallel text
            digest.update("".join(path.suffixes[-2:]).encode())
            content = hashlib.blake2b(digest_size=16)
            with path.open("rb") as handle:
                while block := handle.read(1 << 20):
                    content.update(block)
            # hashes of one length: the text cannot move from one file to the other
            digest.update(b"\0" + content.digest())
        if isinstance(self.data, Dataset):
            digest.update(self.data._fingerprint.encode())
        return digest.hexdigest()


def open_dataset(chosen: Input, split: str, field: str) -> Dataset | tuple[Path, ...]:
    """Open a split of a folder or of a dataset on the Hub. Errors become one line that starts with `field`.

    Of a folder of data files in the formats of `read_rows`, the names of those of the split are returned.
    """
    folder = Path(str(chosen.dataset))
    try:
        if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            return _from_disk(folder, split, field)
        if not chosen.on_hub and (files := _data_files(folder, split, field)):
            return files
        return datasets.load_dataset(chosen.dataset, chosen.configuration, split=split)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk or missing permissions: the message of the system is clearer
        place = (
            "no such file, folder or prefix, and no dataset on the Hub"
            if chosen.on_hub
            else "no dataset"
        )
        reason = one_line(error.__cause__ or error)
        raise UserError(
            f"{field}: {chosen.name}: {place} with a split {split!r}: {reason}"
        ) from error


def _from_disk(folder: Path, split: str, field: str) -> Dataset:
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise UserError(
                f"{field}: {folder} has the splits {', '.join(map(repr, saved))}, not {split!r}"
            )
        return saved[split]
    if split not in ("train", str(saved.split)):
        raise UserError(
            f"{field}: {folder} contains one dataset without splits, and so no split {split!r}"
        )
    return saved


def _data_files(folder: Path, split: str, field: str) -> tuple[Path, ...]:
    """The data files of a split of a folder, or none if `datasets` reads them right.

    It reads text as numbers, dates and missing values.
    """
    builder = datasets.load_dataset_builder(str(folder))
    files = builder.config.data_files or {}
    if split not in files:
        raise UserError(
            f"{field}: {folder} has the splits {', '.join(map(repr, map(str, files)))}, not {split!r}"
        )
    paths = tuple(map(Path, files[split]))
    if all(map(is_readable, paths)):
        return paths
    if builder.name in ("csv", "json"):
        raise UserError(
            f"{field}: {folder} has data files of other formats than .csv, .tsv, .json, .jsonl and .parquet: convert "
            "them, and name them instead of the folder"
        )
    return ()


def load_table(source: Source, report: PairReport) -> Dataset:
    """The valid pairs of an input, memory-mapped from the cache, after writing them there if this content is new."""
    path = cache_file(f"{source.identity()}.arrow")
    saved_report = path.with_suffix(".json")

    def read() -> Dataset:
        saved = PairReport(**json.loads(saved_report.read_text(encoding="utf-8")))
        table = open_table(path, saved.kept)
        report.restore(saved)
        return table

    table = read_cached(path, read)
    if table is None:
        remove_leftovers()
        with atomic_file(path) as temporary:
            _write_table(_valid_pairs(source, report), str(temporary))
        _check_encoding(report)
        # the report is written last: if it exists, the table is complete
        with atomic_file(saved_report) as temporary:
            temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
        table = open_table(path, report.kept)
    return table


def _write_table(pairs: Iterator[tuple[int, str, str]], path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, FEATURES.arrow_schema) as writer:
        while rows := list(islice(pairs, _ROWS_PER_WRITE)):
            lines, sources, targets = zip(*rows, strict=True)
            writer.write_table(pa.table([sources, targets, lines], schema=FEATURES.arrow_schema))
