"""A run with several seeds: what a kill leaves is finished, and the table is that of the scores."""

import json
import re
import shutil
from statistics import mean, stdev

import pytest

from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.run.seeds import scores_of_seeds
from tests.trainer_helpers import SAVING, TINY_RUN, as_flags, error_of, write_pairs

PAIRS = [
    ("One dog", "Ein Hund"),
    ("A cat", "Eine Katze"),
    ("Three dogs", "Drei Hunde"),
    ("Two cats", "Zwei Katzen"),
]


@pytest.fixture
def train(command, tmp_path):
    flags = as_flags(
        {
            **TINY_RUN,
            **SAVING,
            **write_pairs(tmp_path / "data", PAIRS, "train", "test"),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "metrics": ["character_error_rate"],
        }
    )

    def train(folder, *more, seeds=(1, 2)):
        return command("train", *flags, "--seeds", *seeds, "--output_dir", folder, *more)

    return train


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_killed_seeds_end_in_the_same_table(train, tmp_path):
    whole = tmp_path / "whole"
    status, printed, errors = train(whole)
    assert status == 0, errors
    runs = [whole / "seed-1", whole / "seed-2"]
    scores = [read(run / "all_results.json")["test_character_error_rate"] for run in runs]
    assert scores[0] != scores[1]
    cells = f"{mean(scores):.2f} ± {stdev(scores):.2f} | {scores[0]:.2f} | {scores[1]:.2f}"
    row = f"| test character error rate | {cells} |"
    cards = [(run / "README.md").read_text(encoding="utf-8") for run in runs]
    assert [text.count(row) for text in (printed, *cards)] == [1, 1, 1]

    # as a kill after the first update of the second seed leaves it
    killed = tmp_path / "killed"
    card = killed / "seed-1" / "README.md"
    weights = killed / "seed-1" / "model.safetensors"
    shutil.copytree(whole / "seed-1", killed / "seed-1")
    shutil.copytree(whole / "seed-2" / "checkpoint-1", killed / "seed-2" / "checkpoint-1")
    stored = read(whole / "seeds.json")
    (killed / "seeds.json").write_text(json.dumps({"fields": stored["fields"]}))
    kept = weights.stat()
    status, resumed, errors = train(killed)
    assert status == 0, errors
    assert weights.stat() == kept
    assert "checkpoint-1" in resumed
    assert read(killed / "seeds.json") == stored
    assert card.read_text(encoding="utf-8") == cards[0]

    # as a kill between the results and the card leaves them
    card.unlink()
    status, _, errors = train(killed)
    assert status == 0, errors
    assert read(killed / "seeds.json") == stored
    assert card.read_text(encoding="utf-8").count(row) == 1

    status, _, errors = train(whole, "--max_steps", "3")
    assert status == 2
    assert re.match(
        r"error: max_steps: 3, but the runs in .* have 2: name a new output_dir", errors
    )


@pytest.mark.parametrize("seeds", ["1", "1 1"])
def test_seeds_are_several_different_ones(train, tmp_path, seeds):
    status, _, errors = train(tmp_path / "run", seeds=seeds.split())
    assert status == 2
    assert errors == f"error: seeds: {seeds}: give two or more different ones, such as 1 2 3\n"


def test_one_run_refuses_seeds(tmp_path):
    parsed = parse_recipe(["--output_dir", str(tmp_path / "run"), "--seeds", "1", "2"])
    assert error_of(run_training, *parsed).startswith("seeds: this is one run")
    assert not (tmp_path / "run").exists()


def test_table_has_test_scores_and_those_of_validation_without_a_test():
    first = {
        "test_mine:f": 1.0,
        "test_exact_match": 50.0,
        "test_seconds": 2.0,
        "eval_exact_match": 3.0,
    }
    second = first | {"test_exact_match": 52.0}
    scores = scores_of_seeds({3: first, 5: second}, ["mine:f"])
    assert list(scores) == ["test_exact_match", "test_mine:f"]
    assert scores["test_exact_match"] == {
        "mean": 51,
        "deviation": 2**0.5,
        "seeds": {"3": 50.0, "5": 52.0},
    }
    without_test = {"eval_exact_match": 3.0}
    assert list(scores_of_seeds({1: without_test, 2: without_test})) == ["eval_exact_match"]
