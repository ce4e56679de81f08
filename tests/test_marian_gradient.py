"""The README's claim about gradient accumulation, under transformers' trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla_transformer.interop.marian import to_marian
from tests.model_helpers import sentences, tiny_model
from tests.trainer_helpers import DESCENT, QUIET, collate, flat

# Sentences of one length, so that the mean of the batches is the mean of the tokens.
SOURCES = sentences([6] * 16)
TARGETS = sentences([5] * 16, seed=1)
PAIRS = [
    {"input_ids": source, "labels": target} for source, target in zip(SOURCES, TARGETS, strict=True)
]


def update(model: Any, folder: Path, accumulated: int, smoothing: float) -> torch.Tensor:
    """The change of all weights by one update on 16 pairs, in one batch or in several accumulated ones."""
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=16 // accumulated,
        gradient_accumulation_steps=accumulated,
        label_smoothing_factor=smoothing,
        **{**QUIET, **DESCENT, "max_steps": 1},
    )

    def with_decoder_inputs(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        # the trainer takes the labels away where it smooths them, and Marian then cannot shift them
        batch = collate(rows)
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        return batch

    before = flat(model)
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=PAIRS, data_collator=with_decoder_inputs
    )
    trainer.train()
    return flat(model) - before


#: transformers' pull request 47261, July 2026
REPAIRED = Version(transformers.__version__) >= Version("5.23")


@pytest.mark.parametrize(
    ("convert", "smoothing", "ratio"),
    [
        pytest.param(to_marian, 0.0, 8.0, id="Marian"),
        pytest.param(
            to_marian,
            0.1,
            1.0,
            id="Marian with label smoothing",
            marks=pytest.mark.skipif(
                not REPAIRED, reason="older versions of transformers do not divide this loss"
            ),
        ),
        pytest.param(lambda model: model, 0.0, 1.0, id="ours"),
    ],
)
def test_eight_accumulated_steps_have_this_multiple_of_the_gradient(
    convert, smoothing, ratio, tmp_path
):
    one = update(convert(tiny_model(dropout=0.0)), tmp_path / "1", 1, smoothing)
    eight = update(convert(tiny_model(dropout=0.0)), tmp_path / "8", 8, smoothing)
    assert (eight.norm() / one.norm()).item() == pytest.approx(ratio, rel=1e-4)
