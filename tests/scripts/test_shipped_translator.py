"""`en_de` and `en_fr`, the translators of the package: both directions, from every door, without a network."""

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import TranslationPipeline, Translator
from hf_vanilla_transformer.inference.languages import card_languages
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.utils.shipped_models import model_folder
from vanilla_transformer_cli.translate import languages_of

FOLDER = Path(model_folder("en_de"))
ENGLISH, GERMAN = "He speaks three languages.", "Er spricht drei Sprachen."
TRANSLATIONS = {"en_de": GERMAN, "en_fr": "Il parle trois langues."}


@pytest.mark.parametrize(("model", "translation"), TRANSLATIONS.items())
def test_command_translates_in_both_directions(command, tmp_path, model, translation):
    (tmp_path / "x.en").write_text(f"{ENGLISH}\n\n")
    (tmp_path / "x").write_text(f"{translation}\n")
    status, printed, _ = command("translate", "--model", model, "--input", str(tmp_path / "x.en"))
    assert (status, printed) == (0, f"{translation}\n\n")
    back = ["translate", "--model", model, "--target_lang", "en", "--input", str(tmp_path / "x")]
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
    model, tokenizer = (
        kind.from_pretrained(FOLDER) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    assert TranslationPipeline(model, tokenizer)([ENGLISH])[0]["translation_text"] == GERMAN


def test_documents_are_translated(command, tmp_path):
    pytest.importorskip("markdown_it", reason="the extra `documents` is not installed")
    (tmp_path / "page.md").write_text(f"# Title\n\n{ENGLISH}\n\n```\n{ENGLISH}\n```\n")
    files = ["--input", str(tmp_path / "page.md"), "--output", str(tmp_path / "page.de.md")]
    assert command("translate", "--model", "en_de", *files)[0] == 0
    translated = (tmp_path / "page.de.md").read_text(encoding="utf-8")
    assert translated.endswith(f"\n\n{GERMAN}\n\n```\n{ENGLISH}\n```\n")


@pytest.mark.parametrize(("name", "other"), [("en_de", "de"), ("en_fr", "fr")])
def test_cards_name_the_limits_the_licence_and_the_authors(name, other):
    folder = Path(model_folder(name))
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "cc-by-2.0"
    assert card_languages(folder) == ["en", other]
    first_line = card.text.split(f"# {name}\n\n")[1].splitlines()[0]
    assert "short" in first_line and "not" in first_line
    for word in ("tatoeba.org", "manythings.org", "CC BY 2.0 FR", f"opus-mt-en-{other}", "tok:13a"):
        assert word in card.text
    sentences = card.text.split("## Twenty sentences")[1].split("\n## ")[0]
    assert len([line for line in sentences.splitlines() if line.startswith("| ")]) == 1 + 20


def test_files_are_small_and_none_runs_code():
    folders = [Path(model_folder(name)) for name in TRANSLATIONS]
    files = {path: path.stat().st_size for folder in folders for path in folder.iterdir()}
    assert sum(files.values()) <= 12e6
    assert not any(path.suffix in (".py", ".bin", ".pt") for path in files)
    for folder in folders:
        assert "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_weights_in_8_bits_load_as_the_numbers_that_they_are(in_tmp_path):
    weights = load_file(FOLDER / "model.safetensors")
    matrices = {name for name, weight in weights.items() if weight.dim() == 2}
    assert {weights[name].dtype for name in matrices} == {torch.float8_e4m3fn}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(FOLDER, "cpu", dtype)
        loaded = model.state_dict()
        for name, weight in weights.items():
            torch.testing.assert_close(loaded[name], weight.to(dtype), rtol=0, atol=0)


def test_the_recipe_s_page_stores_matrices_in_8_bits(repository, in_tmp_path):
    page = (repository / "scripts/recipes/everyday/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = in_tmp_path / "runs/en_de/model.safetensors"
    file.parent.mkdir(parents=True)
    weights = {"matrix": torch.randn(3, 4), "bias": torch.randn(3)}
    save_file(weights, file)
    exec(code, {})
    stored = load_file(file)
    assert torch.equal(stored["matrix"].float(), weights["matrix"].to(torch.float8_e4m3fn).float())
    assert torch.equal(stored["bias"], weights["bias"].bfloat16())
