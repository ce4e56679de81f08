"""`en_de`, the translator of the package: both directions, from every door, without a network."""

import argparse
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import TranslationPipeline, Translator
from hf_vanilla_transformer.inference.languages import card_languages
from hf_vanilla_transformer.utils.shipped_models import model_folder
from vanilla_transformer_cli.translate import languages_of

FOLDER = Path(model_folder("en_de"))
ENGLISH, GERMAN = "He speaks three languages.", "Er spricht drei Sprachen."


def test_command_translates_in_both_directions(command, tmp_path):
    (tmp_path / "x.en").write_text(f"{ENGLISH}\n\n")
    (tmp_path / "x.de").write_text(f"{GERMAN}\n")
    status, printed, _ = command("translate", "--model", "en_de", "--input", str(tmp_path / "x.en"))
    assert (status, printed) == (0, f"{GERMAN}\n\n")
    back = ["translate", "--model", "en_de", "--target_lang", "en", "--input", str(tmp_path / "x.de")]
    status, printed, _ = command(*back)
    assert (status, printed) == (0, f"{ENGLISH}\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), ("en", "de")),
        ((None, "en"), ("de", "en")),
        (("de", None), ("de", "en")),
        (("en", "de"), ("en", "de")),
    ],
)
def test_languages_of_a_document_are_those_of_the_direction(given, expected):
    arguments = argparse.Namespace(model=[str(FOLDER)], source_lang=given[0], target_lang=given[1])
    assert languages_of(arguments) == expected


def test_python_and_transformers_translate_as_the_command(in_tmp_path):
    translator = Translator.from_pretrained("en_de", "cpu")
    assert list(translator.translate([ENGLISH])) == [GERMAN]
    assert list(translator.translate([GERMAN], target_lang="en")) == [ENGLISH]
    model, tokenizer = (kind.from_pretrained(FOLDER) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert TranslationPipeline(model, tokenizer)([ENGLISH])[0]["translation_text"] == GERMAN


def test_documents_are_translated(command, tmp_path):
    pytest.importorskip("markdown_it", reason="the extra `documents` is not installed")
    (tmp_path / "page.md").write_text(f"# Title\n\n{ENGLISH}\n\n```\n{ENGLISH}\n```\n")
    files = ["--input", str(tmp_path / "page.md"), "--output", str(tmp_path / "page.de.md")]
    assert command("translate", "--model", "en_de", *files)[0] == 0
    translated = (tmp_path / "page.de.md").read_text(encoding="utf-8")
    assert translated.endswith(f"\n\n{GERMAN}\n\n```\n{ENGLISH}\n```\n")


def test_its_card_names_the_limits_the_licence_and_the_authors():
    card = ModelCard.load(FOLDER / "README.md")
    assert card.data.license == "cc-by-2.0"
    assert card_languages(FOLDER) == ["en", "de"]
    first_line = card.text.split("# en_de\n\n")[1].splitlines()[0]
    assert "short" in first_line and "not" in first_line
    for word in ("tatoeba.org", "manythings.org", "CC BY 2.0 FR", "opus-mt-en-de", "tok:13a"):
        assert word in card.text
    sentences = card.text.split("## Twenty sentences")[1].split("\n## ")[0]
    assert len([line for line in sentences.splitlines() if line.startswith("| ")]) == 1 + 20


def test_its_files_are_small_and_none_runs_code():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 12e6
    assert not any(name.endswith((".py", ".bin", ".pt")) for name in files)
    assert "auto_map" not in json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
