"""The time limit, the measurement of bf16 and the default learning rate."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl

from hf_vanilla_transformer.training.run import run
from hf_vanilla_transformer.training.run.arguments import RunArguments
from hf_vanilla_transformer.training.run.precision import bf16_is_faster
from hf_vanilla_transformer.training.state import callbacks
from hf_vanilla_transformer.training.state.callbacks import StopWithCheckpoint
from tests.model_helpers import tiny_model


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: Clock.now))
    return Clock


def step(stop, eval_strategy="steps"):
    args = SimpleNamespace(eval_strategy=eval_strategy, device=torch.device("cpu"))
    return stop.on_step_end(args, None, TrainerControl())


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_time_limit_counts_from_the_start_of_training(clock, strategy):
    stop, unlimited = StopWithCheckpoint(max_minutes=2), StopWithCheckpoint()
    assert unlimited.minutes_left() == math.inf
    clock.now += 500
    stop.on_train_begin()
    try:
        clock.now += 119
        control = step(stop, strategy)
        assert not (control.should_training_stop or control.should_save or control.should_evaluate)
        clock.now += 2
        control = step(stop, strategy)
        assert control.should_training_stop and control.should_save
        assert control.should_evaluate is (strategy == "steps") and not stop.interrupted
        assert not step(unlimited).should_training_stop
    finally:
        stop.on_train_end()


def test_time_limit_includes_the_time_before_a_resume(clock):
    first = StopWithCheckpoint(max_minutes=2)
    first.on_train_begin()
    clock.now += 90
    kept = first.state()["attributes"]["spent"]
    first.on_train_end()
    second = StopWithCheckpoint(max_minutes=2)
    second.spent = kept
    second.on_train_begin()
    try:
        clock.now += 29
        assert not step(second).should_training_stop and second.minutes_left() == 1 / 60
        clock.now += 2
        assert step(second).should_training_stop and second.seconds() == 121
    finally:
        second.on_train_end()


@pytest.mark.parametrize("training", [True, False])
def test_bf16_measurement_has_no_side_effects(training):
    model = tiny_model(dropout=0.5, encoder_layers=1, decoder_layers=1).train(training)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert bf16_is_faster(model, sentences=2, length=3) in (True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[name]), name


def test_peak_learning_rate_defaults_to_the_papers(tmp_path):
    args = RunArguments(output_dir=str(tmp_path), use_cpu=True)
    run.resolve_arguments(tiny_model(d_model=64), args)
    assert args.learning_rate == pytest.approx(64**-0.5 * 4000**-0.5, rel=1e-12)  # Eq. 3 at step 4,000
    args = RunArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=0.5)
    run.resolve_arguments(tiny_model(), args)
    assert args.learning_rate == 0.5
