"""The task of a run: what is loaded decides it, and nothing speaks of languages where the text is none."""

import re
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.batches.corpus_tokenizers import match_case, train_tokenizers
from hf_vanilla_transformer.corpora.corpus import load_corpus
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.text.token_kinds import tokenizer_task
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import SMALL_SIZES, error_of, randomise, tiny_model
from tests.trainer_helpers import as_flags

WORDS_OF_LANGUAGES = re.compile(r".*(?:bleu|chrf|translat|languag|sentence).*", re.IGNORECASE)
RINGS = [
    ("c1ccccc1", "C1CCCCC1"),
    ("C1CCCCC1", "c1ccccc1"),
    ("CC(=O)O", "CCO"),
    ("OCC", "CC=O"),
]
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "generation_max_length": 8,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
}


def write_rows(path: Path, pairs: list[tuple[str, str]]) -> str:
    path.write_text("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    return str(path)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of a model of molecules."""
    rows = [(text, 1) for pair in RINGS for text in pair]
    tokenizer = train_symbol_tokenizer(rows, "smiles")
    randomise(tiny_model(vocab_size=len(tokenizer))).save_pretrained(tmp_path / "base")
    save_tokenizers(tmp_path / "base", tokenizer)
    return tmp_path / "base"


def run(folder: Path, **flags: Any) -> dict[str, Any]:
    return run_training(*parse_recipe(["--output_dir", str(folder), *as_flags(SETTINGS | flags)]))


@pytest.fixture
def splits(tmp_path: Path) -> dict[str, Any]:
    table = write_rows(tmp_path / "rings.tsv", RINGS)
    return {"train": table, "validation": table, "test": table}


def arguments(**flags: Any) -> tuple[Any, int]:
    """Those of the data, and the seed."""
    _, data_args, args = parse_recipe(as_flags({"output_dir": "unused", **flags}))
    return data_args, args.seed


@pytest.mark.parametrize("flags", [{"tokens": "smiles"}, {"average_last": 2}])
def test_fine_tuning_takes_the_task_of_its_base_model(
    base: Path,
    splits: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    flags: dict[str, Any],
) -> None:
    results = run(tmp_path / "run", model_name_or_path=str(base), **splits, **flags)
    assert {
        "test_exact_match",
        "eval_token_error_rate",
        "before_test_exact_match",
    } <= results.keys()
    assert not [name for name in results if "bleu" in name or "chrf" in name]
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    printed = "".join(capsys.readouterr())
    assert WORDS_OF_LANGUAGES.findall(printed + card) == []
    assert tokenizer_task(*load_tokenizers(tmp_path / "run")) == "sequence"
    assert ("eval_exact_match_averaged" in results) == ("average_last" in flags)


@pytest.mark.parametrize("fine_tuned", [True, False])
def test_resumed_run_keeps_the_task(
    base: Path,
    splits: dict[str, Any],
    tmp_path: Path,
    fine_tuned: bool,
) -> None:
    own = {"model_name_or_path": str(base)} if fine_tuned else {**SMALL_SIZES, "tokens": "smiles"}
    flags = {**splits, **own, "lr_scheduler_type": "constant"}
    run(tmp_path / "run", **flags, max_steps=1)
    results = run(tmp_path / "run", **flags, resume_from_checkpoint="true")
    assert results["train_updates"] == 2
    assert not [name for name in results if "bleu" in name]


@pytest.mark.parametrize("flags", [{"tokens": "chars"}, {"target_tokens": "words"}])
def test_tokens_of_a_base_model_cannot_change(
    base: Path, splits: dict[str, Any], tmp_path: Path, flags: dict[str, str]
) -> None:
    ((name, value),) = flags.items()
    message = error_of(run, tmp_path / "run", model_name_or_path=str(base), **splits, **flags)
    assert f"{name}: {value}: fine-tuning keeps the tokenizer" in message


@pytest.mark.parametrize("task", ["sequence", None])
def test_loaded_tokenizers_have_the_task_of_the_run(
    splits: dict[str, Any], tmp_path: Path, task: str | None
) -> None:
    texts = [text for pair in RINGS for text in pair]
    save_tokenizers(tmp_path / "tokenizer", train_tokenizer(texts, 300))
    flags = {"tokenizer_name": str(tmp_path / "tokenizer"), **SMALL_SIZES, **splits}
    if task:
        flags["task"] = task
    results = run(tmp_path / "run", **flags)
    assert ("test_bleu" in results) is (task is None)
    tokenizer, _ = load_tokenizers(tmp_path / "run")
    assert tokenizer_task(tokenizer) == (task or "language")
    assert tokenizer.init_kwargs["normalize_source"] is (task is None)


def test_molecules_that_differ_in_case_are_different(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = write_rows(tmp_path / "train.tsv", RINGS[:1])
    other = write_rows(tmp_path / "valid.tsv", RINGS[1:])
    load_corpus(*arguments(train=table, validation=other, tokens="smiles"))
    assert "trained on" not in capsys.readouterr().out
    load_corpus(*arguments(train=table, validation=table, tokens="smiles"))
    assert "1 of 1 validation pairs have a source that is trained on" in capsys.readouterr().out


def test_held_out_molecules_leave_others_of_another_case_in_training(tmp_path: Path) -> None:
    rings = [f"{'C' * n}c1ccccc1" for n in range(1, 21)]
    molecules = [*rings, *map(str.upper, rings)]
    table = write_rows(tmp_path / "train.tsv", [(each, "O") for each in molecules])
    corpus = load_corpus(*arguments(train=table, tokens="smiles", held_out_pairs=4))
    held_out = set(corpus.pairs["validation"]["source"])
    assert len(held_out) == 4
    assert set(corpus.pairs["train"]["source"]) == set(molecules) - held_out


@pytest.mark.parametrize(("tokens", "text"), [("chars", "XyZ"), ("words", "AA Bb")])
def test_symbols_can_be_lower_cased(tokens: str, text: str) -> None:
    tokenizer = train_symbol_tokenizer([(text, 1)], tokens, lowercase=True)
    data_args, _ = arguments(train="x.tsv", lowercase="true")
    match_case((tokenizer, tokenizer), data_args)
    assert data_args.bleu_lowercase
    kept = train_symbol_tokenizer([(text, 1)], tokens)
    assert "keeps capitals" in error_of(match_case, (kept, kept), data_args)


@pytest.mark.parametrize(
    "tokens", [{"source_tokens": "chars", "target_tokens": "words"}, {"tokens": "bpe"}]
)
def test_source_alone_can_be_lower_cased(tmp_path: Path, tokens: dict[str, str]) -> None:
    table = write_rows(tmp_path / "words.tsv", [("cat", "K AE T"), ("dog", "D AO G")])
    data_args, seed = arguments(train=table, source_lowercase="true", **tokens)
    corpus = load_corpus(data_args, seed)
    source, target = train_tokenizers(corpus, 300, data_args)
    match_case((source, target), data_args)
    assert not data_args.bleu_lowercase
    assert source("Cat")["input_ids"] == source("cat")["input_ids"]
    assert source.decode(source("DoG")["input_ids"], skip_special_tokens=True) == "dog"
    assert target.decode(target("K AE T")["input_ids"], skip_special_tokens=True) == "K AE T"
    error = error_of(match_case, (target, target), data_args)
    assert error.startswith("source_lowercase: True: ")
    assert "keeps capitals" in error
    data_args.bidirectional = True
    assert "source_lowercase" in error_of(load_corpus, data_args, seed)


def test_perturbations_of_text_are_refused_for_molecules(
    splits: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="augment: upper=0.5: .*rewrite"):
        run(tmp_path / "run", **splits, tokens="smiles", augment="upper=0.5")
