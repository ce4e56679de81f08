"""Pairs encoded block by block, by several processes, into files that a later start finds."""

import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher
from datasets.utils import tqdm

from ..utils.atomic_write import atomic_file
from ..utils.dataset_cache import (
    cache_file,
    in_one_piece,
    mapped_files,
    open_table,
    read_cached,
    remove_leftovers,
)
from ..utils.process_pool import in_order
from ..utils.system_calls import forget_pages

BLOCK = 50_000  # pairs of a file. With another number a corpus is encoded again
_ROWS = 1000  # of a call of the tokenizers
_SECONDS = 60  # between two lines, if there is no bar

#: Encodes a batch of pairs, as columns.
Encode: TypeAlias = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


class ShardEncoded(Exception):
    """A shard has done its work. The pairs of all shards are not known to it."""


def encode_blocks(
    pairs: Dataset,
    encode: Encode,
    schema: pa.Schema,
    workers: int,
    say: Callable[[str], None],
    shard: tuple[int, int] | None = None,
) -> Dataset:
    """Encode pairs into files in the cache of `datasets`, of which those that exist are not written again.

    So an interrupted start loses the blocks that were in work. The files are the same for any number of `workers`.

    Args:
        pairs: at least one.
        encode: can be pickled, and its result depends on nothing but its settings and the batch.
        schema: of its result.
        workers: processes. One block, or one worker, is encoded in this process.
        say: gets a line now and then if bars are disabled.
        shard: (i, N) encodes the i-th of N shares of the blocks only, for a call without it.

    Raises:
        ShardEncoded: the blocks of a shard are encoded.
    """
    key = Hasher.hash((pairs._fingerprint, encode, str(schema), BLOCK))
    files = {
        start: cache_file(f"encoded-{key}-{start}.arrow") for start in range(0, len(pairs), BLOCK)
    }
    open_block = {
        start: partial(_opened, file, rows=min(BLOCK, len(pairs) - start))
        for start, file in files.items()
    }
    blocks = {start: read_cached(files[start], read) for start, read in open_block.items()}
    missing = [start for start, block in blocks.items() if block is None]
    if missing:
        remove_leftovers()
    done = min(len(pairs), BLOCK * (len(files) - len(missing)))
    if shard is not None:
        number, shards = shard
        missing = [start for start in missing if start // BLOCK % shards == number - 1]
    with tqdm(desc="Encoding", total=len(pairs), initial=done, unit=" pairs") as bar:
        began = said = time.monotonic()
        encoded = 0
        mapped = mapped_files(pairs)
        work = ((_rows(pairs, start, mapped), files[start]) for start in missing)
        write = partial(_write, encode, schema)
        for count in in_order(write, work, min(workers, len(missing)), __name__):
            bar.update(count)
            encoded += count
            now = time.monotonic()
            if bar.disable and now - said > _SECONDS:
                said = now
                say(_progress(done + encoded, len(pairs), encoded / (now - began)))
    if shard is not None:
        raise ShardEncoded
    return concatenate_datasets([blocks[start] or read() for start, read in open_block.items()])


def _opened(file: Path, rows: int) -> Dataset:
    """The pairs of a block. Opening a file reads a little of each of its parts, and the system maps more around it."""
    block = open_table(file, rows)
    forget_pages(mapped_files(block))
    return block


def _progress(done: int, total: int, rate: float) -> str:
    minutes = (total - done) / rate / 60
    return f"encoded {done:,} of {total:,} pairs, {rate:,.0f} a second, {minutes:,.0f} min left"


def _rows(pairs: Dataset, start: int, mapped: Collection[str]) -> bytes:
    """The rows of a block alone. A pickled slice of a table has all of it. `mapped` are the files of the pairs."""
    block = pairs.select(range(start, min(start + BLOCK, len(pairs))))
    rows = in_one_piece(block)
    forget_pages(mapped)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def _write(encode: Encode, schema: pa.Schema, pairs: bytes, file: Path) -> int:
    """Encode the pairs of a block into a file, which exists when it is complete. Return their number."""
    rows = pa.ipc.open_stream(pairs).read_all()
    with (
        atomic_file(file) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in rows.to_batches(_ROWS):
            writer.write_table(pa.table(encode(batch.to_pydict()), schema=schema))
    return len(rows)
