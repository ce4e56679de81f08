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
from hf_vanilla_transformer.training.trainer.objectives.distillation import DistillationObjective, TopDistributions
from tests.model_helpers import assert_near, gradients, tiny_model, translation_batch
from tests.pretended_gpu import counted, on_cpu, on_gpu

POSITIONS, WIDTH, VOCABULARY = 30, 8, 40
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


def plain(device: str, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return fused_translation_loss(hidden, weight, bias, labels, SMOOTHING, num_items_in_batch=17)


def of_objective(objective: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Any:
    differentiate = partial(objective.differentiate, smoothing=SMOOTHING)
    return fused_objective(hidden, weight, bias, labels, differentiate, objective.uniform(SMOOTHING))


def consistent(objective: Any, device: str, *tensors: Tensor) -> Any:
    return of_objective(objective, *tensors)


def taught(device: str, *tensors: Tensor) -> Any:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.rand(POSITIONS, VOCABULARY, generator=generator).topk(4).indices
    probabilities = torch.rand(POSITIONS, 4, generator=generator).softmax(dim=1)
    distributions = [tokens, probabilities] if device == "cpu" else on_gpu([tokens, probabilities])
    return of_objective(DistillationObjective(TopDistributions(*distributions), 0.6), *tensors)


LOSSES = {
    "plain": (1, plain),
    "R-Drop": (2, partial(consistent, r_drop())),
    "SimCut": (2, partial(consistent, simcut())),
    "distillation": (1, taught),
}


def derivatives(loss_of: Callable, tensors: list[Tensor], device: str) -> list[Tensor]:
    """Loss, logged value and gradients by hidden states, weight and bias."""
    leaves = [each.detach().requires_grad_() for each in tensors[:3]]
    loss, logged = loss_of(device, *leaves, tensors[3])
    loss.backward()
    return on_cpu([loss.detach(), logged, *(each.grad for each in leaves)])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_all_positions_is_that_of_labelled_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ROW_UNIT", 4)
    monkeypatch.setattr(losses, "DEVICE_CHUNK", VOCABULARY * 14)  # several chunks, the last one shorter
    passes, loss_of = LOSSES[name]
    tensors = inputs(passes)
    expected = derivatives(loss_of, tensors, "cpu")
    with counted() as count:
        actual = derivatives(loss_of, on_gpu(tensors), "gpu")
    for found, wanted in zip(actual, expected, strict=True):
        assert_near(found, wanted, 2e-6)
    assert not actual[2][:, ::3].any()  # positions without a label have no gradient
    assert not count.waits


@pytest.mark.parametrize("name", ["plain", "R-Drop"])
def test_loss_is_traced_as_a_whole(name: str) -> None:
    passes, loss_of = LOSSES[name]
    tensors = inputs(passes)
    expected = derivatives(loss_of, tensors, "cpu")
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(derivatives(compiled, tensors, "cpu"), expected, strict=True):
        assert_near(found, wanted, 2e-6)


def test_traced_loss_needs_no_probabilities_in_memory() -> None:
    """A compiler fuses all operations on the logits but a scatter."""
    operations = set()

    def recording(graph: Any, example: Any) -> Callable:
        operations.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    loss_of = torch.compile(LOSSES["plain"][1], backend=aot_autograd(fw_compiler=recording), fullgraph=True)
    derivatives(loss_of, inputs(), "cpu")
    assert any("softmax" in name or "exp" in name for name in operations)
    assert not [name for name in operations if name.startswith("aten.scatter")]


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
        batch = translation_batch([9, 4], [12, 3 + seed], seed=seed)  # other labels are missing in each
        expected = gradients(model, **batch)
        loss = step(**batch, skip_logits=True).loss
        model.zero_grad()
        loss.backward()
        assert loss.item() == pytest.approx(expected[0], abs=1e-5)
        for name, weight in model.named_parameters():
            assert_near(weight.grad, expected[1][name], 1e-5, name)
    assert graphs == {"forward": 1, "backward": 1}
