"""`Seq2SeqTrainer` for sentence pairs."""

from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import Seq2SeqTrainer
from transformers.trainer_pt_utils import LengthGroupedSampler


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` whose `group_by_length` looks at both sides of a pair.

    The base class sorts by the source alone (and one row at a time): of 256 pairs with equal sources, the longest
    target then decides how far all the others are padded.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Dataset):
            return super()._get_train_sampler(train_dataset)
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(batch_size, lengths=pair_lengths(dataset))


def pair_lengths(dataset: Dataset) -> list[int]:
    """One number a pair, sorted by which neighbours are alike in source length and then in target length."""
    table = dataset.with_format("arrow")[:]  # no transform, no Python lists
    source, target = (pc.list_value_length(table[side]).to_numpy().astype("int64") for side in ("input_ids", "labels"))
    return (source * (int(target.max()) + 1) + target).tolist()
