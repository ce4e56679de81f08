"""Weights that are cast together: the values and gradients of autocast, bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.training.trainer import forward_choice
from hf_vanilla_transformer.training.trainer.forward import (
    CastForward,
    PlainForward,
    forward_pass_of,
    linear_weights,
)
from tests.model_helpers import gradients, tiny_model, translation_batch
from tests.trainer_helpers import EntropyLoss, flat
from tests.training import short_runs

VARIANTS = [
    {},
    {"layer_norm_position": "pre", "final_layer_norm": True},
    {"attention_bias": False, "head_dim": 5, "value_head_dim": 3},
    {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "lm_head_bias": True},
]


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_gradients_are_those_of_autocast(fields: dict[str, Any], by_layer: bool) -> None:
    model = tiny_model(label_smoothing=0.1, **fields).train()
    batch = translation_batch([9, 4, 7], [5, 12, 3])
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with forward_pass_of(model, autocast(PlainForward(model).forward)):
        loss, expected = gradients(model, **batch)
    forward = CastForward(model, torch.device("cpu"), torch.bfloat16, by_layer)
    with forward_pass_of(model, forward.forward):
        found, actual = gradients(model, **batch)
    assert found == loss
    assert {gradient.dtype for gradient in actual.values()} == {torch.float32}
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert "forward" not in vars(model)


def test_all_trained_linear_layers_are_cast_but_the_output() -> None:
    model = tiny_model(encoder_layers=2, decoder_layers=1)
    model.model.encoder.layers[0].fc1.weight.requires_grad = False
    nn.utils.parametrizations.weight_norm(
        model.model.encoder.layers[1].fc2
    )  # its call computes more
    linear = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
        for part in ("weight", "bias")
    }
    left_out = {
        f"model.encoder.layers.{each}" for each in ("0.fc1.weight", "1.fc2.weight", "1.fc2.bias")
    }

    def cast(by_layer: bool) -> list[list[str]]:
        return [[path for path, _, _ in group] for group in linear_weights(model, by_layer)]

    (names,) = cast(by_layer=False)
    assert set(names) == linear - left_out
    groups = cast(by_layer=True)
    assert sorted(sum(groups, [])) == sorted(names)
    stacks = [{name.split(".layers.")[0] for name in group} for group in groups]
    assert stacks == [{"model.encoder"}, {"model.encoder"}, {"model.decoder"}]


def test_pass_looks_up_no_weight_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    forward = CastForward(model, torch.device("cpu"), torch.bfloat16)
    monkeypatch.delattr(nn.Module, "get_parameter")
    batch = translation_batch([4, 3], [2, 5])
    before = forward(**batch).loss
    layer = model.model.encoder.layers[0].fc1
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    assert not torch.equal(forward(**batch).loss, before), "a weight that is replaced is used"


SETTINGS = [
    {"pack": True, "tokens_per_update": 150, "ema_decay": 0.9, "max_grad_norm": 0.1},
    {"muon": True, "r_drop_alpha": 3.0},
    {"kind": EntropyLoss},  # which reads the logits
]


trained = partial(short_runs.trained, bf16=True)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on."""
    return lambda: monkeypatch.setattr(forward_choice, "is_bound_by_launches", lambda device: True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_updates_are_those_of_autocast(
    settings: dict[str, Any], tmp_path: Path, as_on_gpu: Any
) -> None:
    expected = trained(tmp_path, **settings)
    assert expected.forwards.cast is None  # on a CPU
    as_on_gpu()
    actual = trained(tmp_path, **settings)
    assert actual.forwards.cast is not None
    assert torch.equal(flat(actual.model), flat(expected.model))


def trained_with_another_model(folder: Path) -> torch.Tensor:
    """The weights of a second model that a trainer trains after its own."""
    trainer = trained(folder, 1)
    other = tiny_model(dropout=0.3, seed=5)
    trainer.model = trainer.model_wrapped = other
    trainer.optimizer = None
    trainer.train()
    return flat(other)


def test_forward_pass_is_chosen_again_for_another_model(tmp_path: Path, as_on_gpu: Any) -> None:
    expected = trained_with_another_model(tmp_path)
    as_on_gpu()
    assert torch.equal(trained_with_another_model(tmp_path), expected)
    assert not torch.equal(expected, flat(tiny_model(seed=5)))


def test_run_resumes_to_the_same_bytes(tmp_path: Path, as_on_gpu: Any) -> None:
    as_on_gpu()
    short_runs.check_resume(trained, tmp_path, **SETTINGS[0])
