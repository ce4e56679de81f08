"""Gradients and weights that are no numbers stop a run before they reach a checkpoint, or are left out where asked."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.state.checkpoints import average_weights
from hf_vanilla_transformer.training.trainer.loss_check import leave_out_on_device
from hf_vanilla_transformer.training.trainer.muon import MuonAdamW
from tests import trainer_helpers
from tests.model_helpers import tiny_model
from tests.trainer_helpers import (
    DESCENT,
    BadGradient,
    error_of,
    flat,
    random_pairs,
    saved_steps,
    with_one_token,
)

WRONG = BadGradient.update
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 1,
    "ema_decay": 0.5,
    "learning_rate": 0.01,
}
TOKENS = {"max_tokens_per_batch": 40, "tokens_per_update": 100}


def made(folder: Path, data: Any = None, kind: Any = BadGradient, **settings: Any) -> Any:
    torch.manual_seed(7)
    return trainer_helpers.make_trainer(
        folder,
        data or random_pairs(24),
        tiny_model(encoder_layers=1, decoder_layers=1),
        kind,
        **SETTINGS | settings,
    )


def trained(*arguments: Any, resume: bool = False, **settings: Any) -> Any:
    trainer = made(*arguments, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


plainly_trained = partial(trained, kind=VanillaTransformerTrainer)


def assert_finite(folder: Path) -> None:
    files = [*folder.rglob("*.safetensors")]
    assert files
    for file in files:
        for name, tensor in load_file(file).items():
            assert tensor.isfinite().all(), name


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "settings",
    [
        TOKENS,
        {**TOKENS, "pack": True},
        {**TOKENS, "muon": True, "max_grad_norm": 0.0},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4, **DESCENT},
    ],
    ids=["tokens", "packed", "muon", "accumulated", "unclipped"],
)
def test_gradient_that_is_not_finite_stops_before_the_weights(
    settings: dict[str, Any], number: float, tmp_path: Path
) -> None:
    trainer = made(tmp_path, **settings)
    trainer.number = number
    message = error_of(trainer.train)
    assert message.startswith(f"the gradient of update {WRONG + 1} is not finite")
    assert trainer.state.global_step == WRONG
    assert flat(trainer.model).isfinite().all()
    for average in trainer.ema.average.values():
        assert average.isfinite().all()
    assert saved_steps(tmp_path) == [2]
    assert_finite(tmp_path / "checkpoint-2")
    assert plainly_trained(tmp_path, resume=True, **settings).state.global_step == 6


def test_error_names_the_lines_of_the_batch_alone(tmp_path: Path) -> None:
    """Only the batch with a certain token has the gradient, in an update of several batches."""
    data = with_one_token(24)
    trainer = made(tmp_path, data, max_tokens_per_batch=40, tokens_per_update=10_000)
    trainer.update = None
    trainer.token = 39
    message = error_of(trainer.train)
    _, named = message.split("contains the lines ")
    lines = [int(line) for line in named.split(";")[0].split(", ")]
    assert 18 in lines
    assert len(lines) <= 6  # of 24
    pairs = [data[line - 1] for line in lines]
    longest = max(len(side) for pair in pairs for side in pair.values())
    assert len(lines) * longest <= 40  # one batch


@pytest.mark.parametrize("muon", [False, True])
def test_update_is_skipped_where_the_user_asks(muon: bool, tmp_path: Path) -> None:
    """As if the optimizer had not been asked."""
    asked: list[int] = []

    class Reference(VanillaTransformerTrainer):
        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            scheduler = super().create_scheduler(*args, **kwargs)
            optimizer: Any = self.optimizer
            step = optimizer.step

            def without_one(*arguments: Any) -> Any:
                asked.append(len(asked))
                return None if len(asked) == WRONG + 1 else step(*arguments)

            optimizer.step = without_one
            return scheduler

    settings = {**TOKENS, "muon": muon}
    expected = trained(tmp_path / "expected", kind=Reference, **settings)
    skipping = trained(tmp_path / "skipped", skip_nonfinite_gradients=True, **settings)
    assert len(asked) == 6
    assert skipping.state.global_step == 6
    assert flat(skipping.model).equal(flat(expected.model))
    for name, average in skipping.ema.average.items():
        assert average.equal(expected.ema.average[name])
    logged = [entry for entry in skipping.state.log_history if "loss" in entry]
    counts = [entry.get("skipped_updates") for entry in logged]
    assert counts == [None, None, None, 1, None, None]
    saved = tmp_path / "skipped" / "checkpoint-6"
    assert_finite(saved)
    log = (saved / "trainer_state.json").read_text(encoding="utf-8")
    json.loads(log, parse_constant=pytest.fail)  # of NaN and Infinity, which are no JSON


def test_loss_that_is_not_finite_is_never_skipped(tmp_path: Path) -> None:
    class BadLoss(VanillaTransformerTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == WRONG else loss

    message = error_of(trained, tmp_path, kind=BadLoss, skip_nonfinite_gradients=True, **TOKENS)
    assert message.startswith(f"the loss of update {WRONG + 1} is nan")


SPOILT = "decoder.layers.0.fc1.weight"


class Spoiler(TrainerCallback):
    """Writes a number into the weights after an update."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: object
    ) -> None:
        if state.global_step == 4:
            model.get_parameter(f"model.{SPOILT}").data[1, 2] = -math.inf


def test_weights_that_a_callback_spoils_are_not_saved(tmp_path: Path) -> None:
    message = error_of(plainly_trained, tmp_path, callbacks=[Spoiler()], **TOKENS)
    assert message.startswith("update 4: ")
    assert SPOILT in message
    assert "checkpoint-2 is complete" in message
    assert saved_steps(tmp_path) == [2]
    assert_finite(tmp_path / "checkpoint-2")


def spoil(file: Path) -> None:
    """Write a number into a tensor of a file."""
    weights = load_file(file)
    (name,) = (name for name in weights if SPOILT in name)
    weights[name][1, 2] = math.nan
    save_file(weights, file, metadata={"format": "pt"})


def test_training_does_not_start_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    name = "model.encoder.layers.1.self_attn.q_proj.bias"
    model = tiny_model()
    nn.init.constant_(model.get_parameter(name), math.inf)
    message = error_of(trainer_helpers.trained, tmp_path, model=model, **TOKENS)
    assert message.startswith(f"model: {name} contains numbers that are not finite")


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors"])
def test_resume_from_weights_that_are_not_finite_is_refused(name: str, tmp_path: Path) -> None:
    plainly_trained(tmp_path, **TOKENS, max_steps=2)
    spoil(tmp_path / "checkpoint-2" / name)
    message = error_of(plainly_trained, tmp_path, resume=True, **TOKENS)
    for part in ("checkpoint-2", SPOILT, "not finite"):
        assert part in message


def test_weights_that_are_not_finite_are_not_averaged(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        tiny_model().save_pretrained(folder)
    spoil(folders[1] / "model.safetensors")
    average = tmp_path / "average.safetensors"
    message = error_of(average_weights, folders, average)
    assert str(folders[1]) in message
    assert SPOILT in message
    assert not average.exists()


# On a GPU the norms are read later


@pytest.mark.parametrize(
    ("norm", "changes"),
    [
        (math.nan, False),
        (math.inf, False),
        (1.0, True),
    ],
)
def test_fused_optimizer_leaves_a_step_out_on_the_device(norm: float, changes: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = flat(model)
    state = optimizer.state[model.weight]
    moments = state["exp_avg"].clone()
    model.weight.grad.fill_(norm)
    assert leave_out_on_device(optimizer, torch.tensor(norm))
    optimizer.step()
    assert flat(model).equal(before) is not changes
    assert state["exp_avg"].equal(moments) is not changes
    assert state["step"].item() == 1 + changes


def test_other_optimizers_leave_nothing_out_by_themselves() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    group = {"params": weights, "muon": True}
    muon = MuonAdamW([group], fused=True, lr=0.1)
    for optimizer in (torch.optim.AdamW(weights), muon):
        assert not leave_out_on_device(optimizer, torch.tensor(1.0))


def test_norms_of_a_gpu_are_read_when_a_loss_is_logged(tmp_path: Path) -> None:
    trainer = plainly_trained(tmp_path, **TOKENS)
    step = trainer._epoch_start
    trainer.losses.add(step, 0, torch.tensor(1.0))
    trainer.losses.add(step, None, torch.tensor(math.inf))
    message = error_of(trainer.log, {"loss": 1.0})
    assert re.search(rf"gradient of update {step + 1} is not finite .* the lines \d+", message)
    trainer.args.skip_nonfinite_gradients = True
    trainer.losses.add(step, None, torch.tensor(math.nan))
    logs = {"loss": 1.0}
    trainer.log(logs)
    assert logs["skipped_updates"] == 1
    assert trainer.losses.skipped == 0


def with_scaler(
    trainer: Any, scale: float, monkeypatch: pytest.MonkeyPatch
) -> torch.amp.GradScaler:
    """Let a trainer on a CPU scale its losses as with fp16, which needs a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
    monkeypatch.setattr(trainer.accelerator, "native_amp", True)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    return scaler


def test_scaler_of_fp16_goes_on_leaving_updates_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GradScaler finds its scale by gradients that are not finite."""
    trainer = made(tmp_path, **TOKENS)
    scaler = with_scaler(trainer, 8.0, monkeypatch)
    trainer.train()
    assert trainer.state.global_step == 6
    assert scaler.get_scale() == 4.0
    assert flat(trainer.model).isfinite().all()


def test_run_in_fp16_without_any_update_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path, **TOKENS)
    trainer.update = None
    with_scaler(trainer, 3e-4, monkeypatch)
    assert error_of(trainer.train).startswith("fp16: the gradients are not finite")
    assert trainer.state.global_step == 2
