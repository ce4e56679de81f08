"""A resumed run is the same run: each argument of `train`, changed on resume, is refused, printed, or irrelevant.

The arguments come from the parser, so that a new one fails here until it is in a group of `fingerprint` or is printed.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.run import facts
from hf_vanilla_transformer.training.run.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
)
from hf_vanilla_transformer.training.run.facts import (
    data_facts,
    fixed_facts,
    model_facts,
    names_digest,
    other_facts,
)
from hf_vanilla_transformer.training.run.recipes import parse_recipe, training_parser
from hf_vanilla_transformer.training.state.fingerprint import (
    COMPARED_AS,
    IRRELEVANT,
    OBJECTIVE,
    OPTIMIZATION,
    PLAN,
    RUN_STATE,
    SELECTION,
    content_of,
    read_run_state,
    source_digest,
)
from hf_vanilla_transformer.training.trainer import resumable_trainer
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.system_info import versions
from hf_vanilla_transformer.utils.user_code import import_function
from tests.model_helpers import SMALL_SIZES, error_of, tiny_model
from tests.trainer_helpers import (
    SAVING,
    EntropyLoss,
    change_json,
    collate,
    run_tiny,
    trained,
    write_pairs,
)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ZAHLEN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"]
PAIRS = list(zip(WORDS, ZAHLEN, strict=True))
OTHERS = [(f"{source} {source}", f"{target} {target}") for source, target in PAIRS]
MODULE = __name__
# Data arguments that are compared by the content that they load.
COMPARED_BY_CONTENT = {
    "base_test",
    "bidirectional",
    "data",
    "held_out_pairs",
    "line_pattern",
    "max_eval_length",
    "max_eval_samples",
    "max_test_samples",
    "numbers_size",
    "sampling_temperature",
    "source_column",
    "target_column",
    "test",
    "tokenizer_name",
    "train",
    "train_weights",
    "validation",
}
MODEL_ARGUMENTS = set(vars(parse_recipe([])[0]))


class Sharp(VanillaTransformerForConditionalGeneration):
    """Another objective with the same weights."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = 3 * output.loss
        return output


def doubled(source: str, target: str, dice: Any) -> tuple[str, str]:
    return f"{source} {source}", f"{target} {target}"


def folded(text: str) -> str:
    return text.casefold()


ACTIONS: dict[str, argparse.Action] = {
    action.dest: action
    for action in training_parser()._actions
    if action.nargs != 0  # help, and the second flags of Booleans
}

#: Cannot be tried here: another machine or service is needed.
NOT_TRIED = {
    "deepspeed": "needs deepspeed",
    "fsdp": "needs several processes",
    "fsdp_config": "needs several processes",
    "push_to_hub": "needs the Hub",
    "parallelism_config": "has no flag",
    "tf32": "needs a GPU",
    "fp16": "needs a GPU",
}


# Runs


class Runs:
    """Runs of two updates, each made once: their folders, flags, and the weights after a third update."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.text = write_pairs(folder / "text", PAIRS) | write_pairs(
            folder / "text", PAIRS[:3], "validation"
        )
        self.others = write_pairs(folder / "others", OTHERS, "train", "validation", "test")
        self.base = self._model("base", 0.0)
        self.other_base = self._model("other_base", 1.0)
        common = {"save_steps": 1, "per_device_train_batch_size": 3, "warmup_steps": 2, "seed": 1}
        files = {**self.text, **common}
        tuned = {
            **dict.fromkeys(SMALL_SIZES),
            **files,
            "model_name_or_path": self.base,
            "vocab_size": None,
            "learning_rate": 0.01,
        }
        self.flags: dict[str, dict[str, Any]] = {
            "fresh": {
                **files,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "metric_for_best_model": "loss",
                "greater_is_better": False,
            },
            "tuned": tuned,
            "lora": {**tuned, "lora_r": 2},
            "tokens": {**files, "max_tokens_per_batch": 40},
            "many": {**common, "train": [self._table()], "directions": ["en-de", "de-en"]},
            "taught": {
                **files,
                "tokenizer_name": self.base,
                "vocab_size": None,
                "teacher": [self.base],
            },
        }
        self.weights: dict[str, dict[str, torch.Tensor]] = {}

    def _model(self, name: str, change: float) -> Path:
        folder = self.folder / name
        tokenizer = train_tokenizer([*WORDS, *ZAHLEN], 280)
        model = tiny_model(vocab_size=len(tokenizer))
        model.model.decoder.layers[0].fc1.bias.data += change
        model.save_pretrained(folder)
        save_tokenizers(folder, tokenizer)
        return folder

    def _table(self) -> Path:
        file = self.folder / "table.tsv"
        rows = [f"{source}\t{target}" for source, target in PAIRS]
        file.write_text("\n".join(["en\tde", *rows]) + "\n", encoding="utf-8")
        return file

    def make(self, kind: str) -> Path:
        """The folder of a run of two updates."""
        folder = self.folder / kind
        if not folder.exists():
            train(folder, self.flags[kind], max_steps=2)
            resumed = self.copy(kind, self.folder / f"{kind}-resumed")
            printed = self.resume(kind, resumed)
            assert changes(printed) == [], "a resume without a change prints none"
            assert "resuming without" not in printed
            self.weights[kind] = weights_of(resumed)
        return folder

    def copy(self, kind: str, target: Path) -> Path:
        return shutil.copytree(self.make(kind), target)

    def resume(self, kind: str, folder: Path, **changed: Any) -> str:
        return train(folder, self.flags[kind], **RESUME | changed)


RESUME = {"max_steps": 3, "resume_from_checkpoint": True}


def train(folder: Path, flags: dict[str, Any], **changed: Any) -> str:
    """Train and return what is printed."""
    fields = (
        {"vocab_size": 280, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
        | flags
        | changed
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_tiny(
            folder, **{name: "null" if value is None else value for name, value in fields.items()}
        )
    return printed.getvalue()


def changes(printed: str) -> list[str]:
    """The names of the changes that a resume has printed, without `max_steps`, which each resume here raises."""
    names = re.findall(r"^resuming with another \w+: (.+?) was ", printed, re.M)
    return [name for name in names if name != "max_steps"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    (file,) = last.glob("*model.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


# Changes


def changed_value(name: str, runs: Runs, now: Any) -> Any:
    """A value of an argument that differs from `now`."""
    known = {
        "activation_function": "gelu",
        "add_languages": ["fr=de"],
        "augment": ["upper=0.5"],
        "base_test": runs.others["validation"],
        "bleu_tokenize": "char",
        "debug": "tpu_metrics_debug",
        "directions": ["de-en", "en-de"],
        "label_names": ["labels"],
        "language_token": "target",
        "layer_norm_position": "pre",
        "liger_kernel_config": "{}",
        "lr_scheduler_kwargs": '{"timescale": 7}',
        "lr_scheduler_type": "constant",
        "metric_for_best_model": "bleu",
        "metrics": ["ter"],
        "normalize": f"{MODULE}:folded",
        "model_class": f"{MODULE}:Sharp",
        "model_name_or_path": runs.other_base,
        "optim": "sgd",
        "torch_compile_backend": "eager",
        "torch_compile_mode": "default",
        "optim_args": "eps=1e-3",
        "position_encoding_type": "sinusoidal_split",
        "preset": "big",
        "report_to": "none",
        "sampling_temperature": 1.0,
        "source_column": "en",
        "rewrite": f"{MODULE}:doubled",
        "source_lang": "fr",
        "source_tokens": "chars",
        "target_tokens": "chars",
        "task": "sequence",
        "tokens": "chars",
        "target_column": "de",
        "target_lang": "it",
        "teacher": [runs.other_base],
        "test": runs.others["test"],
        "tokenizer_name": runs.base,
        "train": runs.others["train"],
        "train_sampling_strategy": "sequential",
        "train_weights": [2],
        "validation": runs.others["validation"],
        "accelerator_config": '{"split_batches": false, "even_batches": false}',
        "activation_checkpointing_kwargs": '{"use_reentrant": false}',
        "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
        "optim_target_modules": "q_proj",
        "include_for_metrics": ["loss"],
        "local_rank": -1,
        "ddp_backend": "gloo",
        "save_strategy": "epoch",
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "max_minutes": 100.0,
        "generation_config": runs.base,
    }
    if name in known:
        return known[name]
    action = ACTIONS[name]
    kind = getattr(action.type, "__name__", "")
    default = now if now is not None else DEFAULTS.get(name, action.default)
    if kind == "string_to_bool":
        return not default
    if kind == "int":
        return 7 if not isinstance(default, int) else default + 1
    if kind == "float":
        return 0.5 if not default or default == 1 else default * 0.5
    if action.choices:
        return next(choice for choice in action.choices if choice != default)
    return "other"


DEFAULTS = {name: getattr(VanillaTransformerConfig(), name, None) for name in MODEL_ARGUMENTS}
#: The run in which a change of the argument has an effect. Others are tried with fresh weights and batches of pairs.
KIND = {
    **dict.fromkeys(
        ("directions", "language_token", "add_languages", "sampling_temperature"), "many"
    ),
    **dict.fromkeys(("source_column", "target_column"), "many"),
    **dict.fromkeys(("lora_r", "model_name_or_path", "trust_remote_code"), "lora"),
    **dict.fromkeys(("max_tokens_per_batch", "pack", "tokens_per_update"), "tokens"),
    **dict.fromkeys(("teacher", "teacher_weight", "teacher_top"), "taught"),
}
#: What an argument needs beside itself.
WITH = {
    "dataloader_persistent_workers": {"dataloader_num_workers": 1},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "dataloader_multiprocessing_context": {"dataloader_num_workers": 1},
    "consistency_start": {"simcut_alpha": 3.0},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "activation_checkpointing_kwargs": {"activation_checkpointing": True},
    "torch_compile": {"torch_compile_backend": "eager"},  # Dynamo without a compiler of C++
    "torch_compile_mode": {"torch_compile_backend": "eager"},
}


def outcome(runs: Runs, kind: str, folder: Path, changed: dict[str, Any]) -> tuple[str, Any]:
    """Resume a run with changed arguments: "refused" and the line, "printed" and the names, "same" or "silent"."""
    resumed = runs.copy(kind, folder)
    try:
        printed = runs.resume(kind, resumed, **changed)
    except UserError as error:
        assert "\n" not in str(error)
        return "refused", str(error)
    if names := changes(printed):
        return "printed", names
    return ("same" if same_weights(runs, kind, resumed) else "silent"), None


def same_weights(runs: Runs, kind: str, folder: Path) -> bool:
    """Whether the weights are those of the run that was resumed without a change."""
    expected = runs.weights[kind]
    actual = weights_of(folder)
    return expected.keys() == actual.keys() and all(
        expected[name].equal(actual[name]) for name in expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_changed_argument_is_refused_printed_or_irrelevant(
    name: str, runs: Runs, tmp_path: Path
) -> None:
    if name in NOT_TRIED:
        pytest.skip(NOT_TRIED[name])
    kind = KIND.get(name, "fresh")
    if name in ("output_dir", "resume_from_checkpoint"):
        assert name in IRRELEVANT  # each resume here has another of both
        return
    value = changed_value(name, runs, runs.flags[kind].get(name))
    found, detail = outcome(runs, kind, tmp_path / "run", {name: value, **WITH.get(name, {})})
    print(name, value, found, detail)
    if name == "ignore_data_skip":  # it starts the epoch again, with a line that says so
        return
    assert found != "silent", f"{name}: {value}: other weights, without a word"
    if found == "same" and name != "use_cpu":  # there may be no other device
        assert name in {*IRRELEVANT, *COMPARED_AS, *COMPARED_BY_CONTENT, *MODEL_ARGUMENTS}
    if name in IRRELEVANT:
        assert found in ("same", "refused")


# The groups


def test_groups_name_arguments_and_none_twice() -> None:
    groups = (
        OPTIMIZATION,
        SELECTION,
        PLAN,
        OBJECTIVE,
        COMPARED_AS,
        IRRELEVANT,
        COMPARED_BY_CONTENT,
    )
    named = [name for names in groups for name in names]
    assert set(named) - ACTIONS.keys() == set()
    assert len(named) == len(set(named))


def test_every_argument_is_kept_or_known_elsewhere(runs: Runs) -> None:
    folder = runs.make("fresh")
    state = read_run_state(folder / "checkpoint-2")
    kept = state.fixed | state.data | state.objective | state.settings
    elsewhere = {*COMPARED_AS, *IRRELEVANT, *COMPARED_BY_CONTENT, *MODEL_ARGUMENTS}
    assert ACTIONS.keys() - kept.keys() - elsewhere == set()
    assert "hub_token" not in kept


# What was silent


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("lora", {"lora_r": 0}),
        ("lora", {"lora_r": 4}),
        ("tuned", {"lora_r": 4}),
        ("fresh", {"model_class": f"{MODULE}:Sharp"}),
        ("fresh", {"dataloader_drop_last": True}),
        ("fresh", {"metric_for_best_model": "bleu", "greater_is_better": True}),
    ],
)
def test_change_of_the_function_is_refused(
    runs: Runs, tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    if "lora_r" in changed:
        pytest.importorskip("peft", reason="needs PEFT")
    found, message = outcome(runs, kind, tmp_path / "run", changed)
    assert found == "refused"
    name, value = next(iter(changed.items()))
    assert message.startswith(f"{name}: {value}, but ")
    assert "was trained with" in message


@pytest.mark.parametrize("kind", ["lora", "tuned"])
def test_other_base_model_is_refused(runs: Runs, tmp_path: Path, kind: str) -> None:
    if kind == "lora":
        pytest.importorskip("peft", reason="needs PEFT")
    found, message = outcome(runs, kind, tmp_path / "run", {"model_name_or_path": runs.other_base})
    assert found == "refused"
    assert message.startswith(f"model_name_or_path: {runs.other_base}, but ")
    assert f"was trained with {runs.base}: " in message


def refusal(*arguments: Any, **changed: Any) -> str:
    return error_of(train, *arguments, **RESUME, **changed)


def test_base_model_that_was_trained_in_place_is_refused(runs: Runs, tmp_path: Path) -> None:
    base = shutil.copytree(runs.base, tmp_path / "base")
    flags = runs.flags["tuned"] | {"model_name_or_path": base}
    train(tmp_path / "run", flags, max_steps=2)
    moved = base.rename(tmp_path / "moved")
    resumed = shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    assert changes(train(resumed, flags | {"model_name_or_path": moved}, **RESUME)) == []
    shutil.copytree(runs.other_base, base)
    message = refusal(tmp_path / "run", flags)
    assert re.match(r"model_name_or_path: .* with digest \w+, but .* with digest \w+: ", message)


def test_teacher_with_other_content_is_printed(runs: Runs, tmp_path: Path) -> None:
    teacher = shutil.copytree(runs.base, tmp_path / "teacher")
    flags = runs.flags["taught"] | {"teacher": [teacher]}
    train(tmp_path / "run", flags, max_steps=2)
    shutil.copyfile(runs.other_base / "model.safetensors", teacher / "model.safetensors")
    assert changes(train(tmp_path / "run", flags, **RESUME)) == ["teacher"]


def test_config_that_was_edited_is_refused(runs: Runs, tmp_path: Path) -> None:
    """The weights of a checkpoint of fine-tuning fit every function of the same sizes."""
    folder = runs.copy("tuned", tmp_path / "run")
    change_json(folder / "checkpoint-2" / "config.json", activation_function="gelu")
    message = refusal(folder, runs.flags["tuned"])
    assert re.match(r"activation_function: gelu, but .* was trained with relu: ", message)


SETTINGS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("damage", "name"), [("cut", "model.safetensors"), *product(["cut", "removed"], SETTINGS)]
)
def test_checkpoint_that_was_partly_copied_is_refused(
    damage: str, name: str, runs: Runs, tmp_path: Path
) -> None:
    folder = runs.copy("tuned", tmp_path / "run")
    file = folder / "checkpoint-2" / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-60])
    else:
        file.unlink()
    message = refusal(folder, runs.flags["tuned"])
    assert name in message
    assert message.endswith(": delete checkpoint-2 to resume from the checkpoint before it")


def test_model_of_another_function_is_refused_by_the_trainer_alone(tmp_path: Path) -> None:
    trained(tmp_path, model=tiny_model(), max_steps=1, **SAVING)
    other = tiny_model(layer_norm_eps=0.1)
    message = error_of(trained, tmp_path, model=other, resume=True, max_steps=2, **SAVING)
    assert re.match("layer_norm_eps: 0.1, but .* was trained with 1e-05: ", message)


def test_trainer_with_another_loss_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trained(tmp_path, max_steps=1, kind=EntropyLoss, **SAVING)
    capsys.readouterr()
    trained(tmp_path, resume=True, max_steps=2, **SAVING)
    printed = capsys.readouterr().out
    assert changes(printed) == ["trainer", "code of trainer"]
    assert "trainer was tests.trainer_helpers:EntropyLoss, is now " in printed


def test_other_versions_are_printed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.copy("fresh", tmp_path / "run")
    monkeypatch.setattr(
        resumable_trainer, "versions", lambda *names: versions(*names) | {"torch": "1.0"}
    )
    assert changes(runs.resume("fresh", folder)) == ["version of torch"]


def test_code_of_the_named_files_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spelling_parts.py").write_text("def twice(text):\n    return text + text\n")
    file = tmp_path / "spelling.py"
    file.write_text("from spelling_parts import twice\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_function("spelling:twice", "rewrite")
    before = source_digest(["spelling"])
    assert before is not None
    assert source_digest(["spelling", "builtins"]) == before
    file.write_text("from spelling_parts import twice as thrice\n")
    assert source_digest(["spelling"]) not in (before, None)
    assert source_digest(["builtins", "hf_vanilla_transformer.training.state.fingerprint"]) is None
    assert source_digest(["made_at_run_time"]) is None
    parts = tmp_path / "spelling_parts.py"
    joined = source_digest(["spelling", "spelling_parts"])
    parts.write_text(file.read_text() + parts.read_text())
    file.write_text("")
    assert source_digest(["spelling", "spelling_parts"]) not in (joined, None)


def test_code_of_a_loss_and_a_collator_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def own(name: str, function: Callable) -> Any:
        """This function, called by code that lies in a file."""
        code = f"def {name}(*inputs, **others):\n    return function(*inputs, **others)\n"
        (tmp_path / f"{name}.py").write_text(code)
        imported = import_function(f"{name}:{name}", name)
        imported.__globals__["function"] = function
        return imported

    monkeypatch.syspath_prepend(tmp_path)
    loss = own("loss_part", lambda outputs, labels, num_items_in_batch: outputs.logits.mean())
    batch = own(
        "batch_part", lambda rows: collate(rows) | {"decoder_input_ids": collate(rows)["input_ids"]}
    )
    settings = {"compute_loss_func": loss, "data_collator": batch, **SAVING}
    trained(tmp_path / "run", max_steps=1, **settings)
    for name in ("loss_part", "batch_part"):
        with (tmp_path / f"{name}.py").open("a") as file:
            file.write("# another version\n")
    capsys.readouterr()
    trained(tmp_path / "run", resume=True, max_steps=2, **settings)
    assert changes(capsys.readouterr().out) == [
        "code of compute_loss_func",
        "code of data_collator",
    ]


def test_folder_of_a_metric_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "metric.py"
    file.write_text("SCALE = 1\n")
    before = names_digest([str(tmp_path), "bleu"])
    file.write_text("SCALE = 2\n")
    assert before is not None
    assert names_digest([str(tmp_path), "bleu"]) != before
    assert names_digest(["bleu", "chrf"]) is None
    code = names_digest(f"{MODULE}:folded")  # of the module, whichever function
    assert code == names_digest([f"{MODULE}:other", "bleu"]) == source_digest([MODULE])
    assert names_digest([str(tmp_path), f"{MODULE}:folded"]).split()[0] == code
    assert names_digest(MODULE) is names_digest(None) is None


def test_splits_are_compared_by_count_and_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "0123456789abcdef"
    corpus = SimpleNamespace(
        pairs={"train": range(1234), "validation": range(2)},
        fingerprint=lambda split: digest + split,
    )
    tokenizer = SimpleNamespace(all_special_ids=[3, 1])
    run = SimpleNamespace(
        corpus=corpus,
        data_args=DataArguments(source_lang="en", lowercase=True),
        model_args=ModelArguments(vocab_size=9),
        args=SimpleNamespace(metric_for_best_model=None),
        tokenizers=(tokenizer, tokenizer),
        facts={"lora_r": 4},
    )
    training = data_facts(run)
    assert training["training data"] == f"1,234 pairs with digest {digest}"
    scores = {"validation data": f"2 pairs with digest {digest}", "bleu_lowercase": False}
    assert not scores.keys() & training.keys()
    run.args.metric_for_best_model = "chrf"
    assert data_facts(run).items() >= (training | scores).items()
    other = {"source_lang": "en", "test data": None, "base_test data": None, **scores}
    codes = dict.fromkeys(f"code of {name}" for name in ("rewrite", "source_form", "normalize"))
    assert other_facts(run).items() >= (other | codes).items()
    monkeypatch.setattr(facts, "tokenizer_digest", lambda tokenizers: "digest")
    fixed = fixed_facts(run)
    own = {"lora_r": 4, "tokenizer": "digest", "special tokens": [[1, 3]] * 2}
    made = {"vocab_size": 9, "lowercase": True}
    assert fixed.items() >= (own | made | {"language_token": "source"}).items()
    run.data_args.tokenizer_name = "ours"
    assert not made.keys() & fixed_facts(run).keys()


def test_base_model_is_compared_by_its_name_and_content(tmp_path: Path) -> None:
    def of_base(base: Path | None, **fields: Any) -> dict[str, Any]:
        return model_facts(RunArguments(str(tmp_path), lora_r=4, **fields), base)

    (tmp_path / "config.json").write_text("{}")
    assert of_base(None) == {"model_name_or_path": None, "lora_r": 4}
    away = of_base(None, model_name_or_path="ours")
    assert away["model_name_or_path"] == {"name": "ours", "digest": None}
    here = of_base(tmp_path, model_name_or_path="ours")["model_name_or_path"]
    assert here == {"name": "ours", "digest": content_of(tmp_path)["digest"]}
    assert here["digest"]


def test_code_of_functions_is_printed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folding.py"
    file.write_text("def folded(text):\n    return text.casefold()\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = runs.flags["fresh"] | {"normalize": "folding:folded"}
    train(tmp_path / "run", flags, max_steps=2)
    file.write_text("def folded(text):\n    return text.upper()\n")
    assert changes(train(tmp_path / "run", flags, **RESUME)) == ["code of normalize"]


def test_class_that_was_forgotten_is_refused(runs: Runs, tmp_path: Path) -> None:
    flags = runs.flags["fresh"]
    train(tmp_path / "run", flags, model_class=f"{MODULE}:Sharp", max_steps=2)
    message = refusal(tmp_path / "run", flags)
    assert re.match(f"model_class: .* was trained with {MODULE}:Sharp: ", message)


def test_scores_of_the_base_model_are_of_the_same_test_set(runs: Runs, tmp_path: Path) -> None:
    flags = runs.flags["tuned"] | {"test": runs.text["validation"]}
    file = tmp_path / "all_results.json"
    train(tmp_path, flags, max_steps=2)
    assert "before_test_bleu" in json.loads(file.read_text())
    printed = train(tmp_path, flags | {"test": runs.others["test"]}, **RESUME)
    assert changes(printed) == ["test data"]
    assert "test: not the split" in printed
    results = json.loads(file.read_text())
    assert "test_bleu" in results
    assert "before_test_bleu" not in results


def test_epoch_that_starts_again_is_printed(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy("fresh", tmp_path / "run")
    printed = runs.resume("fresh", folder, ignore_data_skip=True)
    assert "resuming at the start of the epoch" in printed


# Settings that no longer exist


def recorded(runs: Runs, folder: Path, **groups: dict[str, Any]) -> Path:
    """A copy of a run whose checkpoint has more settings, as an earlier version would have written them."""
    copy = runs.copy("fresh", folder / "run")
    file = copy / "checkpoint-2" / RUN_STATE
    state = json.loads(file.read_text())
    change_json(file, **{group: state[group] | settings for group, settings in groups.items()})
    return copy


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("data", "bpe_dropout", 0.1),
        ("fixed", "weight_tying", "three-way"),
    ],
)
def test_former_setting_of_the_function_is_refused(
    group: str, name: str, value: Any, runs: Runs, tmp_path: Path
) -> None:
    folder = recorded(runs, tmp_path, **{group: {name: value}})
    message = refusal(folder, runs.flags["fresh"])
    assert re.match(
        f"{name}: .*checkpoint-2 was trained with {value}, and this run has no", message
    )
    assert not (folder / "checkpoint-3").exists()


def test_former_settings_are_printed_in_one_line(runs: Runs, tmp_path: Path) -> None:
    folder = recorded(
        runs,
        tmp_path,
        data={"bpe_dropout": 0.1},
        objective={"old_alpha": 3.0, "other_alpha": 0.0},
        settings={"no_cuda": False, "backend": "auto"},
    )
    printed = runs.resume("fresh", folder, ignore_data_skip=True)
    lines = [line for line in printed.splitlines() if line.startswith("resuming without")]
    assert lines == [
        "resuming without old_alpha=3.0, backend=auto, bpe_dropout=0.1: this run has no such setting"
    ]


def test_former_setting_that_was_off_changes_nothing(runs: Runs, tmp_path: Path) -> None:
    folder = recorded(
        runs,
        tmp_path,
        data={"bpe_dropout": 0.0, "stages": None},
        fixed={"fine-tuning": True},
    )
    assert "resuming without" not in runs.resume("fresh", folder)
    assert same_weights(runs, "fresh", folder)


def test_run_that_is_given_its_tokenizer_on_resume_has_no_former_setting(
    runs: Runs, tmp_path: Path
) -> None:
    folder = runs.copy("fresh", tmp_path / "run")
    printed = runs.resume("fresh", folder, tokenizer_name=folder / "checkpoint-2", vocab_size=None)
    assert "resuming without" not in printed
