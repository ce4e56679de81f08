"""The evaluations of a run with `max_minutes` take a tenth of them, from the first one on."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.state import callbacks
from hf_vanilla_transformer.training.trainer import evaluation_budget
from hf_vanilla_transformer.training.trainer.evaluation_budget import EvaluationBudget, longest_cut
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [(f"number {index} of many", f"nummer {index} von vielen") for index in range(60)]
UPDATE = 2.0  # seconds
SENTENCE = 0.1
SECONDS = 120


class Clock:
    """The time of a machine whose updates and sentences take a number of seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.evaluating = 0.0
        step = callbacks.FitThreads.on_step_begin
        predict = VanillaTransformerTrainer.prediction_step

        def timed_step(callback: Any, *arguments: Any, **settings: Any) -> None:
            self.now += UPDATE
            step(callback, *arguments, **settings)

        def timed_prediction(
            trainer: Any,
            model: Any,
            inputs: Any,
            *arguments: Any,
            **settings: Any,
        ) -> Any:
            if trainer.is_in_train:
                seconds = SENTENCE * len(inputs["labels"])
                self.now += seconds
                self.evaluating += seconds
            return predict(trainer, model, inputs, *arguments, **settings)

        monkeypatch.setattr(callbacks.FitThreads, "on_step_begin", timed_step)
        monkeypatch.setattr(VanillaTransformerTrainer, "prediction_step", timed_prediction)
        for module in (callbacks, evaluation_budget):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


RUN = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 0.01,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "max_minutes": SECONDS / 60,
    "num_train_epochs": 100,
    "eval_strategy": "steps",
    "eval_steps": 0.1,
    "save_strategy": "no",
}


def history(folder: Path, name: str) -> list[dict[str, Any]]:
    """The logged entries with this metric."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if name in entry]


@pytest.mark.slow
def test_evaluations_take_a_tenth_and_the_rate_decays(tmp_path, monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    files = write_pairs(tmp_path, PAIRS, "train", "validation")
    results = run_tiny(tmp_path / "run", **RUN, **files)
    printed = capsys.readouterr().out
    assert 0.06 * SECONDS < clock.evaluating <= 0.1 * SECONDS + 1e-6
    planned = int(0.9 * SECONDS / UPDATE)
    assert f"\nschedule: {planned} updates" in printed
    assert results["train_updates"] == planned
    last_rate = history(tmp_path / "run", "learning_rate")[-1]["learning_rate"]
    assert last_rate <= 0.01 / (planned - 2) * 1.01
    # the last evaluation of the history is of all sentences, after training
    counts = [entry.get("eval_sentences", 60) for entry in history(tmp_path / "run", "eval_bleu")]
    assert len(counts) >= 5
    assert max(counts) <= 60
    assert counts[0] < 30
    assert re.search(r"validation  \d+ sentences  loss", printed)
    assert results["eval_sentences"] == 60


@pytest.mark.slow
def test_scores_that_select_weights_are_of_the_same_sentences(tmp_path, monkeypatch) -> None:
    Clock(monkeypatch)
    files = write_pairs(tmp_path, PAIRS, "train", "validation")
    run_tiny(
        tmp_path / "run",
        **RUN | {"save_strategy": "best"},
        **files,
        metric_for_best_model="bleu",
    )
    *counts, _ = [entry.get("eval_sentences") for entry in history(tmp_path / "run", "eval_bleu")]
    assert len(set(counts)) == 1
    assert counts[0] is not None


@pytest.mark.usefixtures("limit_of_the_package")
def test_translations_that_do_not_end_are_cut_after_their_references(
    tmp_path, monkeypatch, caplog
) -> None:
    """Without a limit of minutes they are whole, and of all sentences."""
    excess = []
    original = VanillaTransformerTrainer.prediction_step

    def noted(trainer: Any, model: Any, inputs: Any, *arguments: Any, **settings: Any) -> Any:
        most = longest_cut(inputs["labels"].shape[1])
        loss, ids, kept = original(trainer, model, inputs, *arguments, **settings)
        if trainer.is_in_train:
            length = (ids != trainer.model.config.pad_token_id).sum(dim=1).max()
            excess.append(int(length) - most)
        return loss, ids, kept

    monkeypatch.setattr(VanillaTransformerTrainer, "prediction_step", noted)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    settings = {
        **RUN,
        **write_pairs(tmp_path, PAIRS[:20], "train", "validation"),
        "max_steps": 2,
        "eval_steps": 1,
        "generation_max_length": "null",
    }
    run_tiny(
        tmp_path / "run", **settings | {"max_minutes": 60}
    )  # random weights repeat tokens without an end
    assert "max_length" not in caplog.text
    assert excess
    assert max(excess) <= 1
    excess.clear()
    run_tiny(tmp_path / "whole", **settings | {"max_minutes": "null"})
    assert max(excess) > 1
    assert not history(tmp_path / "whole", "eval_sentences")


class Budgeted:
    """A trainer whose sentences take half a second, and the clock of its run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **state: Any):
        self.now = 0.0
        self.ended = 0.0
        self.eval_dataset = range(1000)
        self.args = SimpleNamespace(
            metric_for_best_model=state.pop("metric", None),
            eval_strategy=state.pop("strategy", "steps"),
        )
        given = {"max_steps": 100, "global_step": 0, "eval_steps": 10}
        self.state = SimpleNamespace(**given | state)
        for module in (callbacks, evaluation_budget):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def translate_rows(self, rows: Any) -> None:
        self.now += 0.5 * len(rows)


@pytest.mark.parametrize(
    ("state", "spent", "evaluating", "evaluations"),
    [
        ({}, 0, 0, 11),  # as many as the updates have, and the first
        ({"global_step": 50}, 300, 30, 6),  # the time is enough for all that are left
        ({"global_step": 10}, 500, 20, 2),  # and here for 10 * 500 / 480 updates
        ({"global_step": 10, "eval_steps": 2}, 500, 20, 6),
        ({"strategy": "epoch", "num_train_epochs": 4}, 0, 0, 5),
        ({"eval_steps": None}, 0, 0, 101),
        ({"strategy": "epoch", "num_train_epochs": 1}, 0, 0, 2),
        ({"global_step": 100}, 900, 50, 1),
        ({"global_step": 102, "eval_steps": 1}, 900, 50, 1),
        ({"global_step": 10, "eval_steps": 1}, 1100, 20, 1),  # the time is over
        ({"global_step": 100}, 900, 110, 1),  # nothing is left
    ],
)
def test_evaluation_has_an_equal_share_of_what_is_left(
    state,
    spent,
    evaluating,
    evaluations,
    monkeypatch,
) -> None:
    trainer = Budgeted(monkeypatch, **state)
    stop = callbacks.StopWithCheckpoint(max_minutes=1000 / 60)
    stop.spent = float(spent)
    stop.evaluation_seconds = float(evaluating)
    budget = EvaluationBudget(stop)
    allowed = max(0, 100 - evaluating) / evaluations
    assert budget._allowed_seconds(trainer) == pytest.approx(allowed)
    affordable = max(1, int((allowed - 2) / 0.5))  # 4 sentences are measured first
    with budget.evaluation(trainer):
        assert budget.rows.tolist() == [
            round(999 * place / max(affordable - 1, 1)) for place in range(affordable)
        ]
        assert not budget.is_whole
        trainer.now += 0.25 * affordable
    assert stop.evaluation_seconds == evaluating + 2 + 0.25 * affordable
    assert budget._seconds_per_sentence == 0.25
    assert budget.rows is None


def test_sentences_of_a_selection_stay_and_translations_that_end_are_whole(monkeypatch) -> None:
    trainer = Budgeted(monkeypatch, metric="bleu", eval_steps=100)
    budget = EvaluationBudget(callbacks.StopWithCheckpoint(max_minutes=100 / 60))
    counts = []
    for ended in (0.89, 0.9):
        assert budget.cuts
        trainer.ended = ended
        with budget.evaluation(trainer):
            counts.append(len(budget.rows))
            trainer.now += 0.001
    assert counts == [6, 6]  # (10 / 2 - 2) / 0.5
    assert not budget.cuts
    trainer.eval_dataset = range(6)
    with budget.evaluation(trainer):
        assert budget.is_whole
    assert budget.state()["attributes"]["_sentences"] == 6


def test_cut_is_after_one_and_a_half_references() -> None:
    assert [longest_cut(length) for length in (0, 1, 2, 3, 10)] == [5, 7, 8, 10, 20]
