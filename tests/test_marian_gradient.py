"""The README's claim about gradient accumulation, under transformers' trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla_transformer.interop.marian import to_marian
from tests.model_helpers import sentences, tiny_model
from tests.trainer_helpers import DESCENT, QUIET, collate, flat

# Sentences of one length, so that the mean of the batches is the mean of the tokens.
PAIRS = [
    {"input_ids": source, "labels": target}
    for source, target in zip(sentences([6] * 16), sentences([5] * 16, seed=1), strict=True)
]


def update(model: Any, folder: Path, accumulated: int) -> torch.Tensor:
    """The change of all weights by one update on 16 pairs, in one batch or in several accumulated ones."""
    batches = {"per_device_train_batch_size": 16 // accumulated, "gradient_accumulation_steps": accumulated}
    args = Seq2SeqTrainingArguments(output_dir=str(folder), **{**QUIET, **DESCENT, **batches, "max_steps": 1})
    before = flat(model)
    Seq2SeqTrainer(model=model, args=args, train_dataset=PAIRS, data_collator=collate).train()
    return flat(model) - before


@pytest.mark.parametrize(("convert", "ratio"), [(to_marian, 8.0), (lambda model: model, 1.0)], ids=["Marian", "ours"])
def test_eight_accumulated_steps_have_this_multiple_of_the_gradient(convert, ratio, tmp_path):
    one, eight = (update(convert(tiny_model(dropout=0.0)), tmp_path / str(n), n) for n in (1, 8))
    assert (eight.norm() / one.norm()).item() == pytest.approx(ratio, rel=1e-4)
