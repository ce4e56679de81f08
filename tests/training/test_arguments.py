"""Arguments that would fail in the middle of a run, or train nothing, are refused when they are given."""

import re

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
)
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.run import argument_checks
from hf_vanilla_transformer.training.run.arguments import RunArguments, set_decoding
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import error_of, run_tiny, write_pairs

PAIRS = [
    ("One dog", "Ein Hund"),
    ("Two dogs, 345 cats, 17 mice", "Zwei Hunde, 345 Katzen, 17 Mäuse"),
    ("A cat", "Eine Katze"),
    ("dog dog dog dog dog dog", "Hund Hund Hund Hund Hund"),
]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("gradient_accumulation_steps=0", " 1"),
        ("per_device_train_batch_size=0", " 1"),
        ("per_device_eval_batch_size=0", " 1"),
        ("generation_max_length=0", " 1"),
        ("test_num_beams=0", " 1"),
        ("max_source_length=0", " 1"),
        ("save_total_limit=0", " 1"),
        ("seed=-1", " 0"),
        ("seed=4294967296", "4,294,967,295"),
        ("data_seed=4294967296", "4,294,967,295"),
        ("generation_max_length=1000000000000", "100,000"),
        ("generation_num_beams=1001", " 1,000,"),
        ("test_num_beams=1001", " 1,000,"),
        ("dataloader_num_workers=1001", " 1,000,"),
        ("dataloader_prefetch_factor=1001", " 1,000,"),
        ("learning_rate=-1.0", " 0"),
        ("learning_rate=nan", " 0"),
        ("weight_decay=inf", " 0"),
        ("adam_beta2=1.0", "below 1"),
        ("save_steps=0", " 0"),
        ("max_minutes=-3", " 0"),
        ("num_train_epochs=-1", " 0"),
        ("num_train_epochs=nan", "finite"),
        ("num_train_epochs=0", "above 0"),
        ("tokens_per_update=9", "max_tokens_per_batch"),
        ("teacher_weight=-0.1", "from 0 to 1"),
        ("teacher_weight=1.1", "from 0 to 1"),
        ("max_steps=0", "updates"),
        ("max_steps=-7", "updates"),
        ("predict_with_generate=False", "False"),
        ("deepspeed=ds.json", "was not found"),
        ("use_liger_kernel=True", "True"),
        ("bf16_full_eval=True", "rounds the weights"),
        ("dataloader_persistent_workers=True", "dataloader_num_workers"),
    ],
)
def test_wrong_number_is_refused_when_it_is_given(argument, reason):
    message = error_of(parse_recipe, ["--output_dir", "x", f"--{argument}"])
    assert argument.split("=")[0] in message
    assert reason in message


@pytest.mark.parametrize(
    "fields",
    [
        {"max_steps": 1, "num_train_epochs": 0.0},
        {"max_steps": -1, "num_train_epochs": 0.01},
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
        {"generation_max_length": 100_000, "test_num_beams": 1000, "seed": 2**32 - 1},
        {"teacher_weight": 0.0},
        {"teacher_weight": 1.0, "teacher_top": 1, "teacher": ["a"]},
        {"consistency_start": 1, "r_drop_alpha": 1.0},
        {"max_tokens_per_batch": 8, "tokens_per_update": 8},
        {"muon": True, "optim": "adamw_torch"},
        {"muon": True, "optim": "adamw_torch_fused"},
        {"muon": True, "bf16": True},
        {"optim": "sgd"},
    ],
    ids=str,
)
def test_numbers_at_their_bounds_are_accepted(fields):
    assert fields.items() <= vars(RunArguments("x", **fields)).items()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\n  lines"), "optim: two lines"),
        (KeyError(), "optim: KeyError()"),
        (UserError("seed: 1"), "seed: 1"),
    ],
    ids=repr,
)
def test_error_of_a_library_is_one_line_with_its_setting(error, message):
    def fail():
        with argument_checks.refused_as_one_line("optim"):
            raise error

    assert error_of(fail) == message


def test_cpu_is_used_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = RunArguments("x", bf16=True)
    assert (args.use_cpu, args.accelerator_config.non_blocking) == (True, False)


def test_what_is_not_asked_for_is_off():
    args = RunArguments("x")
    methods = ("simcut_alpha", "r_drop_alpha", "crossconst_alpha", "consistency_start", "ema_decay")
    for name in (*methods, "teacher_top", "lora_r", "average_last"):
        assert getattr(args, name) == 0, name
    for name in ("muon", "skip_nonfinite_gradients", "trust_remote_code", "auto_bf16"):
        assert getattr(args, name) is False, name
    assert args.teacher_weight == 0.5  # as much of the teacher as of the references
    assert args.accelerator_config.dispatch_batches is False
    asked = RunArguments("x", teacher="a", accelerator_config={"dispatch_batches": True})
    assert asked.accelerator_config.dispatch_batches is True
    assert asked.teacher == ["a"]


@pytest.mark.parametrize("value", [None, "none", ["none"], []])
def test_no_reports_are_written_as_they_are_in_transformers(value):
    """transformers 5.23 turns None into [None], and refuses that."""
    assert RunArguments("x", report_to=value).report_to == []


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_order_of_sums_is_kept_with_more_than_two_processes(monkeypatch, processes):
    """Two summands have the same sum in any order."""
    monkeypatch.setattr(RunArguments, "world_size", processes)
    assert RunArguments("x").ddp_find_unused_parameters is (None if processes == 3 else False)
    assert RunArguments("x", ddp_find_unused_parameters=True).ddp_find_unused_parameters is True


@pytest.mark.parametrize(
    ("own", "fields", "expected"),
    [
        ({"max_length": 9}, {"generation_max_length": 7}, {"max_length": 7}),
        ({"max_new_tokens": 9}, {"generation_max_length": 7}, {"max_length": 7}),
        ({}, {"generation_max_length": 7}, {}),
        ({"max_length": 9}, {}, {"max_length": 9}),
        ({"num_beams": 3, "length_penalty": 0.5}, {}, {"num_beams": 3, "length_penalty": 0.5}),
        (
            {"num_beams": 3, "length_penalty": 0.5},
            {"test_num_beams": 4, "test_length_penalty": 0.0},
            {"num_beams": 4, "length_penalty": 0.0},
        ),
    ],
    ids=str,
)
def test_search_of_the_saved_model_is_that_of_the_test(own, fields, expected):
    config = GenerationConfig(**own)
    set_decoding(config, RunArguments("x", **fields))
    assert config.to_diff_dict().items() >= expected.items()
    assert config.to_diff_dict().keys() <= {*expected, "transformers_version"}


@pytest.mark.parametrize(
    "by_pairs", ["", "by_pairs:\n  9:\n    vocab_size: 270\n"], ids=["fixed", "chosen"]
)
@pytest.mark.parametrize(
    ("name", "value"), [("d_model", 15), ("dropout", 30), ("label_smoothing", 1.5)]
)
def test_sizes_that_cannot_be_are_refused_before_the_text_is_read(
    tmp_path,
    capsys,
    by_pairs,
    name,
    value,
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: x\n{by_pairs}")
    message = error_of(train, tmp_path, recipe, **{"vocab_size": None, name: value})
    assert message.startswith(f"{name}=")
    assert str(value) in message
    assert "pairs" not in capsys.readouterr().out


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("widths", [{}, {"head_dim": 5, "value_head_dim": 7}], ids=str)
def test_size_of_a_model_is_that_of_its_matrices(monkeypatch, positions, widths):
    config = VanillaTransformerConfig(
        vocab_size=101,
        d_model=24,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=3,
        encoder_ffn_dim=50,
        decoder_ffn_dim=70,
        position_encoding_type=positions,
        max_position_embeddings=30,
        **widths,
    )
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    monkeypatch.setattr(argument_checks, "memory_size", lambda: 4 * matrices)
    argument_checks.check_size(config)
    monkeypatch.setattr(argument_checks, "memory_size", lambda: 4 * matrices - 1)
    message = error_of(argument_checks.check_size, config)
    assert re.match(r"the model would have ([\d,]+) parameters", message)[1] == f"{matrices:,}"


def test_size_of_a_model_is_said_in_gigabytes(monkeypatch):
    """Of 4 bytes a parameter."""
    sizes = {"vocab_size": 12 * 10**8, "d_model": 2, "encoder_layers": 1, "decoder_layers": 1}
    monkeypatch.setattr(argument_checks, "memory_size", lambda: 36 * 10**8)
    config = VanillaTransformerConfig(**sizes, encoder_attention_heads=1, decoder_attention_heads=1)
    message = error_of(argument_checks.check_size, config)
    assert message.endswith(
        " parameters, 10 GB, and this machine has 4 GB: make its fields smaller (d_model=2, …)"
    )


def train(folder, *first, **values):
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "save_strategy": "no",
        "warmup_steps": 2,
        **write_pairs(folder, PAIRS, "train", "validation", "test"),
    }
    return run_tiny(folder / "run", *first, **settings | values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optim": "adamw_bnb_8bit"}, "^optim: adamw_bnb_8bit with optim_args="),
        ({"optim": "sgd", "optim_args": "x"}, "^optim: sgd with optim_args="),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "^optim: sgd with .*: Invalid momentum"),
        ({"optim": "galore_adamw", "optim_args": "x=1"}, "^optim: galore_adamw with optim_args="),
        ({"lr_scheduler_type": "reduce_lr"}, "^lr_scheduler_type: reduce_lr is not"),
        ({"torch_compile_mode": "fast"}, "^torch_compile_mode: fast with torch_compile_backend="),
        (
            {"torch_compile_backend": "gcc"},
            "^torch_compile_mode: None with torch_compile_backend=gcc",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "cosine_with_min_lr"),
        (
            {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": '{"timescales": 3}'},
            "inverse_sqrt",
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"lr_end": 5.0}'},
            "polynomial",
        ),
        ({"report_to": "wandbb"}, "wandbb"),
        ({"d_model": 2**31}, "parameters"),
        ({"encoder_layers": 2**31}, "parameters"),
        ({"value_head_dim": 2**31}, "parameters"),
        ({"vocab_size": 3_000_000_000}, "vocab_size.*3000000000"),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_refused_before_training(tmp_path, fields, message):
    assert re.search(message, error_of(train, tmp_path, **fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "max_source_length: 256"),
        ({"max_source_length": "null", "max_target_length": 20}, "max_source_length: None"),
        ({"max_source_length": 20, "max_target_length": 21}, "max_target_length: 21"),
        ({"max_source_length": 20, "max_target_length": 20}, "validation data"),
        (
            {"max_source_length": 20, "max_target_length": 20, "max_eval_samples": 1},
            "test data: the lines",
        ),
    ],
)
def test_sentences_beyond_learned_positions_are_refused_before_training(tmp_path, fields, message):
    learned = {"position_encoding_type": "learned", "max_position_embeddings": 20}
    assert message in error_of(train, tmp_path, **learned, **fields)
    assert not (tmp_path / "run").exists()


def test_lowercase_treats_validation_and_test_alike(tmp_path, monkeypatch):
    """A model that repeats the references in lower case scores 100 on both."""

    def repeat(self, model, inputs, *args, **kwargs):
        return None, inputs["labels"], inputs["labels"]

    monkeypatch.setattr(VanillaTransformerTrainer, "prediction_step", repeat)
    results = train(tmp_path, lowercase=True, bleu_tokenize="char")
    assert results["eval_exact_match"] == results["test_exact_match"] == 100
    assert results["test_bleu"] == pytest.approx(results["eval_bleu"])
    assert results["test_bleu"] > 99
    assert "case:lc" in results["test_bleu_signature"]


def test_lowercase_with_a_tokenizer_that_keeps_capitals_is_refused(tmp_path):
    save_tokenizers(tmp_path / "mine", train_tokenizer(["abc abc"] * 5, 270))
    message = error_of(train, tmp_path, lowercase=True, tokenizer_name=tmp_path / "mine")
    assert message.startswith("lowercase: True: ")
