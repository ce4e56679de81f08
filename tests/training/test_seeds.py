"""A run with several seeds: what a kill leaves is finished, and the table is that of the scores."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import pytest

from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.run.seeds import scores_of_seeds
from tests.trainer_helpers import SAVING, TINY_RUN, as_flags, error_of, write_pairs

PAIRS = [("One dog", "Ein Hund"), ("A cat", "Eine Katze"), ("Three dogs", "Drei Hunde"), ("Two cats", "Zwei Katzen")]


@pytest.fixture
def train(command, tmp_path):
    files = as_flags(write_pairs(tmp_path / "data", PAIRS, "train", "test"))
    fields = (
        TINY_RUN | SAVING | {"max_steps": 2, "per_device_train_batch_size": 2, "metrics": ["character_error_rate"]}
    )
    return partial(command, "train", *as_flags(fields), *files)


def test_killed_seeds_end_in_the_same_table(train, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, printed, errors = train("--seeds", "1", "2", "--output_dir", str(whole))
    assert status == 0, errors
    of_seeds = [json.loads((whole / f"seed-{seed}" / "all_results.json").read_text()) for seed in (1, 2)]
    scores = [each["test_character_error_rate"] for each in of_seeds]
    assert scores[0] != scores[1]
    cells = f"{mean(scores):.2f} ± {stdev(scores):.2f} | {scores[0]:.2f} | {scores[1]:.2f}"
    row = f"| test character error rate | {cells} |"
    cards = [(whole / f"seed-{seed}" / "README.md").read_text(encoding="utf-8") for seed in (1, 2)]
    assert all(text.count(row) == 1 for text in (printed, *cards))

    # as a kill after the first update of the second seed leaves it
    (killed / "seed-2").mkdir(parents=True)
    shutil.copytree(whole / "seed-1", killed / "seed-1")
    shutil.copytree(whole / "seed-2" / "checkpoint-1", killed / "seed-2" / "checkpoint-1")
    stored = json.loads((whole / "seeds.json").read_text(encoding="utf-8"))
    (killed / "seeds.json").write_text(json.dumps({"fields": stored["fields"]}))
    kept = (killed / "seed-1" / "model.safetensors").stat()
    status, resumed, errors = train("--seeds", "1", "2", "--output_dir", str(killed))
    assert status == 0, errors
    assert (killed / "seed-1" / "model.safetensors").stat() == kept and "checkpoint-1" in resumed
    assert json.loads((killed / "seeds.json").read_text(encoding="utf-8")) == stored
    assert (killed / "seed-1" / "README.md").read_text(encoding="utf-8") == cards[0]

    # as a kill between the results and the card leaves them
    (killed / "seed-1" / "README.md").unlink()
    status, _, errors = train("--seeds", "1", "2", "--output_dir", str(killed))
    assert status == 0, errors
    assert json.loads((killed / "seeds.json").read_text(encoding="utf-8")) == stored
    assert (killed / "seed-1" / "README.md").read_text(encoding="utf-8").count(row) == 1

    status, _, errors = train("--seeds", "1", "2", "--output_dir", str(whole), "--max_steps", "3")
    assert status == 2 and re.match(r"error: max_steps: 3, but the runs in .* have 2: name a new output_dir", errors)


@pytest.mark.parametrize("seeds", ["1", "1 1"])
def test_seeds_are_several_different_ones(train, tmp_path, seeds):
    status, _, errors = train("--seeds", *seeds.split(), "--output_dir", str(tmp_path / "run"))
    assert status == 2 and errors == f"error: seeds: {seeds}: give two or more different ones, such as 1 2 3\n"


def test_one_run_refuses_seeds(tmp_path):
    parsed = parse_recipe(["--output_dir", str(tmp_path / "run"), "--seeds", "1", "2"])
    assert error_of(run_training, *parsed).startswith("seeds: this is one run")
    assert not Path(tmp_path / "run").exists()


def test_table_has_test_scores_and_those_of_validation_without_a_test():
    own = {"test_mine:f": 1.0, "test_exact_match": 50.0, "test_seconds": 2.0, "eval_exact_match": 3.0}
    other = own | {"test_exact_match": 52.0, "test_mine:f": 2}
    scores = scores_of_seeds({3: own, 5: other}, ["mine:f"])
    assert list(scores) == ["test_exact_match", "test_mine:f"]
    assert scores["test_exact_match"] == {"mean": 51, "deviation": 2**0.5, "seeds": {"3": 50.0, "5": 52.0}}
    assert list(scores_of_seeds({1: {"eval_exact_match": 3.0}, 2: {"eval_exact_match": 4.0}})) == ["eval_exact_match"]
