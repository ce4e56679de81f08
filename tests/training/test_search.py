"""Search for the values of fields: whole runs, in folders of their own, of which no finished one is repeated."""

import json

import pytest

from hf_vanilla_transformer.training import search as searching
from hf_vanilla_transformer.training.search import search
from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import TINY_RUN, as_flags, write_pairs

optuna = pytest.importorskip("optuna", reason="the extra `search` is not installed")
PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four hundred", "vierhundert"), ("five", "fünf")]


@pytest.fixture
def flags(tmp_path):
    files = write_pairs(tmp_path, PAIRS, "train", "validation")
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    settings |= {"search": ["learning_rate=1e-4..1e-1", "dropout=0,0.3"], "search_trials": 3, "save_steps": 1}
    return [f"--output_dir={tmp_path / 'runs'}", *as_flags({**TINY_RUN, **files, **settings})]


def test_search_trains_whole_runs_and_returns_the_best(flags, tmp_path, capsys, monkeypatch):
    best = search(flags)
    folders = [tmp_path / "runs" / f"trial-{number}" for number in range(3)]
    recorded = json.loads((tmp_path / "runs" / "search.json").read_text())
    values = [recorded[folder.name] for folder in folders]
    losses = [json.loads((folder / "all_results.json").read_text())["eval_loss"] for folder in folders]
    assert best["eval_loss"] == min(losses) and best["output_dir"] == str(folders[losses.index(min(losses))])
    assert all(1e-4 <= each["learning_rate"] <= 1e-1 and each["dropout"] in ("0", "0.3") for each in values)
    assert len({each["learning_rate"] for each in values}) == 3
    for folder, each in zip(folders, values, strict=True):
        assert json.loads((folder / "config.json").read_text())["dropout"] == float(each["dropout"])
    assert f"validation loss {min(losses):.2f}" in capsys.readouterr().out
    # The same command trains nothing again, and a search with more trials goes on with the same proposals.
    monkeypatch.setattr(searching, "run_training", lambda *_, **__: pytest.fail("it trained"))
    assert search(flags)["output_dir"] == best["output_dir"]
    with pytest.raises(UserError, match="name a new output_dir"):
        search([*flags, "--search", "learning_rate=1e-4..1e-2"])


def test_failed_trials_are_left_out(flags, capsys):
    best = search([*flags, "--search", "encoder_attention_heads=2,3", "--search_trials", "4"])
    printed = capsys.readouterr().out
    assert best["encoder_attention_heads"] == "2" and "failed: d_model" in printed


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (["--search", "learning_rat=1e-4..1"], "learning_rat"),
        (["--search", "learning_rate=high"], "search"),
        (["--search", "learning_rate=1..0"], "search"),
        (["--search_trials", "0"], "search_trials"),
        (["--validation", "null", "--eval_strategy", "no"], "search"),
    ],
)
def test_wrong_search_is_refused_in_one_line(flags, more, name):
    with pytest.raises(UserError, match=name) as raised:
        search([*flags, *more])
    assert "\n" not in str(raised.value)
