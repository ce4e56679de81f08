"""Samplers of sentence pairs: batches of similar lengths need little padding, and come in random order.

`LengthGroupedSampler` makes batches of a fixed number of pairs, `TokenBatchSampler` of a maximal number of tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch.nn import functional as F

from ..loss_vanilla_transformer import IGNORED
from ..utils.dataset_cache import ROWS_PER_READ, batches_of

#: The numbers of the rows of each batch of an update. `~row` is a dummy pair.
BatchNumbers: TypeAlias = list[list[int]]

Whole = TypeVar("Whole", int, np.ndarray)

BUCKET = 2  # tokens: the width of a bucket of source lengths


def ceil_div(number: Whole, divisor: int) -> Whole:
    """The quotient of a whole number, or of an array of them, rounded up."""
    return -(-number // divisor)


def starts_of(counts: Sequence[np.ndarray]) -> np.ndarray:
    """Where each group with these counts, given in parts, starts, and the end of the last: (groups + 1,)."""
    starts = np.concatenate([[0], *counts], dtype=np.int64)
    return np.cumsum(starts, out=starts)


def pair_lengths(dataset: "Dataset | Examples") -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths in tokens, each (number of pairs,), of the rows of a dataset without augmentation."""
    dataset = getattr(dataset, "encoded", dataset)
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":  # `set_transform`
        sizes = [
            (len(row["input_ids"]), len(row["labels"]))
            for row in (dataset[i] for i in range(len(dataset)))
        ]
        source, target = np.array(sizes, dtype=np.int64).reshape(-1, 2).T  # (2, number of pairs)
        return source, target
    lengths = {side: np.empty(len(dataset), dtype=np.int32) for side in ("input_ids", "labels")}
    tables = dataset.select_columns(list(lengths)).with_format("arrow")
    start = 0
    # in batches, because a filtered `Dataset` copies the ids it returns
    for table in batches_of(tables, ROWS_PER_READ):
        end = start + len(table)
        for side, column in lengths.items():
            column[start:end] = pc.list_value_length(table[side]).to_numpy()
        start = end
    return lengths["input_ids"], lengths["labels"]


def id_chunks(dataset: Dataset, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids of the lists in a column, one list after the other, and the lengths of the lists, in parts."""
    column = dataset.select_columns([name]).with_format("arrow")
    for table in batches_of(column, ROWS_PER_READ):
        for chunk in table.combine_chunks()[name].chunks:  # a selection has one of each row
            ids = chunk.flatten().to_numpy(zero_copy_only=False)
            lengths = chunk.value_lengths().to_numpy(zero_copy_only=False)
            yield ids, lengths


class LengthGroupedSampler(torch.utils.data.Sampler[int]):
    """Yields every row once per epoch, so that `batch_size` consecutive pairs have similar source and target lengths.

    Pairs are bucketed by source length (with bucket boundaries that shift every epoch), sorted by target length within
    a bucket and split into batches. The batches are shuffled, in an order that `seed` and the epoch determine. The
    class of this name in transformers looks at one side only and leaves the batches sorted by length, and that hurts
    training with a high learning rate.
    """

    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, batch_size: int, seed: int
    ):
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order. `Trainer` calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self.seed, self.epoch))
        bucket = (self.source_lengths + rng.integers(BUCKET)) // BUCKET
        # The last key counts first.
        order = np.lexsort((rng.random(len(self)), self.target_lengths, bucket))
        rest = len(order) % self.batch_size
        # The loader splits after every `batch_size` pairs, so the incomplete batch must stay last. It is from a random
        # place: `dataloader_drop_last` would leave out the longest pairs in every epoch.
        place = rng.integers(len(order) - rest + 1)
        last = order[place : place + rest]
        whole = np.delete(order, np.s_[place : place + rest]).reshape(-1, self.batch_size)
        yield from np.append(rng.permutation(whole).flatten(), last).tolist()


# Batches by number of tokens (§5.1)


def sort_by_length(source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Row numbers (number of pairs,), sorted by bucket of source length, then by target length.

    The order is ascending in one bucket, descending in the next, so that a batch across a boundary fits too.
    """
    bucket = source_lengths // BUCKET
    target = np.where(bucket % 2 == 0, target_lengths, -target_lengths)
    return np.lexsort((source_lengths, target, bucket))  # the last key is the primary one


def runs_of_equals(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The number of each run of pairs with equal source and equal target lengths, (number of pairs,)."""
    is_new_source = np.diff(source, prepend=0) != 0
    is_new_target = np.diff(target, prepend=0) != 0
    return np.cumsum(is_new_source | is_new_target)


def shuffled_runs(runs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Places (number of pairs,), shuffled within runs."""
    return np.argsort(runs + rng.random(len(runs)))


def split_into_batches(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """The start index of each batch of at most `max_tokens` tokens, padding included, and the end of the last.

    `lengths` are the tokens of each pair's longer side, (number of pairs,). A pair over the limit is a batch.
    """
    starts = [0]
    while starts[-1] < len(lengths):
        start = starts[-1]
        most_pairs = max_tokens // max(1, int(lengths[start]))
        candidates = lengths[start : start + most_pairs]
        pairs = np.arange(1, len(candidates) + 1)
        padded = np.maximum.accumulate(candidates) * pairs
        fitting = int(np.searchsorted(padded, max_tokens, side="right"))
        starts.append(start + max(1, fitting))
    return np.array(starts)


def even_groups(tokens: np.ndarray, count: int) -> np.ndarray:
    """Split consecutive batches into `count` non-empty groups of about the same number of `tokens`, (batches,).

    Return the start index of each group, and the end index of the last: (count + 1,).
    """
    border = starts_of([tokens])
    targets = np.arange(count + 1) * (border[-1] / count)
    middles = (border[:-1] + border[1:]) / 2
    nearest = np.searchsorted(middles, targets)
    step = np.arange(count + 1)
    starts = np.maximum.accumulate(nearest - step) + step  # strictly increasing …
    # … with a batch left for each group that follows.
    return np.minimum(starts, len(tokens) - count + step)


def shard_batches(
    batches: list[np.ndarray], lengths: np.ndarray, world_size: int
) -> list[list[np.ndarray]]:
    """Distribute the batches of one update, row numbers each, over the ranks: the same number and about the same work.

    If the number of batches is no multiple of `world_size`, the largest are halved until it is. If there are fewer
    pairs than ranks, the remaining ranks get a dummy pair without labels, encoded as `~row`. They take part in the
    gradient all-reduce with zeros, so that no rank waits forever. `lengths` are the tokens of each row's longer side.
    """

    def size(batch: np.ndarray) -> int:
        return len(batch) * int(lengths[batch].max())

    if world_size == 1:
        return [list(batches)]
    batches_of_rank = ceil_div(len(batches), world_size)
    total = batches_of_rank * world_size
    parts = sorted(batches, key=size, reverse=True)
    while len(parts) < total:
        sizes = [size(batch) if len(batch) > 1 else 0 for batch in parts]
        largest = sizes.index(max(sizes))
        batch = parts[largest]
        if len(batch) == 1:
            break
        half = (len(batch) + 1) // 2
        parts[largest : largest + 1] = [batch[:half], batch[half:]]
    parts.sort(key=size, reverse=True)
    dummy = ~parts[0][:1]
    parts += [dummy] * (total - len(parts))
    rounds = [parts[start : start + world_size] for start in range(0, total, world_size)]
    # alternate the direction: the rank with the largest batch of one round gets the smallest of the next
    for odd in rounds[1::2]:
        odd.reverse()
    return [list(shard) for shard in zip(*rounds, strict=True)]


class TokenBatchSampler(torch.utils.data.Sampler[BatchNumbers]):
    """Yields the updates of an epoch, each as this rank's batches of row numbers. Every pair occurs in one batch.

    Pairs sorted by length are split into batches of at most `max_tokens` source tokens and at most `max_tokens`
    target tokens, padding included (§5.1, fairseq's `--max-tokens`). The batches are shuffled, and consecutive ones
    form an update. Batch boundaries are the same in every epoch, so all epochs have the same number of updates. Each
    epoch shuffles the batches again, and also pairs of equal lengths. An update consists of the same pairs for any
    number of ranks.

    Args:
        source_lengths, target_lengths: tokens, (number of pairs,).
        max_tokens: limit of a batch.
        tokens_per_update: approximate number of target tokens, nearly the same in all updates. None for updates of
            `batches_per_update` batches each.
        seed: determines the order together with the epoch.
        world_size, rank: number of processes that share an update, and the index of this one.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        max_tokens: int,
        *,
        tokens_per_update: int | None = None,
        batches_per_update: int = 1,
        seed: int | Sequence[int] = 0,
        world_size: int = 1,
        rank: int = 0,
    ):
        self.lengths = np.maximum(source_lengths, target_lengths)
        self.tokens_per_update = tokens_per_update
        self.batches_per_update = batches_per_update
        self.seed = seed
        self.world_size = world_size
        self.rank = rank
        self.limit = min(max_tokens, tokens_per_update or max_tokens)
        # Otherwise an update is one batch, or has `batches_per_update`.
        self.joins_batches = tokens_per_update is not None and tokens_per_update > max_tokens
        # Updates of an epoch with about `tokens_per_update`.
        requested = int(target_lengths.sum()) / (tokens_per_update or 1)
        self.requested = max(1, round(requested))
        self.updates = self._plan(source_lengths, target_lengths)
        self.epoch = -1
        self.set_epoch(0)

    def _plan(self, source: np.ndarray, target: np.ndarray) -> int:
        """Make the batches from the lengths of the pairs, each (number of pairs,). Return the number of updates."""
        self.sorted = sort_by_length(source, target)
        self.equal_lengths = runs_of_equals(source[self.sorted], target[self.sorted])
        self.batch_starts = split_into_batches(self.lengths[self.sorted], self.limit)
        # (batches,), target tokens
        self.tokens = np.add.reduceat(target[self.sorted], self.batch_starts[:-1])
        if self.joins_batches:
            return min(self.requested, len(self.tokens))
        if self.tokens_per_update:  # the limit of a batch, so that a batch is an update
            self.batches_per_update = 1
        return ceil_div(len(self.tokens), self.batches_per_update)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch. The trainer calls it."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._draw(np.random.default_rng([*np.atleast_1d(self.seed), epoch]))

    def _draw(self, rng: np.random.Generator) -> None:
        """Shuffle the batches and the pairs of equal lengths, so that every batch keeps its size."""
        self.rows = self.sorted[shuffled_runs(self.equal_lengths, rng)]
        self.order = rng.permutation(len(self.tokens))
        if self.joins_batches:
            self.starts = even_groups(self.tokens[self.order], self.updates)
        else:
            self.starts = np.arange(self.updates + 1) * self.batches_per_update

    def __len__(self) -> int:
        return self.updates

    def update(self, number: int) -> list[np.ndarray]:
        """The batches of one update, for all ranks together: row numbers of each."""
        start, end = self.starts[number : number + 2]
        batches = self.order[start:end]
        starts = self.batch_starts[batches]
        ends = self.batch_starts[batches + 1]
        return [self.rows[first:last] for first, last in zip(starts, ends, strict=True)]

    def batches(self, number: int) -> BatchNumbers:
        """This rank's batches of one update: row numbers, or `~row` for a dummy pair."""
        shards = shard_batches(self.update(number), self.lengths, self.world_size)
        return [batch.tolist() for batch in shards[self.rank]]

    def __iter__(self) -> Iterator[BatchNumbers]:
        return map(self.batches, range(len(self)))


# The pairs of the batches

#: A pair as token ids, `input_ids` and `labels`, with the other columns of its dataset.
Example: TypeAlias = dict[str, Any]
Examples: TypeAlias = list[Example]
#: The tensors of a batch, by the names of the model's arguments.
Batch: TypeAlias = dict[str, torch.Tensor]
Collate: TypeAlias = Callable[[Examples], Batch]


def read_examples(dataset: Any, numbers: Sequence[int]) -> Examples:
    """The rows of a dataset with these numbers, at once if it can."""
    read = getattr(dataset, "__getitems__", None)
    return [dataset[row] for row in numbers] if read is None else read(list(numbers))


def select_rows(row_of: Callable[[int], Example], batches: BatchNumbers) -> list[Examples]:
    """The rows of each batch, by their numbers. `~row` is a dummy pair: its labels become -100."""
    return [
        [row_of(row) if row >= 0 else _without_labels(row_of(~row)) for row in batch]
        for batch in batches
    ]


def _without_labels(row: Example) -> Example:
    return {**row, "labels": [IGNORED] * len(row["labels"])}


class TokenBatchDataset(torch.utils.data.Dataset):
    """Fetches the pairs of a whole update at once, given the row numbers of its batches.

    Args:
        dataset: of pairs. If it `grows`, the batches are those of all ranks, because the new lengths determine how
            an update is cut and sharded: some pairs become several times as long, and would pad a planned batch.
        max_tokens, world_size, rank: of `TokenBatchSampler`, for a dataset that grows.
    """

    def __init__(self, dataset: Dataset, max_tokens: int = 0, world_size: int = 1, rank: int = 0):
        self.dataset = dataset
        self.max_tokens = max_tokens
        self.world_size = world_size
        self.rank = rank

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batches: BatchNumbers) -> list[Examples]:
        rows, batches = self._read(batches)
        return select_rows(rows.__getitem__, batches)

    def numbers(self, batches: BatchNumbers) -> BatchNumbers:
        """The numbers of the pairs of each of this rank's batches."""
        _, batches = self._read(batches)
        return [[max(row, ~row) for row in batch] for batch in batches]

    def _read(self, batches: BatchNumbers) -> tuple[dict[int, Example], BatchNumbers]:
        """The rows by their numbers, and this rank's batches of them."""
        numbers = sorted({max(row, ~row) for batch in batches for row in batch})
        rows = dict(zip(numbers, read_examples(self.dataset, numbers), strict=True))
        if not getattr(self.dataset, "grows", False):
            return rows, batches
        # below, a row is its place in `numbers`
        source, target = pair_lengths(list(rows.values()))
        lengths = np.maximum(source, target)
        order = sort_by_length(source, target)
        starts = split_into_batches(lengths[order], self.max_tokens)
        cut = np.split(order, starts[1:-1])
        shard = shard_batches(cut, lengths, self.world_size)[self.rank]
        return rows, [
            [numbers[row] if row >= 0 else ~numbers[~row] for row in batch.tolist()]
            for batch in shard
        ]


def collate_batches(
    batches: list[Examples],
    collator: Collate,
    row_unit: int = 1,
    pad_token_ids: tuple[int, int] = (0, 0),
) -> list[Batch]:
    """Apply the model's collator to each batch of an update.

    B · S and B · T become multiples of `row_unit`, by padding and dummy pairs without labels, so that a matrix product
    that keeps a kernel for each shape keeps few. `pad_token_ids` are of sources and of decoder inputs.
    """
    if row_unit == 1:
        return [collator(batch) for batch in batches]
    return [_collate_rounded(batch, collator, row_unit, pad_token_ids) for batch in batches]


def _collate_rounded(
    batch: Examples, collator: Collate, row_unit: int, pads: tuple[int, int]
) -> Batch:
    longest_source = max(len(row["input_ids"]) for row in batch)
    longest_target = max(len(row["labels"]) for row in batch)
    pairs, source, target = rounded_shape(len(batch), longest_source, longest_target, row_unit)
    dummies = [_without_labels(batch[-1])] * (pairs - len(batch))
    collated = collator(batch + dummies)
    lengths = {
        "input_ids": (source, pads[0]),
        "attention_mask": (source, 0),
        "labels": (target, IGNORED),
        "decoder_input_ids": (target, pads[1]),
    }
    if any(name not in lengths or each.ndim != 2 for name, each in collated.items()):
        return collator(batch)  # has tensors of its own, whose padding is not known
    padded = {}
    for name, tensor in collated.items():
        length, value = lengths[name]
        padded[name] = F.pad(tensor, (0, length - tensor.shape[1]), value=value)
    return padded


def rounded_shape(pairs: int, source: int, target: int, row_unit: int) -> tuple[int, int, int]:
    """The smallest (B, S, T) with at least these sizes in which B · S and B · T are multiples of `row_unit`."""
    shapes = []
    for more in range(pairs, pairs + row_unit):
        unit = row_unit // math.gcd(row_unit, more)
        source_places = ceil_div(source, unit) * unit
        target_places = ceil_div(target, unit) * unit
        shapes.append((more, source_places, target_places))
    return min(shapes, key=lambda shape: shape[0] * (shape[1] + shape[2]))
