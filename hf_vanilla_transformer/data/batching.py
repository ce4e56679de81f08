"""In which order pairs are seen: grouped by length into batches with little padding, the batches shuffled.

A batch has a number of pairs (`GroupedPairSampler`) or of tokens (`UpdateSampler`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

BUCKET = 2  # tokens; sources whose lengths differ by less share a bucket
_ROWS_READ = 50_000


def pair_lengths(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths in tokens, each (number of pairs,); of a `Dataset` without building Python lists.

    Args:
        dataset: rows with `input_ids` and `labels`. Segmentation with BPE-dropout, by a transform or around the data
            set that it keeps as `encoded`, is not applied.
    """
    dataset = getattr(dataset, "encoded", dataset)
    if not isinstance(dataset, Dataset):
        lengths = [(len(row["input_ids"]), len(row["labels"])) for row in (dataset[i] for i in range(len(dataset)))]
        source, target = np.array(lengths, dtype=np.int64).reshape(-1, 2).T  # (2, number of pairs)
        return source, target
    sides = ["input_ids", "labels"]
    found = np.empty((len(sides), len(dataset)), dtype=np.int32)  # (2, number of pairs)
    start = 0
    # part by part: where rows were left out, the ids of the others are copied
    for table in dataset.select_columns(sides).with_format("arrow").iter(batch_size=_ROWS_READ):
        for number, side in enumerate(sides):
            found[number, start : start + len(table)] = pc.list_value_length(table[side]).to_numpy()
        start += len(table)
    return found[0], found[1]


class GroupedPairSampler(torch.utils.data.Sampler[int]):
    """Every pair once an epoch, such that `batch_size` in a row have nearly the same two lengths.

    Pairs are bucketed by source length (at boundaries that move from epoch to epoch), sorted by target length within
    a bucket, and cut into batches; then the batches are shuffled. transformers' own sampler looks at one side only
    and leaves its batches in order of length, from which a Transformer with a high learning rate learns badly.

    Args:
        source_lengths, target_lengths: tokens, (number of pairs,).
        batch_size: pairs; for all accumulated batches together, if they should be alike.
        seed: together with the epoch it decides the order, so that a resumed run sees the same one.
    """

    def __init__(self, source_lengths: np.ndarray, target_lengths: np.ndarray, batch_size: int, seed: int):
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; `Trainer` calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self.seed, self.epoch))
        bucket = (self.source_lengths + rng.integers(BUCKET)) // BUCKET
        order = np.lexsort((rng.random(len(self)), self.target_lengths, bucket))  # the last key counts first
        starts = np.arange(0, len(order), self.batch_size)
        if len(order) % self.batch_size:
            # A loader cuts every `batch_size` pairs: only the last batch can be the short one.
            starts = np.append(rng.permutation(starts[:-1]), starts[-1])
        else:
            starts = rng.permutation(starts)
        for start in starts:
            yield from order[start : start + self.batch_size].tolist()


# Batches of tokens (§5.1)


def sort_by_length(source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Order pairs such that neighbours have nearly the same two lengths.

    Sources whose lengths differ by less than `BUCKET` stand together, ordered by target: upwards in one bucket,
    downwards in the next, so that a batch which reaches over the border has targets of like lengths as well.

    Returns:
        Rows, (number of pairs,). Their lengths depend on nothing but the lengths given.
    """
    bucket = source_lengths // BUCKET
    target = np.where(bucket % 2 == 0, target_lengths, -target_lengths)
    return np.lexsort((source_lengths, target, bucket))  # the last key counts first


def cut(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Cut a row of pairs into batches of at most `max_tokens` padded tokens; a longer pair is a batch of its own.

    Args:
        lengths: tokens of each pair's longer side, (number of pairs,): with it padded, no side is over the limit.

    Returns:
        Where each batch begins, and the end: (number of batches + 1,).
    """
    cuts = [0]
    while cuts[-1] < len(lengths):
        start = cuts[-1]
        candidates = lengths[start : start + max(1, max_tokens // max(1, int(lengths[start])))]
        padded = np.maximum.accumulate(candidates) * np.arange(1, len(candidates) + 1)
        cuts.append(start + max(1, int(np.searchsorted(padded, max_tokens, side="right"))))
    return np.array(cuts)


def even_groups(tokens: np.ndarray, count: int) -> np.ndarray:
    """Cut a row of batches into `count` groups of about the same number of tokens, none of them empty.

    Args:
        tokens: of each batch, (number of batches,), not fewer than `count`.

    Returns:
        Where each group begins, and the end: (count + 1,).
    """
    border = np.concatenate([[0], np.cumsum(tokens)])
    wanted = np.arange(count + 1) * (border[-1] / count)
    nearest = np.searchsorted((border[:-1] + border[1:]) / 2, wanted)
    step = np.arange(count + 1)
    starts = np.maximum.accumulate(nearest - step) + step  # each at least one further than the one before …
    return np.minimum(starts, len(tokens) - count + step)  # … with enough left for those that follow


def deal(batches: list[np.ndarray], lengths: np.ndarray, processes: int) -> list[list[np.ndarray]]:
    """Share the batches of one update among processes: each gets the same number, and about the same work.

    Where the number of batches is no multiple of the processes, the largest are halved until it is. Where even
    single pairs are too few, a process gets a pair that does not count, `~row` in place of `row`: it takes part in
    the exchange of gradients with zeros, so that nobody waits.

    Args:
        batches: rows of each. lengths: tokens of the longer side by row.

    Returns:
        The batches of each process.
    """

    def size(batch: np.ndarray) -> int:
        return len(batch) * int(lengths[batch].max())

    if processes == 1:
        return [list(batches)]
    share = -(-len(batches) // processes)
    by_size = sorted(((size(batch), number) for number, batch in enumerate(batches)), reverse=True)
    parts = [batches[number] for _, number in by_size]
    while len(parts) < share * processes:
        largest = max(range(len(parts)), key=lambda i: size(parts[i]) if len(parts[i]) > 1 else 0)
        batch = parts[largest]
        if len(batch) == 1:
            break
        half = (len(batch) + 1) // 2
        parts[largest : largest + 1] = [batch[:half], batch[half:]]
    parts.sort(key=size, reverse=True)
    parts += [~parts[0][:1]] * (share * processes - len(parts))
    rounds = [parts[start : start + processes] for start in range(0, len(parts), processes)]
    # Who had the largest batch of one round gets the smallest of the next.
    return [
        [each[process if turn % 2 == 0 else -1 - process] for turn, each in enumerate(rounds)]
        for process in range(processes)
    ]


class UpdateSampler(torch.utils.data.Sampler[list[list[int]]]):
    """The updates of an epoch, each as the batches of this process; every pair is in one of them, once.

    Pairs of like lengths are cut into batches of at most `max_tokens` padded source tokens and at most `max_tokens`
    padded target tokens (§5.1; fairseq's `--max-tokens`), the batches are shuffled, and consecutive ones make an
    update. Lengths and cuts are the same each epoch, so that all epochs have the same number of updates; which of
    the pairs of the same two lengths stands where, and the order of the batches, are drawn anew. An update is made
    of the same pairs however many processes share it.

    Args:
        source_lengths, target_lengths: tokens, (number of pairs,).
        max_tokens: the limit.
        tokens_per_update: target tokens of an update, about; all updates have nearly the same number. None for
            updates of `batches_per_update` batches each.
        seed: with the epoch it decides the order.
        processes, process: among how many an update is shared, and which of them this is.
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
        processes: int = 1,
        process: int = 0,
    ):
        self.lengths = np.maximum(source_lengths, target_lengths)
        self.seed, self.processes, self.process = seed, processes, process
        self.sorted = sort_by_length(source_lengths, target_lengths)
        source, target = source_lengths[self.sorted], target_lengths[self.sorted]
        self.cells = np.cumsum((np.diff(source, prepend=0) != 0) | (np.diff(target, prepend=0) != 0))
        self.cuts = cut(self.lengths[self.sorted], min(max_tokens, tokens_per_update or max_tokens))
        self.tokens = np.add.reduceat(target, self.cuts[:-1])  # of each batch
        if tokens_per_update and tokens_per_update > max_tokens:
            self.batches_per_update = None
            self.updates = min(max(1, round(int(target.sum()) / tokens_per_update)), len(self.tokens))
        else:  # where an update is no more than a batch, the batches were cut for that
            self.batches_per_update = 1 if tokens_per_update else batches_per_update
            self.updates = -(-len(self.tokens) // self.batches_per_update)
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; the trainer calls it."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        rng = np.random.default_rng([*np.atleast_1d(self.seed), epoch])
        # Pairs change places within their cell, that of pairs with the same two lengths.
        self.rows = self.sorted[np.argsort(self.cells + rng.random(len(self.cells)))]
        self.order = rng.permutation(len(self.tokens))
        if self.batches_per_update is None:
            self.starts = even_groups(self.tokens[self.order], self.updates)
        else:
            self.starts = np.arange(self.updates + 1) * self.batches_per_update

    def __len__(self) -> int:
        return self.updates

    def update(self, number: int) -> list[np.ndarray]:
        """The batches of one update, before they are shared: rows of each."""
        chosen = self.order[self.starts[number] : self.starts[number + 1]]
        return [self.rows[self.cuts[batch] : self.cuts[batch + 1]] for batch in chosen]

    def batches(self, number: int) -> list[list[int]]:
        """The rows of this process's batches of one update; `~row` for a pair that does not count."""
        shares = deal(self.update(number), self.lengths, self.processes)
        return [batch.tolist() for batch in shares[self.process]]

    def __iter__(self) -> Iterator[list[list[int]]]:
        return map(self.batches, range(len(self)))
