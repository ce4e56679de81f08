"""`Seq2SeqTrainer` for sentence pairs."""

from typing import Any

import torch
from datasets import Dataset
from transformers import Seq2SeqTrainer

from ..data.batching import GroupedPairSampler, pair_lengths


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` whose `group_by_length` looks at both sides of a pair and shuffles the batches.

    Evaluation keeps the caller's order; the base class would group there too, and return predictions permuted.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Dataset):
            return super()._get_train_sampler(train_dataset)
        # All that one update sees, in however many processes and parts, should be alike.
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return GroupedPairSampler(*pair_lengths(dataset), batch_size, self.args.seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(eval_dataset, Dataset):
            return super()._get_eval_sampler(eval_dataset)
        # Several processes get their shares from accelerate.
        return torch.utils.data.SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None
