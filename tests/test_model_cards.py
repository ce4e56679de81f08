"""The reviewed model cards: valid for the Hub, complete, of an existing recipe, with the template's usage code."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard

from hf_vanilla_transformer.hub import CardFacts
from hf_vanilla_transformer.hub.card import METRICS, model_card

REPOSITORY = Path(__file__).parents[1]
CARDS = sorted(
    path for path in (REPOSITORY / "model_cards").glob("*.md") if path.name != "README.md"
)
CODE = ("modeling_vanilla_transformer.py", "pipeline_vanilla_transformer.py")


@pytest.fixture(params=CARDS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    (found,) = re.findall(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", text)
    return found


def block(text: str, language: str) -> str:
    """The only code block in a language."""
    (code,) = re.findall(rf"(?ms)^```{language}\n(.*?)^```", text)
    return code


def measured(text: str) -> list[EvalResult]:
    results = ModelCard(text).data.eval_results
    assert results
    return results


def test_cards_exist() -> None:
    assert {path.stem for path in CARDS} >= {"numbers_en_de", "multi30k_en_de_tiny"}


def test_metadata_equals_the_text(path: Path, text: str) -> None:
    data: Any = ModelCard(text).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "translation"
    assert data.model_name == path.stem
    found = {each.metric_type for each in measured(text)}
    assert data.metrics == [metric for metric in METRICS if metric in found]
    # a fine-tuned model has a column with the score before
    row = r"^\| (test|validation) \| (.*?) \| ([^|]*?) \|(?: [\d.]* \|)? ([\d.]+) \|$"
    shown = re.findall(row, section(text, "Results"), re.M)
    assert shown == [
        (each.dataset_split, each.dataset_name, each.metric_name, f"{each.metric_value:.2f}")
        for each in measured(text)
    ]


def test_scores_of_the_test_split_have_signatures(text: str) -> None:
    signed = {each.metric_type: each for each in measured(text) if each.dataset_split == "test"}
    for result in (signed["bleu"], signed["chrf"]):
        signature = (result.metric_args or {})["signature"]
        assert re.fullmatch(
            rf"{result.metric_name}2?\|nrefs:1\|case:\w+\|.*version:[\d.]+", signature
        )
        assert f"- `{signature}`" in section(text, "Results")


def test_usage_code_is_that_of_the_template(path: Path, text: str, tmp_path: Path) -> None:
    for name in CODE:
        (tmp_path / name).touch()
    sentences, *_ = re.findall(r"(?m)^sentences = (.*)$", text)
    (example,) = ast.literal_eval(sentences)
    languages, *_ = re.findall(r"(?m)^A translation model from `(\w+)` to `(\w+)`", text)
    facts = CardFacts(path.stem, languages=languages, example=example)
    today = str(model_card(tmp_path, facts))
    assert section(text, "Use") == section(today, "Use")
    assert section(text, "Citation") == section(today, "Citation")
    limits = section(today, "Limits").strip().splitlines()
    assert len(limits) > 2
    for line in limits:
        assert line in section(text, "Limits")


def test_sections_and_facts_are_complete(text: str) -> None:
    titles = ["Use", "Results", "Training", "Data", "Limits", "Citation"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == titles
    training = section(text, "Training")
    for fact in ("updates", "wall time (h:min:s)", "hardware", "versions"):
        assert f"\n- {fact}: " in training
    assert re.findall(r"/home|/root|/work|/tmp|hf_[A-Za-z]{20}", text) == []


def test_recipe_is_that_of_the_repository(path: Path, text: str) -> None:
    given = yaml.safe_load(block(text, "yaml"))
    file = REPOSITORY / "scripts" / "recipes" / f"{path.stem}.yaml"
    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    arguments = shlex.split(block(text, "bash"))
    flags = set(re.findall(r"(?m)^--(\w+)", "\n".join(arguments)))
    same = [name for name in recipe if name in given and name not in flags]
    assert len(same) > 15
    for name in same:
        value = recipe[name]
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        if isinstance(value, str):
            value = value.removeprefix("runs/")
        assert given[name] == value, name
    # The recipe in the card names the precision of its run: a measurement on another machine would make another model.
    assert given.get("bf16") or not given.get("auto_bf16")
    assert "bf16" not in recipe or given.get("bf16") == recipe["bf16"]
    above, *_ = text.split("## Use")
    sizes = dict(re.findall(r"(?m)^\| ([\w, ]+) \| ([\d.,]+) \|$", above))
    fields = {
        "d_model": "d_model",
        "encoder layers": "encoder_layers",
        "vocabulary": "vocab_size",
    }
    for row, field in fields.items():
        assert int(sizes[row].replace(",", "")) == recipe[field]
