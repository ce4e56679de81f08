"""The model card: valid for the Hub, complete, without unmeasured facts and without private paths or tokens."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import IntervalStrategy

from hf_vanilla_transformer.hub import CardFacts, write_model_card
from hf_vanilla_transformer.hub import card as card_module
from hf_vanilla_transformer.hub.card import card_for_repository
from hf_vanilla_transformer.inference.languages import card_languages
from tests.model_helpers import error_of, save_model

BLEU_SIGNATURE = "BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CHRF_SIGNATURE = "chrF2|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0"
TOKEN = "hf_" + "a1B2" * 8

RECIPE = {
    "train": ["/home/alice/secret project/train.en", "~/data/train.de", "org/pairs", "data/more"],
    "test": ["../shared/test_2016.en", Path("/mnt/disk/test_2016.de")],
    "output_dir": "/home/alice/runs/tiny",
    "tokenizer_name": "some-org/tokenizer",
    "train_weights": None,
    "learning_rate": 0.004,
    "bf16": False,
    "eval_strategy": IntervalStrategy.STEPS,
    "report_to": ["tensorboard", "/home/alice/log"],
    "lr_scheduler_kwargs": {"file": "C:\\Users\\alice\\schedule.json", "timescale": 3},
    "hub_token": TOKEN,
    "max_source_length": 256,
}


def full_facts(**changes) -> CardFacts:
    """Facts of a run in which every attribute is set, with private paths and tokens."""
    facts = {
        "model_name": "tiny-en-de",
        "languages": ("en", "no"),  # YAML reads a bare `no` as false
        "recipe": RECIPE,
        "metrics": {
            "test_bleu": 41.0234,
            "test_chrf": 63.456,
            "test_exact_match": 12.5,
            "test_bleu_signature": BLEU_SIGNATURE,
            "test_chrf_signature": CHRF_SIGNATURE,
            "eval_bleu": 40.1,
            "train_updates": 12345,
            "epoch": 7.5,
            "train_loss": 1.23456,
            "averaged_checkpoints": 10,
            "test_examples": [["a | b", "c", "d_e"], ["<x>", "y", ""]],
        },
        "data_summaries": {
            "train": "kept 28,998 of 29,000 pairs; dropped 2 of /home/alice/x.en: empty (lines 7, 31)"
        },
        "data_fingerprints": {"train": "00112233445566778899aabbccddeeff"},
        "parameters": 2_456_789,
        "config": {
            "d_model": 128,
            "vocab_size": 9700,
            "decoder_vocab_size": None,
            "activation_function": "relu",
        },
        "train_seconds": 3599.6,
        "hardware": "AMD EPYC, 2 of 64 cores, 2 torch threads",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "datasets": {"train": ["org/pairs"]},
        "license": "apache-2.0",
    }
    return CardFacts(**(facts | changes))


@pytest.fixture
def full_card(tmp_path) -> str:
    return write_model_card(tmp_path, full_facts()).read_text(encoding="utf-8")


def blocks(card: str, language: str) -> list[str]:
    """The contents of the code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)\n```", card, re.DOTALL)


@pytest.mark.parametrize(
    ("task", "names"), [("language", ["sacrebleu", "torch"]), ("sequence", ["torch"])]
)
def test_signatures_and_versions_of_the_task_are_in_the_text(
    task: str, names: list[str], tmp_path
) -> None:
    versions = {"sacrebleu": "2.5.1", "torch": "2.13.0"}
    card = write_model_card(tmp_path, full_facts(task=task, versions=versions)).read_text(
        encoding="utf-8"
    )
    (row,) = [line for line in card.splitlines() if "versions" in line]
    assert row.endswith(", ".join(f"{name} {versions[name]}" for name in names))
    _, _, text = card.split("---\n", 2)
    assert BLEU_SIGNATURE in text and CHRF_SIGNATURE in text


def test_metadata_is_read_back(tmp_path) -> None:
    path = write_model_card(tmp_path, full_facts())
    assert path == tmp_path / "README.md"
    data = ModelCard.load(path).data
    assert (data.library_name, data.pipeline_tag, data.license) == (
        "transformers",
        "translation",
        "apache-2.0",
    )
    assert (data.language, data.datasets, data.model_name) == (
        ["en", "no"],
        ["org/pairs"],
        "tiny-en-de",
    )
    assert data.metrics == ["bleu", "chrf", "exact_match"]
    found = {(result.dataset_split, result.metric_type): result for result in data.eval_results}
    values = {"bleu": 41.02, "chrf": 63.46, "exact_match": 12.5}
    expected = {
        **{("test", name): value for name, value in values.items()},
        ("validation", "bleu"): 40.1,
    }
    assert {key: result.metric_value for key, result in found.items()} == expected
    assert found["test", "bleu"].metric_args == {"signature": BLEU_SIGNATURE}
    assert found["test", "chrf"].metric_args == {"signature": CHRF_SIGNATURE}
    assert found["test", "bleu"].dataset_name == "test_2016.en, test_2016.de"


def test_recipe_is_yaml_without_directories(full_card) -> None:
    (recipe,) = blocks(full_card, "yaml")
    assert yaml.safe_load(recipe) == {
        "train": ["train.en", "train.de", "org/pairs", "more"],
        "test": ["test_2016.en", "test_2016.de"],
        "output_dir": "tiny",
        "tokenizer_name": "some-org/tokenizer",
        "learning_rate": 0.004,
        "bf16": False,
        "eval_strategy": "steps",
        "report_to": ["tensorboard", "log"],
        "lr_scheduler_kwargs": {"file": "schedule.json", "timescale": 3},
        "max_source_length": 256,
    }


@pytest.mark.parametrize(
    ("items", "written"),
    [
        ([], []),
        (["a.en"], "a.en"),
        (["a.en", None], "a.en"),
        (["a.en", "a.de"], ["a.en", "a.de"]),
    ],
)
def test_list_of_one_is_written_as_recipes_are(tmp_path, items, written) -> None:
    card = write_model_card(tmp_path, full_facts(recipe={"test": items})).read_text("utf-8")
    assert yaml.safe_load(blocks(card, "yaml")[0]) == {"test": written}


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({"held_out_pairs": 500}, "pairs held out of the training text"),
        ({"held_out_pairs": 500, "validation": ["a.en", "a.de"]}, "a.en, a.de"),
        ({"validation": ["".join(("num", "bers"))]}, "number words made by num2words"),
        ({"validation": ["numbers.en"], "max_eval_samples": 9}, "numbers.en, the first 9 pairs"),
        ({}, None),
    ],
)
def test_text_of_a_split_is_described(recipe, text) -> None:
    assert card_module._text(full_facts(recipe=recipe), "validation") == (text, None)


def test_only_the_title_takes_the_name_of_the_repository() -> None:
    usage = '# mine\n\n```python\nname = "mine"\n```\n\n```bash\n# mine\n```'
    text = f"---\nlicense: mit\n---\n{usage}\n"
    renamed = card_for_repository(text, "org/other")
    expected = usage.replace("# mine", "# other", 1).replace('"mine"', '"org/other"')
    assert renamed.rstrip().endswith(expected)


@pytest.mark.parametrize(
    "metadata", ["foo: [", "- a", "language: {", "a: !b 1", "text", "1: 2", "a: 2020-99-99"]
)
def test_damaged_metadata_of_a_card_is_one_line(metadata: str) -> None:
    line = error_of(card_for_repository, f"---\n{metadata}\n---\n# x\n", "me/x", "mit")
    assert line.startswith("README.md: its metadata between the lines --- is damaged (")
    assert "\n" not in line


def test_byte_order_mark_does_not_hide_the_metadata() -> None:
    card = card_for_repository("\ufeff---\nlicense: mit\n---\n# x\n", "me/x", "apache-2.0")
    assert card == "---\nlicense: apache-2.0\n---\n# x\n"


def test_card_has_no_private_parts(full_card) -> None:
    for private in (
        "alice",
        "secret project",
        "/home",
        "/mnt",
        "~",
        "Users",
        "shared",
        TOKEN,
        "hf_a1B2",
    ):
        assert private not in full_card


@pytest.mark.parametrize(
    "value",
    [
        "/home/alice/x.en",
        "~/x.en",
        "~alice/x.en",
        "file:///home/alice/x.en",
        "D:\\alice\\x.en",
        "\\\\alice\\x.en",
    ],
)
@pytest.mark.parametrize(
    "sentence", ["{}", "read {} twice", "({})", "'{}'", "a={}", '{{"file": "{}"}}']
)
def test_absolute_path_is_reduced_within_text(tmp_path, value, sentence) -> None:
    text = sentence.format(value)
    facts = CardFacts("m", recipe={"note": text}, data_summaries={"train": text}, hardware=text)
    card = write_model_card(tmp_path, facts).read_text(encoding="utf-8")
    assert "alice" not in card and "home" not in card
    assert card.count("x.en") == 3


@pytest.mark.parametrize("both", [True, False])
def test_card_says_in_which_directions_the_model_translates(tmp_path, both) -> None:
    facts = full_facts(recipe=RECIPE | {"bidirectional": both})
    assert (
        "from `en` to `no` and back"
        in write_model_card(tmp_path, facts).read_text(encoding="utf-8")
    ) is both


def test_missing_facts_are_left_out(tmp_path) -> None:
    path = write_model_card(tmp_path, CardFacts(model_name="bare"))
    card = path.read_text(encoding="utf-8")
    absent = "None unknown nan Results BLEU Training Data parameters license ![ size"
    assert [text for text in absent.split() if text in card] == []
    data = ModelCard.load(path).data.to_dict()
    assert sorted(data) == ["library_name", "pipeline_tag", "tags"]
    assert not re.search(r"\n{3,}|[ \t]+\n", card)


def card_of(folder: Path, **facts) -> str:
    return write_model_card(folder, CardFacts("x", **facts)).read_text(encoding="utf-8")


def test_card_says_how_to_install_the_package_and_what_the_tokenizer_needs(tmp_path) -> None:
    card = card_of(tmp_path)
    assert "pip install -c scripts/constraints.txt ." in card and "sentencepiece" not in card
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "MarianTokenizer"}', encoding="utf-8"
    )
    assert "pip install sentencepiece sacremoses" in card_of(tmp_path)


@pytest.mark.parametrize("split", ["test", "base_test"])
def test_text_of_the_base_model_is_explained_where_it_was_scored(tmp_path, split) -> None:
    card = card_of(tmp_path, metrics={f"{split}_bleu": 2.0, f"before_{split}_bleu": 1.0})
    assert ("text of the base model" in card) == (
        split == "base_test"
    ) and "before fine-tuning" in card


def test_dataset_of_the_hub_is_in_the_metadata(tmp_path) -> None:
    recipe = {"test": ["org/pairs:de-en"]}
    path = write_model_card(tmp_path, full_facts(recipe=recipe, datasets=recipe))
    result = ModelCard.load(path).data.eval_results[0]
    assert (result.dataset_type, result.dataset_name, result.dataset_config) == (
        "org/pairs",
        "org/pairs:de-en",
        "de-en",
    )


@pytest.mark.parametrize("separate", [False, True])
def test_usage_code_runs(tmp_path, in_tmp_path, capsys, separate) -> None:
    texts = ["a b c d"] * 9
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "tie_word_embeddings": False}
    folder = save_model(
        tmp_path / "tiny", texts, texts if separate else None, vocab_size=300, **sizes
    )
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps(generation | {"max_new_tokens": 3}))
    facts = full_facts(model_name="tiny", example='a "b"')
    card = write_model_card(folder, facts).read_text(encoding="utf-8")
    usage = blocks(card, "python")
    assert len(usage) == 3
    assert all(('subfolder="target_tokenizer"' in code) == separate for code in usage[:2])
    for code in usage:
        exec(code, {})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("[")
    (found,) = ast.literal_eval(third)
    assert [found["translation_text"]] == ast.literal_eval(first) and found["score"] < 0


def test_only_language_codes_become_metadata(tmp_path):
    path = write_model_card(tmp_path, CardFacts("x", languages=("english", "pt-BR")))
    data = ModelCard.load(path).data.to_dict()
    # the Hub refuses a card with subtags in `language`
    assert (data["language"], data["language_bcp47"]) == (["pt"], ["pt-BR"])
    assert "from `english` to `pt-BR`" in path.read_text(encoding="utf-8")
    assert "language_bcp47" not in write_model_card(tmp_path, full_facts()).read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    "languages", [("en", "de"), ("pt-BR", "pt-PT"), ("en", "zh-Hans"), ("sr-Latn", "en")]
)
def test_languages_are_read_from_the_card_as_they_were_given(languages, tmp_path):
    write_model_card(tmp_path, CardFacts("x", languages=languages))
    assert card_languages(tmp_path) == list(languages)
