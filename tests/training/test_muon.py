"""Muon: its formula restated with singular values, torch.optim.Muon and AdamW, and a run that uses it."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer import VanillaTransformerTrainingArguments as Arguments
from hf_vanilla_transformer.training.trainer import muon
from hf_vanilla_transformer.training.trainer.muon import MuonAdamW, orthogonalized
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import tiny_model
from tests.pretended_gpu import counted, on_gpu
from tests.trainer_helpers import SAVING, collate, random_pairs, relative_error, trained

SHAPES = [(6, 6), (10, 4), (4, 10)]


def numpy_orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """U f(f(f(f(f(Σ))))) V^T with f(s) = 3.4445 s - 4.7750 s^3 + 2.0315 s^5, in float64."""
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalized_is_the_polynomial_of_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    for actual, matrix in zip(orthogonalized(matrices), matrices, strict=True):
        assert_allclose(
            actual.numpy(),
            numpy_orthogonalized(matrix.numpy()),
            atol=1e-4,
        )


def test_orthogonalized_zeros_are_zeros() -> None:
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def steps(make: Any, shape: tuple[int, ...], decay: float = 0.5) -> list[Tensor]:
    """A weight after each of three updates with the same random gradients."""
    generator = torch.Generator().manual_seed(0)
    weight = Parameter(torch.randn(shape, generator=generator))
    optimizer = make(weight, decay)
    weights = []
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        weights.append(weight.detach().clone())
    return weights


def by_muon(weight: Parameter, decay: float, **settings: Any) -> MuonAdamW:
    group = {"params": [weight], "muon": True, "weight_decay": decay}
    return MuonAdamW([group], lr=0.1, **settings)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_follows_its_formula(shape: tuple[int, int], decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).double().numpy()
    momentum = np.zeros(shape)
    for actual in steps(by_muon, shape, decay):
        gradient = torch.randn(shape, generator=generator).double().numpy()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = numpy_orthogonalized(0.95 * momentum + 0.05 * gradient)
        weight = (1 - 0.1 * decay) * weight - 0.1 * 0.2 * np.sqrt(max(shape)) * update
        assert_allclose(actual.numpy(), weight, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_in_bfloat16_is_that_of_torch(shape: tuple[int, int]) -> None:
    def by_torch(weight: Parameter, decay: float) -> Optimizer:
        return Muon([weight], lr=0.1, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    here = steps(partial(by_muon, dtype=torch.bfloat16), shape)
    for actual, expected in zip(here, steps(by_torch, shape), strict=True):
        assert relative_error(actual, expected) < 5e-3


@pytest.mark.parametrize("bf16", [False, True])
def test_run_in_bf16_takes_its_matrices_in_bfloat16(
    bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = set()

    def recorded(matrices: Tensor, dtype: torch.dtype) -> Tensor:
        dtypes.add(dtype)
        return orthogonalized(matrices, dtype)

    monkeypatch.setattr(muon, "orthogonalized", recorded)
    run(tmp_path, 1, bf16=bf16)
    assert dtypes == {torch.bfloat16 if bf16 else torch.float32}


@pytest.mark.parametrize("shape", [(5, 3), (7,)])
def test_other_parameters_are_updated_as_by_adamw(shape: tuple[int, ...]) -> None:
    settings = {"lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-9}

    def together(weight: Parameter, decay: float) -> Optimizer:
        matrix = Parameter(torch.ones(2, 2))
        matrix.grad = torch.ones(2, 2)
        groups = [
            {"params": [matrix], "muon": True},
            {"params": [weight], "weight_decay": decay},
        ]
        return MuonAdamW(groups, **settings)

    def alone(weight: Parameter, decay: float) -> Optimizer:
        return AdamW([weight], weight_decay=decay, **settings)

    torch.testing.assert_close(steps(together, shape), steps(alone, shape), rtol=0, atol=0)


def run(folder: Path, steps: int, **settings: Any) -> VanillaTransformerTrainer:
    given = {"muon": True, **SAVING, "save_steps": 2, "max_steps": steps}
    return trained(folder, **given | settings)


def test_trainer_takes_one_step_of_muon(tmp_path: Path) -> None:
    before = tiny_model().train()
    before(**collate(random_pairs(32))).loss.backward()
    after = run(tmp_path, 1, per_device_train_batch_size=32, lr_scheduler_type="constant").model
    for layer in (0, 1):
        for name in ("cross_attn.q_proj", "fc1", "fc2"):
            path = f"model.decoder.layers.{layer}.{name}.weight"
            weight = before.get_parameter(path)
            rate = 0.01 * 0.2 * max(weight.shape) ** 0.5
            step = (weight - after.get_parameter(path)) / rate
            assert_allclose(
                step.detach(),
                numpy_orthogonalized(weight.grad.numpy()),
                atol=1e-3,
            )


def test_matrices_of_many_layers_take_few_kernels() -> None:
    weights = [Parameter(on_gpu(torch.ones(4, 3))) for _ in range(50)]
    optimizer = by_muon(weights[0], 0.1)
    optimizer.add_param_group({"params": weights[1:], "muon": True})
    for _ in range(2):
        for weight in weights:
            weight.grad = on_gpu(torch.ones(4, 3))
        with counted() as count:
            optimizer.step()
    assert count.launches < 120, count.operations.most_common()
    assert not count.waits


def test_resume_without_muon_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2)
    with pytest.raises(UserError, match="muon: False.*checkpoint-2.*True"):
        run(tmp_path, 4, resume=tmp_path / "checkpoint-2", muon=False)


@pytest.mark.parametrize(
    ("setting", "message"), [({"optim": "sgd"}, "optim: sgd"), ({"fp16": True}, "fp16: True")]
)
def test_muon_refuses_what_it_does_not_go_with(
    tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Arguments(output_dir=str(tmp_path), use_cpu=True, muon=True, **setting)
