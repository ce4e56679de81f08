"""The steps of a run, called with small objects: checks before the training, the trainer, and the results."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback

from hf_vanilla_transformer.training.run import run
from hf_vanilla_transformer.training.run.arguments import ModelArguments
from hf_vanilla_transformer.training.run.run_state import Run
from hf_vanilla_transformer.training.state.callbacks import StopWithCheckpoint
from hf_vanilla_transformer.training.state.distributed import StopSignals
from hf_vanilla_transformer.training.trainer.evaluation_budget import EvaluationBudget
from hf_vanilla_transformer.utils.errors import Interrupted
from tests.model_helpers import SPECIAL_TOKENS, error_of, word_tokenizer


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace functions that a step calls."""

    def replace(**functions: Any) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(run, name, function)

    return replace


@pytest.mark.parametrize(
    ("patience", "evaluates", "last", "saves", "limit", "best", "message"),
    [
        (None, "no", 0, "no", None, False, ""),
        (None, "no", 1, "no", None, False, ""),
        (2, "steps", 2, "epoch", None, False, ""),
        (None, "no", 0, "steps", 1, True, ""),
        (None, "no", 1, "steps", 1, True, ""),
        (None, "no", 3, "steps", 3, True, ""),
        (None, "no", 3, "steps", 2, False, "save_total_limit=2 .* average_last=3: set it to 3,"),
        (None, "no", 2, "steps", 1, True, "save_total_limit=1 .* average_last=2: set it to 3,"),
        (0, "no", 0, "steps", None, False, "early_stopping_patience needs"),
        (None, "no", 2, "no", None, False, "average_last=2 needs checkpoints"),
    ],
)
def test_arguments_that_would_fail_in_training_are_refused(
    patience: int | None,
    evaluates: str,
    last: int,
    saves: str,
    limit: int | None,
    best: bool,
    message: str,
) -> None:
    args = SimpleNamespace(
        early_stopping_patience=patience,
        eval_strategy=evaluates,
        average_last=last,
        save_strategy=saves,
        save_total_limit=limit,
        load_best_model_at_end=best,
    )
    if message:
        assert re.match(message, error_of(run.check_arguments, args))
    else:
        run.check_arguments(args)


def evaluated(lengths: list[tuple[int, int]]) -> Dataset:
    rows = [
        {"input_ids": [1] * source, "labels": [1] * target, "line": number}
        for number, (source, target) in enumerate(lengths, 1)
    ]
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("kind", "source", "target", "lengths", "message"),
    [
        ("sinusoidal", None, None, [(9, 9)], None),
        ("learned", 4, 4, [(4, 4)], None),
        ("learned", 4, 5, [], "max_target_length: 5"),
        ("learned", None, 4, [], "max_source_length: None"),
        ("learned", 4, 4, [(4, 5), *[(1, 1), (6, 1)] * 5], "test data: the lines 1, 3, 5, 7, 9 have up to 6"),
    ],
)  # fmt: skip
def test_learned_positions_end(
    kind: str,
    source: int | None,
    target: int | None,
    lengths: list[tuple[int, int]],
    message: str | None,
) -> None:
    config = SimpleNamespace(position_encoding_type=kind, max_position_embeddings=4)
    of_run = SimpleNamespace(
        model=SimpleNamespace(config=config),
        data_args=SimpleNamespace(max_source_length=source, max_target_length=target),
        encoded={"train": None, "test": evaluated(lengths)} if lengths else {},
    )
    if message is None:
        run.check_positions(of_run)
    else:
        assert error_of(run.check_positions, of_run).startswith(message)


@pytest.mark.parametrize(
    ("longest", "limit", "before", "base", "expected"),
    [
        (7, 20, None, None, 7),
        (None, 20, None, None, 20),
        (None, None, None, None, None),
        (7, 20, 9, "base", 9),
        (7, 20, 5, "base", 7),
        (7, 20, None, "base", None),
    ],
)
def test_longest_source_is_recorded(
    longest: int | None, limit: int, before: int | None, base: str | None, expected: int | None
) -> None:
    config = SimpleNamespace(trained_source_length=before)
    of_run = SimpleNamespace(
        model=SimpleNamespace(config=config),
        encoding={"train": SimpleNamespace(longest_source=longest)},
        data_args=SimpleNamespace(max_source_length=limit),
        args=SimpleNamespace(model_name_or_path=base),
    )
    run._record_length(of_run)
    assert config.trained_source_length == expected


@pytest.mark.parametrize(
    ("limit", "usual", "expected"), [(5, 6, 9), (5, 5, 5), (5, None, 5), (None, 6, None)]
)
def test_search_is_as_long_as_the_usual_target(
    limit: int | None, usual: int | None, expected: int | None
) -> None:
    search = SimpleNamespace(max_length_over_source=limit)
    report = SimpleNamespace(usual_over_source=usual, most_over_source=9)
    run._fit_search(
        SimpleNamespace(model=SimpleNamespace(generation_config=search), encoding={"train": report})
    )
    assert search.max_length_over_source == expected


# Models


def tokenizer(words: str = "", **special: str) -> Any:
    return word_tokenizer(
        ["<s>", "<pad>", "</s>", "<unk>", *words.split()], **SPECIAL_TOKENS | special
    )


def sizes(**fields: Any) -> ModelArguments:
    return ModelArguments(d_model=8, encoder_layers=1, decoder_layers=1, **fields)


def test_fresh_model_has_the_tokens_of_its_tokenizers(tmp_path: Path) -> None:
    first = tokenizer("a b")
    model = run.fresh_model(sizes(), (first, first))
    config = model.config
    assert (config.vocab_size, config.decoder_start_token_id, config.eos_token_id) == (6, 0, 2)
    config.use_cache = False
    model.save_pretrained(tmp_path)
    assert run.fresh_model(sizes(), (first, first), tmp_path).num_parameters() > 0
    message = error_of(run.fresh_model, sizes(dropout=0.5), (first, first), tmp_path)
    assert message.startswith(f"dropout: 0.5, but {tmp_path} was trained with ")

    second = tokenizer("c")
    second.bos_token = None
    config = run.fresh_model(sizes(), (first, second)).config
    assert (config.vocab_size, config.decoder_vocab_size) == (6, 5)
    assert (config.decoder_start_token_id, config.decoder_pad_token_id) == (1, 1)
    assert not config.share_encoder_decoder_embeddings
    shared = sizes(share_encoder_decoder_embeddings=True)
    assert "leave it out" in error_of(run.fresh_model, shared, (first, second))


def test_sizes_are_checked_before_the_data_are_read(patch: Any) -> None:
    """Also those that a number of pairs may choose. A base model has its own."""
    bad = sizes(encoder_attention_heads=3)
    choices = {9: SimpleNamespace(arguments=(bad, None, None))}
    patch(load_base=lambda *_: (None, None, {}), load_data=lambda *_: [][0])
    for given, chosen in ((bad, {}), (sizes(), choices)):
        args = SimpleNamespace(model_name_or_path=None, choices=chosen)
        assert "encoder_attention_heads" in error_of(run.load_run, given, None, args, None)
    args.model_name_or_path = "base"
    with pytest.raises(IndexError):
        run.load_run(bad, None, args, None)


@pytest.mark.parametrize(
    ("base", "name", "checkpoint", "lora", "expected"),
    [
        (None, None, None, 0, "fresh"),
        (None, None, "saved", 0, "fresh"),
        (None, "base", "saved", 0, "resumed"),
        ("base", "base", None, 0, "base"),
        ("base", "base", "saved", 1, "base with adapters"),
    ],
)
def test_model_of_a_run(
    patch: Any,
    base: str | None,
    name: str | None,
    checkpoint: str | None,
    lora: int,
    expected: str,
) -> None:
    args = SimpleNamespace(model_name_or_path=name, choices={}, lora_r=lora)
    loaded = ("corpus", "tokenizers", "encoded", "encoding", "model_args", "data_args")
    data = SimpleNamespace(**dict.fromkeys(loaded), args=args, chosen={"by": "pairs"})
    patch(
        load_base=lambda *_: (base and SimpleNamespace(model=base), None, {"of": "base"}),
        load_data=lambda *_: data,
        resumed_model=lambda *_: "resumed",
        fresh_model=lambda *_: "fresh",
        add_lora=lambda model, args: f"{model} with adapters",
    )
    found = run.load_run(sizes(), None, args, checkpoint)
    assert found.model == expected
    assert found.facts == {"of": "base", "by": "pairs"}


# The trainer


class Trainer(SimpleNamespace):
    """Keeps what it is made with."""

    is_fsdp_enabled = False
    budget = None

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


class Plan:
    def __init__(self, *_: Any):
        pass

    @staticmethod
    def is_needed(args: Any) -> bool:
        return args.plans


@pytest.fixture
def made(patch: Any, tmp_path: Path) -> Any:
    """The callbacks of the trainer of a run with these arguments, by their class, and the trainer."""
    patch(
        **dict.fromkeys(
            ("check_optimizer", "check_compilation", "check_schedule", "_validation_metrics"),
            lambda *_: None,
        ),
        **dict.fromkeys(("data_facts", "fixed_facts", "other_facts"), lambda *_: {}),
        DataCollatorForSeq2Seq=lambda tokenizer, model: tokenizer,
        VanillaTransformerTrainer=Trainer,
        PlanUpdates=Plan,
    )

    def make(validation: Any = None, **fields: Any) -> Trainer:
        args = {
            "max_minutes": None,
            "eval_strategy": "steps",
            "early_stopping_patience": None,
            "average_last": 0,
            "save_strategy": "steps",
            "save_total_limit": None,
            "plans": False,
        }
        of_run = SimpleNamespace(
            args=SimpleNamespace(**args | fields),
            model=None,
            tokenizers=("source", "target"),
            encoded={"train": 1, "validation": validation},
        )
        trainer, stop = run.make_trainer(of_run, StopSignals())
        assert stop in trainer.callbacks
        return trainer

    return make


def names(trainer: Trainer) -> list[str]:
    """What a run has besides the usual callbacks."""
    usual = "ReleaseFreeMemory", "FitThreads", "StopWithCheckpoint"
    found = [type(callback).__name__ for callback in trainer.callbacks]
    return [name for name in found if name not in usual]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"early_stopping_patience": 1}, [EarlyStoppingCallback.__name__]),
        ({"max_minutes": 1.0}, [EvaluationBudget.__name__]),
        ({"max_minutes": 1.0, "eval_strategy": "no"}, []),
        ({"max_minutes": 1.0, "validation": [1]}, []),
        ({"plans": True}, ["Plan"]),
    ],
    ids=str,
)
def test_trainer_has_the_callbacks_of_its_arguments(
    made: Any, fields: dict[str, Any], expected: list[str]
) -> None:
    trainer = made(**{"validation": Dataset.from_dict({"a": [1]})} | fields)
    assert names(trainer) == expected
    assert (trainer.budget is not None) is (expected == ["EvaluationBudget"])
    assert trainer.data_collator == trainer.processing_class == "source"
    assert trainer.target_tokenizer == "target"


@pytest.mark.parametrize(
    ("last", "sharded", "kind", "refused"),
    [
        (2, True, "SHARDED_STATE_DICT", True),
        (1, True, "SHARDED_STATE_DICT", False),
        (2, False, "SHARDED_STATE_DICT", False),
        (2, True, "FULL_STATE_DICT", False),
    ],
)
def test_average_of_sharded_checkpoints_is_refused(
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    last: int,
    sharded: bool,
    kind: str,
    refused: bool,
) -> None:
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=kind))
    monkeypatch.setattr(Trainer, "is_fsdp_enabled", sharded)
    monkeypatch.setattr(Trainer, "accelerator", SimpleNamespace(state=state), raising=False)
    if refused:
        assert error_of(made, average_last=last).endswith(f"not {kind}")
    else:
        made(average_last=last)


@pytest.mark.parametrize(
    ("normalize", "metric", "greater", "printed"),
    [
        (None, None, True, ""),
        ("function", "bleu", True, ""),
        (None, "chrf", True, "the weights with the highest chrf are kept\n"),
        (None, "ter", False, "the weights with the lowest ter are kept\n"),
    ],
)
def test_metrics_of_evaluations(
    patch: Any,
    capsys: pytest.CaptureFixture,
    normalize: str | None,
    metric: str | None,
    greater: bool,
    printed: str,
) -> None:
    options = dict.fromkeys(("metrics", "tokenize", "lowercase", "split"))
    measured: list[list[str]] = []
    checked: list[tuple[list[str], Any]] = []
    patch(
        score_options=lambda _, tokenizer: options | {"normalize": normalize, "split": tokenizer},
        make_metrics=lambda metrics, tokenize, lowercase, split: split,
        score_names=lambda metrics: ["bleu"],
        check_selection=lambda args, names, several: measured.append(names),
        check_normalizer=lambda *facts: checked.append(facts),
        translation_metrics=lambda tokenizer, **settings: (tokenizer, settings["sources"]),
    )
    for pairs in ({}, {"validation": {"source": ["a"], "target": ["b"]}}):
        of_run = SimpleNamespace(
            args=SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater),
            data_args=SimpleNamespace(directions=None),
            tokenizers=("source", "target"),
            corpus=SimpleNamespace(pairs=pairs),
            groups=lambda split: None,
        )
        assert run._validation_metrics(of_run) == ("target", ["a"] if pairs else None)
        assert capsys.readouterr().out == printed
    assert measured == [["bleu", "invalid"] if normalize else ["bleu"]] * 2
    assert checked == [(["b"], normalize)]


# Results


def trained(resumed: str | None = None, nothing_left: bool = False, **signals: Any) -> dict:
    def train(resume_from_checkpoint: str | None) -> Any:
        assert resume_from_checkpoint == resumed
        for name, value in signals.items():
            setattr(stop.signals, name, value)
        if signals:
            raise Interrupted("in an evaluation")
        return SimpleNamespace(metrics={"train_loss": 1.0})

    stop = StopWithCheckpoint()
    trainer = SimpleNamespace(
        train=train,
        state=SimpleNamespace(global_step=3, epoch=0.5),
        args=SimpleNamespace(device=torch.device("cpu")),
        has_nothing_left=nothing_left,
    )
    return run.train(trainer, stop, Path("none"), resumed and Path(resumed))


def test_results_of_a_resumed_training_leave_out_the_mean_of_its_part(
    capsys: pytest.CaptureFixture,
) -> None:
    facts = {"train_updates": 3, "train_seconds": 0, "epoch": 0.5}
    assert trained() == facts | {"train_loss": 1.0}
    assert capsys.readouterr().out == "trained 3 updates in 0 s\n"
    assert trained("checkpoint-2", nothing_left=True) == facts
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("received", "status"), [(signal.SIGTERM, 143), (None, 130)])
def test_interrupted_training_names_its_signal(received: int | None, status: int) -> None:
    with pytest.raises(Interrupted, match="^interrupted at step 3; no checkpoint") as raised:
        trained(received=received, agreed=signal.SIGTERM)
    assert raised.value.status == status


@pytest.mark.parametrize(
    ("parts", "encoded", "expected"),
    [
        ({"test": ["x", "y"]}, {"test": {"part": [1, 0]}}, ["y", "x"]),
        ({"test": ["x", "y"]}, {}, None),
        ({"test": []}, {"test": {"part": [0]}}, None),
        ({}, {"test": {"part": [0]}}, None),
    ],
)
def test_parts_of_a_split_are_scored_apart(
    parts: dict[str, list[str]], encoded: dict[str, Any], expected: list[str] | None
) -> None:
    corpus = SimpleNamespace(parts=parts, directions={})
    groups = Run.groups(SimpleNamespace(corpus=corpus, encoded=encoded), "test")
    assert (groups and groups.names) == expected
