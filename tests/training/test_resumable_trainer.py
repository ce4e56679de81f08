"""The steps of the trainer that resumes, each with small objects in place of a run."""

import math
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
)
from transformers.trainer_callback import ExportableState

from hf_vanilla_transformer.training.trainer import resumable_trainer
from hf_vanilla_transformer.training.trainer.resumable_trainer import ResumableTrainer
from tests.model_helpers import error_of, tiny_model
from tests.trainer_helpers import make_trainer, padding_collator, uninitialised

bare = partial(uninitialised, ResumableTrainer)


def replace(monkeypatch: pytest.MonkeyPatch, name: str, method: Any) -> None:
    """Replace a method of the base class."""
    monkeypatch.setattr(Seq2SeqTrainer, name, method)


def patient(counter: int) -> EarlyStoppingCallback:
    """Stops after two evaluations without a better score."""
    callback = EarlyStoppingCallback(2)
    callback.early_stopping_patience_counter = counter
    return callback


@pytest.mark.parametrize(
    ("step", "counter", "minutes", "is_over"),
    [
        (0, 2, 0.0, False),  # a run that has not started
        (1, 1, 0.1, False),
        (5, 0, math.inf, False),
        (6, 0, math.inf, True),
        (7, 0, math.inf, True),  # resumed with a lower max_steps
        (1, 2, math.inf, True),
        (1, 3, math.inf, True),
        (1, 0, 0.0, True),
    ],
)
def test_run_is_over_at_its_end_by_patience_or_by_time(
    step: int, counter: int, minutes: float, is_over: bool
) -> None:
    trainer = bare(
        state=Fake(global_step=step, max_steps=6),
        callback_handler=Fake(callbacks=[object(), patient(0), patient(counter)]),
        _minutes_left=lambda: minutes,
    )
    assert trainer._training_is_over() is is_over


@pytest.mark.parametrize(
    ("step", "minutes", "reason"),
    [
        (5999, 0.1, "it had stopped early"),
        (5999, 0.0, "its max_minutes are over"),
        (6000, 0.0, "update 6,000 of 6,000 is done"),
        (6001, 0.1, "update 6,001 of 6,000 is done"),
    ],
)
def test_line_says_why_a_run_has_ended(step: int, minutes: float, reason: str) -> None:
    state = Fake(global_step=step, max_steps=6000)
    trainer = bare(state=state, _minutes_left=lambda: minutes)
    assert trainer._end_of_run().startswith(reason)


@pytest.mark.parametrize(
    ("resumed", "step", "nothing_left"), [(None, 2, False), ("run", 2, True), ("run", 3, False)]
)
def test_nothing_is_left_if_a_resumed_run_makes_no_update(
    resumed: Any, step: int, nothing_left: bool
) -> None:
    trainer = bare(_resumed_from=resumed, _resumed_step=2, state=Fake(global_step=step))
    assert trainer.has_nothing_left is nothing_left


def test_time_is_that_of_the_callback_with_the_least() -> None:
    stops = [Fake(minutes_left=lambda: 3.0), Fake(minutes_left=lambda: 2.0)]
    assert bare(_stop_callbacks=lambda: stops)._minutes_left() == 2.0
    assert bare(_stop_callbacks=list)._minutes_left() == math.inf


@pytest.mark.parametrize(
    ("data", "tokens", "ended", "position"),
    [
        ([1], None, False, {}),
        ([1], 60, False, {"batches_per_update": 3}),
        (iter([]), None, False, {"epoch": 1, "updates": 4}),
        (iter([]), 60, True, {"batches_per_update": 3, "epoch": 2, "updates": 0}),
    ],
)
def test_position_is_that_in_the_epoch_of_a_stream(
    data: Any, tokens: Any, ended: bool, position: dict[str, int]
) -> None:
    trainer = bare(
        args=Fake(max_tokens_per_batch=tokens),
        train_dataset=data,
        state=Fake(global_step=10),
        control=Fake(should_epoch_stop=ended),
        batches_per_update=3,
        _epoch=1,
        _epoch_start=6,
    )
    assert trainer._position() == position


@pytest.mark.parametrize(
    ("position", "start"), [({}, (1, 2)), ({"epoch": 3, "updates": 5}, (3, 20))]
)
@pytest.mark.parametrize(("step", "best"), [(0, "old"), (4, "run/checkpoint-4"), (5, None)])
def test_run_starts_at_its_position_with_its_best_checkpoint(
    position: dict[str, int],
    start: tuple[int, int],
    step: int,
    best: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace(monkeypatch, "_init_training_state", lambda *_: (1, 2))
    monkeypatch.chdir(tmp_path)
    Path("run/checkpoint-4").mkdir(parents=True)
    state = Fake(best_global_step=step, best_model_checkpoint="old", compute_steps=lambda *_: None)
    trainer = bare(
        state=state,
        args=Fake(gradient_accumulation_steps=4),
        _resumed_from=Path("run/checkpoint-6"),
        _resume_position=position,
    )
    assert trainer._init_training_state(10) == start
    assert state.best_model_checkpoint == best


@pytest.mark.parametrize(
    ("epoch", "resumed", "start"),
    [(2, "checkpoint", 8), (3, "checkpoint", 10), (2, None, 10)],
)
@pytest.mark.parametrize(
    ("over", "stop", "end", "runs"),
    [
        (False, False, False, True),
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
    ],
)
def test_epoch_runs_in_its_order_unless_training_is_over(
    epoch: int,
    resumed: str | None,
    start: int,
    over: bool,
    stop: bool,
    end: bool,
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    replace(monkeypatch, "_run_epoch", lambda trainer, **given: made.append(given["epoch"]))
    trainer = bare(
        args=Fake(gradient_accumulation_steps=4),
        state=Fake(global_step=10),
        control=Fake(should_training_stop=stop, should_epoch_stop=end),
        _training_is_over=lambda: over,
        _evaluate_if_due=lambda time: made.append(time),
        _updates=None,
        _stop_callbacks=list,
        train_dataset=Fake(set_epoch=lambda number: made.append(f"order {number}")),
    )
    trainer._run_epoch(
        epoch=epoch,
        steps_trained_in_current_epoch=8,
        epochs_trained=2,
        resume_from_checkpoint=resumed,
        start_time="due",
        train_dataloader=None,
    )
    assert made == ["due", *([f"order {epoch}", epoch] if runs else [])]
    assert trainer._epoch_start == start
    assert trainer.control.should_training_stop is (over or stop)


@pytest.mark.parametrize("has_limit", [True, False])
def test_ranks_agree_that_the_time_is_over(
    has_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One would wait for the others. Without a limit they do not ask: streams may end their epochs apart."""

    def agreed(*flags: bool, device: torch.device) -> Fake:
        assert has_limit and flags == (False,)
        return Fake(read=lambda: [True])

    monkeypatch.setattr(resumable_trainer, "Agreement", agreed)
    made: list[int] = []
    replace(monkeypatch, "_run_epoch", lambda trainer, **given: made.append(given["epoch"]))
    trainer = bare(
        args=Fake(gradient_accumulation_steps=4, device=torch.device("cpu")),
        state=Fake(global_step=10),
        control=Fake(should_training_stop=False, should_epoch_stop=False),
        train_dataset=[],
        _training_is_over=lambda: False,
        _evaluate_if_due=lambda time: None,
        _stop_callbacks=lambda: [object()] * has_limit,
        _updates=None,
    )
    trainer._run_epoch(
        epoch=3,
        steps_trained_in_current_epoch=0,
        epochs_trained=2,
        resume_from_checkpoint=None,
        start_time=0.0,
        train_dataloader=None,
    )
    assert trainer.control.should_training_stop is has_limit
    assert made == ([] if has_limit else [3])


@pytest.mark.parametrize("tokens", [None, 60])
def test_facts_of_the_data_are_those_that_decide_a_batch(tokens: int | None) -> None:
    given = {
        "max_tokens_per_batch": tokens,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "world_size": 5,
        "train_sampling_strategy": "random",
        "dataloader_drop_last": True,
    }
    facts = bare(args=Fake(**given), data_facts={"digest": "a"})._data()
    by_pairs = [
        facts[name]
        for name in ("pairs per update", "train_sampling_strategy", "dataloader_drop_last")
    ]
    assert by_pairs == ([30, "random", True] if tokens is None else [None] * 3)
    assert facts["digest"] == "a"


@pytest.mark.parametrize(
    ("metric", "mixed", "precision"), [(None, "no", "float32"), ("bleu", "bf16", "bf16")]
)
@pytest.mark.parametrize("ours", [True, False])
def test_facts_that_are_fixed_are_those_of_the_function(
    metric: str | None, mixed: str, precision: str, ours: bool
) -> None:
    model = tiny_model(layer_norm_eps=0.1) if ours else nn.Linear(1, 1)
    trainer = bare(
        args=Fake(metric_for_best_model=metric, learning_rate=0.5),
        accelerator=Fake(mixed_precision=mixed, unwrap_model=lambda model: model),
        model=model,
        fixed_facts={"given": 1},
        _base_model=lambda: model,
    )
    facts = trainer._fixed()
    assert (facts["given"], facts["learning_rate"], facts["precision"]) == (1, 0.5, precision)
    assert ("metric_for_best_model" in facts) is (metric is not None)
    assert facts.get("layer_norm_eps") == (0.1 if ours else None)
    assert facts["model_class"].endswith("ForConditionalGeneration" if ours else ":Linear")


@pytest.mark.parametrize(
    ("loss", "name"), [(None, None), (patient, "patient"), (Fake(), "SimpleNamespace")]
)
def test_facts_of_the_objective_name_its_function(loss: Any, name: str | None) -> None:
    model = Fake(config=Fake(dropout=0.3))
    trainer = bare(args=Fake(), model=model, compute_loss_func=loss, _teachers=["teacher"])
    facts = trainer._objective()
    assert facts["compute_loss_func"] == name
    assert (facts["dropout"], facts["teacher"]) == (0.3, ["teacher"])


class Counting(TrainerCallback, ExportableState):
    """A callback with a count that checkpoints keep."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> dict[str, Any]:
        return counted(self.count)


def counted(count: int) -> dict[str, Any]:
    return {"args": {}, "attributes": {"count": count}}


@pytest.mark.parametrize(
    ("saved", "counts"),
    [
        ({}, [0]),
        ({"Counting": counted(3)}, [3]),
        ({"Counting": counted(3)}, [3, 0]),
        ({"Counting": [counted(3), counted(4)]}, [3, 4]),
        ({"Counting": [counted(3), counted(4)]}, [3]),
    ],
)
def test_callbacks_go_on_with_their_counts(saved: dict[str, Any], counts: list[int]) -> None:
    callbacks = [Counting() for _ in counts]
    control = TrainerControl()
    other = TrainerControl(should_log=True).state()
    state = Fake(stateful_callbacks={**saved, "TrainerControl": other})
    handler = Fake(callbacks=[object(), *callbacks])
    bare(state=state, control=control, callback_handler=handler)._load_callback_state()
    assert [callback.count for callback in callbacks] == counts
    assert not control.should_log
    states = [counted(count) for count in counts]
    assert state.stateful_callbacks == {
        "Counting": states if len(states) > 1 else states[0],
        "TrainerControl": control.state(),
    }


Loaded = namedtuple("Loaded", ["missing_keys", "unexpected_keys"])


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("resumed", [None, Path("checkpoint")])
def test_tied_weights_are_not_missing(
    ours: bool, resumed: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    checked: list[Any] = []
    replace(monkeypatch, "_issue_warnings_after_load", lambda trainer, found: told.append(found))
    monkeypatch.setattr(resumable_trainer, "check_weights", lambda *given: checked.append(given))
    model = tiny_model() if ours else nn.Linear(1, 1)
    model.all_tied_weights_keys = {"lm_head.weight": "shared"}
    trainer = bare(model=model, args=Fake(output_dir="run"), _resumed_from=resumed)
    trainer._issue_warnings_after_load(Loaded(["lm_head.weight", "fc1"], ["fc9"]))
    assert told == [Loaded(["fc1"], ["fc9"])]
    info = {"missing_keys": ["fc1"], "unexpected_keys": ["fc9"], "mismatched_keys": ()}
    assert checked == ([(resumed or Path("run"), info)] if ours else [])


def test_end_keeps_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of one would delete it if another one is the best."""
    args = Fake(save_total_limit=1)
    replace(monkeypatch, "_finalize_training", lambda *_: args.save_total_limit)
    trainer = bare(args=args, _evaluate_if_due=lambda time: None)
    assert trainer._finalize_training(None, 8, 0.0) is None
    assert args.save_total_limit == 1


def test_checkpoint_is_pushed_after_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    replace(monkeypatch, "_push_from_checkpoint", lambda trainer, folder: pushed.append(folder))
    replace(monkeypatch, "_get_output_dir", lambda trainer, trial: "run")
    for staging, folder in ((None, "run"), (Path("staged"), "staged")):
        trainer = bare(_staging=staging)
        assert trainer._get_output_dir(None) == folder
        trainer._push_from_checkpoint(folder)
    assert pushed == ["run"]


def test_tokens_that_a_call_does_not_read_are_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = padding_collator(None).tokenizer
    monkeypatch.setattr(
        resumable_trainer, "unrecognised_tokens", lambda given: ["a", "b", "c", "d"]
    )
    make_trainer(tmp_path, processing_class=tokenizer)
    assert "reads its tokens a, b, c as ordinary text" in capsys.readouterr().out


def test_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    message = error_of(trainer.train, resume_from_checkpoint=str(tmp_path))
    assert message.endswith("is not complete: it has no trainer_state.json")


def test_run_without_an_update_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, "train", lambda *_, **settings: settings)
    trainer = make_trainer(tmp_path)
    assert error_of(trainer.train) == "no update was trained: the training data has no batch"
    trainer.state.global_step = 1
    assert trainer.train() == {"resume_from_checkpoint": None}
