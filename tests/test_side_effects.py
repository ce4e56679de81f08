"""The hooks of the inference engine come and go with it."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.engine import optimize
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.model_helpers import tiny_model
from tests.search_helpers import varied_model


def registered() -> tuple[int, int]:
    """The hooks of the process that an engine registers."""
    modules, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    return len(modules._global_module_registration_hooks), len(
        optimizer._global_optimizer_post_hooks
    )


def test_hooks_are_registered_with_the_first_engine_and_removed_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    # other tests of this process may still have engines
    monkeypatch.setattr(optimize, "_engines", {})
    monkeypatch.setattr(optimize, "_hooks", [])
    others = registered()

    def added() -> tuple[int, int]:
        now = registered()
        return now[0] - others[0], now[1] - others[1]

    assert added() == (0, 0)
    first = optimize_for_inference(varied_model())
    second = optimize_for_inference(varied_model())
    assert added() == (1, 1)
    first.train()
    gc.collect()
    assert added() == (1, 1)
    del second
    gc.collect()
    assert added() == (0, 0)
    optimize_for_inference(first.eval())
    assert added() == (1, 1)
    del first
    gc.collect()
    assert added() == (0, 0)


@pytest.mark.slow
def test_modules_are_built_while_engines_come_and_go() -> None:
    model = varied_model()

    def build(_: int) -> int:
        models = [nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())) for _ in range(20)]
        return sum(len(list(model.modules())) for model in models)

    def optimize(_: int) -> int:
        optimize_for_inference(model).inference_engine = None
        return 80

    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(optimize if number % 4 == 0 else build, number) for number in range(200)
        ]
        assert {job.result() for job in jobs} == {80}


def test_default_device_is_not_that_of_the_model() -> None:
    """A step of training and a search on the CPU, while new tensors go to another device."""
    source = torch.tensor([[4, 5, 2]])
    model = tiny_model(dropout=0.3)
    with torch.device("meta"):
        loss = model.train()(source, labels=source).loss
        loss.backward()
        found = model.eval().generate(source, num_beams=2, max_new_tokens=3)
    assert loss.isfinite()
    assert found.equal(model.generate(source, num_beams=2, max_new_tokens=3))
