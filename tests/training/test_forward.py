"""Weights that are cast together: the values and gradients of autocast, bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_vanilla_transformer.training.trainer import forward as forward_module
from hf_vanilla_transformer.training.trainer import forward_choice
from hf_vanilla_transformer.training.trainer.forward import (
    CastForward,
    CompiledForward,
    ForwardChoice,
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


# The compiled pass, with a function in place of its graph

SHAPES = ((1, 3), (1, 2))


def packed_batch(source: int = 3, target: int = 2, name: str = "segment_ids") -> dict[str, Tensor]:
    """A row with so many places."""
    places = {"input_ids": source, "decoder_input_ids": target, "labels": target, name: source}
    return {side: torch.ones(1, count, dtype=torch.int64) for side, count in places.items()}


class Stacks(nn.Module):
    """A model whose embeddings double and triple their ids, and a weight that is trained or not."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def get_encoder(self) -> Any:
        return SimpleNamespace(embed_tokens=lambda ids: 2 * ids)

    def get_decoder(self) -> Any:
        return SimpleNamespace(embed_tokens=lambda ids: 3 * ids)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CompiledForward]:
    """Make a pass that computes by a function of the model and the batch."""

    def compiled(function: Callable, **settings: Any) -> Callable:
        assert settings == {"fullgraph": True, "dynamic": False, "backend": "own"}
        return function

    monkeypatch.setattr(torch, "compile", compiled)

    def make(function: Callable) -> CompiledForward:
        model = Stacks()
        return CompiledForward(partial(function, model), model, SHAPES, backend="own")

    return make


def twice(model: Stacks, **batch: Any) -> Any:
    return SimpleNamespace(loss=2 * model.trained.sum(), nll_loss=batch)


def test_compiled_pass_has_the_embeddings_and_a_number_as_tensors(compiling: Any) -> None:
    forward = compiling(twice)
    outputs = forward(**packed_batch(), num_items_in_batch=7)
    assert outputs.loss == 2
    given = outputs.nll_loss
    assert given.pop("skip_logits") is True
    assert {name: value.tolist() for name, value in given.items()} == {
        "inputs_embeds": [[2, 2, 2]],
        "decoder_inputs_embeds": [[3, 3]],
        "labels": [[1, 1]],
        "segment_ids": [[1, 1, 1]],
        "num_items_in_batch": 7,
    }
    assert "num_items_in_batch" not in forward(**packed_batch()).nll_loss


def test_batch_of_the_planned_shape_takes_the_compiled_pass(compiling: Any) -> None:
    forward = compiling(twice)
    for batch in (
        packed_batch(source=2),
        packed_batch(source=4),
        packed_batch(target=1),
        packed_batch(target=3),
        packed_batch(name="mask"),
    ):
        assert not forward.fits(batch)
        assert ForwardChoice(forward, print).of(batch) is print
    assert ForwardChoice(forward, print).of(packed_batch()) is forward
    assert ForwardChoice(None, print).of(packed_batch()) is print
    forward.failed = True
    assert ForwardChoice(forward, print).of(packed_batch()) is print


def test_rehearsal_says_how_long_it_took(
    compiling: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    times = iter([10.0, 13.0])
    monkeypatch.setattr(forward_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    forward = compiling(twice)
    assert forward.is_due
    forward.compile(packed_batch())
    assert (forward.is_due, forward.failed) == (False, False)
    assert forward.model.trained.grad is None
    assert capsys.readouterr().out == (
        "torch_compile: one graph for updates of batches of 1 rows of 3 source and 2 target places, "
        "compiled in 3 s\n"
    )


def test_error_of_a_compiler_is_a_line_and_a_lack_of_memory_an_error(
    compiling: Any, capsys: pytest.CaptureFixture
) -> None:
    def failing(model: Any, **batch: Any) -> Any:
        raise errors.pop(0)

    errors = [torch.OutOfMemoryError("full"), RuntimeError("no\ncompiler")]
    forward = compiling(failing)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        forward.compile(packed_batch())
    forward.compile(packed_batch())
    assert (forward.is_due, forward.failed) == (False, True)
    assert capsys.readouterr().out == (
        "torch_compile: the update is not compiled: RuntimeError: no compiler\n"
    )


def test_forward_of_a_model_before_the_pass_is_restored() -> None:
    model = nn.Linear(2, 2)
    model.forward = before = lambda x: x
    with forward_pass_of(model, print):
        assert model.forward is print
    assert model.forward is before


# The choice


def choice(
    casts: bool = True,
    precision: str = "bf16",
    processes: int = 1,
    device: str = "cuda",
    compiles: bool = False,
    plan: Any = None,
) -> ForwardChoice:
    args = SimpleNamespace(
        device=torch.device(device),
        torch_compile_backend=None,
        torch_compile_mode=None,
        world_size=1,
    )
    accelerator = SimpleNamespace(mixed_precision=precision, num_processes=processes)
    trainer: Any = SimpleNamespace(args=args, accelerator=accelerator)
    return forward_choice.choose_forward(trainer, tiny_model(), plan, casts, compiles)


def test_weights_are_cast_on_a_gpu_in_bfloat16() -> None:
    assert choice().cast is not None
    for other in ({"casts": False}, {"precision": "no"}, {"device": "cpu"}):
        assert choice(**other).cast is None


def test_updates_of_packed_rows_are_compiled_with_the_weights_cast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: made.append(given))
    plan = SimpleNamespace(places=(5, 4), rows_of_batch=2)
    assert choice(compiles=True).compiled is None
    assert choice(plan=plan).compiled is None
    for processes, groups in ((1, 1), (2, 4)):  # by layer for several
        compiled = choice(plan=plan, compiles=True, processes=processes).compiled
        assert compiled.shapes == ((2, 5), (2, 4))
        assert len(compiled.forward.__self__.groups) == groups
    plain = choice(plan=plan, compiles=True, precision="no").compiled
    assert isinstance(plain.forward.__self__, PlainForward)
    settings = {"fullgraph": True, "dynamic": False, "backend": "inductor", "mode": None}
    assert made == [settings] * 3


@pytest.mark.parametrize(
    ("mode", "batches", "chosen"),
    [
        (None, 8, None),
        ("default", 8, "default"),
        ("reduce-overhead", 4, "reduce-overhead"),  # one on each device
        ("reduce-overhead", 8, None),
    ],
)
def test_graphs_of_cuda_are_for_one_batch(
    mode: str | None, batches: int, chosen: str | None, capsys: pytest.CaptureFixture
) -> None:
    args: Any = SimpleNamespace(torch_compile_mode=mode, world_size=4)
    plan: Any = SimpleNamespace(batches_of_update=batches)
    assert forward_choice._compile_mode(args, plan) == chosen
    assert ("left out" in capsys.readouterr().out) is (mode != chosen)
