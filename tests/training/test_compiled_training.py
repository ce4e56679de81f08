"""Updates of packed rows compiled as one graph for each pass, for a whole run, and resumed to the same bytes."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from tests.trainer_helpers import (
    DESCENT,
    EntropyLoss,
    FailingBackward,
    flat,
    random_pairs,
    relative_error,
)
from tests.training import short_runs

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def forget_compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (
        "BACKEND",
        "MODE",
    ):  # transformers sets them, and every later trainer would read them
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


trained = partial(short_runs.trained, pack=True, layers=1)


class Graphs:
    """The graphs of compilations, by direction, and their operations."""

    def __init__(self) -> None:
        self.count = Counter()
        self.operations = set()

    def add(self, direction: str, graph: Any) -> None:
        self.count[direction] += 1
        self.operations |= {str(node.target) for node in graph.graph.nodes}


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Record the graphs that are compiled from now on."""
    graphs = Graphs()

    def counting(direction: str) -> Callable:
        def compiler(graph: Any, example: Any) -> Callable:
            graphs.add(direction, graph)
            return graph.forward

        return compiler

    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    compile_with = torch.compile

    def compiled(function: Callable, **settings: Any) -> Callable:
        return compile_with(function, **{**settings, "backend": backend})

    monkeypatch.setattr(torch, "compile", compiled)
    return graphs


@pytest.mark.slow  # test_fixed_shape_loss.py compiles one update
def test_run_has_one_graph_of_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    graphs = record_graphs(monkeypatch)
    # four epochs with batches that are not full, several batches an update, and evaluations in between
    trainer = trained(
        tmp_path,
        50,
        tokens_per_update=100,
        bf16=True,
        eval_strategy="steps",
        eval_steps=20,
        eval_dataset=random_pairs(8),
        **COMPILED,
    )
    assert trainer.state.epoch > 3
    assert graphs.count == {"forward": 1, "backward": 1}
    assert not counters["graph_break"]
    line = "torch_compile: one graph for updates of batches of 1 rows of 60 source and 60 target places, compiled in"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.slow
def test_gradients_of_embeddings_are_added_up_outside_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor adds those of a token's places up in any order on a GPU, and a resumed run would have other bits."""
    graphs = record_graphs(monkeypatch)
    trained(tmp_path, 1, **COMPILED)
    assert graphs.count == {"forward": 1, "backward": 1}
    assert not [name for name in graphs.operations if "embedding" in name or "index_put" in name]


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_compiled_updates_are_those_of_eager_ones(bf16: bool, tmp_path: Path) -> None:
    settings = {"tokens_per_update": 150, "dropout": 0.0, "bf16": bf16, **DESCENT}

    def weights(steps: int, **more: Any) -> torch.Tensor:
        return flat(trained(tmp_path, steps, **settings | more).model)

    eager = weights(3)
    moved = eager - weights(1, learning_rate=1e-9)
    assert relative_error(weights(3, **COMPILED) - eager + moved, moved) < (1e-2 if bf16 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"bf16": True}, {"muon": True, "ema_decay": 0.9, "tokens_per_update": 100}],
    ids=str,
)
def test_compiled_run_resumes_to_the_same_bytes(settings: dict[str, Any], tmp_path: Path) -> None:
    short_runs.check_resume(trained, tmp_path, **settings, **COMPILED)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor, torch's own compiler, needs a C++ compiler"
)
def test_run_compiled_by_inductor_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    short_runs.check_resume(trained, tmp_path, torch_compile=True)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # one a run


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"r_drop_alpha": 3.0}, "because the run computes two passes over a batch"),
        ({"kind": EntropyLoss}, "because the run has a loss of its own"),
        ({"gradient_checkpointing": True}, "because the run computes activations again"),
    ],
)
def test_update_that_cannot_be_compiled_is_named(
    settings: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trainer = trained(tmp_path, 1, **settings, **COMPILED)
    assert trainer.state.global_step == 1
    assert f"compiled updates: no, {reason}" in capsys.readouterr().out
    assert not counters["stats"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_run_goes_on_without_a_compiler_that_fails(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def failing(function: Callable, **_: Any) -> Callable:
        def run(*args: Any) -> Any:
            if direction == "forward":
                raise RuntimeError("no compiler\nis here")
            loss, nll_loss = function(*args)
            return FailingBackward.apply(loss), nll_loss

        return run

    monkeypatch.setattr(torch, "compile", failing)
    compiled = trained(tmp_path, 2, **COMPILED)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("torch_compile")
    ]
    assert lines == ["torch_compile: the update is not compiled: RuntimeError: no compiler is here"]
    assert torch.equal(flat(compiled.model), flat(trained(tmp_path, 2).model))


def compile_to_nothing(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let `torch.compile` return its function, and record its settings."""
    calls = []

    def compiled(function: Callable, **settings: Any) -> Callable:
        calls.append(settings)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    return calls


def test_rehearsal_is_no_part_of_the_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(tmp_path, 2)
    compile_to_nothing(monkeypatch)
    actual = trained(tmp_path, 2, **COMPILED)
    assert not actual.forwards.compiled.is_due
    assert not actual.forwards.compiled.failed
    assert torch.equal(flat(actual.model), flat(expected.model))
    assert actual.state.log_history[0]["nll_loss"] == expected.state.log_history[0]["nll_loss"]


@pytest.mark.parametrize(
    ("mode", "tokens", "kept"),
    [
        ("reduce-overhead", None, True),
        ("reduce-overhead", 100, False),  # two batches an update
        ("max-autotune", 100, False),
        ("max-autotune-no-cudagraphs", 100, True),
    ],
)
def test_gradients_are_not_added_up_in_the_memory_of_a_cuda_graph(
    mode: str,
    tokens: int | None,
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """The second batch's graph writes where it wrote the gradients of the first."""
    calls = compile_to_nothing(monkeypatch)
    trainer = trained(
        tmp_path,
        1,
        tokens_per_update=tokens,
        torch_compile=True,
        torch_compile_mode=mode,
    )
    assert trainer._updates.batches_of_update == (1 if tokens is None else 2)
    assert [call["mode"] for call in calls] == [mode if kept else None]
    assert (f"torch_compile_mode={mode}: left out" in capsys.readouterr().out) is not kept


def test_compiling_is_the_default_of_gpus_only(tmp_path: Path) -> None:
    assert trained(tmp_path, 1).forwards.compiled is None
