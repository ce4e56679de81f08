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
CARDS = sorted(path for path in (REPOSITORY / "model_cards").glob("*.md") if path.name != "README.md")
CODE = ("modeling_vanilla_transformer.py", "pipeline_vanilla_transformer.py")


@pytest.fixture(params=CARDS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def block(text: str, language: str) -> str:
    """The only code block in a language."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return code


def measured(text: str) -> list[EvalResult]:
    results = ModelCard(text).data.eval_results
    assert results
    return results


def test_cards_exist() -> None:
    assert {path.stem for path in CARDS} >= {"numbers_en_de", "multi30k_en_de_tiny"}


def test_metadata_equals_the_text(path: Path, text: str) -> None:
    data: Any = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.model_name) == ("transformers", "translation", path.stem)
    assert data.metrics == [metric for metric in METRICS if metric in {each.metric_type for each in measured(text)}]
    # a fine-tuned model has a column with the score before
    row = r"^\| (test|validation) \| (.*?) \| ([^|]*?) \|(?: [\d.]* \|)? ([\d.]+) \|$"
    shown = re.findall(row, section(text, "Results"), re.M)
    assert shown == [
        (each.dataset_split, each.dataset_name, each.metric_name, f"{each.metric_value:.2f}")
        for each in measured(text)
    ]


def test_scores_of_the_test_split_have_signatures(text: str) -> None:
    signed = {each.metric_type: each for each in measured(text) if each.dataset_split == "test"}
    for metric in ("bleu", "chrf"):
        signature = (signed[metric].metric_args or {})["signature"]
        assert re.fullmatch(rf"{signed[metric].metric_name}2?\|nrefs:1\|case:\w+\|.*version:[\d.]+", signature)
        assert f"- `{signature}`" in section(text, "Results")


def test_usage_code_is_that_of_the_template(path: Path, text: str, tmp_path: Path) -> None:
    for name in CODE:
        (tmp_path / name).touch()
    (example,) = ast.literal_eval(re.findall(r"^sentences = (.*)$", text, re.MULTILINE)[0])
    source, target = re.findall(r"^A translation model from `(\w+)` to `(\w+)`", text, re.MULTILINE)[0]
    today = str(model_card(tmp_path, CardFacts(path.stem, languages=(source, target), example=example)))
    assert section(text, "Use") == section(today, "Use")
    assert section(text, "Citation") == section(today, "Citation")
    limits = section(today, "Limits").strip().splitlines()
    assert len(limits) > 2 and [line for line in limits if line not in section(text, "Limits")] == []


def test_sections_and_facts_are_complete(text: str) -> None:
    titles = ["Use", "Results", "Training", "Data", "Limits", "Citation"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == titles
    training = section(text, "Training")
    for fact in ("updates", "wall time (h:min:s)", "hardware", "versions"):
        assert f"\n- {fact}: " in training
    assert re.findall(r"/home|/root|/work|/tmp|hf_[A-Za-z]{20}", text) == []


def test_recipe_is_that_of_the_repository(path: Path, text: str) -> None:
    given = yaml.safe_load(block(text, "yaml"))
    recipe = yaml.safe_load((REPOSITORY / "scripts" / "recipes" / f"{path.stem}.yaml").read_text(encoding="utf-8"))
    arguments = shlex.split(block(text, "bash"))
    flags = {each.removeprefix("--").split("=")[0] for each in arguments if each.startswith("--")}
    same = [name for name in recipe if name in given and name not in flags]
    assert len(same) > 15
    for name in same:
        value = recipe[name][0] if isinstance(recipe[name], list) and len(recipe[name]) == 1 else recipe[name]
        assert given[name] == (value.removeprefix("runs/") if isinstance(value, str) else value), name
    # The recipe in the card names the precision of its run: a measurement on another machine would make another model.
    assert given.get("bf16") or not given.get("auto_bf16")
    assert "bf16" not in recipe or given.get("bf16") == recipe["bf16"]
    sizes = dict(re.findall(r"^\| ([\w, ]+) \| ([\d.,]+) \|$", text.split("## Use")[0], re.MULTILINE))
    assert int(sizes["d_model"]) == recipe["d_model"] and int(sizes["encoder layers"]) == recipe["encoder_layers"]
    assert int(sizes["vocabulary"].replace(",", "")) == recipe["vocab_size"]
