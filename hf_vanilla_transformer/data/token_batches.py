"""The pairs of the batches that `TokenBatchSampler` plans, from a table or from a stream."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F

from ..loss_vanilla_transformer import IGNORED
from .batching import TokenBatchSampler, pair_lengths

Rows = list[dict[str, Any]]


def select_rows(row_of: Callable[[int], dict[str, Any]], batches: list[list[int]]) -> list[Rows]:
    """The rows of each batch, by their numbers. `~row` is a dummy pair: its labels become -100."""
    return [[row_of(row) if row >= 0 else _without_labels(row_of(~row)) for row in batch] for batch in batches]


def _without_labels(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": [IGNORED] * len(row["labels"])}


class TokenBatchDataset(torch.utils.data.Dataset):
    """Fetches the pairs of a whole update at once, given the row numbers of its batches."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batches: list[list[int]]) -> list[Rows]:
        read = getattr(self.dataset, "__getitems__", lambda numbers: [self.dataset[row] for row in numbers])
        numbers = sorted({max(row, ~row) for batch in batches for row in batch})
        return select_rows(dict(zip(numbers, read(numbers), strict=True)).__getitem__, batches)


class StreamingTokenBatches(torch.utils.data.IterableDataset):
    """Token batches from a stream: buffers one window of pairs at a time and yields its updates.

    Every rank reads the whole stream and keeps its share of each update, so that all ranks have as many updates. If
    the stream has `state_dict` and `load_state_dict`, like an `IterableDataset` of `datasets`, resuming reads one
    window again. Otherwise it reads from the start. `window` is the number of buffered pairs. `seed` and `plan` are
    arguments of `TokenBatchSampler`.
    """

    def __init__(self, stream: Any, window: int, seed: int, **plan: Any):
        self.stream, self.window, self.seed, self.plan = stream, window, seed, plan
        self.epoch = 0
        self.longest = 0  # tokens, of the pairs read so far
        self._position = _start_of(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order. The trainer calls it."""
        self.epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Position: the epoch, the window, the number of its updates yielded, and the stream's state before it."""
        return dict(self._position)

    def load_state_dict(self, position: dict[str, Any]) -> None:
        """Make the next iteration resume at a position."""
        self.set_epoch(position["epoch"])
        self._position = dict(position)

    def __iter__(self) -> Iterator[list[Rows]]:
        start = self._position if self._position["epoch"] == self.epoch else _start_of(self.epoch)
        seekable = hasattr(self.stream, "load_state_dict")
        if seekable and start["stream"] is not None:
            self.stream.load_state_dict(start["stream"])
        rows = iter(self.stream)
        if not seekable:
            deque(islice(rows, start["window"] * self.window), maxlen=0)  # skip
        number, done = start["window"], start["update"]
        state, window = self._stream_state(), list(islice(rows, self.window))
        while window:
            # one row ahead tells whether this window is the last
            next_state, next_row = self._stream_state(), list(islice(rows, 1))
            sampler = TokenBatchSampler(*pair_lengths(window), seed=[self.seed, number], **self.plan)
            sampler.set_epoch(self.epoch)
            self.longest = max(self.longest, int(sampler.lengths.max()))
            for update in range(done, len(sampler)):
                self._position = {"epoch": self.epoch, "window": number, "update": update + 1, "stream": state}
                if update + 1 == len(sampler) and not next_row:
                    self._position = _start_of(self.epoch + 1)
                yield select_rows(window.__getitem__, sampler.batches(update))
            number, done, state = number + 1, 0, next_state
            window = next_row + list(islice(rows, self.window - 1))
        self._position = _start_of(self.epoch + 1)

    def _stream_state(self) -> Any:
        return self.stream.state_dict() if hasattr(self.stream, "load_state_dict") else None


def _start_of(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "window": 0, "update": 0, "stream": None}


def collate_batches(
    batches: list[Rows], collator: Callable[[Rows], Any], row_unit: int = 1, pad_token_ids: tuple[int, int] = (0, 0)
) -> list[Any]:
    """Apply the model's collator to each batch of an update.

    B · S and B · T become multiples of `row_unit`, by padding and dummy pairs without labels, so that a matrix product
    that keeps a kernel for each shape keeps few.

    Args:
        pad_token_ids: of sources and of decoder inputs.
    """
    if row_unit == 1:
        return [collator(batch) for batch in batches]
    return [_collate_rounded(batch, collator, row_unit, pad_token_ids) for batch in batches]


def _collate_rounded(batch: Rows, collator: Callable[[Rows], Any], row_unit: int, pads: tuple[int, int]) -> Any:
    longest = {name: max(len(row[name]) for row in batch) for name in ("input_ids", "labels")}
    pairs, source, target = rounded_shape(len(batch), longest["input_ids"], longest["labels"], row_unit)
    collated = collator(batch + [_without_labels(batch[-1])] * (pairs - len(batch)))
    for name, length, value in (
        ("input_ids", source, pads[0]),
        ("attention_mask", source, 0),
        ("labels", target, IGNORED),
        ("decoder_input_ids", target, pads[1]),
    ):
        if name in collated:
            collated[name] = F.pad(collated[name], (0, length - collated[name].shape[1]), value=value)
    return collated


def rounded_shape(pairs: int, source: int, target: int, row_unit: int) -> tuple[int, int, int]:
    """The smallest (B, S, T) with at least these sizes in which B · S and B · T are multiples of `row_unit`."""
    shapes = []
    for more in range(pairs, pairs + row_unit):
        unit = row_unit // math.gcd(row_unit, more)
        shapes.append((more, -(-source // unit) * unit, -(-target // unit) * unit))
    return min(shapes, key=lambda shape: shape[0] * (shape[1] + shape[2]))
