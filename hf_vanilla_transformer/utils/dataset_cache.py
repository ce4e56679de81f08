"""Files in the cache of `datasets` that this package makes, and tables of its data sets."""

import time
from contextlib import suppress
from pathlib import Path

import datasets
import pyarrow as pa

_LEFTOVER_SECONDS = 3600


def cache_file(name: str) -> Path:
    """Path of a file in the cache of `datasets`. Creates the folder."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_vanilla_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def remove_leftovers() -> None:
    """Delete temporary files of `atomic_file` and `datasets` that nobody has written to for an hour."""
    for path in cache_file("").iterdir():
        with suppress(OSError):  # a parallel process was faster, or a different user owns it
            if (
                path.name.startswith((".", "tmp"))
                and time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS
            ):
                path.unlink()


def in_one_piece(dataset: datasets.Dataset) -> pa.Table:
    """The table of a data set. That of a selection has a chunk for each row, of which each takes some 50 µs."""
    return dataset.with_format("arrow")[:].combine_chunks()
