"""Find the duplicates of a text of any size, by keys in files of their own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import SpooledTemporaryFile
from typing import IO

import numpy as np

_FILES = 64
_IN_MEMORY = 1 << 18  # bytes of a file that are not written to the disk

#: A pair: what near duplicates and what duplicates have in common, how much is wrong with it, and its row.
RECORD = np.dtype([("near", "i8"), ("exact", "i8"), ("flaws", "u4"), ("row", "i8")])


@contextmanager
def open_duplicates(folder: str) -> Iterator["Duplicates"]:
    """Duplicates with files in a folder. They have no names, so that the system removes those of a killed process."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(SpooledTemporaryFile(_IN_MEMORY, dir=folder)) for _ in range(_FILES)
        ]
        yield Duplicates(files)


class Duplicates:
    """The records of a text. Pairs with the same keys are in the same of its files."""

    def __init__(self, files: Sequence[IO[bytes]]):
        self._files = files

    def add(self, records: np.ndarray) -> None:
        """Add records of later rows than those before. Duplicates must be near duplicates, too."""
        numbers = records["near"] % len(self._files)
        for number, file in enumerate(self._files):
            file.write(records[numbers == number].tobytes())

    def rows(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names of rules, each with rows that it drops. The last rule of a row is its first in `RULES`."""
        for file in self._files:
            file.seek(0)
            records = np.frombuffer(file.read(), RECORD)
            yield "near_duplicate", _all_but_best(records, "near")
            yield "duplicate", _all_but_best(records, "exact")


def _all_but_best(records: np.ndarray, key: str) -> np.ndarray:
    """The rows that have the key of another with fewer flaws, or of an earlier one with as many."""
    order = np.lexsort((records["flaws"], records[key]))
    keys = records[key][order]
    return records["row"][order[1:][keys[1:] == keys[:-1]]]
