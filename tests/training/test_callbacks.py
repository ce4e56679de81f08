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


FLAGS = "should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop"


def decided(event, stop, control=(), signal=False, **facts):
    """The flags that are set after an event."""
    args = SimpleNamespace(eval_strategy="epoch", eval_delay=1, device=torch.device("cpu"))
    state = SimpleNamespace(**{"epoch": 1.5, "global_step": 7, "max_steps": 9, **facts})
    stop.signals.agreed = 2 if signal else None
    stop.signals.agree = lambda device, flag=False, at_once=False: (flag,)
    found = getattr(stop, event)(args, state, TrainerControl(**dict.fromkeys(control, True)))
    return [flag.removeprefix("should_") for flag in FLAGS if getattr(found, flag)]


def test_evaluation_of_an_epoch_is_due_after_its_last_update():
    for epoch, control, due in (
        (1.5, (), False),
        (2.0, (), True),
        (1.0, (), True),
        (0.0, (), False),  # before eval_delay
        (1.5, ("should_epoch_stop",), True),
        (0.9, ("should_epoch_stop",), False),
        (None, ("should_epoch_stop",), False),
    ):
        stop = StopWithCheckpoint()
        decided("on_step_end", stop, control, epoch=epoch)
        assert stop.evaluation_due is due
        for asked in ((), ("should_evaluate",)):
            flags = decided("on_step_end", stop, (*control, *asked), signal=True, epoch=epoch)
            assert stop.evaluation_due is bool(due or asked)
            assert flags == ["save", "training_stop", *(["epoch_stop"] if control else [])]


def test_end_of_training_is_saved_once():
    stop = StopWithCheckpoint()
    assert decided("on_epoch_end", stop) == [] and not stop.saved_for_scoring
    assert decided("on_epoch_end", stop, global_step=9) == ["save"] and stop.saved_for_scoring
    over = ("should_training_stop",)
    assert decided("on_epoch_end", stop, over) == ["save", "training_stop"] and stop.saved_for_scoring
    assert decided("on_epoch_end", stop, (*over, "should_save")) == ["save", "training_stop"]
    assert not stop.saved_for_scoring
    flags = ("should_log", "should_evaluate")
    assert decided("on_epoch_end", stop, flags, signal=True) == ["save", "training_stop"]
    assert decided("on_evaluate", stop, over) == ["save", "training_stop"]
    assert decided("on_evaluate", stop) == []
    assert decided("on_save", stop) == [] and decided("on_save", stop, signal=True) == ["training_stop"]
    assert decided("on_evaluate", stop, over) == ["training_stop"]
    assert decided("on_epoch_end", stop, over) == ["training_stop"]
    assert decided("on_epoch_end", stop, flags, signal=True) == ["training_stop"]


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
