"""Faults of sequences, normalisers and symbols: one clear line or a count, and nothing is lost."""

import re
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.evaluation import score_translations
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.normalization import import_normalizer
from tests.model_helpers import error_of
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [("CCO", "CC=O"), ("c1ccccc1", "C1CCCCC1"), ("CC(=O)O", "CCO"), ("[Na+].[OH-]", "O")] * 3
SETTINGS = {
    "vocab_size": None,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "generation_max_length": 8,
}


def write_sides(folder: Path, pairs: list[tuple[str, str]]) -> list[Path]:
    return write_pairs(folder, pairs)["train"]


def run(folder: Path, pairs: list[tuple[str, str]], **flags: Any) -> dict[str, Any]:
    return run_tiny(folder / "run", **SETTINGS | flags, train=write_sides(folder, pairs))


def symbols_of(pairs: list[tuple[str, str]], tokens: str) -> Any:
    return train_symbol_tokenizer([(text, 1) for pair in pairs for text in pair], tokens)


def test_empty_and_long_pairs_are_counted_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    longest = [("C" * 10_000, "C"), ("C", "N" * 10_000), ("C" * 511, "O" * 511)]
    pairs = [*PAIRS, ("CCO", ""), ("", "C"), *longest]
    limits = {"max_source_length": 512, "max_target_length": 512}
    results = run(tmp_path, pairs, tokens="smiles", **limits)
    printed = capsys.readouterr().out
    assert results["train_updates"] == 1
    assert "1 empty target (line 13)" in printed
    assert "1 empty source (line 14)" in printed
    loaded, _ = load_pairs(write_sides(tmp_path, pairs))
    _, report = encode_pairs(loaded, symbols_of(pairs, "smiles"), drop_too_long=True, **limits)
    assert report.first_lines == [15, 16]
    assert report.too_long == 2
    assert report.summary() in printed


def test_tabs_inside_are_symbols_of_plain_text(tmp_path: Path) -> None:
    pairs = [("a\tb", "c\td"), ("\tx", "y")]
    loaded, _ = load_pairs(write_sides(tmp_path, pairs))
    assert loaded["source"][0] == "a\tb"
    assert loaded["target"][0] == "c\td"
    tokenizer = symbols_of(pairs, "chars")
    assert tokenizer.decode(tokenizer("a\tb")["input_ids"], skip_special_tokens=True) == "a\tb"
    with pytest.raises(UserError, match=r"line 1: the source has 'a\\tb': one space separates"):
        train_symbol_tokenizer([("a\tb", 1)], "words", side="source")


def test_text_that_is_no_token_is_an_error_of_training(tmp_path: Path) -> None:
    message = error_of(run, tmp_path, [*PAIRS, ("CC日O", "C")], tokens="smiles")
    assert re.search(
        "line 13: .* has '日' at character 3, which is no token of tokens=smiles", message
    )


def test_unknown_symbols_of_validation_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = tmp_path / "valid.tsv"
    table.write_text("source\ttarget\nCCO\tCC\nCCP\tCC\nCC\tBr\n", encoding="utf-8")
    results = run(tmp_path, PAIRS, validation=table, tokens="smiles")
    assert results["eval_sentences"] == 3
    printed = capsys.readouterr().out
    assert (
        "validation: 2 of 3 pairs have symbols that the training text lacks (lines 3, 4)" in printed
    )


def test_normaliser_that_always_fails_is_refused_before_training(own_modules: Path) -> None:
    module = "def nothing(text):\n    return None\n\n\nnumber = 5\n"
    (own_modules / "normalizers_of_faults.py").write_text(module, encoding="utf-8")
    table = own_modules / "valid.tsv"
    table.write_text("source\ttarget\nCCO\tCC\n", encoding="utf-8")
    flags = {
        "validation": table,
        "tokens": "smiles",
        "normalize": "normalizers_of_faults:nothing",
    }
    message = error_of(run, own_modules, PAIRS, **flags)
    assert message.startswith("normalize: all 1 references are invalid; None for 'CC'")
    assert not (own_modules / "run").exists()
    message = error_of(import_normalizer, "normalizers_of_faults:number")
    assert message.startswith("normalize: normalizers_of_faults:number is no function")


def test_equal_forms_of_a_list_take_one_place() -> None:
    lists = [["a", "A", "b", "B", "c", "x!", "y!", "d"]]

    def form(text: str) -> str | None:
        return None if text.endswith("!") else text.lower()

    def top(reference: str, normalize: Any) -> dict[str, float]:
        scores = score_translations(
            ["a"],
            [reference],
            metrics=["top_k"],
            n_best=lists,
            normalize=normalize,
        )
        return {name: value for name, value in scores.items() if name.startswith("top_")}

    assert top("c", None) == {"top_1": 0, "top_3": 0, "top_5": 100}
    assert top("c", form) == {"top_1": 0, "top_3": 100, "top_5": 100}  # a, b, c
    assert top("d", form) == {"top_1": 0, "top_3": 0, "top_5": 0}  # a, b, c, two invalid ones, d
