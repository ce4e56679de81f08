"""Pairs encoded block by block, by several processes, into files that a later start finds."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher
from datasets.utils import tqdm

from ..utils.atomic_write import atomic_file
from ..utils.dataset_cache import cache_file, remove_leftovers
from ..utils.system_calls import process_context

BLOCK = 50_000  # pairs of a file. With another number a corpus is encoded again
_ROWS = 1000  # of a call of the tokenizers
_SECONDS = 60  # between two lines, if there is no bar

#: Encodes a batch of pairs, as columns.
Encode: TypeAlias = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


def encode_blocks(
    pairs: Dataset, encode: Encode, schema: pa.Schema, workers: int, say: Callable[[str], None]
) -> Dataset:
    """Encode pairs into files in the cache of `datasets`, of which those that exist are not written again.

    So an interrupted start loses the blocks that were in work. The files are the same for any number of `workers`.

    Args:
        pairs: at least one.
        encode: can be pickled, and its result depends on nothing but its settings and the batch.
        schema: of its result.
        workers: processes. One block, or one worker, is encoded in this process.
        say: gets a line now and then if bars are disabled.
    """
    key = Hasher.hash((pairs._fingerprint, encode, str(schema), BLOCK))
    files = {
        start: cache_file(f"encoded-{key}-{start}.arrow") for start in range(0, len(pairs), BLOCK)
    }
    missing = [start for start, file in files.items() if not file.is_file()]
    if missing:
        remove_leftovers()
    done = min(len(pairs), BLOCK * (len(files) - len(missing)))
    with tqdm(desc="Encoding", total=len(pairs), initial=done, unit=" pairs") as bar:
        began = said = time.monotonic()
        encoded = 0
        work = ((_rows(pairs, start), files[start]) for start in missing)
        for count in _in_order(work, encode, schema, min(workers, len(missing))):
            bar.update(count)
            encoded += count
            now = time.monotonic()
            if bar.disable and now - said > _SECONDS:
                said = now
                say(_progress(done + encoded, len(pairs), encoded / (now - began)))
    return concatenate_datasets([Dataset.from_file(str(file)) for file in files.values()])


def _progress(done: int, total: int, rate: float) -> str:
    minutes = (total - done) / rate / 60
    return f"encoded {done:,} of {total:,} pairs, {rate:,.0f} a second, {minutes:,.0f} min left"


def _rows(pairs: Dataset, start: int) -> pa.Table:
    """The rows of a block."""
    block = pairs.select(range(start, min(start + BLOCK, len(pairs))))
    return block.with_format("arrow")[:]


def _in_order(
    work: Iterator[tuple[pa.Table, Path]], encode: Encode, schema: pa.Schema, workers: int
) -> Iterator[int]:
    """Write blocks, and yield the number of pairs of each. The error is that of the first block that has one."""
    if workers <= 1:
        for rows, file in work:
            yield _write(encode, schema, rows, file)
        return
    context = process_context(__name__)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (encode, schema))
    waiting: deque[Future[int]] = deque()
    try:
        for rows, file in work:
            waiting.append(pool.submit(_write_in_worker, _as_bytes(rows), file))
            if len(waiting) > 2 * workers:  # the others would wait in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _as_bytes(rows: pa.Table) -> bytes:
    """The rows alone. A pickled slice of a table has all of it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def _write(encode: Encode, schema: pa.Schema, rows: pa.Table, file: Path) -> int:
    """Encode the pairs of a block into a file, which exists when it is complete. Return their number."""
    with (
        atomic_file(file) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in rows.to_batches(_ROWS):
            writer.write_table(pa.table(encode(batch.to_pydict()), schema=schema))
    return len(rows)


# In the processes of workers


class _Worker:
    """What a worker encodes with."""

    encode: Encode
    schema: pa.Schema


def _start_worker(encode: Encode, schema: pa.Schema) -> None:
    _Worker.encode = staticmethod(encode)
    _Worker.schema = schema
    # Ctrl-C in a terminal reaches all processes. The main process decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has a core
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process after the main process was killed, which could not tell it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_in_worker(rows: bytes, file: Path) -> int:
    return _write(_Worker.encode, _Worker.schema, pa.ipc.open_stream(rows).read_all(), file)
