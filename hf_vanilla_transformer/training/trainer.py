"""`Seq2SeqTrainer` for sentence pairs."""

from typing import Any

import torch
from datasets import Dataset
from transformers import Seq2SeqTrainer

from ..data.batching import GroupedPairSampler, pair_lengths


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` whose `group_by_length` looks at both sides of a pair and shuffles the batches."""

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Dataset):
            return super()._get_train_sampler(train_dataset)
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return GroupedPairSampler(*pair_lengths(dataset), batch_size, self.args.seed)
