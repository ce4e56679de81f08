"""What an update asks of a GPU, counted on a pretended one: a ratchet for launches, and no waits."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.modeling_vanilla_transformer import check_labels
from hf_vanilla_transformer.training.trainer.forward import CastForward
from hf_vanilla_transformer.training.trainer.objectives.consistency import simcut
from tests.model_helpers import gradients, six_layers, tiny_model, translation_batch
from tests.pretended_gpu import DEVICE, autocast, counted, held_memory, on_cpu, on_gpu

# of a forward and a backward pass of the base model, 6 + 6 layers
LAUNCHES = 1_096
LAUNCHES_OF_CASTS = {
    False: 840,  # all weights together
    True: 880,  # by layer, for several processes
}


def assert_few_launches(model: nn.Module, forward: Callable, most: int) -> None:
    """Count the second update, after everything that the first one makes."""
    batch = translation_batch([9, 4, 7], [5, 12, 3])
    batch["num_items_in_batch"] = batch["labels"].ne(-100).sum()
    batch = on_gpu(batch)
    for _ in range(2):
        model.zero_grad()
        with counted() as count:
            with autocast():
                loss = forward(**batch).loss
            loss.backward()
    assert count.launches <= most, count.operations.most_common(20)
    assert not count.waits
    assert not count.copies


def test_update_launches_few_kernels_and_waits_for_none() -> None:
    model = on_gpu(six_layers().train())
    assert_few_launches(model, model, LAUNCHES)


def test_labels_are_checked_on_a_cpu_alone() -> None:
    labels = torch.tensor([[3, -100]])
    with counted() as count:
        check_labels(on_gpu(labels), 2)
    assert count.launches == 0
    assert not count.waits
    with pytest.raises(ValueError, match="labels contains 3, but must be below 2"):
        check_labels(labels, 2)


@pytest.mark.parametrize("ends", [2, [2, 5]])
def test_second_pass_of_simcut_is_made_without_a_copy(ends: int | list[int]) -> None:
    model = on_gpu(tiny_model())
    model.config.eos_token_id = ends
    batch = on_gpu(translation_batch([9, 4], [5, 3]))
    batch["decoder_input_ids"] = batch["labels"].clamp(min=1)
    with counted() as count:
        twice = simcut(3.0, probability=1.0).inputs(model, batch)
    assert not count.copies and not count.waits
    _, second = on_cpu(twice["inputs_embeds"]).chunk(2)
    is_end = torch.isin(on_cpu(batch["input_ids"]), torch.tensor(ends))
    assert torch.equal(second.any(-1), is_end)


@pytest.mark.parametrize(("by_layer", "launches"), LAUNCHES_OF_CASTS.items())
def test_weights_that_are_cast_together_need_few_kernels(by_layer: bool, launches: int) -> None:
    model = on_gpu(six_layers().train())
    cast = CastForward(model, torch.device(DEVICE), torch.bfloat16, by_layer)
    assert_few_launches(model, cast.forward, launches)
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": False},
        {"head_dim": 5, "value_head_dim": 3},
        {"label_smoothing": 0.1},
    ],
)
def test_joint_projections_have_the_gradients_of_separate_ones(fields: dict) -> None:
    """Which a CPU computes."""
    batch = translation_batch([9, 4], [5, 12])
    model = tiny_model(**fields).train()
    loss, expected = gradients(model, **batch)
    with counted() as count:
        found, actual = gradients(on_gpu(model), **on_gpu(batch))
    assert abs(found - loss) < 1e-5
    for name, gradient in expected.items():
        torch.testing.assert_close(on_cpu(actual[name]), gradient, rtol=1e-4, atol=1e-6)
    # 2 + 2 layers: q, k and v together, q, k and v of the source, out and feed-forward
    products = sum(count.operations[name] for name in ("addmm", "addmm_", "mm"))
    assert products == 3 * (2 * 4 + 2 * 7) + 3
    assert count.launches
    assert not torch.accelerator.is_available()  # other libraries still choose the CPU


def test_pretended_gpu_counts_waits_copies_and_shapes() -> None:
    values = on_gpu(torch.arange(6.0).reshape(2, 3))
    with counted() as count:
        (values * 2 + 1).transpose(0, 1)  # two kernels
    assert count.launches == 2
    assert not count.waits
    assert not count.copies
    with counted() as count:
        assert values[1, 2].item() == 5  # wait
        assert values.nonzero().shape == (5, 2)  # wait
        assert values[values > 3].tolist() == [4, 5]  # two waits
        assert values.cpu().device.type == "cpu"  # wait
        torch.tensor(3.0, device=values.device)  # copy, and torch waits for it
        torch.ones(2).to(values.device, non_blocking=True)
    assert sum(count.waits.values()) == 5
    assert sum(count.copies.values()) == 2
    assert sum(count.blocking.values()) == 1
    with counted() as count:
        for _ in range(2):
            (values @ values.T).sum()
    assert list(count.shapes) == [("mm", (2, 3), (3, 2))]


def test_held_memory_does_not_depend_on_garbage() -> None:
    """A collection may give back the memory of other tests at any time, and a new tensor then gets it."""
    sizes = [1000, 30_000, 120_000]

    def held_by_new_tensors(collects: bool) -> int:
        for size in sizes * 20:
            garbage: list = [on_gpu(torch.zeros(size, dtype=torch.uint8))]
            garbage.append(garbage)
        with counted(), held_memory() as held:
            if collects:
                gc.collect()
            tensors = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
        del tensors
        return held.peak

    assert held_by_new_tensors(False) == held_by_new_tensors(True) == sum(sizes)
