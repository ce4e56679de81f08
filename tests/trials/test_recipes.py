"""A part of the trial with random recipes. `python -m scripts.trials.recipes` runs all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.trials import recipes


@pytest.mark.slow
def test_random_recipes_end_trained_or_in_one_line() -> None:
    # In a process of its own: a process that has computed a gradient cannot fork another one that computes one.
    command = [sys.executable, "-m", "scripts.trials.recipes", "--first", "1000", "--runs", "25"]
    trial = subprocess.run(command, capture_output=True, text=True)
    assert trial.returncode == 0, trial.stdout[-5000:] + trial.stderr[-2000:]
    summary = trial.stdout.splitlines()[-1]
    assert "trained and saved" in summary and "refused in one line" in summary


def test_judge_notices_faults(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    files = recipes.files_in(tmp_path)
    (tmp_path / "notes.txt").write_text("changed")
    trained = recipes.Outcome(0, "")
    recipes.judge(trained, tmp_path, "nothing", files)
    assert trained.faults == [
        "trained, but there is no all_results.json",
        "changed or lost: notes.txt",
    ]
    for status, output, fault in (
        (1, "Traceback\nKeyError: 'x'\n", "status 1: KeyError: 'x'"),
        (2, "error: a\nerror: b\n", "2 lines of error"),
        (2, "error: a\nmore\n", "the error has more than one line"),
        (-9, "", "status -9: "),
    ):
        outcome = recipes.Outcome(status, output)
        recipes.judge(outcome, tmp_path, "nothing", {})
        assert outcome.faults == [fault]
    refused = recipes.Outcome(2, "reading\nerror: max_steps: 0\n")
    recipes.judge(refused, tmp_path, "nothing", recipes.files_in(tmp_path))
    assert refused.faults == [] and refused.kind == "refused in one line"
