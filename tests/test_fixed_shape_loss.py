"""The loss of all positions, those without a label with the weight 0: for GPUs and torch.compile.

It is compared with the loss of a CPU, which test_loss.py and the tests of the objectives compare with definitions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from hf_vanilla_transformer import loss_vanilla_transformer as losses
from hf_vanilla_transformer.loss_vanilla_transformer import fused_objective, fused_translation_loss
from hf_vanilla_transformer.training.trainer.objectives.consistency import r_drop, simcut
from hf_vanilla_transformer.training.trainer.objectives.distillation import (
    DistillationObjective,
    TopDistributions,
)
from tests.model_helpers import (
    assert_near,
    assert_same_gradients,
    gradients,
    tiny_model,
    translation_batch,
)
from tests.pretended_gpu import counted, on_cpu, on_gpu

POSITIONS = 30
WIDTH = 8
VOCABULARY = 40
SMOOTHING = 0.1


def inputs(passes: int = 1) -> list[Tensor]:
    """Hidden states (P, N, D), weight (V, D), bias (V,) and labels (N,), a third of them without one."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)
    labels[::3] = -100
    return [
        torch.randn(passes, POSITIONS, WIDTH, generator=generator),
        torch.randn(VOCABULARY, WIDTH, generator=generator),
        torch.randn(VOCABULARY, generator=generator),
        labels,
    ]


def plain(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return fused_translation_loss(*tensors, SMOOTHING, num_items_in_batch=17)


def of_objective(objective: Any, *tensors: Tensor) -> Any:
    differentiate = partial(objective.differentiate, smoothing=SMOOTHING)
    return fused_objective(*tensors, differentiate, objective.uniform(SMOOTHING))


def taught(hidden: Tensor, *tensors: Tensor) -> Any:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.rand(POSITIONS, VOCABULARY, generator=generator).topk(4).indices
    probabilities = torch.rand(POSITIONS, 4, generator=generator).softmax(dim=1)
    distributions = [each.to(hidden.device) for each in (tokens, probabilities)]
    objective = DistillationObjective(TopDistributions(*distributions), 0.6)
    return of_objective(objective, hidden, *tensors)


LOSSES = {  # passes, and the loss
    "plain": (1, plain),
    "R-Drop": (2, partial(of_objective, r_drop())),
    "SimCut": (2, partial(of_objective, simcut())),
    "distillation": (1, taught),
}


def derivatives(loss_of: Callable, tensors: list[Tensor]) -> list[Tensor]:
    """Loss, logged value and gradients by hidden states, weight and bias."""
    *inputs, labels = tensors
    leaves = [each.detach().requires_grad_() for each in inputs]
    loss, logged = loss_of(*leaves, labels)
    loss.backward()
    return on_cpu([loss.detach(), logged, *(each.grad for each in leaves)])


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert_near(found, wanted, 2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_all_positions_is_that_of_labelled_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "ROW_UNIT", 4)
    monkeypatch.setattr(
        losses, "DEVICE_CHUNK", VOCABULARY * 14
    )  # several chunks, the last one shorter
    passes, loss_of = LOSSES[name]
    tensors = inputs(passes)
    expected = derivatives(loss_of, tensors)
    with counted() as count:
        actual = derivatives(loss_of, on_gpu(tensors))
    assert_same(actual, expected)
    assert not actual[2][:, ::3].any()  # positions without a label have no gradient
    assert not count.waits


@pytest.mark.parametrize("name", ["plain", "R-Drop"])
def test_loss_is_traced_as_a_whole(name: str) -> None:
    passes, loss_of = LOSSES[name]
    tensors = inputs(passes)
    expected = derivatives(loss_of, tensors)
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    assert_same(derivatives(compiled, tensors), expected)


def test_traced_loss_needs_no_probabilities_in_memory() -> None:
    """A compiler fuses all operations on the logits but a scatter."""
    operations = set()

    def recording(graph: Any, example: Any) -> Callable:
        operations.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    backend = aot_autograd(fw_compiler=recording)
    loss_of = torch.compile(plain, backend=backend, fullgraph=True)
    derivatives(loss_of, inputs())
    assert any("softmax" in name or "exp" in name for name in operations)
    assert not [name for name in operations if name.startswith("aten.scatter")]


@pytest.mark.slow
def test_model_with_the_fused_loss_is_one_graph_for_all_batches_of_a_shape() -> None:
    graphs = {"forward": 0, "backward": 0}

    def counting(direction: str) -> Callable:
        def compiler(graph: Any, example: Any) -> Callable:
            graphs[direction] += 1
            return graph.forward

        return compiler

    model = tiny_model(label_smoothing=0.1, encoder_layers=1, decoder_layers=1).train()
    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    step = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for seed in range(4):
        batch = translation_batch(
            [9, 4], [12, 3 + seed], seed=seed
        )  # other labels are missing in each
        expected_loss, expected = gradients(model, **batch)
        loss, found = gradients(step, **batch, skip_logits=True)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        found = {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}
        assert_same_gradients(found, expected)
    assert graphs == {"forward": 1, "backward": 1}
