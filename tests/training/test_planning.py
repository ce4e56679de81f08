"""A run chooses fields by the number of its training pairs and updates by its minutes, and keeps both at a resume."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import SchedulerType, TrainerState, TrainingArguments, get_scheduler

from hf_vanilla_transformer.training.run import planning
from hf_vanilla_transformer.training.run.arguments import Choice
from hf_vanilla_transformer.training.run.planning import PlanUpdates, choose_by_pairs, make_schedule
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.state import callbacks
from hf_vanilla_transformer.training.state.callbacks import StopWithCheckpoint
from tests.trainer_helpers import assert_same_model, error_of, run_tiny, write_pairs

ROWS = {4: {"d_model": 8, "why": "few"}, 12: {"d_model": 24, "dropout": 0.3}}
TRAIN = {
    "per_device_train_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 5,
    "learning_rate": 0.01,
    "seed": 3,
    "d_model": None,  # the rows have it
}


@pytest.fixture
def recipe(tmp_path):
    def write(rows, **fields):
        path = tmp_path / "sized.yaml"
        path.write_text(
            yaml.safe_dump({"output_dir": "x", "by_pairs": rows, **fields}), encoding="utf-8"
        )
        return path

    return write


@pytest.fixture
def pairs(tmp_path):
    def write(count):
        words = [(f"number {index}", f"nummer {index}") for index in range(count)]
        return write_pairs(tmp_path / f"text{count}", words)

    return write


def saved_config(folder):
    return json.loads((folder / "config.json").read_text())


def width(folder):
    return saved_config(folder)["d_model"]


@pytest.mark.parametrize(
    ("count", "fields", "expected", "printed"),
    [
        (4, {}, 8, "d_model=8"),
        (5, {}, 24, "d_model=24"),
        (12, {}, 24, "d_model=24"),
        (13, {}, 24, "d_model=24"),
        (3, {"train_weights": 5}, 8, "d_model=8"),  # the weights of inputs do not count
        (12, {"d_model": 32}, 32, "dropout=0.3"),  # flags win
    ],
)
def test_fields_follow_the_number_of_pairs(
    tmp_path,
    recipe,
    pairs,
    capsys,
    count,
    fields,
    expected,
    printed,
):
    run_tiny(tmp_path / "run", recipe(ROWS), **TRAIN | fields, **pairs(count), max_steps=1)
    assert width(tmp_path / "run") == expected
    output = capsys.readouterr().out
    assert printed in output
    assert ("d_model=" in output) == ("d_model" not in fields)
    assert ("few" in output) == (expected == 8)
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"d_model: {expected}" in card
    assert "by_pairs" not in card


def test_resumed_run_keeps_its_fields(tmp_path, recipe, pairs):
    folder = tmp_path / "run"
    run_tiny(folder, recipe(ROWS), **TRAIN, **pairs(4), max_steps=5)
    more = {
        **TRAIN,
        **pairs(12),
        "ignore_data_skip": True,
        "resume_from_checkpoint": True,
    }
    run_tiny(folder, recipe(ROWS), **more, max_steps=10)
    assert width(folder) == 8
    moved = {8: ROWS[4], 12: ROWS[12]}
    message = error_of(run_tiny, folder, recipe(moved), **more, max_steps=15)
    assert "d_model" in message
    assert "checkpoint-10" in message


def test_fine_tuning_refuses_a_size_that_its_base_does_not_have(tmp_path, recipe, pairs):
    base = tmp_path / "base"
    settings = {**TRAIN, **pairs(12), "max_steps": 1}
    run_tiny(base, **settings | {"d_model": 16})
    settings |= {"model_name_or_path": base, "vocab_size": saved_config(base)["vocab_size"]}
    message = error_of(run_tiny, tmp_path / "tuned", recipe(ROWS), **settings)
    assert "d_model: 24" in message
    assert "16" in message


NO_ROWS = "by_pairs needs rows such as `20000: {dropout: 0.3, why: few words}`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "by_pairs: {4: {d_modle: 8}}",
            "by_pairs: 4 has an unknown field d_modle; did you mean d_model?",
        ),
        (
            "by_pairs: {4: {dropout: 0.1}}\ndropout: 0.2",
            "by_pairs: 4: dropout is outside by_pairs too: keep one",
        ),
        ("by_pairs: {4: {train: [a, b]}}", "by_pairs: 4: train cannot depend on the pairs"),
        ("by_pairs: {4: {seed: 2}}", "by_pairs: 4: seed cannot depend on the pairs"),
        ("by_pairs: {few: {dropout: 0.1}}", NO_ROWS),
        ("by_pairs: {0: {dropout: 0.1}}", NO_ROWS),
        ("by_pairs: {4: 0.1}", NO_ROWS),
        ("by_pairs: [0.1]", NO_ROWS),
    ],
)
def test_wrong_rows_are_refused(tmp_path, text, message):
    path = tmp_path / "sized.yaml"
    path.write_text(f"output_dir: x\n{text}\n", encoding="utf-8")
    assert error_of(parse_recipe, [str(path)]) == f"{path}: {message}"


def test_wrong_value_of_a_row_is_named(recipe):
    message = error_of(parse_recipe, [str(recipe({4: {"dropout": "much"}}))])
    assert "--dropout: invalid float value: 'much'" in message


@pytest.mark.parametrize(
    ("pairs", "kept", "max_steps", "limit", "updates"),
    [
        (4, {}, -1, 4, -1),
        (5, {}, -1, 9, -1),
        (13, {}, -1, 12, -1),
        (5, {planning.CHOICE: 4, planning.UPDATES: 30}, -1, 4, 30),
        (5, {planning.CHOICE: 4, planning.UPDATES: 30}, 7, 4, 7),
        (9, {planning.CHOICE: 6}, -1, 9, -1),  # a row that the recipe has no longer
    ],
)
def test_resume_keeps_the_row_and_the_planned_updates(
    monkeypatch, capsys, pairs, kept, max_steps, limit, updates
):
    monkeypatch.setattr(planning, "read_run_state", lambda folder: SimpleNamespace(fixed=kept))
    rows = {
        size: Choice(fields, why, (size, size, SimpleNamespace(max_steps=max_steps)))
        for size, fields, why in (
            (12, {"dropout": 0.3, "d_model": 8}, ""),
            (4, {}, "few"),
            (9, {}, ""),
        )
    }
    corpus = SimpleNamespace(
        reports={"train": SimpleNamespace(kept=pairs)}, pairs={"train": range(pairs)}
    )
    args = SimpleNamespace(choices=rows)
    *_, args, facts = choose_by_pairs((0, 0, args), corpus, "checkpoint-1" if kept else None)
    assert facts.pop(planning.CHOICE) == limit
    assert args.max_steps == updates
    assert facts == ({planning.UPDATES: 30} if updates == 30 else {})
    said = {4: "4: few\n  \n", 9: "9\n  \n", 12: "12\n  dropout=0.3 d_model=8\n"}[limit]
    number = f"{pairs} training pairs"
    assert capsys.readouterr().out == f"{number}: the recipe's fields for up to {said}"


@pytest.mark.parametrize(("rate", "expected"), [(None, 1.0), (0.25, 0.25)])
def test_schedule_warms_up_to_the_learning_rate(rate, expected):
    args = TrainingArguments("unused", use_cpu=True, learning_rate=rate, warmup_steps=0.5)
    schedule = make_schedule(args, 8)
    rates = [schedule.base_lrs[0] * schedule.lr_lambdas[0](step) for step in (2, 4, 6, 8)]
    assert rates == [expected / 2, expected, expected / 2, 0]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("linear", [()] * 3),
        (SchedulerType("greedy"), [(1.0,)] * 3),
        ("reduce_lr_on_plateau", [(1.0,)] * 3),
    ],
)
@pytest.mark.parametrize(("max_steps", "updates"), [(1, 1), (7, 7), (-1, 1000)])
def test_schedule_is_tried_before_training(monkeypatch, kind, steps, max_steps, updates):
    made = []
    taken = []

    def make(arguments, count):
        made.append(count)
        optimizer = SimpleNamespace(step=lambda: None)
        return SimpleNamespace(optimizer=optimizer, step=lambda *loss: taken.append(loss))

    monkeypatch.setattr(planning, "make_schedule", make)
    fields = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": None}
    planning.check_schedule(SimpleNamespace(max_steps=max_steps, **fields))
    assert (made, taken) == ([updates], steps)


@pytest.fixture
def clock(monkeypatch):
    """The clock of a run. `seconds` gives those of an update from the number of updates before it."""
    clock = SimpleNamespace(now=0.0, seconds=lambda updates: 0.0)
    original = callbacks.FitThreads.on_step_begin

    def step(callback, args, state, control, **settings):
        clock.now += clock.seconds(state.global_step)
        original(callback, args, state, control, **settings)

    monkeypatch.setattr(callbacks.FitThreads, "on_step_begin", step)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: clock.now)
    return clock


def planned(folder, flags, **fields):
    """Train. Return the updates and the learning rates that were logged."""
    run_tiny(folder, **flags, **TRAIN | fields)
    state = TrainerState.load_from_json(folder / "trainer_state.json")
    rates = [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry]
    return state.global_step, rates


SCHEDULED = {
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
    "max_minutes": 5,
    "num_train_epochs": 100,
}


def test_several_ranks_seldom_ask_whether_the_plan_is_due(monkeypatch):
    asked = []
    monkeypatch.setattr(planning, "has_other_ranks", lambda: True)
    monkeypatch.setattr(
        planning,
        "broadcast_from_main",
        lambda make: asked.append(state.global_step) or make(),
    )
    schedule = make_schedule(TrainingArguments("unused", use_cpu=True), 100)
    plan = PlanUpdates(
        SimpleNamespace(lr_scheduler=schedule, fixed_facts={}), StopWithCheckpoint(max_minutes=100)
    )
    state = TrainerState()
    for step in range(1, 45):
        state.global_step = step
        plan.on_step_end(None, state, None)
    assert asked == [20, 30, 40]


def plans(seconds, at_steps, *, limit=600, updates=None, most=1000, asleep=0, **fields):
    """(update, planned updates) of each plan, from the training seconds at each of these updates."""
    made = []

    class Facts(dict):
        def __setitem__(self, name, number):
            made.append((state.global_step, number))
            super().__setitem__(name, number)

    args = TrainingArguments("unused", use_cpu=True, learning_rate=0.5, **fields)
    facts = Facts({} if updates is None else {planning.UPDATES: updates})
    stop = SimpleNamespace(max_seconds=limit, evaluation_seconds=asleep)
    plan = PlanUpdates(
        SimpleNamespace(lr_scheduler=make_schedule(args, 1000), fixed_facts=facts), stop
    )
    state = TrainerState(max_steps=most)
    for step in at_steps:
        stop.seconds = lambda step=step: seconds(step) + asleep
        state.global_step = step
        plan.on_step_end(args, state, None)
    assert not made or state.max_steps == args.max_steps == made[-1][1]
    return made


def slower(step):
    """1 second an update, after the hundredth 2 seconds."""
    return step + max(0, step - 100)


@pytest.mark.parametrize(
    ("seconds", "fields", "expected"),
    [
        # 540 of 600 seconds are for updates. A twentieth of them, 30, have passed.
        (lambda step: step, {}, [(30, 540)]),
        (lambda step: step, {"asleep": 15}, [(15, 540)]),  # evaluations count as passed
        (lambda step: step, {"most": 400}, [(30, 400)]),  # of the epochs
        (lambda step: 10 + 2 * step, {"limit": 1000}, [(20, 445)]),
        # Checks after 27 updates each. 27 take 45 seconds at the one after 118.
        (slower, {}, [(30, 540), (118, 118 + 404 * 27 // 45), (136, 136 + 368 // 2)]),
        (lambda step: step if step < 30 else 2000, {}, [(30, 31)]),  # at least one
        (lambda step: step / 2, {"most": 5000}, [(60, 1080)]),
        (lambda step: 3 * step, {}, [(11, 180)]),
        (lambda step: 30, {}, [(11, 1000)]),
        (lambda step: step, {"first": 15}, [(30, 540)]),  # of a resumed run
    ],
)
def test_updates_are_planned_from_the_time_of_those_so_far(seconds, fields, expected):
    first = fields.pop("first", 1)
    assert plans(seconds, range(first, 180), **fields) == expected


@pytest.mark.parametrize(
    ("steps", "limit", "expected"),
    [
        # 5 updates in 10 seconds, and (180 - 20) / 2 more, are 95 of 100.
        ((9, 10, 15), 200, []),
        ((9, 10, 15), 198, [(15, 94)]),
        ((9, 10, 15), 20, [(15, 16)]),
        ((9, 10, 14), 20, []),  # less than a twentieth
        ((9, 10, 15, 19), 200, []),  # counted from the last check
        ((9, 10, 100), 20, []),  # the last update
    ],
)
def test_plan_is_checked_after_a_twentieth_of_it(steps, limit, expected):
    assert plans(lambda step: 2 * step - 10, steps, limit=limit, updates=100) == expected


def test_schedule_of_every_group_ends_with_the_plan(capsys):
    args = TrainingArguments("unused", use_cpu=True, eval_steps=0.25)
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (1.0, 3.0)]
    schedule = get_scheduler("linear", torch.optim.SGD(groups), 0, 1000)
    trainer = SimpleNamespace(lr_scheduler=schedule, fixed_facts={})
    stop = SimpleNamespace(max_seconds=30, evaluation_seconds=0)
    plan = PlanUpdates(trainer, stop)
    state = TrainerState(max_steps=1000)
    for step in (10, 20):
        state.global_step = step
        stop.seconds = lambda step=step: step
        plan.on_step_end(args, state, None)
    assert trainer.fixed_facts == {planning.UPDATES: 27}
    said = "schedule: 27 updates, for 0.5 minutes and 3 epochs at 1 s an update\n"
    assert capsys.readouterr().out == said
    assert state.eval_steps == 7  # a quarter, rounded up
    assert [factor(18) for factor in schedule.lr_lambdas] == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize(
    "fields",
    [
        {"limit": None},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    ],
    ids=str,
)
def test_nothing_is_planned_without_minutes_or_an_end(fields):
    assert plans(lambda step: step, range(1, 60), **fields) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"max_minutes": None}, False),
        ({"max_steps": 1}, False),
        ({"lr_scheduler_type": "inverse_sqrt"}, False),
        ({"lr_scheduler_type": SchedulerType("constant")}, False),
        ({"lr_scheduler_type": SchedulerType("cosine")}, True),
    ],
    ids=str,
)
def test_minutes_plan_a_schedule_that_ends(fields, expected):
    limits = {"max_minutes": 5, "max_steps": -1, "lr_scheduler_type": "linear"}
    assert PlanUpdates.is_needed(SimpleNamespace(**limits | fields)) is expected


@pytest.mark.slow
def test_schedule_ends_with_the_minutes(tmp_path, pairs, clock, capsys):
    clock.seconds = lambda updates: 6  # 50 updates in 5 minutes, of which 45 are planned
    updates, rates = planned(tmp_path / "run", pairs(12), **SCHEDULED, dropout=0.3)
    assert updates == 45
    assert rates[-1] == pytest.approx(0.01 / 42, rel=1e-6)
    assert "schedule: 45 updates" in capsys.readouterr().out
    assert "max_steps: 45" in (tmp_path / "run" / "README.md").read_text()
    # the epochs are still a limit, and a schedule without an end is not planned
    for schedule, seconds in (("inverse_sqrt", 6), ("linear", 0.5)):
        clock.seconds = lambda updates, seconds=seconds: seconds
        limits = {"num_train_epochs": 20, "max_minutes": 20, "lr_scheduler_type": schedule}
        updates, _ = planned(tmp_path / schedule, pairs(12), **SCHEDULED | limits)
        assert updates == 120


@pytest.mark.slow
def test_resumed_run_keeps_its_schedule(tmp_path, pairs, clock):
    settings = {**SCHEDULED, "dropout": 0.3}
    clock.seconds = lambda updates: 6
    planned(tmp_path / "whole", pairs(12), **settings)
    settings["resume_from_checkpoint"] = tmp_path / "whole" / "checkpoint-20"
    clock.seconds = lambda updates: 1
    updates, _ = planned(tmp_path / "resumed", pairs(12), **settings)
    assert updates == 45
    assert_same_model(tmp_path / "whole", tmp_path / "resumed")
    # a number that the user gives wins
    updates, _ = planned(tmp_path / "longer", pairs(12), **settings, max_steps=60)
    assert updates == 60


@pytest.mark.slow
def test_plan_is_shortened_if_updates_become_slower(tmp_path, pairs, clock, capsys):
    """Other processes use the machine: the rate still decays within the minutes."""
    clock.seconds = lambda updates: 6 if updates >= 30 else 3
    updates, rates = planned(tmp_path / "run", pairs(12), **SCHEDULED, save_steps=1000)
    assert 30 < updates < 90
    assert clock.now <= 300
    assert rates[-1] <= 2 * 0.01 / updates
    assert capsys.readouterr().out.count("schedule: ") >= 2
