"""The data of whole runs: long evaluation sentences are left out with a count and their lines; mixtures."""

import json

import pytest

from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import run_tiny

PAIRS = [("two hundred", "zweihundert"), ("thirty", "dreißig"), ("seven", "sieben"), ("one", "eins")]


def train(folder, long_side, **values):
    """Two updates. Line 3 of the validation and of the test data has over 8,000 tokens on one side."""
    flags = dict(values)
    for split in ("train", "validation", "test"):
        rows = [list(pair) for pair in PAIRS]
        if split != "train":
            rows[2][long_side] = "seven " * 8000
        for side, name in enumerate(("en", "de")):
            (folder / f"{split}.{name}").write_text("".join(f"{row[side]}\n" for row in rows), encoding="utf-8")
        flags[split] = folder / split
    flags |= {"source_lang": "en", "target_lang": "de", "max_steps": 2, "save_strategy": "no", "min_frequency": 1}
    return run_tiny(folder / "run", **flags, eval_strategy="steps", eval_steps=1)


@pytest.mark.parametrize("long_side", [0, 1])
def test_long_evaluation_pairs_are_left_out_and_reported(tmp_path, capsys, long_side):
    results = train(tmp_path, long_side)
    printed = capsys.readouterr().out
    for split in ("validation", "test"):
        assert f"{split}: left out 1 of 4 pairs: longer than max_eval_length=1024 tokens (line 3)" in printed
    assert results["test_sentences"] == 3
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "kept 3 of 4 pairs; dropped 1: longer than max_eval_length=1024 tokens (line 3)" in card
    assert json.loads((tmp_path / "run" / "all_results.json").read_text())["test_sentences"] == 3


def test_evaluation_limit_that_leaves_nothing_is_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="validation: .* 4 .*max_eval_length=1 "):
        train(tmp_path, 0, max_eval_length=1)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.safetensors"))


def test_recipe_trains_on_a_mixture(tmp_path, capsys):
    for name in ("one", "two"):
        for side, language in enumerate(("en", "de")):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    (tmp_path / "mixture.yaml").write_text(
        f"train: [{tmp_path}/one, {tmp_path}/two]\ntrain_weights: [1, 3]\nsource_lang: en\ntarget_lang: de\n"
    )
    flags = {"min_frequency": 1, "save_strategy": "no", "max_steps": 1}
    run_tiny(tmp_path / "run", tmp_path / "mixture.yaml", **flags)
    printed = capsys.readouterr().out
    assert "one.de × 1: kept 4 of 4 pairs; " in printed and "two.de × 3: kept 4 of 4 pairs" in printed
    assert (tmp_path / "run" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="^train_weights: "):
        run_tiny(tmp_path / "other", tmp_path / "mixture.yaml", **flags, train=tmp_path / "one")
