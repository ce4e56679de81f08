"""`VanillaTransformerTrainer`: exact updates with token batches, atomic checkpoints, exact resumption."""

import json
import math
import random
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from transformers import Seq2SeqTrainer, TrainerState

from hf_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
)
from hf_vanilla_transformer.batches import encode_pairs, with_augmentation
from hf_vanilla_transformer.batches.batching import collate_batches
from hf_vanilla_transformer.batches.redrawing import RedrawnDataset
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.perturbations import PERTURBATIONS
from hf_vanilla_transformer.training.trainer import log_metrics, trainer
from tests.model_helpers import PAD, error_of, slow, tiny_marian, tiny_model
from tests.trainer_helpers import (
    DESCENT,
    SAVING,
    collate,
    everything_on,
    flat,
    make_trainer,
    padding_collator,
    random_pairs,
    relative_error,
    saved_steps,
    trained,
)

WORDS = [
    "eins",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
]
BOTH_TRAINERS = (VanillaTransformerTrainer, Seq2SeqTrainer)


def log_of(made, name):
    return [entry[name] for entry in made.state.log_history if name in entry]


# 1. Exact


def smoothed():
    return tiny_model(label_smoothing=0.1)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A run of transformers' own trainer, with all 32 sentences in each update."""
    return trained(
        tmp_path_factory.mktemp("theirs"),
        model=smoothed(),
        kind=Seq2SeqTrainer,
        per_device_train_batch_size=32,
        max_steps=8,
        **DESCENT,
    )


def assert_update_is_theirs(made, theirs):
    start = flat(smoothed())
    moved = flat(made.model) - start
    assert relative_error(moved, flat(theirs.model) - start) <= 1e-5
    assert log_of(made, "loss") == pytest.approx(log_of(theirs, "loss"), rel=1e-4)


def by_tokens(folder, max_tokens):
    """8 updates of all 32 sentences."""
    return trained(
        folder,
        model=smoothed(),
        max_tokens_per_batch=max_tokens,
        tokens_per_update=1001,
        max_steps=8,
        **DESCENT,
    )


@pytest.mark.parametrize(
    ("max_tokens", "batches"),
    [
        (1000, range(1, 2)),
        (90, range(3, 6)),
        (22, range(14, 19)),
    ],
)
def test_update_of_1_4_or_16_batches_equals_that_of_seq2seq_trainer(
    tmp_path, theirs, max_tokens, batches
):
    made = by_tokens(tmp_path, max_tokens)
    assert len(made._updates.batches(0)) in batches
    assert_update_is_theirs(made, theirs)


@pytest.mark.skipif(
    not hasattr(Seq2SeqTrainer, "loss_is_scaled_for_ga"),
    reason="this transformers has no such attribute",
)
def test_mean_losses_of_the_batches_of_an_update_are_averaged(tmp_path):
    class MeanOfBatch(VanillaTransformerTrainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    settings = {"max_tokens_per_batch": 40, "tokens_per_update": 1001, "max_steps": 1}
    made = make_trainer(tmp_path, kind=MeanOfBatch, **settings)
    batches = next(iter(made.get_train_dataloader()))
    assert len(batches) > 3
    losses = [made.model(**batch).loss.item() for batch in batches]
    made.train()
    assert log_of(made, "loss") == pytest.approx([sum(losses) / len(losses)], rel=1e-5)


def test_update_is_the_same_with_rounded_shapes(tmp_path, monkeypatch, theirs):
    collated = partial(
        collate_batches,
        collator=collate,
        row_unit=64,
        pad_token_ids=(PAD, PAD),
    )
    monkeypatch.setattr(trainer, "padded_batches", lambda *_: collated)
    assert_update_is_theirs(by_tokens(tmp_path, 60), theirs)


def test_update_with_everything_on_is_the_same_in_1_or_8_batches(tmp_path):
    def run(**settings):
        return everything_on(tmp_path, **DESCENT | settings)

    def average(made):
        return torch.cat([weight.flatten() for weight in made.ema.average.values()])

    common = {"max_steps": 3, "learning_rate": 0.1}
    whole = run(max_tokens_per_batch=1000, tokens_per_update=1001, **common)
    parts = run(max_tokens_per_batch=40, tokens_per_update=1001, **common)
    assert len(parts._updates.batches(0)) > 6
    pairs = run(per_device_train_batch_size=4, gradient_accumulation_steps=8, **common)
    start = flat(run(learning_rate=0.0, max_steps=1).model)
    expected = flat(whole.model) - start
    assert expected.norm() > 0.1
    for made in (parts, pairs):
        assert relative_error(flat(made.model) - start, expected) <= 1e-5
        assert relative_error(average(made), average(whole)) <= 1e-5


@pytest.mark.parametrize(
    ("bf16", "positions", "rounded"),
    [
        (True, "sinusoidal", True),
        (False, "sinusoidal", False),
        (True, "learned", False),
    ],
)
def test_shapes_are_rounded_in_bfloat16_on_a_cpu(tmp_path, bf16, positions, rounded):
    model = tiny_model(position_encoding_type=positions)
    made = make_trainer(tmp_path, model=model, max_tokens_per_batch=60, bf16=bf16)
    (batch,), *_ = made.get_train_dataloader()
    for name in ("input_ids", "attention_mask", "labels"):
        assert (batch[name].numel() % 64 == 0) is rounded


@pytest.mark.parametrize("strategy", ["random", "sequential"])
def test_trainer_without_token_batches_is_seq2seq_trainer(tmp_path, strategy):
    ours, theirs = (
        trained(
            tmp_path,
            model=tiny_model(dropout=0.2),
            kind=kind,
            train_sampling_strategy=strategy,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=6,
        )
        for kind in BOTH_TRAINERS
    )
    assert torch.equal(flat(ours.model), flat(theirs.model))


@pytest.mark.parametrize("workers", [0, 2])
def test_token_batches_contain_every_pair_once_per_epoch(tmp_path, workers):
    rows = random_pairs(50)
    for number, row in enumerate(rows):
        row["input_ids"] = [4 + number % 30, 4 + number // 30, 2]
    seen = []

    class Watching(VanillaTransformerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.extend(inputs["input_ids"].tolist())
            assert inputs["input_ids"].numel() <= 40
            assert inputs["labels"].numel() <= 40
            return super().compute_loss(model, inputs, *args, **kwargs)

    made = trained(
        tmp_path,
        Dataset.from_list(rows),
        kind=Watching,
        num_train_epochs=2,
        max_tokens_per_batch=40,
        tokens_per_update=60,
        dataloader_num_workers=workers,
    )
    first = seen[:50]
    second = seen[50:]
    assert sorted(first) == sorted(row["input_ids"] for row in rows) == sorted(second)
    assert first != second, "each epoch has an order of its own"
    assert made.state.global_step == 2 * len(made._updates)
    assert made.state.epoch == 2


# 2. Refused settings, warnings and the log


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch"),
        ({"tokens_per_update": 100}, "tokens_per_update=100"),
        ({"max_tokens_per_batch": 9, "gradient_accumulation_steps": 4}, "tokens_per_update"),
        ({"max_tokens_per_batch": 9, "dataloader_drop_last": True}, "dataloader_drop_last=True"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        VanillaTransformerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)


def without_labels(rows):
    batch = collate(rows)
    batch["targets"] = batch.pop("labels")
    return batch


def without_kwargs():
    class WithoutKwargs(VanillaTransformerForConditionalGeneration):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            return super().forward(input_ids, attention_mask, labels=labels)

    return WithoutKwargs(tiny_model().config)


def stream(count):
    return IterableDataset.from_generator(lambda: iter(random_pairs(count)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data", lambda: stream(4), "a dataset with a length"),
        ("model", lambda: tiny_marian(40), "MarianMTModel.*compute_loss_func"),
        ("model", without_kwargs, "WithoutKwargs.*compute_loss_func"),
        ("data_collator", lambda: without_labels, "max_tokens_per_batch=40.*data_collator"),
    ],
)
def test_token_batches_refuse_what_they_cannot_train(tmp_path, name, value, message):
    settings = {"max_tokens_per_batch": 40, "max_steps": 1, name: value()}
    assert re.search(message, error_of(trained, tmp_path, **settings))


def test_pair_over_the_token_limit_is_reported_and_trained(tmp_path, capsys):
    rows = [*random_pairs(10), {"input_ids": [5] * 70, "labels": [6, 2]}]
    made = trained(tmp_path, rows, max_tokens_per_batch=30, num_train_epochs=1)
    warning = "warning: 1 pairs are longer than max_tokens_per_batch=30 (the longest: 70 tokens)"
    assert warning in capsys.readouterr().out
    updates = map(made._updates.batches, range(len(made._updates)))
    assert [10] in [batch for update in updates for batch in update]


@pytest.mark.parametrize("workers", [0, 1])
def test_augmented_batches_keep_the_token_limit(tmp_path, text, workers):
    """Capitals and pairs of pairs are several times as long as the pairs that the batches were planned for."""
    encoded, tokenizer = text
    limit = 2 * max(len(row["input_ids"]) for row in encoded)
    made = make_trainer(
        tmp_path,
        with_augmentation(encoded, tokenizer, augment={"upper": 0.2, "merge": 0.2}, seed=1),
        tiny_model(vocab_size=300),
        max_tokens_per_batch=limit,
        tokens_per_update=limit,
        dataloader_num_workers=workers,
    )
    updates = list(made.get_train_dataloader())
    batches = [batch for update in updates for batch in update]
    assert len(batches) > len(updates)
    assert sum(len(batch["labels"]) for batch in batches) == len(encoded)
    for batch in batches:
        source = batch["input_ids"]
        assert len(source) == 1 or source.numel() <= limit


class Grown:
    """Makes the pair of line 113 three times as long."""

    grows = True

    def __call__(self, row, epoch):
        return {**row, "input_ids": row["input_ids"] * (3 if row["line"] == 113 else 1)}


@pytest.mark.parametrize("batching", ["tokens", "grown", "pairs"])
def test_nan_loss_names_the_lines_of_its_batch(tmp_path, batching):
    class Broken(VanillaTransformerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * float("nan") if (inputs["input_ids"] == 39).any() else loss

    rows = [
        {"input_ids": [4, 5, 2], "labels": row["labels"], "line": 100 + number}
        for number, row in enumerate(random_pairs(20))
    ]
    rows[13]["input_ids"] = [39, 2]
    data = Dataset.from_list(rows)
    settings = {"max_tokens_per_batch": 12, "tokens_per_update": 40}
    if batching == "grown":
        data = RedrawnDataset(data, Grown())
    elif batching == "pairs":
        settings = {"per_device_train_batch_size": 4, "train_sampling_strategy": "group_by_length"}
    message = error_of(trained, tmp_path, data, kind=Broken, num_train_epochs=1, **settings)
    assert " nan" in message
    lines = message.split("lines ")[1].split(", ")
    assert "113" in lines
    assert len(lines) <= 4


def test_log_has_throughput_padding_and_perplexity(tmp_path):
    made = trained(tmp_path, max_tokens_per_batch=60, max_steps=3)
    made.eval_dataset = random_pairs(6)
    made.evaluate()
    first = next(entry for entry in made.state.log_history if "loss" in entry)
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]), rel=1e-5)
    assert 0 < first["padding"] < 0.5
    assert first["tokens_per_second"] > 0
    assert first["minutes_left"] >= 0
    assert {"grad_norm", "learning_rate"} <= first.keys()
    last = made.state.log_history[-1]
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]), rel=1e-5)


@pytest.mark.parametrize("own", ["function", "method", "smoother"])
def test_loss_of_the_callers_has_no_perplexity(tmp_path, own):
    def square(outputs, labels, num_items_in_batch=None, shift_labels=False):
        return outputs.logits.square().mean()

    class Squared(VanillaTransformerTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = square(outputs, None)
            return (loss, outputs) if return_outputs else loss

    class Smoothed(VanillaTransformerTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.label_smoother = square

    model = tiny_model()
    settings = {
        "function": {"compute_loss_func": square},
        "method": {"kind": Squared},
        "smoother": {"kind": Smoothed},
    }
    made = trained(
        tmp_path,
        model=model,
        data_collator=padding_collator(model),
        eval_dataset=random_pairs(2),
        max_steps=1,
        **settings[own],
    )
    assert "eval_loss" in made.evaluate()
    assert log_of(made, "perplexity") == log_of(made, "eval_perplexity") == []


def test_throughput_is_that_of_the_clock_and_of_the_masks(monkeypatch):
    """A window starts at its first update, or at the end of the one before."""
    clock = iter([10.0, 41.0, 101.0])
    monkeypatch.setattr(log_metrics, "time", SimpleNamespace(monotonic=clock.__next__))
    batch = {  # 8 tokens in 12 places
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "labels": torch.tensor([[4, 5, 2], [5, -100, -100]]),
    }
    meter = log_metrics.ThroughputMeter()

    def read(update, limit):
        state = TrainerState(global_step=update, max_steps=12)
        return meter.read(state, lambda number: number, limit)

    assert read(0, 1e9) == {}
    meter.count([batch, batch], 60)
    meter.count([batch], torch.tensor(90))
    assert read(2, 1e9) == {
        "tokens_per_second": 4.8,  # 150 / 31
        "padding": 0.3333,
        "minutes_left": 2.583,  # 10 * 31 / 2 / 60
    }
    meter.count([batch], 120)
    assert read(3, 1.0) == {
        "tokens_per_second": 2.0,
        "padding": 0.3333,
        "minutes_left": 1.0,
    }


@pytest.mark.parametrize(
    "batching",
    [
        {"max_tokens_per_batch": 1000},
        {"max_tokens_per_batch": 40, "tokens_per_update": 1001},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
    ],
)
def test_log_has_the_unsmoothed_loss(tmp_path, batching):
    """All 32 sentences are one update, and each log entry covers two updates."""
    settings = DESCENT | {"learning_rate": 0.0, "logging_steps": 2, "max_steps": 4}
    made = trained(tmp_path, model=tiny_model(label_smoothing=0.1), **batching, **settings)
    with torch.no_grad():
        plain = made.model.eval()(**collate(random_pairs(32))).loss.item()
    assert log_of(made, "nll_loss") == pytest.approx([plain, plain], rel=1e-5)
    assert log_of(made, "perplexity")[:2] == pytest.approx([math.exp(plain)] * 2, rel=1e-4)
    assert abs(log_of(made, "loss")[0] / plain - 1) > 1e-4


def test_evaluation_counts_every_sentence_with_drop_last(tmp_path):
    pairs = random_pairs(6)
    made = make_trainer(
        tmp_path,
        pairs,
        dataloader_drop_last=True,
        per_device_eval_batch_size=4,
        per_device_train_batch_size=4,
    )
    assert len(made.predict(pairs).label_ids) == 6
    assert len(made.get_eval_dataloader(pairs)) == 2
    assert len(made.get_train_dataloader()) == 1


# What evaluations of six pairs compute. They are one batch.

PAIRS = random_pairs(6)
generating = pytest.mark.parametrize("generates", [True, False])


def evaluated(folder, model, kind=VanillaTransformerTrainer, generates=False, **settings):
    return make_trainer(
        folder,
        PAIRS,
        model,
        kind,
        predict_with_generate=generates,
        per_device_eval_batch_size=6,
        **settings,
    )


def predict(made, generates):
    return made.predict(PAIRS, **{"max_new_tokens": 3} if generates else {})


@generating
def test_evaluation_computes_no_logits_that_are_dropped(tmp_path, monkeypatch, generates):
    model = tiny_model(label_smoothing=0.1)
    with torch.no_grad():
        expected = model(**collate(PAIRS)).loss.item()
    monkeypatch.setattr(
        "hf_vanilla_transformer.loss_vanilla_transformer.translation_loss", None
    )  # of logits
    made = evaluated(tmp_path, model, generates=generates)
    assert made.evaluate(PAIRS, max_new_tokens=3)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def squared_logits(outputs, labels):
    return outputs.logits[labels != -100].pow(2).mean()


class WithOwnLoss(VanillaTransformerForConditionalGeneration):
    """A model whose `forward` names the arguments that it takes, and reads the logits."""

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch=None):
        outputs = super().forward(input_ids, attention_mask, labels=labels)
        outputs.loss = squared_logits(outputs, labels)
        return outputs


class TrainerWithOwnLoss(VanillaTransformerTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = squared_logits(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("own", ["model", "trainer"])
def test_evaluation_computes_logits_for_code_of_the_caller(tmp_path, own):
    model = tiny_model()
    kind = VanillaTransformerTrainer
    batch = collate(PAIRS)
    with torch.no_grad():
        expected = squared_logits(model(**batch, skip_logits=False), batch["labels"]).item()
    if own == "model":
        model.__class__ = WithOwnLoss
    else:
        kind = TrainerWithOwnLoss
    made = evaluated(tmp_path, model, kind)
    assert made.evaluate(PAIRS)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def tokens_of_targets(logits, labels):
    return logits[0].argmax(-1)[labels != -100]


def right_and_all(logits, labels):
    tokens = labels != -100
    return torch.stack([(logits[0].argmax(-1) == labels)[tokens].sum(), tokens.sum()])


# Six pairs in batches of five
@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        (
            {"predict_with_generate": True},
            {"num_return_sequences": 3, "num_beams": 3, "max_length": 4},
        ),
        ({"preprocess_logits_for_metrics": tokens_of_targets}, {}),
        ({"preprocess_logits_for_metrics": right_and_all}, {}),
    ],
)
def test_evaluation_keeps_all_that_is_computed_for_a_batch(tmp_path, settings, asked):
    model = tiny_model()
    actual, expected = (
        make_trainer(tmp_path, PAIRS, model, kind, per_device_eval_batch_size=5, **settings)
        .predict(PAIRS, **asked)
        .predictions
        for kind in BOTH_TRAINERS
    )
    assert actual.tolist() == expected.tolist()


def test_evaluation_counts_the_loss_of_each_pair_once(tmp_path):
    model = tiny_model()
    losses = []
    with torch.no_grad():
        for rows in (PAIRS[:4], PAIRS[4:]):
            losses += [model(**collate(rows)).loss.item()] * len(rows)
    made = make_trainer(tmp_path, PAIRS, model, per_device_eval_batch_size=4)
    assert made.evaluate(PAIRS)["eval_loss"] == pytest.approx(sum(losses) / 6, rel=1e-5)


@generating
def test_predictions_are_those_of_seq2seq_trainer(tmp_path, generates):
    """Tokens (B, T), or logits (B, T, V)."""
    model = tiny_model()
    actual, expected = (
        predict(evaluated(tmp_path, model, kind, generates), generates).predictions
        for kind in BOTH_TRAINERS
    )
    if not generates:
        actual = actual[0]
        expected = expected[0]
    assert actual.shape == expected.shape
    assert (actual == expected).all()


@generating
def test_evaluation_in_bf16_runs_a_forward_of_the_caller(tmp_path, generates):
    losses = []
    for kind in BOTH_TRAINERS:
        model = tiny_model()
        before = model.forward

        def forward(before=before, **inputs):
            outputs = before(**inputs)
            outputs.loss = outputs.loss * 2
            return outputs

        model.forward = forward
        settings = {"bf16": True, "generation_max_length": 3, "remove_unused_columns": False}
        made = evaluated(tmp_path, model, kind, generates, **settings)
        losses.append(made.evaluate(PAIRS)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_rows_without_labels_are_translated(tmp_path):
    model = tiny_model()
    made = make_trainer(
        tmp_path, model=model, data_collator=padding_collator(model), predict_with_generate=True
    )
    pairs = random_pairs(5)
    sources = [{"input_ids": row["input_ids"]} for row in pairs]
    predicted = made.predict(sources, max_length=20)
    assert predicted.label_ids is None
    expected = made.predict(pairs, max_length=20).predictions
    assert predicted.predictions.tolist() == expected.tolist()


@pytest.mark.parametrize("after_training", [True, False])
def test_evaluation_in_bf16_decodes_with_packed_weights(tmp_path, after_training):
    model = tiny_model()
    made = evaluated(tmp_path, model, generates=True, bf16=True, learning_rate=0.0, max_steps=1)
    if after_training:
        made.train()
    found = predict(made, generates=True)
    assert list(model.inference_engine.packed) == [torch.bfloat16]
    batch = collate(PAIRS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(**batch, max_new_tokens=3)
        loss = model(**batch).loss.item()
    assert (found.predictions[:, : expected.shape[1]] == expected.numpy()).all()
    assert found.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)


@generating
@pytest.mark.parametrize("loss_only", [True, False])
def test_evaluation_loss_of_label_smoothing_factor_is_that_of_seq2seq_trainer(
    tmp_path, generates, loss_only
):
    model = tiny_model()

    def collator(rows):
        batch = collate(rows)
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        return batch

    def loss(kind, **settings):
        made = evaluated(tmp_path, model, kind, generates, data_collator=collator, **settings)
        return predict(made, generates).metrics["test_loss"]

    settings = {"prediction_loss_only": loss_only, "label_smoothing_factor": 0.1}
    expected = loss(Seq2SeqTrainer, **settings)
    assert loss(VanillaTransformerTrainer, **settings) == expected
    assert expected != loss(Seq2SeqTrainer)


# 3. Resuming


@pytest.fixture(scope="module")
def text():
    rng = random.Random(3)
    sources = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(40)]
    targets = [each[::-1] for each in sources]
    tokenizer = train_tokenizer(sources + targets, 300)
    data = Dataset.from_dict({"source": sources, "target": targets})
    encoded, *_ = encode_pairs(data, tokenizer, drop_too_long=True)
    return encoded, tokenizer


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """A run of 13 updates that saves each, and what makes it again: with shuffling, dropout and changed pairs."""
    encoded, tokenizer = text

    def run(folder, resume=None):
        return trained(
            folder,
            with_augmentation(
                encoded, tokenizer, augment=dict.fromkeys(PERTURBATIONS, 0.1), seed=1
            ),
            tiny_model(vocab_size=300, dropout=0.3, encoder_layers=1, decoder_layers=1),
            resume=resume,
            max_steps=13,
            max_tokens_per_batch=60,
            tokens_per_update=80,
            **SAVING,
        )

    folder = tmp_path_factory.mktemp("uninterrupted")
    made = run(folder)
    assert 3 < len(made._updates) < 8  # steps 3 and 5 are within an epoch
    return folder, made, run


@pytest.mark.parametrize("step", [3, *slow(5), 10])
def test_resumed_run_is_bit_identical(tmp_path, uninterrupted, step):
    folder, made, run = uninterrupted
    resumed = run(tmp_path, str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == 13
    assert log_of(resumed, "loss")[step:] == log_of(made, "loss")[step:]
    assert torch.equal(flat(resumed.model), flat(made.model))


def test_resume_does_not_read_skipped_data(tmp_path):
    class Counted(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 200

        def __getitem__(self, row):
            self.read += 1
            return rows[row]

    rows = random_pairs(200)
    settings = {
        "max_tokens_per_batch": 40,
        "max_steps": 20,
        "save_strategy": "steps",
        "save_steps": 19,
    }
    trained(tmp_path, Counted(), **settings)
    data = Counted()
    made = make_trainer(tmp_path / "resumed", data, **settings)
    updates = made.get_train_dataloader().batch_sampler
    data.read = -len(data)  # the plan of the batches reads each once more
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-19"))
    assert 0 < data.read <= 2 * max(len(batch) for update in updates for batch in update)


# 4. Checkpoints

BATCHES = {"max_tokens_per_batch": 60, **SAVING}


def test_checkpoint_appears_when_complete(tmp_path, monkeypatch):
    seen = []
    original = VanillaTransformerTrainer._save_rng_state

    def look(self, folder):
        complete = [path.name for path in tmp_path.glob("checkpoint-*")]
        seen.append((complete, Path(folder).parent.name))
        original(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_rng_state", look)
    trained(tmp_path, max_steps=2, **BATCHES)
    assert seen == [([], ".saving"), (["checkpoint-1"], ".saving")]
    assert saved_steps(tmp_path) == [1, 2]
    assert (tmp_path / "checkpoint-2" / "run_state.json").is_file()
    assert not (tmp_path / ".saving").exists()


def test_failed_save_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    original = VanillaTransformerTrainer._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step == 2:
            raise OSError(28, "No space left on device")
        original(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError, match="No space"):
        trained(tmp_path, max_steps=3, save_total_limit=1, **BATCHES)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert saved_steps(tmp_path) == [1]


def test_save_total_limit_keeps_the_best_checkpoint(tmp_path, monkeypatch):
    class Judged(VanillaTransformerTrainer):
        def evaluate(self, *args, **kwargs):
            scores = {"eval_score": 9.0 if self.state.global_step == 2 else 1.0}
            self.log(dict(scores))
            return scores

    monkeypatch.setattr(
        VanillaTransformerTrainer, "_validate_args", lambda self: None
    )  # there is no evaluation data
    made = trained(
        tmp_path,
        kind=Judged,
        max_steps=5,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        **BATCHES,
    )
    best = tmp_path / "checkpoint-2"
    assert saved_steps(tmp_path) == [2, 5]
    assert made.state.best_model_checkpoint == str(best)
    written = json.loads((best / "trainer_state.json").read_text())
    assert written["best_model_checkpoint"] == str(best)
    weights = made.model.state_dict()
    for name, tensor in load_file(best / "model.safetensors").items():
        assert tensor.equal(weights[name])


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    trained(tmp_path, max_steps=2, **BATCHES)
    before = weights.read_bytes()
    trained(tmp_path, random_pairs(32, seed=5), max_steps=2, **BATCHES)
    assert weights.read_bytes() != before
    assert saved_steps(tmp_path) == [1, 2]
