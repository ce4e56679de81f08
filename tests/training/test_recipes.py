"""Recipes and flags are parsed into arguments. Mistakes are one-line errors."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerPreTrainedModel
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.training.run import recipes
from hf_vanilla_transformer.training.run.arguments import ModelArguments, chosen_values, run_task
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import fresh_model
from tests.trainer_helpers import error_of

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes"
LAUNCHES = sorted(FOLDER.glob("accelerate_*.yaml"))
RECIPES = sorted(set(FOLDER.glob("*.yaml")) - set(LAUNCHES))


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe. Return its path."""

    def write(content):
        path = tmp_path / "recipe.yaml"
        path.write_text(
            content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8"
        )
        return str(path)

    return write


def complaint(*arguments):
    """The one-line error of a wrong command line."""
    return error_of(parse_recipe, list(arguments))


# Table 3, §5.1, §5.3, §5.4 and §6.1: dropout, steps, checkpoints averaged, vocabulary
PAPER = {
    "wmt14_en_de_base": (0.1, 100_000, 5, 37_000),
    "wmt14_en_de_big": (0.3, 300_000, 20, 37_000),
    "wmt14_en_fr_base": (0.1, 100_000, 5, 32_000),
    "wmt14_en_fr_big": (0.1, 300_000, 20, 32_000),
}


@pytest.mark.parametrize("name", PAPER)
def test_wmt_recipes_have_the_papers_settings(name):
    model, data, run = parse_recipe([str(FOLDER / f"{name}.yaml")])
    assert (model.dropout, run.max_steps, run.average_last, model.vocab_size) == PAPER[name]
    assert (run.tokens_per_update, run.warmup_steps, model.label_smoothing) == (25_000, 4000, 0.1)
    assert (run.adam_beta1, run.adam_beta2, run.adam_epsilon, run.learning_rate) == (
        0.9,
        0.98,
        1e-9,
        None,
    )
    assert (run.test_num_beams, run.test_length_penalty) == (4, None)  # α = 0.6 is the model's own
    assert model.preset == name.rsplit("_")[-1]
    assert run.save_total_limit > run.average_last
    assert (
        data.train
        == data.validation
        == data.test
        == [f"wmt/wmt14:{data.target_lang}-{data.source_lang}"]
    )


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_launch_files_are_accepted_by_accelerate(path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DISABLE_RICH", "1")
    from accelerate.commands.config.config_args import load_config_from_file

    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config_from_file(str(path))  # it refuses unknown fields
    for name in ("num_processes", "num_machines", "distributed_type"):
        assert getattr(config, name) == values[name]
    assert config.mixed_precision == "no"
    wrapped = config.fsdp_config.get("fsdp_transformer_layer_cls_to_wrap", "")
    assert set(filter(None, wrapped.split(","))) <= set(
        VanillaTransformerPreTrainedModel._no_split_modules
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_values_reach_the_arguments(path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = values.pop("by_pairs", {})
    outcome = parse_recipe([str(path)])
    chosen = [(outcome, {})]
    chosen += [(outcome[-1].choices[pairs].arguments, row) for pairs, row in rows.items()]
    for arguments, row in chosen:
        parsed = {name: value for each in arguments for name, value in vars(each).items()}
        row.pop("why", None)
        for name, value in (values | row).items():
            expected = float(value) if isinstance(parsed[name], float) else value
            assert parsed[name] in (expected, [expected]), (
                name
            )  # a list of one may be written without brackets
    assert values["output_dir"] == f"runs/{path.stem}"
    languages = {"source_lang", "target_lang", "directions"} & values.keys()
    if run_task(outcome[1]) == "sequence":
        assert not languages
    elif path.stem.endswith("_corpus"):  # of the user, who names files and languages
        assert not languages
        assert "train" not in values
    else:
        assert languages in ({"source_lang", "target_lang"}, {"directions"})


def test_flags_override_the_recipe(recipe):
    path = recipe(
        {"d_model": 64, "dropout": 0.3, "max_steps": 5, "output_dir": "runs/a", "bf16": False}
    )
    flags = ["--d_model=32", "--max_steps", "9", "--output-dir", "runs/b"]
    model, _, run = parse_recipe([path, *flags])
    assert (model.d_model, model.dropout, run.max_steps, run.output_dir) == (32, 0.3, 9, "runs/b")


def test_flags_work_without_a_recipe():
    model, data, run = parse_recipe(
        ["--output_dir", "x", "--lowercase", "--preset", "B16", "--min_frequency", "3"]
    )
    assert (run.output_dir, data.lowercase, model.preset, data.min_frequency) == (
        "x",
        True,
        "B16",
        3,
    )
    assert model.d_model is None  # the preset's


YAML = """
output_dir: 1.10
learning_rate: 4e-3
test_length_penalty: -0.5
bidirectional: yes
tie_word_embeddings: false
load_best_model_at_end: off
average_tokens_across_devices: false
label_names: [labels, other]
report_to: [none]
lr_scheduler_kwargs: {timescale: 10}
augment: {upper: 0.5, noise: 0.2}
d_model: 0x10
include_num_input_tokens_seen: no
max_source_length: 12
max_target_length: ~
max_minutes: 5
validation:
train: 'my data/train set.jsonl'
source_lang: on
target_lang: no
eval_strategy: no
logging_strategy: no
resume_from_checkpoint: yes
"""
PARSED = {
    "output_dir": "1.10",
    "learning_rate": 0.004,  # YAML 1.1 reads a string
    "test_length_penalty": -0.5,
    "bidirectional": True,
    "tie_word_embeddings": False,
    "scale_embedding": None,
    "load_best_model_at_end": False,
    "average_tokens_across_devices": False,
    "label_names": ["labels", "other"],
    "report_to": [],
    "lr_scheduler_kwargs": {"timescale": 10},
    "augment": ["upper=0.5", "noise=0.2"],
    "d_model": 16,
    "include_num_input_tokens_seen": "no",
    "max_source_length": 12,
    "max_target_length": None,
    "max_minutes": 5.0,
    "validation": None,
    "train": ["my data/train set.jsonl"],
    "source_lang": "on",
    "target_lang": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "resume_from_checkpoint": "True",
}


def test_yaml_values_of_every_type_are_converted(recipe):
    parsed = {}
    for arguments in parse_recipe([recipe(YAML)]):
        parsed |= vars(arguments)
    for name, expected in PARSED.items():
        assert parsed[name] == expected, name
        assert isinstance(parsed[name], str) == isinstance(expected, str), name


def test_null_is_no_value_for_optional_fields(recipe):
    path = recipe("output_dir: x\nmax_source_length: null\nlabel_names: null\n")
    _, data, run = parse_recipe([path])
    assert data.max_source_length is None
    assert run.label_names is None
    _, data, _ = parse_recipe([path, "--max_source_length", "12"])
    assert data.max_source_length == 12
    _, data, _ = parse_recipe(["--output_dir", "x", "--max_source_length", "null"])
    assert data.max_source_length is None
    message = complaint(recipe("output_dir: x\nmax_steps: null\n"))
    assert "has no value for max_steps; leave the line out for the default, -1" in message
    assert "invalid int value: 'null'" in complaint("--max_steps", "null")


@pytest.mark.parametrize(
    ("name", "value"),
    [("warmup_steps", 4000), ("max_eval_length", None), ("ddp_backend", None), ("d_model", None)],
)
def test_null_stands_for_the_default_of_a_run(recipe, name, value):
    for command in ([recipe(f"output_dir: x\n{name}: null\n")], [f"--{name}=null"]):
        parsed = {key: one for each in parse_recipe(command) for key, one in vars(each).items()}
        assert parsed[name] == value


def test_flag_with_no_unsets_what_is_true():
    _, _, run = parse_recipe(["--no_average_tokens_across_devices"])
    assert run.average_tokens_across_devices is False


def test_fields_that_are_named_are_those_of_recipe_and_flags(recipe):
    _, _, run = parse_recipe([recipe("output_dir: x\nseed: 1\n"), "--max-steps=-1", "--bf16"])
    assert run.named == ["bf16", "max_steps", "output_dir", "seed"]


def test_row_has_its_own_fields_and_those_of_the_flags(recipe):
    rows = "by_pairs: {9: {dropout: 0.3, d_model: 8, why: no}, 4: {d_model: 16}}"
    *_, run = parse_recipe([recipe(f"output_dir: x\n{rows}\n"), "--d_model", "24"])
    assert list(run.choices) == [4, 9]
    few = run.choices[9]
    assert (few.fields, few.why, few.arguments[0].d_model) == ({"dropout": 0.3}, "no", 24)
    assert (run.choices[4].fields, run.choices[4].why) == ({}, "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("[1] Unable to find address for: eth9"),
            "GLOO_SOCKET_IFNAME: this host has no interface eth9; ",
        ),
        (ValueError("two\n  lines"), "two lines"),
        (KeyError(), "KeyError()"),
        (
            ValueError("b is not a valid Kind, please select one of a"),
            "seed: b is not a valid Kind, please select one of a",
        ),
        (ValueError("x is not a valid K, please select one of a"), "x is not a valid K, please"),
    ],
    ids=str,
)
def test_error_of_transformers_is_one_line(monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(recipes.HfArgumentParser, "parse_args_into_dataclasses", fail)
    line = complaint("--seed=a", "--d_model=b", "--seed", "b", "--logging_steps=c")
    assert "\n" not in line
    assert line.startswith(message)


def test_field_that_is_given_twice_is_refused(recipe):
    message = complaint(recipe("output_dir: x\nmax_steps: 5\nseed: 1\nmax_steps: 9\n"))
    assert message.endswith(" gives max_steps in the lines 2 and 4: keep one")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("learning_rat", "learning_rate"), ("d_modle", "d_model"), ("train_file", "train")],
)
def test_misspelt_field_gets_a_suggestion(recipe, name, nearest):
    dashes = name.replace("_", "-")
    commands = [
        [recipe({"output_dir": "x", name: 1})],
        ["--output_dir", "x", f"--{name}", "1"],
        ["--output_dir", "x", f"--{name}=1"],
        ["--output_dir", "x", f"--{dashes}", "1"],
    ]
    for command in commands:
        message = complaint(*command)
        assert ("recipe.yaml" in message) == (len(command) == 1)
        assert f" {name};" in message
        assert f" {nearest}?" in message


def test_abbreviated_field_is_refused():
    assert " learning" in complaint("--output_dir", "x", "--learning", "0.1")


@pytest.mark.parametrize("flags", ["train.en train.de", "--max_steps 3 train.en", "-o x"])
def test_value_without_its_field_is_named(recipe, flags):
    message = complaint(recipe("output_dir: x\n"), *flags.split())
    assert "--train train.en train.de" in message and "HfArgumentParser" not in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_steps: many", "argument --max_steps/--max-steps: invalid int value: 'many'"),
        ("d_model: 1.5", "argument --d_model/--d-model: invalid int value: '1.5'"),
        ("bidirectional: perhaps", "argument --bidirectional: Truthy value expected: got perhaps"),
        ("dropout: much", "argument --dropout: invalid float value: 'much'"),
        ("lr_scheduler_type: sideways", "lr_scheduler_type: sideways is not a valid SchedulerType"),
        (
            "eval_strategy: sometimes",
            "argument --eval_strategy/--eval-strategy: invalid choice: 'sometimes'",
        ),
        ("max_steps: [1, 2]", "max_steps: [1, 2]: give one value"),
        ("encoder_layers: []", "encoder_layers: []: give one value"),
    ],
)
def test_wrong_value_is_named(recipe, line, message):
    assert message in complaint(recipe(f"output_dir: x\n{line}\n"))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("- d_model: 3\n- dropout: 0.1\n", "`field: value`"),
        ("", "`field: value`"),
        ("no field", "`field: value`"),
        ("d_model: [1, 2", "YAML"),
        ("a: b: c\n", "YAML"),
        ("7: 8\n", " 7"),
        ("on: 1\n", " on"),
    ],
)
def test_invalid_recipe_file_is_refused(recipe, content, part):
    message = complaint(recipe(content))
    assert part in message
    assert "recipe.yaml" in message


def test_recipe_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes("output_dir: für\n".encode("latin-1"))
    assert "YAML" in complaint(str(path))


@pytest.mark.parametrize("path", ["nowhere.yaml", "."])
def test_missing_recipe_is_refused(path):
    assert path in complaint(path)


def test_recipe_after_flags_is_refused(recipe):
    assert "recipe.yaml" in complaint("--output_dir", "x", recipe({"seed": 1}))


DECIDED_ELSEWHERE = {"decoder_vocab_size", "is_encoder_decoder", "use_cache", "position_offset"}


def own_fields():
    every = {field.name: field for field in dataclasses.fields(VanillaTransformerConfig)}
    own = every.keys() & VanillaTransformerConfig.__annotations__.keys()
    return {name: every[name] for name in own - DECIDED_ELSEWHERE if not name.endswith("_token_id")}


def test_model_fields_are_those_of_the_configuration():
    fields = {
        field.name: field for field in dataclasses.fields(ModelArguments) if field.name != "preset"
    }
    hints = get_type_hints(ModelArguments)
    assert fields.keys() == own_fields().keys()
    for name, expected in own_fields().items():
        # HfArgumentParser takes one type and None
        kind = float if expected.type == float | int else expected.type
        assert hints[name] == kind | None, name
        assert fields[name].default is None
        shown = (
            expected.default is None
            or f"(default {expected.default})" in fields[name].metadata["help"]
        )
        assert shown, name


def test_preset_fields_can_be_overridden():
    model_args, _, _ = parse_recipe(
        ["--preset=C2", "--d_model=16", "--encoder_ffn_dim=16", "--output_dir=x"]
    )
    tokenizer = train_tokenizer(["two two"] * 3, 262)
    config = fresh_model(model_args, (tokenizer, tokenizer)).config
    assert (config.encoder_layers, config.decoder_layers, config.d_model) == (2, 2, 16)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim) == (16, 2048)


def test_chosen_values_reproduce_the_arguments(recipe):
    given = {
        "output_dir": "x",
        "d_model": 16,
        "learning_rate": 0.5,
        "eval_strategy": "steps",
        "lowercase": True,
    }
    chosen = chosen_values(*parse_recipe([recipe(given)]))
    assert given.items() <= chosen.items()
    assert not {"dropout", "bleu_tokenize"} & chosen.keys()
    again = chosen_values(*parse_recipe([recipe(yaml.safe_dump(chosen))]))
    assert again == chosen
