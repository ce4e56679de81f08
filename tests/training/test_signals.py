"""SIGINT and SIGTERM: a complete checkpoint, then the exit status 130 or 143. No evaluation is lost or repeated."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from transformers import Seq2SeqTrainer

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.state.distributed import StopSignals
from hf_vanilla_transformer.training.trainer.resumable_trainer import ResumableTrainer
from hf_vanilla_transformer.utils.errors import Interrupted
from tests.model_helpers import slow
from tests.trainer_helpers import (
    TINY_RUN,
    TORCHRUN,
    as_flags,
    assert_same_model,
    run_tiny,
    saved_steps,
    write_pairs,
)
from vanilla_transformer_cli.main import main

FLAGS = TINY_RUN | {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 0.01,
    "warmup_steps": 1,
    "dropout": 0.3,
    "save_strategy": "no",
    "eval_strategy": "no",
}


@pytest.fixture(autouse=True)
def default_handlers():
    """The handlers of a terminal, also where the tests run in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL), (
            "not restored"
        )
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """40 pairs to train on, four to validate on and four to test."""
    folder = tmp_path_factory.mktemp("data")
    rows = [(f"{number} and {number + 1}", f"{number} und {number + 1}") for number in range(40)]
    return write_pairs(folder, rows) | write_pairs(folder, rows[:4], "validation", "test")


@pytest.fixture
def train(pairs):
    def train(folder, **values):
        return run_tiny(folder, **{**FLAGS, **pairs, **values})

    return train


def evaluations(folder):
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]


@contextmanager
def sending(name, send_at, number):
    """Send a signal to this process in a method of the trainer, when `send_at(trainer)` holds for the first time."""
    original = getattr(VanillaTransformerTrainer, name)
    sent = []

    def patched(self, *arguments, **settings):
        if not sent and send_at(self):
            sent.append(self.state.global_step)
            signal.raise_signal(number)
        return original(self, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VanillaTransformerTrainer, name, patched)
        yield sent


@contextmanager
def interrupted(name, send_at, number=signal.SIGTERM):
    """`sending`, in a run that stops."""
    with sending(name, send_at, number), pytest.raises(Interrupted) as raised:
        yield raised


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_an_update_saves_a_checkpoint(train, tmp_path, capfd, number):
    run = tmp_path / "run"
    with interrupted(
        "training_step", lambda trainer: trainer.state.global_step == 1, number
    ) as raised:
        train(run)
    assert raised.value.status == 128 + number
    assert re.search(f"step 2; {run}/checkpoint-2 .*resume", str(raised.value))
    assert capfd.readouterr().out.count("stopping: ") == 1
    assert saved_steps(run) == [2]
    assert not (run / "model.safetensors").exists()  # nothing looks finished
    if number == signal.SIGTERM:
        train(run, resume_from_checkpoint=True)
        train(tmp_path / "undisturbed")
        assert_same_model(tmp_path / "undisturbed", run)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("steps", [2, 4, 6, 8, 10]),
        pytest.param("epoch", [5, 10], marks=pytest.mark.slow),
    ],
)
def test_interrupted_evaluation_is_made_first_by_the_resumed_run(
    train, tmp_path, strategy, expected
):
    settings = {"eval_strategy": strategy, "eval_steps": 2, "save_strategy": "no", "max_steps": 10}
    first = expected[0]

    def second_batch(trainer):
        return trainer.is_in_train and trainer.state.global_step == first and next(batches) == 1

    batches = itertools.count()
    with interrupted("prediction_step", second_batch) as raised:
        train(tmp_path, **settings)
    assert re.search(f"step {first}; .*-{first} ", str(raised.value))
    assert saved_steps(tmp_path) == [first]
    assert evaluations(tmp_path / f"checkpoint-{first}") == []
    train(tmp_path, **settings, resume_from_checkpoint=True)
    steps = [step for step, _ in evaluations(tmp_path)]
    assert steps[: len(expected)] == expected


@pytest.mark.parametrize("signalled", [False, True])
def test_checkpoint_after_a_signal_in_its_evaluation_has_no_scores(signalled, monkeypatch):
    asked = []

    def save(trainer, place):
        control = trainer.control
        asked.append((control.should_evaluate, control.should_save, control.should_training_stop))
        if signalled and len(asked) == 1:
            raise Interrupted("signal", signal.SIGTERM)

    monkeypatch.setattr(Seq2SeqTrainer, "_maybe_log_save_evaluate", save)
    trainer = object.__new__(ResumableTrainer)
    trainer.control = SimpleNamespace(
        should_evaluate=True, should_save=False, should_training_stop=False
    )
    trainer._maybe_log_save_evaluate("here")
    assert asked == [(True, False, False), *([(False, True, True)] if signalled else [])]


@pytest.mark.parametrize(
    ("resumed", "due", "is_made"), [(False, True, False), (True, False, False), (True, True, True)]
)
@pytest.mark.parametrize(("best", "kept"), [(4, True), (4, False), (3, True)])
def test_evaluation_that_is_due_is_made_from_the_state_of_the_checkpoint(
    resumed, due, is_made, best, kept, tmp_path
):
    made = []
    checkpoint = tmp_path / "old" / "checkpoint-4"
    here = tmp_path / "run" / "checkpoint-4"
    if kept:
        here.mkdir(parents=True)
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path / "run")),
        control=SimpleNamespace(should_evaluate=False),
        state=SimpleNamespace(global_step=4, best_global_step=best, best_model_checkpoint="before"),
        model_wrapped="model",
        _resumed_from=checkpoint if resumed else None,
        _stop_callbacks=lambda: [SimpleNamespace(evaluation_due=each) for each in (False, due)],
        _load_rng_state=made.append,
        _maybe_log_save_evaluate=lambda *given: made.append(given),
        _tr_loss=0.5,
        _epoch=1,
    )
    ResumableTrainer._evaluate_if_due(trainer, 9.0)
    given = (0.5, None, "model", None, 1, None, 9.0)
    assert made == ([str(checkpoint), given] if is_made else [])
    assert trainer.control.should_evaluate is is_made
    found = str(here if kept else checkpoint)
    assert trainer.state.best_model_checkpoint == (found if is_made and best == 4 else "before")


@pytest.mark.slow
def test_run_killed_between_a_save_and_the_evaluation_of_its_epoch_loses_neither(train, tmp_path):
    """As by SIGKILL: the checkpoint of the last update of an epoch was saved, its evaluation not made."""
    settings = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 5, "max_steps": 7}
    run = tmp_path / "killed"
    undisturbed = tmp_path / "undisturbed"

    def killed(trainer):
        raise KeyError("killed")

    with sending("prediction_step", killed, signal.SIGKILL), pytest.raises(KeyError):
        train(run, **settings)
    train(run, **settings, resume_from_checkpoint=True)
    train(undisturbed, **settings)
    assert_same_model(undisturbed, run)
    expected = evaluations(undisturbed)
    assert expected[0][0] == 5
    assert evaluations(run) == expected


def test_signal_in_a_save_stops_after_it(train, tmp_path):
    with interrupted("_save_rng_state", lambda trainer: trainer.state.global_step == 2):
        train(tmp_path, save_strategy="steps", save_steps=2)
    assert saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("phase", ["last evaluation", *slow("validation"), "test"])
def test_ctrl_c_after_the_last_update_loses_nothing(train, tmp_path, phase, capfd):
    """With `save_strategy: no` nothing was saved before."""

    def in_phase(trainer):
        scored = (tmp_path / "model.safetensors").exists()
        return trainer.state.global_step == 4 and scored is (phase == "test")

    with interrupted("prediction_step", in_phase, signal.SIGINT) as raised:
        train(tmp_path, eval_strategy="steps" if phase == "last evaluation" else "no", eval_steps=4)
    assert raised.value.status == 130
    message = str(raised.value)
    assert re.search(f"{tmp_path}/checkpoint-4 .*--resume_from_checkpoint true", message)
    assert ("test split" in message) is (phase == "test")
    assert ("current update" in capfd.readouterr().out) is (phase == "last evaluation")
    assert saved_steps(tmp_path) == [4]
    assert not (tmp_path / "all_results.json").exists()


@pytest.mark.slow
def test_finished_results_stay_while_the_same_weights_are_scored_again(train, tmp_path):
    results = tmp_path / "all_results.json"
    train(tmp_path, save_strategy="steps")
    before = results.read_bytes()

    def in_test(trainer):
        return (tmp_path / "model.safetensors").exists() and next(batches) > 2

    batches = itertools.count()
    with interrupted("prediction_step", in_test):
        train(tmp_path, save_strategy="steps", resume_from_checkpoint=True)
    assert results.read_bytes() == before


def test_ignored_signals_stay_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_second_signal_acts_at_once():
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signals.message = "later"
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        signal.raise_signal(signal.SIGINT)


def test_signal_repeated_by_torchrun_is_no_second_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    now = time.monotonic()
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        signal.raise_signal(signal.SIGINT)


def test_training_in_a_thread_has_no_handlers(train, tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path, max_steps=1)))
    thread.start()
    thread.join(300)
    assert results and results[0]["train_updates"] == 1


def test_command_exits_with_143_after_sigterm(pairs, tmp_path, capfd):
    flags = ["--output_dir", str(tmp_path), *as_flags(FLAGS | pairs)]
    at_once = sending("training_step", lambda trainer: True, signal.SIGTERM)
    with at_once, pytest.raises(SystemExit) as leaving:
        main(["train", *flags])
    assert leaving.value.code == 143
    assert "error: interrupted at step 1;" in capfd.readouterr().err


# Real processes


def interrupt(repository, folder, number, launcher, **values):
    """Send a signal to all processes of a run in training, as a terminal and a scheduler do. Returns what is printed.

    Args:
        launcher: the command before `-m vanilla_transformer_cli`.
    """
    flags = as_flags({**FLAGS, "max_steps": 1_000_000, "output_dir": folder, **values})
    environment = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(repository),
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [*launcher, "-m", "vanilla_transformer_cli", "train", *flags],
        start_new_session=True,
        cwd=repository,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "  loss " in line:
            os.killpg(process.pid, number)
            break
    printed, errors = process.communicate(timeout=120)
    return process.returncode, printed, errors


@pytest.mark.slow
def test_workers_of_the_data_loader_survive_a_signal_to_all_processes(repository, tmp_path, pairs):
    status, _, errors = interrupt(
        repository,
        tmp_path,
        signal.SIGTERM,
        [sys.executable],
        dataloader_num_workers=2,
        **pairs,
    )
    assert status == 143, errors
    assert "Traceback" not in errors
    assert len(saved_steps(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_processes_stop_at_the_same_update_with_one_message(
    repository, tmp_path, pairs, number
):
    _, printed, errors = interrupt(
        repository,
        tmp_path,
        number,
        [*TORCHRUN, "--nproc_per_node=2"],
        max_tokens_per_batch=100,
        **pairs,
    )
    (step,) = saved_steps(tmp_path)
    assert (printed + errors).count("stopping: ") == 1, errors
    assert errors.count("error: interrupted at step") == 1, errors
    assert f"interrupted at step {step}; " in errors
    states = sorted(path.name for path in (tmp_path / f"checkpoint-{step}").glob("rng_state*"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]


@pytest.mark.slow
def test_signal_trials(repository):
    """Four random moments. `python -m scripts.trials.signals` has more."""
    command = [sys.executable, "-m", "scripts.trials.signals", "--trials", "4", "--processes", "1"]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "1 processes: 4 trials" in run.stdout
