"""`VanillaTransformerTrainer`: exact updates with token batches, atomic checkpoints, exact resumption."""

import json
import math
import random
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
from hf_vanilla_transformer.training.state.checkpoints import complete_checkpoints
from hf_vanilla_transformer.training.trainer import log_metrics, trainer
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import PAD, error_of, slow, tiny_marian, tiny_model
from tests.trainer_helpers import (
    DESCENT,
    SAVING,
    collate,
    everything_on,
    flat,
    make_trainer,
    random_pairs,
    relative_error,
    trained,
)

WORDS = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


# 1. Exact


@pytest.mark.parametrize("smoothing", [0.1, *slow(0.0)])
def test_update_is_the_same_in_1_4_or_16_batches(tmp_path, smoothing):
    """8 updates of all 32 sentences."""
    moved, counts = [], []
    for max_tokens in (1000, 90, 22):
        model = tiny_model(label_smoothing=smoothing)
        before = flat(model)
        settings = {"max_tokens_per_batch": max_tokens, "tokens_per_update": 1001, "max_steps": 8} | DESCENT
        made = trained(tmp_path, random_pairs(32), model, **settings)
        moved.append((flat(model) - before, losses(made)))
        counts.append(len(made._updates.batches(0)))
    assert counts[0] == 1 and 3 <= counts[1] <= 5 and 14 <= counts[2] <= 18
    (expected, their_losses), *others = moved
    for update, each in others:
        assert relative_error(update, expected) <= 1e-5
        assert each == pytest.approx(their_losses, rel=1e-4)


def test_update_with_everything_on_is_the_same_in_1_or_8_batches(tmp_path):
    tokens = {"tokens_per_update": 1001, "max_steps": 3, "learning_rate": 0.1}
    runs = [everything_on(tmp_path, max_tokens_per_batch=size, **DESCENT | tokens) for size in (1000, 40)]
    runs.append(
        everything_on(
            tmp_path,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            **DESCENT | tokens | {"tokens_per_update": None},
        )
    )
    assert len(runs[1]._updates.batches(0)) > 6
    start = flat(everything_on(tmp_path, **DESCENT | {"learning_rate": 0.0, "max_steps": 1}).model)
    expected, *others = (flat(made.model) - start for made in runs)
    assert expected.norm() > 0.1 and all(relative_error(update, expected) <= 1e-5 for update in others)
    averages = [torch.cat([weight.flatten() for weight in made.ema.average.values()]) for made in runs]
    assert all(relative_error(average, averages[0]) <= 1e-5 for average in averages[1:])


def test_update_is_the_same_with_rounded_shapes(tmp_path, monkeypatch):
    start, moved = flat(tiny_model()), []
    for unit in (1, 64):
        collated = partial(collate_batches, collator=collate, row_unit=unit, pad_token_ids=(PAD, PAD))
        monkeypatch.setattr(trainer, "padded_batches", lambda *_, collated=collated: collated)
        made = trained(tmp_path, max_tokens_per_batch=60, max_steps=5, **DESCENT)
        moved.append((flat(made.model) - start, losses(made)))
    (expected, their_losses), (update, each) = moved
    assert relative_error(update, expected) <= 1e-5
    assert each == pytest.approx(their_losses, rel=1e-4)


@pytest.mark.parametrize(
    ("bf16", "positions", "rounded"),
    [(True, "sinusoidal", True), (False, "sinusoidal", False), (True, "learned", False)],
)
def test_shapes_are_rounded_in_bfloat16_on_a_cpu(tmp_path, bf16, positions, rounded):
    model = tiny_model(position_encoding_type=positions)
    made = make_trainer(tmp_path, random_pairs(32), model, max_tokens_per_batch=60, bf16=bf16)
    (batch,), *_ = made.get_train_dataloader()
    assert all((batch[name].numel() % 64 == 0) == rounded for name in ("input_ids", "attention_mask", "labels"))


def test_update_equals_that_of_seq2seq_trainer(tmp_path):
    """The same 32 sentences in one batch of 32."""
    update = {"max_tokens_per_batch": 60, "tokens_per_update": 1000, "max_steps": 5}
    ours = trained(tmp_path, **update, **DESCENT)
    theirs = trained(
        tmp_path, random_pairs(32), kind=Seq2SeqTrainer, per_device_train_batch_size=32, max_steps=5, **DESCENT
    )
    start = flat(tiny_model())
    assert relative_error(flat(ours.model) - start, flat(theirs.model) - start) <= 1e-5
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)


@pytest.mark.parametrize("strategy", ["random", "sequential"])
def test_trainer_without_token_batches_is_seq2seq_trainer(tmp_path, strategy):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6}
    weights = []
    for kind in (VanillaTransformerTrainer, Seq2SeqTrainer):
        model = tiny_model(dropout=0.2)
        trained(tmp_path, random_pairs(32), model, kind, train_sampling_strategy=strategy, **settings)
        weights.append(flat(model))
    assert torch.equal(*weights)


@pytest.mark.parametrize("workers", [0, 2])
def test_token_batches_contain_every_pair_once_per_epoch(tmp_path, workers):
    rows = [
        {**row, "input_ids": [4 + number % 30, 4 + number // 30, 2]} for number, row in enumerate(random_pairs(50))
    ]
    seen = []

    class Watching(VanillaTransformerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.extend(map(tuple, inputs["input_ids"].tolist()))
            assert all(inputs[side].numel() <= 40 for side in ("input_ids", "labels"))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {"max_tokens_per_batch": 40, "tokens_per_update": 60, "dataloader_num_workers": workers}
    made = trained(tmp_path, Dataset.from_list(rows), kind=Watching, num_train_epochs=2, **settings)
    everything = sorted(tuple(row["input_ids"]) for row in rows)
    assert sorted(seen[:50]) == everything == sorted(seen[50:])
    assert seen[:50] != seen[50:], "each epoch has an order of its own"
    assert made.state.global_step == 2 * len(made._updates) and made.state.epoch == 2


def test_token_batches_of_a_stream_are_refused(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(random_pairs(4)))
    assert "a dataset with a length" in error_of(trained, tmp_path, stream, max_tokens_per_batch=40, max_steps=1)


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


def test_model_that_ignores_num_items_in_batch_is_refused(tmp_path):
    with pytest.raises(UserError, match="MarianMTModel.*compute_loss_func"):
        make_trainer(tmp_path, model=tiny_marian(40), max_tokens_per_batch=40)


def test_token_batches_without_labels_are_refused(tmp_path):
    def collator(rows):
        batch = collate(rows)
        batch["targets"] = batch.pop("labels")
        return batch

    message = error_of(trained, tmp_path, data_collator=collator, max_tokens_per_batch=40, max_steps=1)
    assert "max_tokens_per_batch=40" in message and "data_collator" in message


def test_pair_over_the_token_limit_is_reported_and_trained(tmp_path, capsys):
    rows = [*random_pairs(10), {"input_ids": [5] * 70, "labels": [6, 2]}]
    made = trained(tmp_path, rows, max_tokens_per_batch=30, num_train_epochs=1)
    printed = capsys.readouterr().out
    assert "warning: 1 pairs are longer than max_tokens_per_batch=30 (the longest: 70 tokens)" in printed
    assert [10] in [batch for number in range(len(made._updates)) for batch in made._updates.batches(number)]


@pytest.mark.parametrize("workers", [0, 1])
def test_augmented_batches_keep_the_token_limit(tmp_path, text, workers):
    """Capitals and pairs of pairs are several times as long as the pairs that the batches were planned for."""
    encoded, tokenizer = text
    augmented = with_augmentation(encoded, tokenizer, augment={"upper": 0.2, "merge": 0.2}, seed=1)
    limit = 2 * max(len(row["input_ids"]) for row in encoded)
    options = {"tokens_per_update": limit, "dataloader_num_workers": workers}
    made = make_trainer(tmp_path, augmented, tiny_model(vocab_size=300), max_tokens_per_batch=limit, **options)
    updates = list(made.get_train_dataloader())
    shapes = [batch["input_ids"].shape for update in updates for batch in update]
    assert sum(batch["labels"].shape[0] for update in updates for batch in update) == len(encoded)
    assert all(pairs == 1 or pairs * length <= limit for pairs, length in shapes)
    assert len(shapes) > len(updates)


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

    rows = [{**row, "input_ids": [4, 5, 2], "line": 100 + number} for number, row in enumerate(random_pairs(20))]
    rows[13]["input_ids"] = [39, 2]
    tokens = {"max_tokens_per_batch": 12, "tokens_per_update": 40}
    pairs = {"per_device_train_batch_size": 4, "train_sampling_strategy": "group_by_length"}
    settings = pairs if batching == "pairs" else tokens
    data = Dataset.from_list(rows)
    data = RedrawnDataset(data, Grown()) if batching == "grown" else data
    with pytest.raises(UserError) as raised:
        trained(tmp_path, data, kind=Broken, num_train_epochs=1, **settings)
    message = str(raised.value)
    assert " nan" in message
    lines = [int(line) for line in message.split("lines ")[1].split(", ")]
    assert 113 in lines and len(lines) <= 4


def test_log_has_throughput_padding_and_perplexity(tmp_path):
    made = trained(tmp_path, max_tokens_per_batch=60, max_steps=3)
    made.eval_dataset = random_pairs(6)
    made.evaluate()
    first = next(entry for entry in made.state.log_history if "loss" in entry)
    assert first["perplexity"] == pytest.approx(torch.tensor(first["loss"]).exp().item(), rel=1e-5)
    assert 0 < first["padding"] < 0.5 and first["tokens_per_second"] > 0 and first["minutes_left"] >= 0
    assert {"grad_norm", "learning_rate"} <= first.keys()
    last = made.state.log_history[-1]
    assert last["eval_perplexity"] == pytest.approx(torch.tensor(last["eval_loss"]).exp().item(), rel=1e-5)


def test_throughput_is_that_of_the_clock_and_of_the_masks(monkeypatch):
    """A window starts at its first update, or at the end of the one before."""
    clock = iter([10.0, 40.0, 100.0])
    monkeypatch.setattr(log_metrics, "time", SimpleNamespace(monotonic=clock.__next__))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {"attention_mask": mask, "labels": torch.tensor([[4, 2], [5, -100]])}  # 7 tokens in 10 places
    meter = log_metrics.ThroughputMeter()

    def read(update, limit):
        state = TrainerState(global_step=update, max_steps=12)
        return meter.read(state, lambda number: number, limit)

    assert read(0, 1e9) == {}
    meter.count([batch, batch], 6)
    meter.count([batch], torch.tensor(9))
    assert read(2, 1e9) == {"tokens_per_second": 15 / 30, "padding": 0.3, "minutes_left": 10 * 30 / 2 / 60}
    meter.count([batch], 120)
    assert read(3, 1.0) == {"tokens_per_second": 120 / 60, "padding": 0.3, "minutes_left": 1.0}


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
    settings = batching | DESCENT | {"learning_rate": 0.0, "logging_steps": 2, "max_steps": 4}
    made = trained(tmp_path, random_pairs(32), tiny_model(label_smoothing=0.1), **settings)
    with torch.no_grad():
        plain = made.model.eval()(**collate(random_pairs(32))).loss.item()
    lines = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["nll_loss"] for entry in lines] == pytest.approx([plain, plain], rel=1e-5)
    assert [entry["perplexity"] for entry in lines] == pytest.approx([math.exp(plain)] * 2, rel=1e-4)
    assert abs(lines[0]["loss"] / plain - 1) > 1e-4


def test_evaluation_counts_every_sentence_with_drop_last(tmp_path):
    settings = {"dataloader_drop_last": True, "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4}
    made = make_trainer(tmp_path, random_pairs(6), **settings)
    assert len(made.predict(random_pairs(6)).label_ids) == 6
    assert len(made.get_eval_dataloader(random_pairs(6))) == 2 and len(made.get_train_dataloader()) == 1


@pytest.mark.parametrize("generates", [True, False])
def test_evaluation_computes_no_logits_that_are_dropped(tmp_path, monkeypatch, generates):
    data, model = random_pairs(6), tiny_model(label_smoothing=0.1)
    batch = collate(list(data))
    with torch.no_grad():
        expected = model.eval()(**batch).loss.item()
    monkeypatch.setattr("hf_vanilla_transformer.loss_vanilla_transformer.translation_loss", None)  # of logits
    made = make_trainer(tmp_path, data, model, predict_with_generate=generates, per_device_eval_batch_size=6)
    assert made.evaluate(data, max_new_tokens=3)["eval_loss"] == pytest.approx(expected, rel=1e-5)


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


def squared_logits(outputs, labels):
    return outputs.logits[labels != -100].pow(2).mean()


@pytest.mark.parametrize("own", ["model", "trainer"])
def test_evaluation_computes_logits_for_code_of_the_caller(tmp_path, own):
    data, model = random_pairs(6), tiny_model()
    batch = collate(list(data))
    with torch.no_grad():
        expected = squared_logits(model(**batch, skip_logits=False), batch["labels"]).item()
    kind = VanillaTransformerTrainer
    if own == "model":
        model.__class__ = WithOwnLoss
    else:
        kind = TrainerWithOwnLoss
    made = make_trainer(tmp_path, data, model, kind, per_device_eval_batch_size=6)
    assert made.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("generates", [True, False])
def test_predictions_are_those_of_seq2seq_trainer(tmp_path, generates):
    data, model = random_pairs(6), tiny_model()
    settings = {"predict_with_generate": generates, "per_device_eval_batch_size": 6}
    limits = {"max_new_tokens": 3} if generates else {}
    kinds = VanillaTransformerTrainer, Seq2SeqTrainer
    results = [
        make_trainer(tmp_path, data, model, kind, **settings).predict(data, **limits).predictions for kind in kinds
    ]
    actual, expected = results if generates else (each[0] for each in results)  # tokens (B, T), or logits (B, T, V)
    assert actual.shape == expected.shape and (actual == expected).all()


@pytest.mark.parametrize("after_training", [True, False])
def test_evaluation_in_bf16_decodes_with_packed_weights(tmp_path, after_training):
    data, model = random_pairs(6), tiny_model()
    settings = {"predict_with_generate": True, "per_device_eval_batch_size": 6, "bf16": True, "learning_rate": 0.0}
    made = make_trainer(tmp_path, data, model, max_steps=1, **settings)
    if after_training:
        made.train()
    found = made.predict(data, max_new_tokens=3)
    assert list(model.inference_engine.packed) == [torch.bfloat16]
    batch = collate(list(data))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(**batch, max_new_tokens=3)
        loss = model(**batch).loss.item()
    assert (found.predictions[:, : expected.shape[1]] == expected.numpy()).all()
    assert found.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("loss_only", [True, False])
def test_evaluation_loss_of_label_smoothing_factor_is_that_of_seq2seq_trainer(tmp_path, generates, loss_only):
    data, model = random_pairs(6), tiny_model()

    def loss(kind, **settings):
        made = make_trainer(tmp_path, data, model, kind, predict_with_generate=generates, **settings)
        made.data_collator = lambda rows: {
            **(batch := collate(rows)),
            "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"]),
        }
        return made.predict(data, **{"max_new_tokens": 3} if generates else {}).metrics["test_loss"]

    settings = {"prediction_loss_only": loss_only, "label_smoothing_factor": 0.1}
    assert loss(VanillaTransformerTrainer, **settings) == loss(Seq2SeqTrainer, **settings) != loss(Seq2SeqTrainer)


# 3. Resuming


@pytest.fixture(scope="module")
def text():
    rng = random.Random(3)
    sources = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(40)]
    data = Dataset.from_dict({"source": sources, "target": [each[::-1] for each in sources]})
    tokenizer = train_tokenizer(sources + data["target"][:], 300)
    return encode_pairs(data, tokenizer, drop_too_long=True)[0], tokenizer


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """A run of 13 updates that saves each, and what makes it again: with shuffling, dropout and changed pairs."""
    encoded, tokenizer = text
    tokens = {"max_tokens_per_batch": 60, "tokens_per_update": 80}

    def run(folder, resume=None):
        fresh = with_augmentation(encoded, tokenizer, augment=dict.fromkeys(PERTURBATIONS, 0.1), seed=1)
        model = tiny_model(vocab_size=300, dropout=0.3, encoder_layers=1, decoder_layers=1)
        return trained(folder, fresh, model, resume=resume, max_steps=13, **tokens, **SAVING)

    folder = tmp_path_factory.mktemp("uninterrupted")
    made = run(folder)
    assert 3 < len(made._updates) < 8  # steps 3 and 5 are within an epoch
    return folder, made, run


@pytest.mark.parametrize("step", [3, *slow(5), 10])
def test_resumed_run_is_bit_identical(tmp_path, uninterrupted, step):
    folder, made, run = uninterrupted
    resumed = run(tmp_path, str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == 13
    assert losses(resumed)[step:] == losses(made)[step:]
    assert torch.equal(flat(resumed.model), flat(made.model))


def test_resume_does_not_read_skipped_data(tmp_path):
    class Counted(torch.utils.data.Dataset):
        def __init__(self):
            self.rows, self.read = random_pairs(200), 0

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, row):
            self.read += 1
            return self.rows[row]

    settings = {"max_tokens_per_batch": 40, "max_steps": 20, "save_strategy": "steps", "save_steps": 19}
    trained(tmp_path, Counted(), **settings)
    data = Counted()
    made = make_trainer(tmp_path / "resumed", data, **settings)
    lengths = made.get_train_dataloader().batch_sampler
    data.read = -len(data)  # they are read resumed
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-19"))
    assert 0 < data.read <= 2 * max(len(batch) for update in lengths for batch in update)


# 4. Checkpoints


def test_checkpoint_appears_when_complete(tmp_path, monkeypatch):
    seen = []
    original = VanillaTransformerTrainer._save_rng_state

    def look(self, folder):
        seen.append((sorted(path.name for path in tmp_path.glob("checkpoint-*")), Path(folder).parent.name))
        original(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_rng_state", look)
    trained(tmp_path, max_tokens_per_batch=60, max_steps=2, **SAVING)
    assert seen == [([], ".saving"), (["checkpoint-1"], ".saving")]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "run_state.json").is_file() and not (tmp_path / ".saving").exists()


def test_failed_save_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    original = VanillaTransformerTrainer._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step == 2:
            raise OSError(28, "No space left on device")
        original(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError, match="No space"):
        trained(tmp_path, max_tokens_per_batch=60, max_steps=3, save_total_limit=1, **SAVING)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-1"]


def test_save_total_limit_keeps_the_best_checkpoint(tmp_path, monkeypatch):
    class Judged(VanillaTransformerTrainer):
        def evaluate(self, *args, **kwargs):
            scores = {"eval_score": {2: 9.0}.get(self.state.global_step, 1.0)}
            self.log(dict(scores))
            return scores

    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 2, "max_steps": 5}
    monkeypatch.setattr(VanillaTransformerTrainer, "_validate_args", lambda self: None)  # there is no evaluation data
    made = trained(tmp_path, kind=Judged, max_tokens_per_batch=60, **SAVING, **best, **steps)
    assert {path.name for path in complete_checkpoints(tmp_path)} == {"checkpoint-2", "checkpoint-5"}
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    written = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert written["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(tensor, made.model.state_dict()[name]) for name, tensor in weights.items())


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    settings = {"max_tokens_per_batch": 60, **SAVING}
    trained(tmp_path, max_steps=2, **settings)
    before = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    trained(tmp_path, random_pairs(32, seed=5), max_steps=2, **settings)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() != before
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
