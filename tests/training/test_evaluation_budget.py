"""The evaluations of a run with `max_minutes` take a tenth of them, from the first one on."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.state import callbacks
from hf_vanilla_transformer.training.trainer import evaluation_budget
from hf_vanilla_transformer.training.trainer.evaluation_budget import longest_cut
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [(f"number {index} of many", f"nummer {index} von vielen") for index in range(60)]
UPDATE, SENTENCE, MINUTES = 2.0, 0.1, 2  # seconds


class Clock:
    """The time of a machine whose updates and sentences take a number of seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.evaluating = 0.0
        self.limits: list[int | None] = []
        step = callbacks.FitThreads.on_step_begin
        predict = VanillaTransformerTrainer.prediction_step

        def timed_step(callback: Any, *arguments: Any, **settings: Any) -> None:
            self.now += UPDATE
            step(callback, *arguments, **settings)

        def timed_prediction(trainer: Any, model: Any, inputs: Any, *arguments: Any, **settings: Any) -> Any:
            if trainer.is_in_train:
                seconds = SENTENCE * len(inputs["labels"])
                self.now += seconds
                self.evaluating += seconds
            return predict(trainer, model, inputs, *arguments, **settings)

        monkeypatch.setattr(callbacks.FitThreads, "on_step_begin", timed_step)
        monkeypatch.setattr(VanillaTransformerTrainer, "prediction_step", timed_prediction)
        for module in (callbacks, evaluation_budget):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


RUN: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 0.01,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "max_minutes": MINUTES,
    "num_train_epochs": 100,
    "eval_strategy": "steps",
    "eval_steps": 0.1,
    "save_strategy": "no",
}


def history(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_evaluations_take_a_tenth_and_the_rate_decays(tmp_path, monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    files = write_pairs(tmp_path, PAIRS, "train", "validation")
    results = run_tiny(tmp_path / "run", **RUN, **files)
    printed = capsys.readouterr().out
    assert 0.06 * 60 * MINUTES < clock.evaluating <= 0.1 * 60 * MINUTES + 1e-6
    planned = int(re.findall(r"^schedule: (\d+) updates", printed, re.M)[0])
    assert results["train_updates"] == planned == int(0.9 * 60 * MINUTES / UPDATE)
    rates = [entry["learning_rate"] for entry in history(tmp_path / "run") if "learning_rate" in entry]
    assert rates[-1] <= 0.01 / (planned - 2) * 1.01
    evaluations = [entry for entry in history(tmp_path / "run") if "eval_bleu" in entry]
    # the last evaluation of the history is of all sentences, after training
    assert len(evaluations) >= 5 and all(entry.get("eval_sentences", 60) <= 60 for entry in evaluations)
    assert evaluations[0]["eval_sentences"] < 30
    assert re.search(r"validation  \d+ sentences  loss", printed)
    assert results["eval_sentences"] == 60


def test_scores_that_select_weights_are_of_the_same_sentences(tmp_path, monkeypatch) -> None:
    Clock(monkeypatch)
    files = write_pairs(tmp_path, PAIRS, "train", "validation")
    run_tiny(tmp_path / "run", **RUN | {"save_strategy": "best"}, **files, metric_for_best_model="bleu")
    counts = [entry.get("eval_sentences") for entry in history(tmp_path / "run") if "eval_bleu" in entry]
    assert len(set(counts[:-1])) == 1 and counts[0] is not None


@pytest.mark.usefixtures("limit_of_the_package")
def test_translations_that_do_not_end_are_cut_after_their_references(tmp_path, monkeypatch, caplog) -> None:
    lengths: list[tuple[int, int]] = []
    original = VanillaTransformerTrainer.prediction_step

    def noted(trainer: Any, model: Any, inputs: Any, *arguments: Any, **settings: Any) -> Any:
        labels = inputs["labels"].shape[1]
        loss, ids, kept = original(trainer, model, inputs, *arguments, **settings)
        if trainer.is_in_train:
            pad = trainer.model.config.pad_token_id
            lengths.append((int((ids != pad).sum(dim=1).max()), longest_cut(labels)))
        return loss, ids, kept

    monkeypatch.setattr(VanillaTransformerTrainer, "prediction_step", noted)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    files = write_pairs(tmp_path, PAIRS[:20], "train", "validation")
    settings = {"max_steps": 2, "eval_steps": 1, "max_minutes": 60, "generation_max_length": "null"}
    run_tiny(tmp_path / "run", **RUN | settings, **files)  # random weights repeat tokens without an end
    assert "max_length" not in caplog.text
    assert lengths and all(length <= most + 1 for length, most in lengths)
    lengths.clear()
    run_tiny(tmp_path / "whole", **RUN | settings | {"max_minutes": "null"}, **files)
    assert any(length > most + 1 for length, most in lengths)


def test_run_without_a_limit_of_minutes_evaluates_all_sentences(tmp_path) -> None:
    files = write_pairs(tmp_path, PAIRS[:20], "train", "validation")
    run_tiny(tmp_path / "run", **RUN | {"max_steps": 2, "eval_steps": 1, "max_minutes": "null"}, **files)
    assert all("eval_sentences" not in entry for entry in history(tmp_path / "run"))
