"""Faults of sequences, normalisers and symbols: one clear line or a count, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.evaluation import score_translations
from hf_vanilla_transformer.text import save_tokenizers
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.normalization import import_normalizer
from tests.trainer_helpers import run_tiny

PAIRS = [("CCO", "CC=O"), ("c1ccccc1", "C1CCCCC1"), ("CC(=O)O", "CCO"), ("[Na+].[OH-]", "O")] * 3
SETTINGS = {"vocab_size": None, "max_steps": 1, "per_device_train_batch_size": 4, "generation_max_length": 8}


def write_sides(folder: Path, pairs: list[tuple[str, str]], end: str = "\n") -> list[str]:
    names = [folder / "train.products", folder / "train.reactants"]
    for side, name in enumerate(names):
        name.write_bytes("".join(pair[side] + end for pair in pairs).encode())
    return [str(name) for name in names]


def run(folder: Path, **flags: Any) -> dict[str, Any]:
    return run_tiny(folder / "run", **SETTINGS | flags)


def test_empty_and_long_pairs_are_counted_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pairs = [*PAIRS, ("CCO", ""), ("", "C"), ("C" * 10_000, "C"), ("C", "N" * 10_000), ("C" * 511, "O" * 511)]
    limits = {"max_source_length": 512, "max_target_length": 512}
    results = run(tmp_path, train=write_sides(tmp_path, pairs), tokens="smiles", **limits)
    printed = capsys.readouterr().out
    assert results["train_updates"] == 1
    assert "1 empty target (line 13)" in printed.replace("targets", "target").replace("lines", "line"), printed
    assert "1 empty source (line 14)" in printed.replace("sources", "source").replace("lines", "line"), printed
    report = encode_pairs(
        load_pairs(write_sides(tmp_path, pairs))[0],
        train_symbol_tokenizer([(text, 1) for pair in pairs for text in pair], "smiles"),
        max_source_length=512,
        max_target_length=512,
        drop_too_long=True,
    )[1]
    assert report.too_long == 2 and report.summary() in printed
    assert "15" in report.summary() and "16" in report.summary() and "17" not in report.summary()


def test_line_ends_are_no_symbols(tmp_path: Path) -> None:
    mixed = write_sides(tmp_path, PAIRS, "\r\n")
    lines = Path(mixed[1]).read_bytes().split(b"\r\n")
    Path(mixed[1]).write_bytes(b"\n".join(lines[:4]) + b"\r\n" + b"\r\n".join(lines[4:]))
    loaded, report = load_pairs(mixed)
    assert list(zip(loaded["source"], loaded["target"], strict=True)) == PAIRS
    assert report.kept == len(PAIRS)


def test_tabs_inside_are_symbols_of_plain_text(tmp_path: Path) -> None:
    pairs = [("a\tb", "c\td"), ("\tx", "y")]
    loaded, _ = load_pairs(write_sides(tmp_path, pairs))
    assert loaded["source"][0] == "a\tb" and loaded["target"][0] == "c\td"
    tokenizer = train_symbol_tokenizer([(text, 1) for pair in pairs for text in pair], "chars")
    assert tokenizer.decode(tokenizer("a\tb")["input_ids"], skip_special_tokens=True) == "a\tb"
    with pytest.raises(UserError, match=r"line 1: the source has 'a\\tb': one space separates"):
        train_symbol_tokenizer([("a\tb", 1)], "words", side="source")


@pytest.mark.parametrize("side", [0, 1])
def test_symbols_that_a_loaded_tokenizer_lacks_are_an_error_of_training(tmp_path: Path, side: int) -> None:
    known = train_symbol_tokenizer([(text, 1) for pair in PAIRS for text in pair], "smiles")
    save_tokenizers(tmp_path / "tokenizer", known)
    pairs = [*PAIRS[:5], ("CCP", "CC") if side == 0 else ("CC", "CCP"), *PAIRS]
    name = ("source", "target")[side]
    with pytest.raises(UserError, match=f"line 6: the {name} has 'P', which the tokenizer does not know") as error:
        run(tmp_path, train=write_sides(tmp_path, pairs), tokenizer_name=str(tmp_path / "tokenizer"))
    assert "\n" not in str(error.value)


def test_text_that_is_no_token_is_an_error_of_training(tmp_path: Path) -> None:
    pairs = [*PAIRS, ("CC日O", "C")]
    with pytest.raises(UserError, match="line 13: .* has '日' at character 3, which is no token of tokens=smiles"):
        run(tmp_path, train=write_sides(tmp_path, pairs), tokens="smiles")


def test_unknown_symbols_of_validation_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = tmp_path / "valid.tsv"
    table.write_text("source\ttarget\nCCO\tCC\nCCP\tCC\nCC\tBr\n", encoding="utf-8")
    results = run(tmp_path, train=write_sides(tmp_path, PAIRS), validation=str(table), tokens="smiles")
    assert results["eval_sentences"] == 3
    printed = capsys.readouterr().out
    assert "validation: 2 of 3 pairs have symbols that the training text lacks (lines 3, 4)" in printed


NORMALIZERS = """
def broken(text):
    raise NameError("name 'Chem' is not defined")


def nothing(text):
    return None


number = 5
"""


@pytest.fixture
def normalizers(own_modules: Path) -> None:
    (own_modules / "normalizers_of_faults.py").write_text(NORMALIZERS, encoding="utf-8")


@pytest.mark.usefixtures("normalizers")
def test_normaliser_that_always_fails_is_refused_before_training(tmp_path: Path) -> None:
    table = tmp_path / "valid.tsv"
    table.write_text("source\ttarget\nCCO\tCC\n", encoding="utf-8")
    flags = {"train": write_sides(tmp_path, PAIRS), "validation": str(table), "tokens": "smiles"}
    for name, reason in (("broken", "NameError: name 'Chem' is not defined"), ("nothing", "None for 'CC'")):
        with pytest.raises(UserError, match=f"normalize: all 1 references are invalid; {reason}"):
            run(tmp_path, **flags, normalize=f"normalizers_of_faults:{name}")
        with pytest.raises(UserError, match=f"normalize: all 2 references are invalid; {reason[:8]}"):
            score_translations(["a", "b"], ["a", "c"], normalize=import_normalizer(f"normalizers_of_faults:{name}"))
    with pytest.raises(UserError, match="normalize: normalizers_of_faults:number is no function"):
        import_normalizer("normalizers_of_faults:number")


def test_equal_forms_of_a_list_take_one_place() -> None:
    lists = [["a", "A", "b", "B", "c", "x!", "y!", "d"]]

    def form(text: str) -> str | None:
        return None if text.endswith("!") else text.lower()

    def top(reference: str, normalize: Any) -> dict[str, float]:
        scores = score_translations(["a"], [reference], metrics=["top_k"], n_best=lists, normalize=normalize)
        return {name: value for name, value in scores.items() if name.startswith("top_")}

    assert top("c", None) == {"top_1": 0, "top_3": 0, "top_5": 100}
    assert top("c", form) == {"top_1": 0, "top_3": 100, "top_5": 100}  # a, b, c
    assert top("d", form) == {"top_1": 0, "top_3": 0, "top_5": 0}  # a, b, c, two invalid ones, d


def test_invalid_smiles_are_counted() -> None:
    pytest.importorskip("rdkit", reason="needs the extra `chemistry`")
    normalize = import_normalizer("hf_vanilla_transformer.text.smiles:canonical")
    predicted = ["OCC", "C1CC", "C(", "c1ccccc1", "CC(=O)O", ""]
    references = ["CCO", "CCC", "C", "C1=CC=CC=C1", "CC(O)=O", "C"]
    scores = score_translations(predicted, references, normalize=normalize)
    assert scores["exact_match"] == pytest.approx(50)
    assert scores["invalid"] == pytest.approx(50)  # an open ring, an open branch, nothing at all
