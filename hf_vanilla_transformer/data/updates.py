"""The pairs of an update, as the batches that `UpdateSampler` plans: out of a table, or out of a stream."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from .batching import UpdateSampler, pair_lengths

IGNORED = -100  # the label of what does not count
Rows = list[dict[str, Any]]


def pick(rows: Callable[[int], dict[str, Any]], batches: list[list[int]]) -> list[Rows]:
    """The rows of each batch.

    Args:
        rows: gives the row of a number.
        batches: row numbers; `~row` for a pair that shall not count, whose labels are then all -100.
    """
    return [[rows(row) if row >= 0 else _uncounted(rows(~row)) for row in batch] for batch in batches]


def _uncounted(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": [IGNORED] * len(row["labels"])}


class UpdateDataset(torch.utils.data.Dataset):
    """A data set whose items are the pairs of whole updates, asked for by the batches of row numbers.

    Args:
        dataset: rows by number; if it has `__getitems__`, all rows of an update are read at once.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batches: list[list[int]]) -> list[Rows]:
        if not hasattr(self.dataset, "__getitems__"):
            return pick(self.dataset.__getitem__, batches)
        numbers = sorted({max(row, ~row) for batch in batches for row in batch})
        return pick(dict(zip(numbers, self.dataset.__getitems__(numbers), strict=True)).__getitem__, batches)


class UpdateStream(torch.utils.data.IterableDataset):
    """The updates of a stream: out of one window of it after the other.

    Every process reads the whole stream and keeps its own share of each update, so that all have the same number.

    Args:
        stream: pairs with `input_ids` and `labels`. With `state_dict` and `load_state_dict`, as an `IterableDataset`
            of `datasets` has them, going on in its middle reads one window again; without, all from the start.
        window: pairs that are held at a time.
        seed: as of `UpdateSampler`.
        plan: its other arguments but the lengths.
    """

    def __init__(self, stream: Any, window: int, seed: int, **plan: Any):
        self.stream, self.window, self.seed, self.plan = stream, window, seed, plan
        self.epoch = 0
        self.longest = 0  # tokens, of the pairs read so far
        self._position: dict[str, Any] = _start_of(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; the trainer calls it."""
        self.epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: the epoch, the window, how many of its updates were given, and the way to that window."""
        return dict(self._position)

    def load_state_dict(self, position: dict[str, Any]) -> None:
        """Go on from there when it is read next."""
        self.set_epoch(position["epoch"])
        self._position = dict(position)

    def __iter__(self) -> Iterator[list[Rows]]:
        begin = self._position if self._position["epoch"] == self.epoch else _start_of(self.epoch)
        can_jump = hasattr(self.stream, "load_state_dict")
        if can_jump and begin["stream"] is not None:
            self.stream.load_state_dict(begin["stream"])
        rows = iter(self.stream)
        if not can_jump:
            deque(islice(rows, begin["window"] * self.window), maxlen=0)  # read and forget
        number, given = begin["window"], begin["update"]
        way, window = self._way(), list(islice(rows, self.window))
        while window:
            way_on, next_row = self._way(), list(islice(rows, 1))
            sampler = UpdateSampler(*pair_lengths(window), seed=[self.seed, number], **self.plan)
            sampler.set_epoch(self.epoch)
            self.longest = max(self.longest, int(sampler.lengths.max()))
            for update in range(given, len(sampler)):
                self._position = {"epoch": self.epoch, "window": number, "update": update + 1, "stream": way}
                if update + 1 == len(sampler) and not next_row:
                    self._position = _start_of(self.epoch + 1)
                yield pick(window.__getitem__, sampler.batches(update))
            number, given, way, window = number + 1, 0, way_on, next_row + list(islice(rows, self.window - 1))
        self._position = _start_of(self.epoch + 1)

    def _way(self) -> Any:
        return self.stream.state_dict() if hasattr(self.stream, "load_state_dict") else None


def _start_of(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "window": 0, "update": 0, "stream": None}


def collate_update(update: list[Rows], collator: Callable[[Rows], Any]) -> list[Any]:
    """Each batch as the model takes it."""
    return [collator(batch) for batch in update]
