"""Training of several directions: marks, scores of each, resuming, fine-tuning and new languages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.corpora.data_arguments import DataArguments
from hf_vanilla_transformer.text.language_tokens import language_tokens
from hf_vanilla_transformer.text.vocabulary import extend_languages
from hf_vanilla_transformer.training.run.fine_tuning import add_languages, load_base_model
from tests.model_helpers import save_model_of_languages, slow
from tests.trainer_helpers import assert_same_model, error_of, run_tiny

DIRECTIONS = ["en-de", "en-fr", "de-en"]
NUMBERS = {
    "train": "numbers",
    "validation": "numbers",
    "test": "numbers",
    "numbers_size": 40,
    "directions": DIRECTIONS,
    "max_eval_samples": 9,
    "max_test_samples": 9,
    "test_num_beams": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 4,
}
ONE_DIRECTION = {"directions": "null", "source_lang": "en", "target_lang": "de"}


def test_base_model_gets_the_languages_that_it_lacks(tmp_path: Path, capsys: Any) -> None:
    base = load_base_model(str(save_model_of_languages(tmp_path, on_source=False)))
    rows = base.model.config.vocab_size
    directions = ["en-de", "en-es"]
    data_args = DataArguments(directions=directions, add_languages=["es=fr"])
    add_languages(base, data_args)
    assert capsys.readouterr().out == "new languages: es\n"
    ids = language_tokens(base.tokenizers[0]).ids
    assert ids["es"] == rows
    embeddings = base.model.get_input_embeddings().weight
    assert embeddings[ids["es"]].equal(embeddings[ids["fr"]])


@pytest.fixture(scope="module", params=["target", *slow("source")])
def finished(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run") / "finished"
    return folder, run_tiny(folder, **NUMBERS, language_token=request.param)


def test_each_direction_is_scored_and_the_mean_chooses(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    folder, results = finished
    for split in ("test", "eval"):
        for metric in ("bleu", "chrf", "exact_match"):
            apart = [results[f"{split}_{metric}_{name}"] for name in DIRECTIONS]
            assert results[f"{split}_{metric}"] == pytest.approx(sum(apart) / 3)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"chrF, {name}" in card for name in DIRECTIONS)
    assert "The test text was translated with 2 beams, score log P / " in card
    assert set(json.loads((folder / "tokenizer_config.json").read_text())["directions"][0]) == {
        "en",
        "de",
    }


def test_translation_starts_in_the_direction_of_the_sentence(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = finished
    translator = Translator.from_pretrained(folder)
    assert translator.directions.pairs == [("en", "de"), ("en", "fr"), ("de", "en")]
    mixed = list(
        translator.translate(["seven", "seven"], target_lang=["de", "fr"], max_new_tokens=4)
    )
    apart = [
        next(translator.directed("en", code).translate(["seven"], max_new_tokens=4))
        for code in ("de", "fr")
    ]
    assert mixed == apart
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mark = language_tokens(tokenizer).target(("en", "de"))
    ids = [*mark, *tokenizer("sieben")["input_ids"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "sieben"


TOKENS = {"max_tokens_per_batch": 80, "tokens_per_update": 120}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, TOKENS, {**TOKENS, "pack": True}], ids=["pairs", "tokens", "packed"]
)
def test_resumed_run_is_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    values = {
        **NUMBERS,
        "train": ["en-de=numbers", "en-fr=numbers", "de-en=numbers"],
        "sampling_temperature": 2.0,
        "augment": ["merge=0.5", "copy=0.2"],
        "eval_strategy": "no",
        **settings,
    }
    run_tiny(tmp_path / "whole", **values)
    run_tiny(tmp_path / "parts", **values | {"max_steps": 2, "num_train_epochs": 9})
    run_tiny(tmp_path / "parts", **values, resume_from_checkpoint=True)
    assert_same_model(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_zero_shot_directions_can_be_scored(tmp_path: Path) -> None:
    zero_shot = {
        "validation": ["de-fr=numbers", "fr-de=numbers"],
        "directions": ["en-de", "en-fr"],
        "eval_steps": 4,
    }
    results = run_tiny(tmp_path / "run", **NUMBERS | zero_shot)
    assert {"eval_bleu_de-fr", "eval_bleu_fr-de"} <= results.keys()
    assert "eval_bleu_en-de" not in results


def test_several_validation_inputs_are_scored_by_name(tmp_path: Path) -> None:
    inputs = [tmp_path / "news.tsv", tmp_path / "talks.tsv"]
    for path in inputs:
        path.write_text("en\tde\nseven\tsieben\neight\tacht\n", encoding="utf-8")
    results = run_tiny(tmp_path / "run", **NUMBERS | ONE_DIRECTION | {"validation": inputs})
    assert {"eval_bleu", "eval_bleu_news", "eval_bleu_talks", "eval_chrf_talks"} <= results.keys()


@pytest.mark.slow
def test_new_language_leaves_the_others_alone(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(folder)
    old = AutoModelForSeq2SeqLM.from_pretrained(folder)
    new = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert extend_languages(new, tokenizer, [("en", "es"), ("en", "it")], {"es": "fr"}) == [
        "es",
        "it",
    ]
    ids = language_tokens(tokenizer).ids
    for weight in (new.get_input_embeddings().weight, new.get_output_embeddings().weight):
        assert weight[ids["es"]].equal(weight[ids["fr"]])
    inputs = {
        "input_ids": torch.tensor([[ids["de"], 9, 11, 2]]),
        "decoder_input_ids": torch.tensor([[0, 7, 8]]),
        "output_hidden_states": True,
    }
    with torch.no_grad():
        before = old.eval()(**inputs)
        after = new.eval()(**inputs)
    # equal to the bit: all that the logits of old tokens are products of. Their sums depend on the width of the matrix
    assert after.decoder_hidden_states[-1].equal(before.decoder_hidden_states[-1])
    rows = before.logits.shape[2]
    assert new.get_output_embeddings().weight[:rows].equal(old.get_output_embeddings().weight)
    assert after.logits[..., :rows].allclose(before.logits, rtol=0, atol=1e-6)
    base = NUMBERS | {
        "model_name_or_path": folder,
        "directions": ["en-es", "en-fr"],
        "add_languages": ["es=fr"],
    }
    results = run_tiny(tmp_path / "run", **base)
    assert {"eval_bleu_en-es", "before_test_bleu_en-es"} <= results.keys()
    pairs = Translator.from_pretrained(tmp_path / "run").directions.pairs
    assert pairs == [("en", "de"), ("en", "fr"), ("de", "en"), ("en", "es")]
    assert "directions" in error_of(run_tiny, tmp_path / "none", **base | {"directions": "null"})
    assert "add_languages" in error_of(
        run_tiny, tmp_path / "wrong", **base | {"add_languages": ["es=xx"]}
    )


@pytest.mark.slow
def test_crossconst_needs_directions(tmp_path: Path) -> None:
    settings = NUMBERS | {"crossconst_alpha": 0.3, "max_steps": 1, "eval_strategy": "no"}
    run_tiny(tmp_path / "run", **settings)
    assert "crossconst_alpha" in error_of(run_tiny, tmp_path / "one", **settings | ONE_DIRECTION)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"directions": ["en"]}, "directions"),
        ({"source_lang": "en"}, "source_lang"),
        ({"bidirectional": True}, "bidirectional"),
        ({"language_token": "both"}, "language_token"),
        ({"sampling_temperature": 0.5}, "sampling_temperature"),
        pytest.param(
            {"test": "fr-pl=numbers"}, "target_lang", marks=pytest.mark.slow
        ),  # two seconds
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, values: dict[str, Any], name: str) -> None:
    assert name in error_of(run_tiny, tmp_path / "run", **NUMBERS | values)
