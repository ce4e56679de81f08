"""Files in the cache of `datasets` that this package makes, and tables of its data sets."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa

from .atomic_write import full_disk_reason
from .system_calls import forget_pages
from .untrusted import one_line

_LOGGER = logging.getLogger(__name__)
Value = TypeVar("Value")

ROWS_PER_READ = 50_000
_MAPPED_ROWS = 200_000  # some 50 MB
_SCATTERED_ROWS = 200  # as much: the system maps 64 KB and more around each
_FEW_ROWS = 20_000
_LEFTOVER_SECONDS = 3600


def cache_file(name: str) -> Path:
    """Path of a file in the cache of `datasets`. Creates the folder."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_vanilla_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def read_cached(name: object, read: Callable[[], Value]) -> Value | None:
    """What `read` finds in the cache, or None if it is missing or damaged: then it must be made again.

    A warning names what is damaged. Caches are cleaned by hand, copied in part, and cut off by a full disk.
    """
    try:
        return read()
    except FileNotFoundError:
        return None
    except Exception as error:  # tokenizers raises no class of its own
        if full_disk_reason(error):
            raise
        _LOGGER.warning("%s is damaged, and made again: %s", name, one_line(error))
        return None


def open_table(path: Path, rows: int) -> datasets.Dataset:
    """Map a table of this number of rows. Arrow reads a file that was cut between two of its parts as a shorter one.

    Raises:
        ValueError: it has another number of rows.
    """
    table = datasets.Dataset.from_file(str(path))
    _require_rows(table, rows)
    return table


def map_batches(
    dataset: datasets.Dataset, function: Callable[[dict[str, list]], dict[str, list]], rows: int
) -> datasets.Dataset:
    """`Dataset.map` of batches, whose result in the cache has this number of rows, or is made again."""

    def read() -> datasets.Dataset:
        mapped = dataset.map(function, batched=True)
        _require_rows(mapped, rows)
        return mapped

    mapped = read_cached(f"the result of {function.__name__} in {cache_file('')}", read)
    if mapped is None:
        mapped = dataset.map(function, batched=True, load_from_cache_file=False)
    return mapped


def _require_rows(table: datasets.Dataset, rows: int) -> None:
    if len(table) != rows:
        raise ValueError(f"{len(table):,} of {rows:,} rows")


def remove_leftovers() -> None:
    """Delete temporary files of `atomic_file` and `datasets` that nobody has written to for an hour."""
    for path in cache_file("").iterdir():
        with suppress(OSError):  # a parallel process was faster, or a different user owns it
            if (
                path.name.startswith((".", "tmp"))
                and time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS
            ):
                path.unlink()


def batches_of(
    dataset: datasets.Dataset, rows: int, mapped_rows: int = _MAPPED_ROWS
) -> Iterator[Any]:
    """The batches of `Dataset.iter`. What was read of mapped files does not stay in memory.

    Args:
        rows: of a batch.
        mapped_rows: after which pages are given back.
    """
    files = mapped_files(dataset)
    read = 0
    for batch in dataset.iter(rows):
        yield batch
        read += rows
        if read >= mapped_rows:
            forget_pages(files)
            read = 0
    forget_pages(files)


def mapped_files(dataset: datasets.Dataset) -> set[str]:
    """The files that a data set has mapped, by the names that `forget_pages` takes."""
    return {os.path.realpath(file["filename"]) for file in dataset.cache_files}


def number_columns(dataset: datasets.Dataset, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of numbers, each (N,)."""
    types = {name: dataset.data.schema.field(name).type.to_pandas_dtype() for name in names}
    columns = {name: np.empty(len(dataset), kind) for name, kind in types.items()}
    tables = dataset.select_columns(list(names)).with_format("arrow")
    start = 0
    for table in batches_of(tables, ROWS_PER_READ):
        end = start + len(table)
        for name, column in columns.items():
            column[start:end] = table[name]
        start = end
    return columns


def selected(dataset: datasets.Dataset, rows: np.ndarray) -> datasets.Dataset:
    """Rows of a data set. A few are read at once, because later readers would map the pages around each of them.

    Of many, `Dataset.select` would make a Python object of each number, 40 bytes.
    """
    digest = blake2b(dataset._fingerprint.encode(), digest_size=8)
    digest.update(np.ascontiguousarray(rows, dtype="<i8").data)
    facts = {"info": dataset.info, "split": dataset.split, "fingerprint": digest.hexdigest()}
    if 0 < len(rows) <= _FEW_ROWS:
        chosen = dataset.select(rows).with_format("arrow")
        batches = batches_of(chosen, _SCATTERED_ROWS, mapped_rows=_SCATTERED_ROWS)
        copies = [batch.combine_chunks() for batch in batches]  # each while its pages are there
        return datasets.Dataset(pa.concat_tables(copies).combine_chunks(), **facts)
    known = dataset._indices
    numbers = rows if known is None else known.column(0).to_numpy()[rows]
    indices = pa.table({"indices": pa.array(numbers.astype(np.uint64))})
    return datasets.Dataset(dataset.data, indices_table=indices, **facts)


def in_one_piece(dataset: datasets.Dataset) -> pa.Table:
    """The table of a data set. That of a selection has a chunk for each row, of which each takes some 50 µs."""
    return dataset.with_format("arrow")[:].combine_chunks()
