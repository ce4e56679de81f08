"""Sentence pairs from wherever they lie, checked row by row, memory-mapped or streamed."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value

from ..atomic_write import atomic_file
from ..errors import UserError
from .readers import Fault, Row, read_parallel, read_rows

FEATURES = Features({"source": Value("string"), "target": Value("string"), "line": Value("int64")})

# part of the name of every cached table: raise it when the same input would give another table
_CACHE_VERSION = 1
_ROWS_PER_WRITE = 10_000
_LINES_TOLD = 5

RawPair = tuple[int, Any, Any]  # line number, source, target: nothing checked yet


@dataclass
class PairReport:
    """What became of the rows of one input.

    Attributes:
        name: the input, as the user named it.
        seen, kept: numbers of rows.
        dropped: reason -> number of rows dropped for it.
        first_lines: reason -> the first few of their line numbers, from 1.
        fingerprint: hash of the kept text in its order; the same pairs give the same one from any format.

    Of a streamed data set it tells what has been read so far, in the process that read it.
    """

    name: str
    seen: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_lines: dict[str, list[int]] = field(default_factory=dict)
    fingerprint: str = ""

    def keep(self, source: str, target: str) -> None:
        """Count a good row and chain its text to the fingerprint."""
        self.seen += 1
        self.kept += 1
        # "\0" with the lengths of both sides: no other pair of texts gives the same bytes
        text = f"{self.fingerprint}\0{len(source)}\0{source}{target}"
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def drop(self, reason: str, line: int) -> None:
        """Count a row that is left out."""
        self.seen += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        lines = self.first_lines.setdefault(reason, [])
        if len(lines) < _LINES_TOLD:
            lines.append(line)

    def reset(self) -> None:
        """Forget all rows: a streamed data set is being read again from its start."""
        self.restore(PairReport(self.name))

    def restore(self, other: "PairReport") -> None:
        """Take over all that another report counted."""
        for attribute in fields(self):
            if attribute.name != "name":
                setattr(self, attribute.name, getattr(other, attribute.name))

    def summary(self) -> str:
        """Say it in one line: `kept 998 of 1,000 pairs; dropped 2: empty target (lines 7, 31)`."""
        text = f"kept {self.kept:,} of {self.seen:,} pairs"
        if not self.dropped:
            return text
        reasons = ", ".join(self._reason(reason, count) for reason, count in self.dropped.items())
        return f"{text}; dropped {self.seen - self.kept:,}: {reasons}"

    def _reason(self, reason: str, count: int) -> str:
        return describe_dropped(reason, count, self.first_lines[reason], many=len(self.dropped) > 1)


def describe_dropped(reason: str, count: int, lines: Sequence[int], many: bool = False) -> str:
    """Say a reason with its first lines, `empty target (lines 7, 31, …)`; with its count if there are `many`."""
    numbers = ", ".join(str(line) for line in lines) + (", …" if count > len(lines) else "")
    counted = f"{count:,} {reason}" if many else reason
    return f"{counted} (line{'s' if count > 1 else ''} {numbers})"


@dataclass(frozen=True)
class Columns:
    """Where a row has its two sentences; what is None is found from the rest."""

    source_column: str | None = None
    target_column: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None

    def names_in(self, columns: Sequence[str], where: str) -> tuple[str | None, str, str]:
        """Choose the columns.

        Args:
            columns: the columns that exist.
            where: the input's name, for errors.

        Returns:
            (column that holds both sides in a {language: text}, or None; key of the source; key of the target).

        Raises:
            UserError: nothing fits; the message names the columns that exist.
        """
        holder: str | None = None
        source, target = self.source_column, self.target_column
        if not source and not target:
            source, target = self.source_lang, self.target_lang
            holder = "translation" if source and target and "translation" in columns else None
        if not source and not target:
            source, target = "source", "target"
        if not source or not target or not {holder or source, holder or target} <= set(columns):
            need = f"{source!r} and {target!r}" if source and target else "a source and a target"
            raise UserError(
                f"{where} has the columns {', '.join(map(repr, columns))}; {need} are needed: "
                "name them by source_column and target_column, or by source_lang and target_lang"
            )
        return holder, source, target


def _pick(rows: Iterable[tuple[int, Row | Fault]], columns: Columns, where: str) -> Iterator[RawPair]:
    """Take the two sentences out of each row; the first good row decides which columns there are."""
    rows = iter(rows)
    head = []  # up to the first good row
    for each in rows:
        head.append(each)
        if not isinstance(each[1], Fault):
            break
    if not head or isinstance(head[-1][1], Fault):
        yield from ((line, row, None) for line, row in head)
        return
    first_line, first = head[-1]
    holder, source, target = columns.names_in(list(first), where)
    for line, row in chain(head, rows):
        if isinstance(row, Fault):
            yield line, row, None
            continue
        if holder is not None:
            nested = row.get(holder)
            row = nested if isinstance(nested, Mapping) else {}
            if line == first_line and not {source, target} <= set(row):
                raise UserError(
                    f"{where}: its 'translation' has the languages {', '.join(map(repr, row)) or 'none'}, "
                    f"not {source!r} and {target!r}: set source_lang and target_lang"
                )
        yield line, row.get(source), row.get(target)


def _fault(side: str, text: Any, max_characters: int | None) -> str | None:
    """Say what is wrong with one side of a pair, or None."""
    if isinstance(text, Fault):
        return str(text)
    if text is None:
        return f"missing {side}"
    if not isinstance(text, str):
        return f"{side} is not text"
    if not text.strip():
        return f"empty {side}"
    if max_characters is not None and len(text) > max_characters:
        return f"{side} longer than {max_characters:,} characters"
    try:
        text.encode()  # JSON can spell half a character, "\ud83d", which no file can hold
    except UnicodeEncodeError:
        return f"{side} is not valid Unicode"
    return None


def _checked(pairs: Iterable[RawPair], report: PairReport, max_characters: int | None) -> Iterator[RawPair]:
    """Let the good pairs through, and tell the report of every row."""
    report.reset()
    for line, source, target in pairs:
        reason = _fault("source", source, max_characters) or _fault("target", target, max_characters)
        if reason is not None:
            report.drop(reason, line)
            continue
        report.keep(source, target)
        yield line, source, target
    if not report.kept:
        raise UserError(f"{report.name} holds no usable pair: {report.summary()}")


def load_pairs(
    *,
    file: str | Path | None = None,
    source_file: str | Path | None = None,
    target_file: str | Path | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    source_lang: str | None = None,
    target_lang: str | None = None,
    source_column: str | None = None,
    target_column: str | None = None,
    streaming: bool = False,
    max_characters: int | None = None,
) -> tuple[Dataset | IterableDataset, PairReport]:
    """Load sentence pairs from exactly one input and check each of them.

    Text is kept as it is, spaces at its ends too. A table read once stays as an Arrow file in the cache of
    `datasets` under a name made from the input's content: memory does not grow with the corpus.

    Args:
        file: JSON lines, CSV, TSV (each also `.gz`) or Parquet; CSV and TSV with a header.
        source_file, target_file: parallel text, plain or `.gz`; line n of one translates line n of the other.
        dataset_name: a data set of the Hub, a folder of data files, or a folder made by `save_to_disk`.
        dataset_config_name: its configuration.
        split: its split.
        source_lang, target_lang: keys in the column `translation`, or columns that carry these names.
        source_column, target_column: the columns, by name. Without any of the four: `source` and `target`.
        streaming: read while iterating, with no table on disk; errors and the report come along the way.
        max_characters: a longer sentence on either side drops the pair.

    Returns:
        The pairs, with columns `source`, `target` and `line` (of the input, from 1), and the report of what
        was dropped. Rows with a missing, empty, too long or non-text side are dropped and counted.

    Raises:
        UserError: not exactly one input, a missing or unreadable file, bytes that are not UTF-8, parallel files
            of different length, a missing column or language, or no good pair at all.
    """
    columns = Columns(source_column, target_column, source_lang, target_lang)
    _require_one_input(file, source_file, target_file, dataset_name)
    source = _Input(file, source_file, target_file, dataset_name, dataset_config_name, split, columns, streaming)
    report = PairReport(source.name)
    if streaming:
        return _stream(source, report, max_characters), report
    return _table(source, report, max_characters), report


def _require_one_input(file: Any, source_file: Any, target_file: Any, dataset_name: Any) -> None:
    if bool(source_file) != bool(target_file):
        raise UserError("parallel text needs both source_file and target_file")
    if sum(map(bool, (file, source_file, dataset_name))) != 1:
        raise UserError("give exactly one of: file; source_file with target_file; dataset_name")


class _Input:
    """The one input of `load_pairs`: its name, its identity, and its rows as often as they are wanted."""

    def __init__(
        self,
        file: str | Path | None,
        source_file: str | Path | None,
        target_file: str | Path | None,
        dataset_name: str | None,
        config_name: str | None,
        split: str,
        columns: Columns,
        streaming: bool,
    ) -> None:
        self.columns = columns
        self.files = [Path(name) for name in (file, source_file, target_file) if name]
        for path in self.files:
            if not path.is_file():
                raise UserError(f"{path} is {'a folder, not a file' if path.is_dir() else 'not there: no such file'}")
        self.name = " + ".join(map(str, self.files)) or f"{dataset_name} ({split})"
        self.data = _open_dataset(dataset_name, config_name, split, streaming) if dataset_name else None

    def pairs(self) -> Iterator[RawPair]:
        """Read from the start. Raises UserError where the input is at fault."""
        if len(self.files) == 2:
            return read_parallel(*self.files)
        rows = read_rows(self.files[0]) if self.data is None else self._rows_of(self.data)
        return _pick(rows, self.columns, self.name)

    def _rows_of(self, data: Dataset | IterableDataset) -> Iterator[tuple[int, Row]]:
        if data.column_names is not None:
            # other columns may be pictures: never decode what is not wanted
            holder, source, target = self.columns.names_in(data.column_names, self.name)
            data = data.select_columns([holder] if holder else list(dict.fromkeys([source, target])))
        line = 0
        for batch in data.iter(batch_size=1000):
            for values in zip(*batch.values(), strict=True):
                line += 1
                yield line, dict(zip(batch, values, strict=True))

    def identity(self) -> str:
        """Hash the input's content (the files' bytes) and what is read from it."""
        digest = hashlib.blake2b(repr((_CACHE_VERSION, self.columns)).encode(), digest_size=16)
        for path in self.files:
            # the name's ending decides how the bytes are read
            digest.update("".join(path.suffixes[-2:]).encode())
            with path.open("rb") as handle:
                while block := handle.read(1 << 20):
                    digest.update(block)
        if isinstance(self.data, Dataset):
            digest.update(self.data._fingerprint.encode())
        return digest.hexdigest()


def _open_dataset(name: str, config_name: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """Open a data set of the Hub or a folder, and put what goes wrong into one line."""
    try:
        folder = Path(name)
        if any((folder / made).is_file() for made in ("state.json", "dataset_dict.json")):
            return _from_disk(name, split)
        return datasets.load_dataset(name, config_name, split=split, streaming=streaming)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk, a folder one may not read: the system's own words are better
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"cannot load the data set {name!r} (split {split!r}): {reason}") from error


def _from_disk(folder: str, split: str) -> Dataset:
    saved = datasets.load_from_disk(folder)
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise UserError(f"{folder} has the splits {', '.join(map(repr, saved))}, not {split!r}")
        return saved[split]
    if split not in ("train", str(saved.split)):
        raise UserError(f"{folder} holds one data set without splits; the split {split!r} was asked for")
    return saved


def _stream(source: _Input, report: PairReport, max_characters: int | None) -> IterableDataset:
    def read() -> Iterator[dict[str, Any]]:
        for line, text, translation in _checked(source.pairs(), report, max_characters):
            yield {"source": text, "target": translation, "line": line}

    return IterableDataset.from_generator(read, features=FEATURES)


def _table(source: _Input, report: PairReport, max_characters: int | None) -> Dataset:
    """Map the checked pairs from the cache, after writing them there if this content is new."""
    key = hashlib.blake2b(f"{source.identity()} {max_characters}".encode(), digest_size=16).hexdigest()
    path = cache_file(f"{key}.arrow")
    notes = path.with_suffix(".json")
    # the notes are written last: where they are, the table is whole
    if not notes.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            _write_table(_checked(source.pairs(), report, max_characters), str(temporary))
        with atomic_file(notes) as temporary:
            temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    else:
        report.restore(PairReport(**json.loads(notes.read_text(encoding="utf-8"))))
    return Dataset.from_file(str(path))


def cache_file(name: str) -> Path:
    """Where something made from an input is kept, under a name that tells its content."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "hf_vanilla_transformer" / name


def _write_table(pairs: Iterator[RawPair], path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, FEATURES.arrow_schema) as writer:
        while rows := list(islice(pairs, _ROWS_PER_WRITE)):
            lines, sources, targets = zip(*rows, strict=True)
            writer.write_table(pa.table([sources, targets, lines], schema=FEATURES.arrow_schema))
