"""The time limit, signals, freed memory, the measurement of bf16 and the default learning rate."""

import math
import signal
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl

from hf_vanilla_transformer.training.run import precision, run
from hf_vanilla_transformer.training.run.arguments import RunArguments
from hf_vanilla_transformer.training.run.precision import bf16_is_faster
from hf_vanilla_transformer.training.state import callbacks
from hf_vanilla_transformer.training.state.callbacks import StopWithCheckpoint
from hf_vanilla_transformer.training.state.distributed import StopSignals
from hf_vanilla_transformer.utils.errors import Interrupted
from tests.model_helpers import error_of, tiny_model


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
    stop = StopWithCheckpoint(max_minutes=2)
    unlimited = StopWithCheckpoint()
    assert unlimited.minutes_left() == math.inf
    clock.now += 500
    stop.on_train_begin()
    try:
        clock.now += 119
        control = step(stop, strategy)
        assert not (control.should_training_stop or control.should_save or control.should_evaluate)
        clock.now += 1
        assert not step(stop, strategy).should_training_stop
        clock.now += 1
        assert stop.minutes_left() == 0
        control = step(stop, strategy)
        assert control.should_training_stop
        assert control.should_save
        assert control.should_evaluate is (strategy == "steps")
        assert not stop.interrupted
        assert not step(unlimited).should_training_stop
    finally:
        stop.on_train_end()


def test_limit_of_a_new_run_is_unspent(clock):
    stop = StopWithCheckpoint(max_minutes=2)
    clock.now += 500
    assert stop.minutes_left() == 2
    assert set(stop.state()["attributes"].values()) == {0}


def test_signals_are_noted_during_training_only():
    def is_noted(event):
        getattr(stop, event)()
        return signal.getsignal(signal.SIGINT) is not before

    before = signal.getsignal(signal.SIGINT)
    stop = StopWithCheckpoint()
    events = ["on_train_end", "on_train_begin", "on_train_end"]
    assert [is_noted(event) for event in events * 2] == [False, True, False] * 2


def test_signal_before_the_first_update_says_what_happens_next(capsys):
    signals = StopSignals()
    StopWithCheckpoint(signals=signals)
    with signals:
        signal.raise_signal(signal.SIGTERM)
    assert f"stopping: {callbacks.IN_TRAINING} (" in capsys.readouterr().out


def test_signal_ends_an_evaluation_that_the_resumed_run_makes():
    stop = StopWithCheckpoint()
    stop.signals.received = signal.SIGTERM
    with pytest.raises(Interrupted) as raised:
        stop.on_prediction_step(SimpleNamespace(device=torch.device("cpu")))
    assert raised.value.status == 128 + signal.SIGTERM
    assert stop.evaluation_due


FLAGS = "log", "evaluate", "save", "training_stop", "epoch_stop"


def decided(event, stop, *control, signal=False, **facts):
    """The flags that are set after an event, of which some were set before."""
    args = SimpleNamespace(eval_strategy="epoch", eval_delay=1, device=torch.device("cpu"))
    state = SimpleNamespace(**{"epoch": 1.5, "global_step": 7, "max_steps": 9, **facts})
    stop.signals.agreed = 2 if signal else None
    stop.signals.agree = lambda device, flag=False, at_once=False: (flag,)
    before = TrainerControl(**{f"should_{flag}": True for flag in control})
    found = getattr(stop, event)(args, state, before)
    return [flag for flag in FLAGS if getattr(found, f"should_{flag}")]


@pytest.mark.parametrize(
    ("epoch", "control", "due"),
    [
        (1.5, [], False),
        (2.0, [], True),
        (1.0, [], True),
        (0.0, [], False),  # before eval_delay
        (1.5, ["epoch_stop"], True),
        (0.9, ["epoch_stop"], False),
        (None, ["epoch_stop"], False),
    ],
)
def test_evaluation_of_an_epoch_is_due_after_its_last_update(epoch, control, due):
    stop = StopWithCheckpoint()
    decided("on_step_end", stop, *control, epoch=epoch)
    assert stop.evaluation_due is due
    for asked in ([], ["evaluate"]):
        flags = decided("on_step_end", stop, *control, *asked, signal=True, epoch=epoch)
        assert stop.evaluation_due is bool(due or asked)
        assert flags == ["save", "training_stop", *control]


@pytest.mark.parametrize("flag", FLAGS)
def test_ranks_agree_at_once_if_they_wait_anyway(flag):
    asked = []
    stop = StopWithCheckpoint()
    stop.signals.agree = lambda *_, at_once: asked.append(at_once) or [False]
    args = SimpleNamespace(eval_strategy="no", device=torch.device("cpu"))
    stop.on_step_end(args, None, TrainerControl(**{f"should_{flag}": True}))
    assert asked == [flag != "epoch_stop"]


def test_end_of_training_is_saved_once():
    stop = StopWithCheckpoint()
    assert decided("on_epoch_end", stop) == []
    assert not stop.saved_for_scoring
    assert decided("on_epoch_end", stop, global_step=9) == ["save"]
    assert stop.saved_for_scoring
    assert decided("on_epoch_end", stop, "training_stop") == ["save", "training_stop"]
    assert stop.saved_for_scoring
    assert decided("on_epoch_end", stop, "training_stop", "save") == ["save", "training_stop"]
    assert not stop.saved_for_scoring
    assert decided("on_epoch_end", stop, "log", "evaluate", signal=True) == [
        "save",
        "training_stop",
    ]
    assert decided("on_evaluate", stop, "training_stop") == ["save", "training_stop"]
    assert decided("on_evaluate", stop) == []
    assert decided("on_save", stop) == []
    assert decided("on_save", stop, signal=True) == ["training_stop"]
    # now it is saved
    assert decided("on_evaluate", stop, "training_stop") == ["training_stop"]
    assert decided("on_epoch_end", stop, "training_stop") == ["training_stop"]
    assert decided("on_epoch_end", stop, "log", "evaluate", signal=True) == ["training_stop"]


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
        assert not step(second).should_training_stop
        assert second.minutes_left() == 1 / 60
        clock.now += 2
        assert step(second).should_training_stop
        assert second.seconds() == 121
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
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)


def test_peak_learning_rate_defaults_to_the_papers(tmp_path):
    def learning_rate(**settings):
        args = RunArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
        run.resolve_arguments(tiny_model(d_model=64), args)
        return args.learning_rate

    def rate(update):
        return pytest.approx(64**-0.5 * update**-0.5, rel=1e-12)  # Eq. 3

    assert learning_rate() == rate(4000)
    for steps, update in ((0, 1), (1, 1), (2, 2), (9, 9)):
        assert learning_rate(warmup_steps=steps) == rate(update)
    base = {"model_name_or_path": "base", "warmup_steps": 0.5}
    assert learning_rate(**base) == rate(200_000)
    assert learning_rate(learning_rate=0.5, warmup_steps=0.5) == 0.5
    assert "warmup_steps=0.5 is a share" in error_of(learning_rate, warmup_steps=0.5)


@pytest.mark.parametrize(("device", "updates"), [("cpu", [20, 40]), ("cuda", [])])
def test_free_memory_is_released_every_20_updates_on_a_cpu(monkeypatch, device, updates):
    released = []
    monkeypatch.setattr(callbacks, "release_free_memory", lambda: released.append(update))
    args = SimpleNamespace(device=torch.device(device))
    for update in range(1, 50):
        callbacks.ReleaseFreeMemory().on_step_end(args, SimpleNamespace(global_step=update))
    assert released == updates


class Timed(torch.nn.Module):
    """A model whose steps take these seconds, in bfloat16 and in float32."""

    config = SimpleNamespace(vocab_size=7, target_vocab_size=5)
    device = torch.device("cpu")

    def __init__(self, **seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seconds = {name: iter(each) for name, each in seconds.items()}
        self.now = 0.0

    def forward(self, input_ids, labels):
        assert self.training
        assert input_ids.equal(labels)
        assert input_ids.tolist() == [[0, 1, 2, 3], [4, 0, 1, 2]]
        self.now += next(self.seconds["bf16" if torch.is_autocast_enabled("cpu") else "fp32"])
        return SimpleNamespace(loss=self.weight.square())


@pytest.mark.parametrize(
    ("bf16", "fp32", "faster"),
    [
        # The first step is a warm-up. Medians are compared.
        ([100, 2, 4, 2], [1, 3, 3, 3], True),
        ([1, 3, 3, 3], [100, 2, 4, 2], False),
        ([1, 9, 2, 2], [1, 3, 3, 3], True),
        ([1, 2, 2, 9], [1, 3, 3, 3], True),
        ([0, 2, 2, 2], [0, 2, 2, 2], False),
    ],
)
def test_faster_precision_is_that_of_the_median_step(monkeypatch, bf16, fp32, faster):
    model = Timed(bf16=bf16, fp32=fp32)
    monkeypatch.setattr(precision, "time", SimpleNamespace(perf_counter=lambda: model.now))
    assert bf16_is_faster(model, sentences=2, length=4) is faster
    assert not any(list(rest) for rest in model.seconds.values())


@pytest.mark.parametrize(
    ("fields", "kept", "printed"),
    [
        ({}, None, "float32"),
        ({"bf16": True}, None, "bf16 (as set)"),
        ({"fp16": True}, None, "fp16 (as set)"),
        ({"auto_bf16": True, "bf16": True}, None, "bf16 (as set)"),
        ({"auto_bf16": True, "fp16": True}, None, "fp16 (as set)"),
        ({"auto_bf16": True}, None, "bf16 (the faster one in a measurement)"),
        ({"auto_bf16": True}, "bf16", "bf16 (as in checkpoint-1)"),
        ({"auto_bf16": True}, "float32", "float32 (as in checkpoint-1)"),
    ],
    ids=str,
)
def test_precision_is_measured_only_if_it_is_open(monkeypatch, capsys, fields, kept, printed):
    state = SimpleNamespace(fixed={"precision": kept})
    monkeypatch.setattr(precision, "bf16_is_faster", lambda model: True)
    monkeypatch.setattr(precision, "read_run_state", lambda checkpoint: state)
    unset = {"auto_bf16": False, "bf16": False, "fp16": False, "mixed_precision": "no"}
    args = SimpleNamespace(device="cpu", **unset | fields)
    precision.resolve_precision(torch.nn.Identity(), args, kept and "checkpoint-1")
    assert capsys.readouterr().out == f"precision: {printed}\n"
    assert args.bf16 is printed.startswith("bf16")
    measured = args.bf16 and "bf16" not in fields
    assert args.mixed_precision == ("bf16" if measured else "no")
    assert args.auto_bf16 is False
