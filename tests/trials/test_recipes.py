"""A part of the trial with random recipes. `python -m tests.trials.recipes` runs all of it."""

from pathlib import Path

import pytest

from tests.trials import recipes


@pytest.mark.slow
def test_random_recipes_end_trained_or_in_one_line(tmp_path: Path) -> None:
    outcomes = {number: outcome for number, *_, outcome in recipes.run_cases(range(1000, 1025), 0, tmp_path)}
    faults = {number: outcome.faults for number, outcome in outcomes.items() if outcome.faults}
    assert not faults, "\n".join(f"{number}: {outcomes[number].output[-2000:]}" for number in faults)
    kinds = {outcome.kind for outcome in outcomes.values()}
    assert kinds == {"trained and saved", "refused in one line"}


def test_judge_notices_faults(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    files = recipes.files_in(tmp_path)
    (tmp_path / "notes.txt").write_text("changed")
    trained = recipes.Outcome(0, "")
    recipes.judge(trained, tmp_path, "nothing", files)
    assert trained.faults == ["trained, but there is no all_results.json", "changed or lost: notes.txt"]
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
