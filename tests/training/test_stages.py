"""Stages: mixtures by fractions, drawn the same by every run, resume and number of processes, and when they end."""

import json
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hf_vanilla_transformer.data.perturbations import PERTURBATIONS
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.stages import StageSchedule, parse_stages
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer
from hf_vanilla_transformer.utils.errors import Interrupted
from tests.trainer_helpers import as_flags, assert_same_model, error_of, run_tiny, write_pairs

SIZES = {"large": 24, "clean": 5}
BOTH, CLEAN = "fractions: [0.75, 0.25]", "fractions: [0, 1]"


def pairs_of(name):
    return [(f"{name} {'a' * number} {number}", f"{name} {'e' * number} {number}") for number in range(SIZES[name])]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two inputs to train on, and validation text."""
    folder = tmp_path_factory.mktemp("text")
    train = [file for name in SIZES for file in write_pairs(folder / name, pairs_of(name))["train"]]
    return {"train": train, **write_pairs(folder, pairs_of("clean")[:3], "validation")}


def run(folder, files, *stages, **values):
    settings = {"per_device_train_batch_size": 4, "learning_rate": 0.01, "warmup_steps": 1, "dropout": 0.3}
    settings |= {"save_strategy": "no", "eval_strategy": "no", "max_steps": 12, "stages": list(stages)}
    return run_tiny(folder, **files, **settings | values)


def log_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def begins(folder):
    """The updates before each stage."""
    return [entry["step"] for entry in log_of(folder) if "stage" in entry]


def evaluated(folder):
    return [entry["step"] for entry in log_of(folder) if "eval_bleu" in entry]


# 1. What an epoch has


def test_fractions_hold_and_no_pair_is_repeated_before_the_others_of_its_input():
    parts = np.repeat([0, 1, 2], [70, 9, 30])
    stages = parse_stages(
        ["fractions: [0.7, 0.3, 0], epochs: 3", "fractions: [0.2, 0.1, 0.7], epochs: 4", "fractions: [0, 1, 0]"]
    )
    schedule = StageSchedule(stages, parts, seed=3)
    read, epoch = {part: [] for part in range(3)}, 0
    for number, epochs in enumerate((3, 4, 2)):
        if number:
            schedule.start_next(epoch, 0)
        counts = Counter()
        for _ in range(epochs):
            rows = schedule.rows(epoch)
            assert (rows == schedule.rows(epoch)).all()
            counts.update(parts[rows].tolist())
            for row in rows.tolist():
                read[int(parts[row])].append(row)
            epoch += 1
        size = [min(n / f for n, f in zip((70, 9, 30), stage.fractions, strict=True) if f) for stage in stages][number]
        for part, fraction in enumerate(stages[number].fractions):
            assert abs(counts[part] - epochs * size * fraction) <= 1
    for part, rows in read.items():
        size, once = (70, 9, 30)[part], set(np.flatnonzero(parts == part).tolist())
        passes = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
        assert len(rows) > 30 and all(set(each) == once for each in passes)
        assert len({tuple(each) for each in passes}) == len(passes)  # each in another order
    assert not (StageSchedule(stages, parts, seed=4).rows(0) == StageSchedule(stages, parts, seed=3).rows(0)).all()


BATCHES: dict[str, dict[str, Any]] = {
    "pairs": {},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "tokens": {"max_tokens_per_batch": 200, "tokens_per_update": 300},
}


@pytest.mark.parametrize("batches", BATCHES)
def test_run_trains_the_pairs_of_its_stages(files, tmp_path, monkeypatch, batches, capsys):
    trained, step = [], VanillaTransformerTrainer.training_step

    def record(trainer, model, inputs, *arguments):
        for batch in inputs if trainer.by_tokens else [inputs]:
            texts = trainer.processing_class.batch_decode(batch["input_ids"], skip_special_tokens=True)
            trained.extend((trainer._epoch, text.split()[0]) for text in texts)
        return step(trainer, model, inputs, *arguments)

    monkeypatch.setattr(VanillaTransformerTrainer, "training_step", record)
    stages = f"{BOTH}, epochs: 2", f"{CLEAN}, epochs: 3"
    settings = {"max_steps": -1, "num_train_epochs": 9, "lr_scheduler_type": "linear"}
    results = run(tmp_path, files, *stages, **settings | BATCHES[batches])
    counts = Counter(trained)
    assert [(counts[epoch, "large"], counts[epoch, "clean"]) for epoch in range(6)] == [
        *[(15, 5)] * 2,
        *[(0, 5)] * 3,
        (0, 0),
    ]
    assert results["epoch"] == 5
    printed = capsys.readouterr().out
    assert all(f"stage {number} of 2: {text}" in printed for number, text in enumerate(stages, 1))
    begin = begins(tmp_path)
    rates = [entry["learning_rate"] for entry in log_of(tmp_path) if "learning_rate" in entry]
    if batches != "tokens":  # the number of updates of an epoch is known, and the schedule ends with the run
        assert begin == [0, 10] and results["train_updates"] == 16 and rates[-1] == pytest.approx(0.01 / 15)
    assert "stages:" in (tmp_path / "README.md").read_text()


# 2. When a stage ends

DRAWN = {"bpe_dropout": 0.1, "augment": [f"{name}=0.1" for name in PERTURBATIONS]}
SCORED = {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 2}
ENDS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "epochs": ("epochs: 1", {}, [0, 5, 8]),
    "updates": ("updates: 3", {}, [0, 3, 6]),
    "patience": ("patience: 1", SCORED, [0, 4, 6]),  # the score stays 0
    "updates, scored by epochs": ("updates: 3", {"eval_strategy": "epoch"}, [0, 3, 6]),
    "patience by epochs": ("patience: 1", {"eval_strategy": "epoch", "generation_max_length": 2}, [0, 10]),
}


@pytest.mark.parametrize("end", ENDS)
def test_resumed_run_is_the_same_run(files, tmp_path, end):
    until, settings, expected = ENDS[end]
    stages = f"{BOTH}, {until}", f"fractions: [0.5, 0.5], {until}", CLEAN
    values = settings | DRAWN | {"save_strategy": "steps", "save_steps": 1}
    run(tmp_path / "whole", files, *stages, **values)
    assert begins(tmp_path / "whole")[: len(expected)] == expected
    for step in (2, expected[1], expected[1] + 1):
        resumed = tmp_path / f"resumed_{step}"
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        run(resumed, files, *stages, **values, resume_from_checkpoint=checkpoint)
        assert_same_model(tmp_path / "whole", resumed)
        assert begins(resumed) == begins(tmp_path / "whole")
        assert evaluated(resumed) == evaluated(tmp_path / "whole")


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.slow
def test_resumed_run_is_the_same_run_with_other_batches(files, tmp_path, batches):
    stages = f"{BOTH}, epochs: 1", "fractions: [0.4, 0.6], updates: 3", CLEAN
    values = DRAWN | BATCHES[batches] | {"save_strategy": "steps", "save_steps": 1}
    run(tmp_path / "whole", files, *stages, **values)
    for step in range(1, 11):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        run(tmp_path / str(step), files, *stages, **values, resume_from_checkpoint=checkpoint)
        assert_same_model(tmp_path / "whole", tmp_path / str(step))


@pytest.mark.parametrize(
    ("strategy", "until", "update"),
    [("steps", "patience: 1", 4), ("epoch", "patience: 1", 10)],
)
def test_interrupted_evaluation_at_the_end_of_a_stage_is_made_first(
    files, tmp_path, monkeypatch, strategy, until, update
):
    stages, settings, sent = (f"{BOTH}, {until}", CLEAN), SCORED | {"eval_strategy": strategy}, []
    step = VanillaTransformerTrainer.prediction_step

    def interrupt(trainer, *arguments, **values):
        if trainer.is_in_train and trainer.state.global_step == update and not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))
        return step(trainer, *arguments, **values)

    with monkeypatch.context() as context, pytest.raises(Interrupted):
        context.setattr(VanillaTransformerTrainer, "prediction_step", interrupt)
        run(tmp_path / "parts", files, *stages, **settings)
    run(tmp_path / "parts", files, *stages, **settings, resume_from_checkpoint=True)
    run(tmp_path / "whole", files, *stages, **settings)
    assert begins(tmp_path / "parts") == begins(tmp_path / "whole") == [0, update]
    assert evaluated(tmp_path / "parts") == evaluated(tmp_path / "whole")
    assert_same_model(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(("until", "updates"), [("epochs: 2", 4), ("updates: 3", 5), ("patience: 1", 4)])
def test_run_ends_with_its_last_stage(files, tmp_path, until, updates):
    stages = f"{BOTH}, updates: 2", f"{CLEAN}, {until}"
    values = SCORED | {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 50, "max_steps": -1}
    results = run(tmp_path, files, *stages, **values)
    assert results["train_updates"] == updates + 2 * (until == "epochs: 2")
    assert evaluated(tmp_path)[-1] == results["train_updates"]
    again = run(tmp_path, files, *stages, **values, resume_from_checkpoint=True)
    assert again["train_updates"] == results["train_updates"]


def test_run_that_ends_before_its_last_stage_says_so(files, tmp_path, capsys):
    run(tmp_path, files, f"{BOTH}, patience: 3", CLEAN, **SCORED | {"max_steps": 3})
    assert "the run ended in stage 1 of 2" in capsys.readouterr().out


# 3. Directions, and what is refused


@pytest.mark.slow
def test_directions_have_fractions(tmp_path):
    numbers = {"train": "numbers", "numbers_size": 20, "directions": ["en-de", "de-en"]}
    run(tmp_path / "run", numbers, f"{BOTH}, epochs: 1", CLEAN)
    assert len(begins(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("stages", "values", "named"),
    [
        (["fractions: [0.5, 0.4]"], {}, "0.9"),
        (["fractions: [1.5, -0.5]"], {}, "fractions"),
        (["fractions: [.nan, 1]"], {}, "fractions"),
        (["fractions: 1"], {}, "fractions"),
        (["epochs: 2"], {}, "fractions"),
        (["0.5, 0.5"], {}, "fractions"),
        ([f"{BOTH}, steps: 3"], {}, "steps"),
        ([f"{BOTH}, epochs: 3, updates: 5"], {}, "epochs"),
        ([f"{BOTH}, epochs: 0"], {}, "epochs"),
        ([f"{BOTH}, updates: 1.5"], {}, "updates"),
        ([BOTH, CLEAN], {}, "epochs"),
        (["fractions: [1]"], {}, "2 fractions"),
        ([f"{BOTH}, epochs: 2", "fractions: [0.2, 0.3, 0.5]"], {}, "2 fractions"),
        ([BOTH], {"train_weights": [1, 2]}, "train_weights"),
        ([BOTH], {"streaming": True}, "streaming"),
        ([f"{BOTH}, patience: 2", CLEAN], {}, "eval_strategy"),
        ([f"{BOTH}, epochs: 3", CLEAN], {"max_steps": -1, "num_train_epochs": 3}, "num_train_epochs: 3"),
        ([f"{BOTH}, updates: 12", CLEAN], {}, "max_steps: 12"),
    ],
)
def test_wrong_stages_are_refused(files, tmp_path, stages, values, named):
    message = error_of(run, tmp_path, files, *stages, **values)
    assert named in message and ("stage" in message)


def test_resume_with_other_stages_is_refused(files, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 5}
    run(tmp_path, files, f"{BOTH}, updates: 7", CLEAN, **saved)
    more = saved | {"max_steps": 15, "resume_from_checkpoint": True}
    assert "stages: " in error_of(run, tmp_path, files, f"{BOTH}, updates: 8", CLEAN, **more)
    run(tmp_path, files, f"{BOTH}, updates: 8", CLEAN, **more, ignore_data_skip=True)
    assert begins(tmp_path) == [0, 7]  # it goes on in the second one


def test_recipe_and_flags_are_written_alike(files, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "train: [a, b]\noutput_dir: x\nstages:\n  - fractions: [0.75, 0.25]\n    epochs: 3\n  - {fractions: [0, 1]}\n"
    )
    flags = as_flags({"train": ["a", "b"], "output_dir": "x", "stages": [f"{{{BOTH}, epochs: 3}}", f"{{{CLEAN}}}"]})
    assert parse_recipe([str(recipe)])[1] == parse_recipe(flags)[1]
