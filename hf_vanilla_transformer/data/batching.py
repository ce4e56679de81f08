"""In which order pairs are seen: grouped by length into batches with little padding, the batches shuffled."""

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

BUCKET = 2  # tokens; sources whose lengths differ by less share a bucket


def pair_lengths(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths in tokens, each (number of pairs,), without building Python lists.

    Args:
        dataset: columns `input_ids` and `labels`; a transform (BPE-dropout) is not applied.
    """
    table = dataset.with_format("arrow")[:]
    source, target = (pc.list_value_length(table[side]).to_numpy() for side in ("input_ids", "labels"))
    return source, target


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
