"""The trainer's own loop on a pretended GPU: what an update of packed rows asks of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerTrainingArguments
from tests.model_helpers import tiny_model
from tests.pretended_gpu import DEVICE, Count, counted, install, on_gpu
from tests.test_pretended_gpu import six_layers
from tests.trainer_helpers import make_trainer, random_pairs

UPDATES = 3
LAUNCHES_OF_A_STEP = 860  # for a batch, with masks, scaling and what is logged


@pytest.fixture
def trainer_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a trainer that finds the pretended GPU."""
    install()

    def device(args: Any) -> torch.device:
        args._setup_devices  # noqa: B018  finds out what else the device decides
        return torch.device(DEVICE)

    monkeypatch.setattr(VanillaTransformerTrainingArguments, "device", property(device))

    def make(folder: Path, model: Any, **settings: Any) -> Any:
        settings = {"max_tokens_per_batch": 60, "pack": True, "optim": "adamw_torch", "logging_steps": 100, **settings}
        trainer = make_trainer(folder, random_pairs(64), on_gpu(model), **settings)
        trainer.accelerator.device_placement = False  # the model is there
        return trainer

    return make


def trained(trainer: Any) -> Count:
    with counted() as count:
        trainer.train()
    return count


def test_updates_wait_for_nothing(trainer_on_gpu: Any, tmp_path: Path) -> None:
    model = tiny_model(dropout=0.1, label_smoothing=0.1)
    settings = {"tokens_per_update": 120, "max_steps": UPDATES, "bf16": True}
    trainer = trainer_on_gpu(tmp_path, model, **settings)
    count = trained(trainer)
    batches = trainer._updates.batches_of_update
    assert batches > 1
    # at the end of the run: the losses of its batches, and their mean
    assert sum(count.waits.values()) == 2, count.waits
    assert all("loss_check.py" in place or "_total_loss_scalar" in place for place in count.waits)
    # the tensors of each batch, the number of target tokens of each update, and once a zero
    assert sum(count.copies.values()) == UPDATES * (batches * 7 + 1) + 1
    assert sum(count.blocking.values()) == 1, count.blocking  # that zero


def test_epoch_has_three_shapes_of_attention(trainer_on_gpu: Any, tmp_path: Path) -> None:
    trainer = trainer_on_gpu(tmp_path, tiny_model(), num_train_epochs=1)
    trainer.train_dataset = [{**pair, "labels": pair["labels"][:5]} for pair in trainer.train_dataset]
    count = trained(trainer)
    source, target = trainer._updates.places
    assert source != target
    assert len(trainer._updates) > 4
    lengths = {(query[2], key[2]) for _, query, key, *_ in count.attention_shapes}
    assert lengths == {(source, source), (target, target), (target, source)}
    assert len(count.attention_shapes) == 3


def test_passes_of_the_loop_launch_few_kernels(trainer_on_gpu: Any, tmp_path: Path) -> None:
    trainer = trainer_on_gpu(tmp_path, six_layers(), max_steps=2, bf16=True)
    counts = []
    step = trainer.training_step

    def counted_step(*args: Any) -> torch.Tensor:
        with counted() as count:
            loss = step(*args)
        counts.append(count)
        return loss

    trainer.training_step = counted_step
    trained(trainer)
    assert trainer.forwards.cast is not None
    # without the optimizer, which works on all weights together on a real GPU
    assert counts[-1].launches <= LAUNCHES_OF_A_STEP, counts[-1].operations.most_common(20)
    assert not counts[-1].waits
