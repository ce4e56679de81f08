"""A prepared folder: the data of a run, encoded once and mapped by every process that trains on it.

The folder contains

- `prepared.json`: the settings that decide the data, and the reports and fingerprints of the splits;
- `tokenizer/`: of `save_tokenizers`;
- `train.arrow`: the training pairs as token ids, in one record batch. So the ids of all sentences are one array of the
  file, which no process copies;
- for each other split its text, `SPLIT.pairs.arrow`, and its ids, `SPLIT.arrow`.

The bytes are the same for any number of workers, and also after an interruption.
"""

import io
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ..corpora.corpus import Corpus
from ..corpora.mixtures import MixtureReport
from ..corpora.pairs import PairReport
from ..text.tokenizer_files import save_tokenizers
from ..utils.atomic_write import new_folder
from ..utils.dataset_cache import in_one_piece, number_columns
from ..utils.errors import UserError
from ..utils.system_calls import forget_pages
from ..utils.untrusted import one_line, read_json_object
from .batching import id_chunks, starts_of
from .corpus_tokenizers import Tokenizers, tokenizer_folder
from .encoding import EncodingReport

VERSION = 2
_FACTS = "prepared.json"
_SIDES = "input_ids", "labels"
_PIECE = 1 << 26  # bytes
_PART = "part"  # how temporary files start


@dataclass
class Prepared:
    """The data of a run. The text of the training pairs is not part of it."""

    settings: dict[str, Any]  #: fields that decided the data
    corpus: Corpus
    encoded: dict[str, Dataset]  #: the splits as token ids
    encoding: dict[str, EncodingReport]


def write_prepared(folder: Path, prepared: Prepared, tokenizers: Tokenizers) -> None:
    """Write a prepared folder. It exists when it is complete.

    Raises:
        UserError: the folder exists.
        DiskFull: there is no space.
    """
    corpus = prepared.corpus
    facts = {
        "version": VERSION,
        "settings": prepared.settings,
        "pairs": {split: len(pairs) for split, pairs in corpus.pairs.items()},
        "corpus": {name: value for name, value in vars(corpus).items() if name != "pairs"},
        "encoding": prepared.encoding,
    }
    with new_folder(folder) as new:
        save_tokenizers(tokenizer_folder(str(new)), *tokenizers)
        for split, encoded in prepared.encoded.items():
            path = _file(new, split)
            if split == "train":
                sizes = [len(each) for each in tokenizers]
                _write_flat(encoded, path, np.min_scalar_type(max(sizes)))
                for part in new.glob(f"{_PART}*"):  # nothing maps them any more
                    part.unlink()
                continue
            _write_table(in_one_piece(encoded), path)
            _write_table(in_one_piece(corpus.pairs[split]), _file(new, f"{split}.pairs"))
        text = json.dumps(facts, indent=2, default=asdict, ensure_ascii=False)
        (new / _FACTS).write_text(text + "\n", encoding="utf-8")


def read_prepared(folder: Path) -> Prepared:
    """Map a prepared folder. What this holds in memory does not grow with the training pairs.

    Raises:
        UserError: there is no such folder, or it is damaged or of another version.
    """
    file = folder / _FACTS
    if not file.is_file():
        raise UserError(f"data: {folder} is no folder of `vanilla-transformer prepare`")
    facts = read_json_object(file)
    if facts.get("version") != VERSION:
        raise UserError(
            f"data: {folder} was prepared by another version of this package: prepare it again"
        )
    try:
        corpus = _restored_corpus(facts["corpus"])
        encoded = {}
        for split, count in facts["pairs"].items():
            encoded[split] = Dataset.from_file(str(_file(folder, split)))
            if split == "train":
                # Only the number of the texts counts from here on.
                corpus.pairs[split] = Dataset(pa.table({"line": pa.nulls(count)}))
                continue
            corpus.pairs[split] = Dataset.from_file(str(_file(folder, f"{split}.pairs")))
        encoding = {split: EncodingReport(**each) for split, each in facts["encoding"].items()}
    except (OSError, ValueError, TypeError, LookupError, pa.ArrowException) as error:
        raise UserError(
            f"data: {folder} is damaged ({one_line(error)}): prepare it again"
        ) from error
    return Prepared(facts["settings"], corpus, encoded, encoding)


def _restored_corpus(facts: Mapping[str, Any]) -> Corpus:
    """A corpus without its pairs, from JSON."""
    reports = {split: _restored_report(each) for split, each in facts["reports"].items()}
    selected = {split: tuple(each) for split, each in facts["selected"].items()}
    directions = {split: list(map(tuple, each)) for split, each in facts["directions"].items()}
    changed = {"reports": reports, "selected": selected, "directions": directions}
    return Corpus(**{**facts, **changed})


def _restored_report(facts: Mapping[str, Any]) -> PairReport | MixtureReport:
    if "parts" not in facts:
        return PairReport(**facts)
    parts = list(map(_restored_report, facts["parts"]))
    return MixtureReport(**{**facts, "parts": parts})


# Tables


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.arrow"


def _write_table(table: pa.Table, path: Path, mapped: Collection[Path] = ()) -> None:
    """Write a table. Of columns in files that are `mapped`, only a piece is in memory at a time."""
    with path.open("wb") as file:
        sink = pa.PythonFile(_InPieces(file, mapped), "w")
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)


class _InPieces(io.RawIOBase):
    """Writes a buffer piece by piece, and lets each piece of a mapped file leave the memory."""

    def __init__(self, file: BinaryIO, mapped: Collection[Path]) -> None:
        self._file = file
        self._mapped = {os.path.realpath(each) for each in mapped}

    def writable(self) -> bool:
        return True

    def write(self, buffer: Any) -> int:
        content = memoryview(buffer).cast("B")
        for start in range(0, len(content), _PIECE):
            self._file.write(content[start : start + _PIECE])
            forget_pages(self._mapped)
        return len(content)


def _write_flat(encoded: Dataset, path: Path, ids_type: np.dtype) -> None:
    """Write a table of lists of ids as one record batch. The lists are mapped from files of their own next to it."""
    columns: dict[str, Any] = {}
    parts: list[Path] = []
    for name in _SIDES:
        ids = path.with_name(f"{_PART}-{name}")
        starts = path.with_name(f"{_PART}-{name}-starts")
        _write_lists(encoded, name, ids, starts, ids_type)
        columns[name] = pa.LargeListArray.from_arrays(
            _mapped(starts, np.dtype(np.int64)), _mapped(ids, ids_type)
        )
        parts += [ids, starts]
    others = [name for name in encoded.column_names if name not in _SIDES]
    _write_table(pa.table(columns | number_columns(encoded, others)), path, mapped=parts)


def _write_lists(
    encoded: Dataset, name: str, ids_file: Path, starts_file: Path, ids_type: np.dtype
) -> None:
    """Write the ids of a column of lists, one list after the other, and where each list starts."""
    lengths = []
    with ids_file.open("wb") as file:
        for ids, its_lengths in id_chunks(encoded, name):
            ids.astype(ids_type).tofile(file)
            lengths.append(its_lengths)
    starts_of(lengths).tofile(starts_file)


def _mapped(file: Path, kind: np.dtype) -> pa.Array:
    """The numbers in a file, as an array that stays there."""
    buffer = pa.memory_map(str(file)).read_buffer()
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(kind), buffer.size // kind.itemsize, [None, buffer]
    )
