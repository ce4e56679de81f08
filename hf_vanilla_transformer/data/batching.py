"""Samplers of sentence pairs: batches of similar lengths need little padding, and come in random order.

`LengthGroupedSampler` makes batches of a fixed number of pairs, `TokenBatchSampler` of a maximal number of tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

BUCKET = 2  # tokens: the width of a bucket of source lengths
_ROWS_PER_READ = 50_000


def pair_lengths(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths in tokens, each (number of pairs,), of rows with `input_ids` and `labels`.

    BPE-dropout (an attribute `encoded`) is not applied.
    """
    dataset = getattr(dataset, "encoded", dataset)
    if not isinstance(dataset, Dataset):
        sizes = [(len(row["input_ids"]), len(row["labels"])) for row in (dataset[i] for i in range(len(dataset)))]
        source, target = np.array(sizes, dtype=np.int64).reshape(-1, 2).T  # (2, number of pairs)
        return source, target
    sides = ["input_ids", "labels"]
    lengths = np.empty((len(sides), len(dataset)), dtype=np.int32)  # (2, number of pairs)
    start = 0
    # in chunks, because a filtered `Dataset` copies the ids it returns
    for table in dataset.select_columns(sides).with_format("arrow").iter(batch_size=_ROWS_PER_READ):
        for number, side in enumerate(sides):
            lengths[number, start : start + len(table)] = pc.list_value_length(table[side]).to_numpy()
        start += len(table)
    return lengths[0], lengths[1]


class LengthGroupedSampler(torch.utils.data.Sampler[int]):
    """Yields every row once per epoch, so that `batch_size` consecutive pairs have similar source and target lengths.

    Pairs are bucketed by source length (with bucket boundaries that shift every epoch), sorted by target length within
    a bucket and split into batches. The batches are shuffled, in an order that `seed` and the epoch determine. The
    class of this name in transformers looks at one side only and leaves the batches sorted by length, and that hurts
    training with a high learning rate. If all accumulated batches of an update should have similar lengths,
    `batch_size` counts their pairs.
    """

    def __init__(self, source_lengths: np.ndarray, target_lengths: np.ndarray, batch_size: int, seed: int):
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
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
        order = np.lexsort((rng.random(len(self)), self.target_lengths, bucket))  # the last key counts first
        starts = np.arange(0, len(order), self.batch_size)
        if len(order) % self.batch_size:
            # The loader splits after every `batch_size` pairs, so the incomplete batch must stay last.
            starts = np.append(rng.permutation(starts[:-1]), starts[-1])
        else:
            starts = rng.permutation(starts)
        for start in starts:
            yield from order[start : start + self.batch_size].tolist()


# Batches by number of tokens (§5.1)


def sort_by_length(source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Row numbers (number of pairs,), sorted so that neighbours have similar source and target lengths.

    Pairs are sorted by bucket of source length, then by target length: ascending in one bucket, descending in the
    next, so that a batch across a bucket boundary also has similar target lengths.
    """
    bucket = source_lengths // BUCKET
    target = np.where(bucket % 2 == 0, target_lengths, -target_lengths)
    return np.lexsort((source_lengths, target, bucket))  # the last key is the primary one


def split_into_batches(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Split consecutive pairs greedily into batches of at most `max_tokens` tokens, padding included.

    `lengths` are the tokens of each pair's longer side, (number of pairs,). A pair that exceeds the limit alone forms
    a batch. Return the start index of each batch, and the end index of the last: (number of batches + 1,).
    """
    starts = [0]
    while starts[-1] < len(lengths):
        start = starts[-1]
        candidates = lengths[start : start + max(1, max_tokens // max(1, int(lengths[start])))]
        padded = np.maximum.accumulate(candidates) * np.arange(1, len(candidates) + 1)
        starts.append(start + max(1, int(np.searchsorted(padded, max_tokens, side="right"))))
    return np.array(starts)


def even_groups(tokens: np.ndarray, count: int) -> np.ndarray:
    """Split consecutive batches into `count` non-empty groups of about the same number of tokens.

    `tokens` has the number of tokens of each batch. Return the start index of each group, and the end index of the
    last: (count + 1,).
    """
    border = np.concatenate([[0], np.cumsum(tokens)])
    targets = np.arange(count + 1) * (border[-1] / count)
    nearest = np.searchsorted((border[:-1] + border[1:]) / 2, targets)
    step = np.arange(count + 1)
    starts = np.maximum.accumulate(nearest - step) + step  # strictly increasing …
    return np.minimum(starts, len(tokens) - count + step)  # … with a batch left for each group that follows


def shard_batches(batches: list[np.ndarray], lengths: np.ndarray, world_size: int) -> list[list[np.ndarray]]:
    """Distribute the batches of one update, row numbers each, over the ranks: the same number and about the same work.

    If the number of batches is no multiple of `world_size`, the largest are halved until it is. If there are fewer
    pairs than ranks, the remaining ranks get a dummy pair without labels, encoded as `~row`. They take part in the
    gradient all-reduce with zeros, so that no rank waits forever. `lengths` are the tokens of each row's longer side.
    """

    def size(batch: np.ndarray) -> int:
        return len(batch) * int(lengths[batch].max())

    if world_size == 1:
        return [list(batches)]
    total = -(-len(batches) // world_size) * world_size
    parts = sorted(batches, key=size, reverse=True)
    while len(parts) < total:
        largest = max(range(len(parts)), key=lambda i: size(parts[i]) if len(parts[i]) > 1 else 0)
        batch = parts[largest]
        if len(batch) == 1:
            break
        half = (len(batch) + 1) // 2
        parts[largest : largest + 1] = [batch[:half], batch[half:]]
    parts.sort(key=size, reverse=True)
    parts += [~parts[0][:1]] * (total - len(parts))
    rounds = [parts[start : start + world_size] for start in range(0, total, world_size)]
    # alternate the direction: the rank with the largest batch of one round gets the smallest of the next
    return [[each[rank if turn % 2 == 0 else -1 - rank] for turn, each in enumerate(rounds)]
            for rank in range(world_size)]  # fmt: skip


class TokenBatchSampler(torch.utils.data.Sampler[list[list[int]]]):
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
        self.seed, self.world_size, self.rank = seed, world_size, rank
        self.sorted = sort_by_length(source_lengths, target_lengths)
        source, target = source_lengths[self.sorted], target_lengths[self.sorted]
        # number of each run of pairs with equal source and equal target length
        self.equal_lengths = np.cumsum((np.diff(source, prepend=0) != 0) | (np.diff(target, prepend=0) != 0))
        limit = min(max_tokens, tokens_per_update or max_tokens)
        self.batch_starts = split_into_batches(self.lengths[self.sorted], limit)
        self.tokens = np.add.reduceat(target, self.batch_starts[:-1])  # target tokens of each batch
        if tokens_per_update and tokens_per_update > max_tokens:
            self.batches_per_update = None
            self.updates = min(max(1, round(int(target.sum()) / tokens_per_update)), len(self.tokens))
        else:  # a batch is limited to `tokens_per_update`, so it is an update
            self.batches_per_update = 1 if tokens_per_update else batches_per_update
            self.updates = -(-len(self.tokens) // self.batches_per_update)
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch. The trainer calls it."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        rng = np.random.default_rng([*np.atleast_1d(self.seed), epoch])
        # shuffles only within runs of equal lengths, so that every batch keeps its size
        self.rows = self.sorted[np.argsort(self.equal_lengths + rng.random(len(self.equal_lengths)))]
        self.order = rng.permutation(len(self.tokens))
        if self.batches_per_update is None:
            self.starts = even_groups(self.tokens[self.order], self.updates)
        else:
            self.starts = np.arange(self.updates + 1) * self.batches_per_update

    def __len__(self) -> int:
        return self.updates

    def update(self, number: int) -> list[np.ndarray]:
        """The batches of one update, for all ranks together: row numbers of each."""
        chosen = self.order[self.starts[number] : self.starts[number + 1]]
        return [self.rows[self.batch_starts[batch] : self.batch_starts[batch + 1]] for batch in chosen]

    def batches(self, number: int) -> list[list[int]]:
        """This rank's batches of one update: row numbers, or `~row` for a dummy pair."""
        shards = shard_batches(self.update(number), self.lengths, self.world_size)
        return [batch.tolist() for batch in shards[self.rank]]

    def __iter__(self) -> Iterator[list[list[int]]]:
        return map(self.batches, range(len(self)))
