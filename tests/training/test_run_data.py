"""The data of whole runs: long evaluation sentences are left out with a count and their lines."""

import json

import pytest

from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [
    ("two hundred", "zweihundert"),
    ("thirty", "dreißig"),
    ("seven", "sieben"),
    ("one", "eins"),
]


def train(folder, long_side, **values):
    """Two updates. Line 3 of the validation and of the test data has over 8,000 tokens on one side."""
    long_pair = ["seven", "sieben"]
    long_pair[long_side] = "seven " * 8000
    evaluated = [*PAIRS[:2], tuple(long_pair), PAIRS[3]]
    return run_tiny(
        folder / "run",
        **write_pairs(folder, PAIRS, "train"),
        **write_pairs(folder, evaluated, "validation", "test"),
        **values,
        max_steps=2,
        save_strategy="no",
        min_frequency=1,
        eval_strategy="steps",
        eval_steps=1,
    )


@pytest.mark.parametrize("long_side", [0, 1])
def test_long_evaluation_pairs_are_left_out_and_reported(tmp_path, capsys, long_side):
    results = train(tmp_path, long_side)
    printed = capsys.readouterr().out
    for split in ("validation", "test"):
        assert (
            f"{split}: left out 1 of 4 pairs: longer than max_eval_length=1024 tokens (line 3)"
            in printed
        )
    stored = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["test_sentences"] == stored["test_sentences"] == 3
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "kept 3 of 4 pairs; dropped 1: longer than max_eval_length=1024 tokens (line 3)" in card


def test_evaluation_limit_that_leaves_nothing_is_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="validation: .* 4 .*max_eval_length=1 "):
        train(tmp_path, 0, max_eval_length=1)
    assert not list(tmp_path.glob("run/*.safetensors"))
