"""The trainer's own loop on a pretended GPU: what an update of packed rows asks of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hf_vanilla_transformer import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.state import distributed
from hf_vanilla_transformer.training.state.callbacks import StopWithCheckpoint
from tests.model_helpers import six_layers, tiny_model
from tests.pretended_gpu import DEVICE, Count, counted, install, on_gpu
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
        trainer = make_trainer(
            folder,
            random_pairs(64),
            on_gpu(model),
            max_tokens_per_batch=60,
            pack=True,
            optim="adamw_torch",
            logging_steps=100,
            **settings,
        )
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
    trainer.train_dataset = [
        {**pair, "labels": pair["labels"][:5]} for pair in trainer.train_dataset
    ]
    count = trained(trainer)
    source, target = trainer._updates.places
    assert source != target
    assert len(trainer._updates) > 4
    lengths = {(query[2], key[2]) for _, query, key, *_ in count.attention_shapes}
    assert lengths == {(source, source), (target, target), (target, source)}
    assert len(count.attention_shapes) == 3


@pytest.mark.slow
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


def test_ranks_agree_on_a_stop_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setattr(distributed, "has_other_ranks", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: None)
    monkeypatch.setattr(torch, "Event", MagicMock())
    stop = StopWithCheckpoint(max_minutes=1)
    args = SimpleNamespace(device=torch.device(DEVICE), eval_strategy="no")
    answers = []
    for spent in (0, 61, 62):
        stop.spent = spent
        with counted() as count:
            answers.append(
                stop.on_step_end(args, TrainerState(), TrainerControl()).should_training_stop
            )
        assert not count.waits
        assert not count.blocking
        assert count.copies
    assert answers == [False, False, True]  # one update after the limit
    stop.spent = 0
    control = stop.on_step_end(args, TrainerState(), TrainerControl(should_log=True))
    assert (
        not control.should_training_stop
    )  # agreed on at once, and what was asked before is dropped
