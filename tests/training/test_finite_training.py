"""Gradients and weights that are no numbers stop a run before they reach a checkpoint, or are left out where asked."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.state.checkpoints import average_weights, complete_checkpoints
from hf_vanilla_transformer.training.trainer.loss_check import leave_out_on_device
from hf_vanilla_transformer.training.trainer.muon import MuonAdamW
from hf_vanilla_transformer.utils.errors import UserError
from tests import trainer_helpers
from tests.model_helpers import tiny_model
from tests.trainer_helpers import DESCENT, BadGradient, error_of, flat, random_pairs, with_one_token

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


def trained(folder: Path, data: Any = None, kind: Any = BadGradient, resume: Any = None, **settings: Any) -> Any:
    data = random_pairs(24) if data is None else data
    model = tiny_model(encoder_layers=1, decoder_layers=1)
    return trainer_helpers.trained(folder, data, model, kind=kind, resume=resume, **SETTINGS | settings)


def assert_finite(folder: Path) -> None:
    files = [*folder.rglob("*.safetensors")]
    assert files
    for name, tensor in chain.from_iterable(load_file(file).items() for file in files):
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
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
    settings: dict[str, Any], number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    class Kept(BadGradient):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.number = number
            kept.append(self)

    message = error_of(trained, tmp_path, kind=Kept, **settings)
    assert message.startswith(f"the gradient of update {WRONG + 1} is not finite")
    (trainer,) = kept
    assert trainer.state.global_step == WRONG
    assert flat(trainer.model).isfinite().all()
    assert all(average.isfinite().all() for average in trainer.ema.average.values())
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert_finite(tmp_path / "checkpoint-2")
    assert trained(tmp_path, kind=VanillaTransformerTrainer, resume=True, **settings).state.global_step == 6


def test_error_names_the_lines_of_the_batch_alone(tmp_path: Path) -> None:
    """Only the batch with a certain token has the gradient, in an update of several batches."""
    data = with_one_token(24)

    class OfToken(BadGradient):
        update = None
        token = 39

    message = error_of(trained, tmp_path, data, kind=OfToken, max_tokens_per_batch=40, tokens_per_update=10_000)
    lines = [int(line) for line in message.split("contains the lines ")[1].split(";")[0].split(", ")]
    assert 18 in lines and len(lines) <= 6  # of 24
    lengths = [max(len(data[line - 1]["input_ids"]), len(data[line - 1]["labels"])) for line in lines]
    assert len(lines) * max(lengths) <= 40  # one batch


@pytest.mark.parametrize("settings", [TOKENS, {**TOKENS, "muon": True}], ids=["adam", "muon"])
def test_update_is_skipped_where_the_user_asks(settings: dict[str, Any], tmp_path: Path) -> None:
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

    expected = trained(tmp_path / "expected", kind=Reference, **settings)
    skipping = trained(tmp_path / "skipped", skip_nonfinite_gradients=True, **settings)
    assert len(asked) == skipping.state.global_step == 6
    assert flat(skipping.model).equal(flat(expected.model))
    assert all(average.equal(expected.ema.average[name]) for name, average in skipping.ema.average.items())
    counts = [entry.get("skipped_updates") for entry in skipping.state.log_history if "loss" in entry]
    assert counts == [1 if update == WRONG else None for update in range(6)]
    assert_finite(tmp_path / "skipped" / "checkpoint-6")


def test_loss_that_is_not_finite_is_never_skipped(tmp_path: Path) -> None:
    class BadLoss(VanillaTransformerTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (float("nan") if self.state.global_step == WRONG else 1)

    message = error_of(trained, tmp_path, kind=BadLoss, skip_nonfinite_gradients=True, **TOKENS)
    assert message.startswith(f"the loss of update {WRONG + 1} is nan")


class Spoiler(TrainerCallback):
    """Writes a number into the weights after an update."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        if state.global_step == 4:
            with torch.no_grad():
                model.model.decoder.layers[0].fc1.weight[1, 2] = float("-inf")


def test_weights_that_a_callback_spoils_are_not_saved(tmp_path: Path) -> None:
    message = error_of(trained, tmp_path, kind=VanillaTransformerTrainer, callbacks=[Spoiler()], **TOKENS)
    assert message.startswith("update 4: ") and "decoder.layers.0.fc1.weight" in message
    assert "checkpoint-2 is complete" in message
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert_finite(tmp_path / "checkpoint-2")


def spoil(file: Path, number: float = float("nan")) -> str:
    """Write a number into a tensor of a file, and return its name."""
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "decoder.layers.0.fc1.weight" in name)
    weights[name][1, 2] = number
    save_file(weights, file, metadata={"format": "pt"})
    return name


def test_training_does_not_start_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_model()
    nn.init.constant_(model.model.encoder.layers[1].self_attn.q_proj.bias, float("inf"))
    message = error_of(trainer_helpers.trained, tmp_path, None, model, max_steps=1, max_tokens_per_batch=40)
    assert message.startswith(
        "model: model.encoder.layers.1.self_attn.q_proj.bias contains numbers that are not finite"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors"])
def test_resume_from_weights_that_are_not_finite_is_refused(name: str, tmp_path: Path) -> None:
    trained(tmp_path, kind=VanillaTransformerTrainer, **TOKENS | {"max_steps": 2})
    tensor = spoil(tmp_path / "checkpoint-2" / name)
    message = error_of(trained, tmp_path, kind=VanillaTransformerTrainer, resume=True, **TOKENS)
    assert "checkpoint-2" in message and tensor in message and "not finite" in message


def test_weights_that_are_not_finite_are_not_averaged(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        tiny_model().save_pretrained(tmp_path / folder)
    folders = [tmp_path / "first", tmp_path / "second"]
    tensor = spoil(folders[1] / "model.safetensors")
    message = error_of(average_weights, folders, tmp_path / "average.safetensors")
    assert str(folders[1]) in message and tensor in message
    assert not (tmp_path / "average.safetensors").exists()


# On a GPU the norms are read later


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), 1.0])
def test_fused_optimizer_leaves_a_step_out_on_the_device(norm: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before, moments = flat(model), optimizer.state[model.weight]["exp_avg"].clone()
    model.weight.grad.fill_(norm)
    assert leave_out_on_device(optimizer, torch.tensor(norm))
    optimizer.step()
    changes = norm == 1.0
    assert flat(model).equal(before) is not changes
    assert optimizer.state[model.weight]["exp_avg"].equal(moments) is not changes
    assert optimizer.state[model.weight]["step"].item() == 1 + changes


def test_other_optimizers_leave_nothing_out_by_themselves() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    for optimizer in (
        torch.optim.AdamW(weights),
        MuonAdamW([{"params": weights, "muon": True}], fused=True, lr=0.1),
    ):
        assert not leave_out_on_device(optimizer, torch.tensor(1.0))


def test_norms_of_a_gpu_are_read_when_a_loss_is_logged(tmp_path: Path) -> None:
    trainer = trained(tmp_path, kind=VanillaTransformerTrainer, **TOKENS)
    step = trainer._epoch_start
    trainer.losses.add(step, 0, torch.tensor(1.0))
    trainer.losses.add(step, None, torch.tensor(float("inf")))
    with pytest.raises(UserError, match=rf"gradient of update {step + 1} is not finite .* the lines \d+"):
        trainer.log({"loss": 1.0})
    trainer.args.skip_nonfinite_gradients = True
    trainer.losses.add(step, None, torch.tensor(float("nan")))
    logs = {"loss": 1.0}
    trainer.log(logs)
    assert logs["skipped_updates"] == 1 and trainer.losses.skipped == 0


def with_scaler(trainer: Any, scale: float, monkeypatch: pytest.MonkeyPatch) -> torch.amp.GradScaler:
    """Let a trainer on a CPU scale its losses as with fp16, which needs a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
    monkeypatch.setattr(trainer.accelerator, "native_amp", True)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    return scaler


def test_scaler_of_fp16_goes_on_leaving_updates_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler finds its scale by gradients that are not finite."""
    trainer = trainer_helpers.make_trainer(tmp_path, random_pairs(24), kind=BadGradient, max_steps=6, **TOKENS)
    scaler = with_scaler(trainer, 8.0, monkeypatch)
    trainer.train()
    assert trainer.state.global_step == 6
    assert scaler.get_scale() == 4.0
    assert flat(trainer.model).isfinite().all()


def test_run_in_fp16_without_any_update_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Always(BadGradient):
        update = None

    trainer = trainer_helpers.make_trainer(tmp_path, random_pairs(24), kind=Always, max_steps=6, **TOKENS)
    with_scaler(trainer, 3e-4, monkeypatch)
    with pytest.raises(UserError, match="^fp16: the gradients are not finite"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_log_of_a_skipped_update_is_json(tmp_path: Path) -> None:
    trained(tmp_path, skip_nonfinite_gradients=True, **TOKENS)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=refuse)
