"""A resumed run is the same run: same settings, data and precision. Otherwise one line says why not."""

import logging
import shutil

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.run import precision
from tests import trainer_helpers
from tests.model_helpers import slow, tiny_model
from tests.trainer_helpers import (
    SAVING,
    error_of,
    everything_on,
    flat,
    make_trainer,
    random_pairs,
    run_tiny,
    saved_steps,
    write_pairs,
)

TOKENS = {"max_tokens_per_batch": 60, "tokens_per_update": 80}


def trained(folder, data=None, model=None, **settings):
    data = data or Dataset.from_list(random_pairs(32))
    model = model or tiny_model(dropout=0.3, encoder_layers=1, decoder_layers=1)
    return trainer_helpers.trained(folder, data, model, **SAVING | settings)


def by_tokens(folder, steps=3, **settings):
    return trained(folder, max_steps=steps, **TOKENS | settings)


def refusal(folder, **settings):
    """What refuses to go on with a run."""
    return error_of(by_tokens, folder, **{"resume": True, **settings})


# 1. The last checkpoint of the run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    by_tokens(folder, steps=2)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a run with two checkpoints."""
    return shutil.copytree(finished, tmp_path / "run")


def test_older_checkpoint_needs_a_new_output_dir(run, tmp_path):
    older = run / "checkpoint-1"
    message = refusal(run, resume=str(older))
    for part in ("resume_from_checkpoint", "checkpoint-2", "output_dir"):
        assert part in message
    assert saved_steps(run) == [1, 2]
    continued = by_tokens(tmp_path / "new", resume=older)
    assert continued.state.global_step == 3
    assert saved_steps(tmp_path / "new") == [2, 3]


# 2. What the checkpoint must contain

STATE = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]


def cut(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def change(file):
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle - 40 : middle] = b"\xff" * 40
    file.write_bytes(content)


@pytest.mark.parametrize("name", STATE)
def test_resume_without_a_file_of_the_checkpoint_is_refused(run, name):
    (run / "checkpoint-2" / name).unlink()
    message = refusal(run)
    assert "checkpoint-2" in message
    assert name in message


@pytest.mark.parametrize("damage", [cut, change])
@pytest.mark.parametrize("name", [*STATE, "run_state.json"])
def test_resume_from_a_damaged_checkpoint_is_refused(run, damage, name):
    damage(run / "checkpoint-2" / name)
    message = refusal(run)
    for part in (name, "damaged", "delete checkpoint-2"):
        assert part in message


def test_resume_does_not_report_tied_weights_as_missing(run, caplog):
    logger = logging.getLogger("transformers")
    model = tiny_model(dropout=0.3, encoder_layers=1, decoder_layers=1)
    logger.addHandler(caplog.handler)
    try:
        made = by_tokens(
            run,
            model=model,
            resume=True,
            eval_dataset=random_pairs(4),
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert made.state.best_model_checkpoint
    assert "missing keys" not in caplog.text
    assert model.lm_head.weight is model.get_input_embeddings().weight


# 3. The same settings


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("learning_rate", 0.02),
        ("weight_decay", 0.1),
        ("adam_beta2", 0.9),
        ("lr_scheduler_type", "constant"),
        ("warmup_steps", 3),
        ("optim", "sgd"),
        ("bf16", True),
        ("seed", 5),
        ("tokens_per_update", 90),
        ("max_tokens_per_batch", 50),
    ],
)
def test_resume_with_another_setting_is_refused(run, changed, value):
    message = refusal(run, **{changed: value})
    name = "precision" if changed == "bf16" else changed
    assert message.startswith(f"{name}: ")
    assert "checkpoint-2" in message
    of_data = changed in ("seed", "tokens_per_update", "max_tokens_per_batch")
    assert (f"model_name_or_path={run / 'checkpoint-2'}" in message) is not of_data


@pytest.mark.parametrize(
    ("changed", "value", "name"),
    [
        ("per_device_train_batch_size", 8, "pairs per update"),
        ("train_sampling_strategy", "sequential", "train_sampling_strategy"),
    ],
)
def test_resume_with_other_batches_is_refused(tmp_path, changed, value, name):
    settings = {"per_device_train_batch_size": 4, "max_steps": 2}
    trained(tmp_path, **settings)
    settings |= {"max_steps": 3, "resume": True, changed: value}
    assert name in error_of(trained, tmp_path, **settings)
    trained(tmp_path, ignore_data_skip=True, **settings)


PAIRS = [
    ("one", "eins"),
    ("two", "zwei"),
    ("three", "drei"),
    ("four hundred", "vierhundert"),
    ("five", "fünf"),
]
RESUME = {"max_steps": 3, "resume_from_checkpoint": True}


def train(folder, **values):
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "save_steps": 1,
        "warmup_steps": 2,
    }
    return run_tiny(folder, **settings | values)


@pytest.fixture(scope="module")
def finished_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    files = write_pairs(folder, PAIRS)
    train(folder / "run", **files)
    return folder / "run", files


@pytest.fixture
def text_run(finished_text, tmp_path):
    """A copy of a whole run on text files, and the flags that name them."""
    run, files = finished_text
    return shutil.copytree(run, tmp_path / "run"), files


def test_resume_with_moved_files_goes_on(text_run, tmp_path):
    run, _ = text_run
    results = train(run, **write_pairs(tmp_path / "moved", PAIRS), **RESUME)
    assert results["train_updates"] == 3


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"max_source_length": 20}, "max_source_length: 20"),
        ({"max_target_length": 30}, "max_target_length: 30"),
        ({"augment": ["upper=0.1"]}, "augment: "),
        ({"vocab_size": 270}, "vocab_size: 270"),
        ({"lowercase": True}, "lowercase: True"),
        ({"min_frequency": 3}, "min_frequency: 3"),
    ],
)
def test_resume_with_data_made_otherwise_is_refused(text_run, changed, name):
    run, files = text_run
    assert name in error_of(train, run, **files, **changed, **RESUME)
    assert saved_steps(run) == [1, 2]


@pytest.mark.parametrize(
    "pairs",
    [
        PAIRS[:-1],
        [*PAIRS[:-1], ("six", "sechs")],
    ],
)
def test_resume_with_other_pairs_is_refused(text_run, tmp_path, pairs):
    run, _ = text_run
    files = write_pairs(tmp_path / "others", pairs)
    assert f"training data: {len(pairs)} pairs" in error_of(train, run, **files, **RESUME)
    assert saved_steps(run) == [1, 2]


@pytest.mark.slow
def test_resume_with_another_tokenizer_is_refused(text_run, tmp_path):
    run, files = text_run
    save_tokenizers(tmp_path / "other", train_tokenizer(["abc abc"] * 5, 270))
    message = error_of(train, run, **files, **RESUME, tokenizer_name=tmp_path / "other")
    assert message.startswith("tokenizer_name: ")
    results = train(run, **files, **RESUME, tokenizer_name=run / "checkpoint-2")
    assert results["train_updates"] == 3


def lines_with(capsys, part):
    return [line for line in capsys.readouterr().out.splitlines() if part in line]


@pytest.mark.parametrize(
    ("faster", "chosen"),
    [
        (False, "float32"),
        (True, "bf16"),
    ],
)
def test_precision_is_measured_once(tmp_path, monkeypatch, capsys, faster, chosen):
    run = tmp_path / "run"
    files = write_pairs(tmp_path, PAIRS)
    answers = iter([faster])
    monkeypatch.setattr(precision, "bf16_is_faster", lambda model: next(answers))
    train(run, **files, auto_bf16=True)
    train(run, **files, auto_bf16=True, **RESUME)
    first, second = lines_with(capsys, "precision: ")
    assert first.startswith(f"precision: {chosen} ")
    assert second.startswith(f"precision: {chosen} ")
    card = (run / "README.md").read_text(encoding="utf-8")
    assert ("bf16: true" in card) is faster
    assert "auto_bf16" not in card


# 4. The same course


def streamed(folder, resume=None):
    """4 updates to a pass."""
    data = IterableDataset.from_generator(lambda: iter(random_pairs(16)))
    return trained(folder, data, resume=resume, per_device_train_batch_size=4, max_steps=10)


@pytest.fixture(scope="module")
def whole_stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    return folder, flat(streamed(folder).model)


# In the first and second pass, and at the ends of two.
@pytest.mark.parametrize("step", [*slow(2, 4), 6, 8])
def test_stream_by_pairs_resumes_within_a_later_pass(whole_stream, tmp_path, step):
    folder, expected = whole_stream
    resumed = streamed(tmp_path, resume=folder / f"checkpoint-{step}")
    assert resumed.state.global_step == 10
    assert torch.equal(flat(resumed.model), expected)


@pytest.mark.parametrize(
    "settings", [TOKENS, {"per_device_train_batch_size": 8}], ids=["tokens", "pairs"]
)
def test_finished_run_is_not_trained_further(tmp_path, capsys, settings):
    settings = {**settings, "max_steps": 6}  # not at the end of an epoch
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    expected = trained(tmp_path, **settings)
    before = weights.read_bytes()
    assert lines_with(capsys, "nothing left") == []
    resumed = trained(tmp_path, resume=True, **settings)
    (line,) = lines_with(capsys, "nothing left to train")
    assert "update 6 of 6" in line
    assert f"model_name_or_path={tmp_path / 'checkpoint-6'}" in line
    assert resumed.state.global_step == 6
    assert saved_steps(tmp_path)[-1] == 6
    assert torch.equal(flat(resumed.model), flat(expected.model))
    assert weights.read_bytes() == before


def judged(folder, scores, steps=9, patience=2, **settings):
    """A run whose evaluations have these scores, one after each update."""

    class Judged(VanillaTransformerTrainer):
        def evaluate(self, *args, **kwargs):
            found = {"eval_score": scores[self.state.global_step - 1]}
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, found
            )
            return found

        def _validate_args(self):
            pass  # there is no evaluation data

    made = by_tokens(
        folder,
        steps,
        kind=Judged,
        callbacks=[EarlyStoppingCallback(patience)],
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="score",
        greater_is_better=True,
        **settings,
    )
    return made.state


def test_early_stopping_counts_evaluations_before_a_resume(tmp_path, capsys):
    run = tmp_path / "resumed"
    scores = [5.0, 4.0, 3.0, 9.0, 1.0, 1.0, 1.0]
    assert judged(tmp_path / "whole", scores).global_step == 3
    judged(run, scores, steps=2)
    assert judged(run, scores, resume=True).global_step == 3
    # stopped early: nothing is trained further, unless with more patience
    assert lines_with(capsys, "nothing left") == []
    assert judged(run, scores, resume=True).global_step == 3
    assert lines_with(capsys, "nothing left to train: it had stopped early")
    assert judged(run, scores, resume=True, patience=3).global_step == 7


def test_best_checkpoint_is_found_in_a_moved_run(tmp_path):
    scores = [5.0, 4.0, 3.0]
    judged(tmp_path / "run", scores, steps=2)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    resumed = judged(moved, scores, steps=3, resume=True)
    assert resumed.best_model_checkpoint == str(moved / "checkpoint-1")


@pytest.mark.slow
def test_early_stopping_can_be_added_by_a_resume(tmp_path):
    by_tokens(tmp_path, steps=2)
    assert judged(tmp_path, [1.0] * 9, resume=True).global_step == 5


def test_time_limit_survives_restored_callback_states(text_run, capsys):
    run, files = text_run
    results = train(
        run,
        **files,
        resume_from_checkpoint=True,
        restore_callback_states_from_checkpoint=True,
        max_steps=40,
        max_minutes=1e-6,
    )
    assert results["train_updates"] == 2  # the time had been spent before
    printed = capsys.readouterr().out
    assert "nothing left to train: its max_minutes are over" in printed
    assert "trained 2 updates" not in printed


def test_new_optimizer_starts_from_a_checkpoint(text_run, tmp_path):
    def weights(folder):
        return load_file(folder / "model.safetensors")

    run, files = text_run
    results = train(
        tmp_path / "new",
        **files,
        model_name_or_path=run / "checkpoint-1",
        vocab_size=None,
        learning_rate=0.0,
        lr_scheduler_type="constant",
        optim="sgd",
        seed=5,
        max_steps=3,
    )
    assert results["train_updates"] == 3
    found = weights(tmp_path / "new")
    for other, equal in (("checkpoint-1", True), ("checkpoint-2", False)):
        expected = weights(run / other)
        assert all(found[name].equal(tensor) for name, tensor in expected.items()) is equal


# 5. LoRA


def adapted(folder, alpha=8, **settings):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    torch.manual_seed(3)
    lora = peft.LoraConfig(
        r=2,
        lora_alpha=alpha,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.2,
    )
    model = peft.get_peft_model(tiny_model(encoder_layers=1, decoder_layers=1), lora)
    return by_tokens(
        folder, data=random_pairs(32), model=model, lr_scheduler_type="constant", **settings
    )


def with_everything(folder, steps, resume=None):
    settings = {**SAVING, **TOKENS, "lr_scheduler_type": "constant", "max_steps": steps}
    return everything_on(folder, resume, dropout=0.2, **settings)


@pytest.mark.parametrize("train", [adapted, *slow(with_everything)])
def test_lora_run_resumes_bit_identically(tmp_path, train):
    run = tmp_path / "resumed"
    expected = train(tmp_path / "whole", steps=6)
    train(run, steps=4)
    resumed = train(run, steps=6, resume=True)
    assert resumed.state.global_step == 6
    assert torch.equal(flat(resumed.model), flat(expected.model))
    if expected.ema:
        for name, average in expected.ema.average.items():
            assert average.equal(resumed.ema.average[name])


def test_adapters_of_another_scale_are_refused(tmp_path):
    adapted(tmp_path, steps=1)
    message = error_of(adapted, tmp_path, steps=2, alpha=16, resume=True)
    assert message.startswith("lora_alpha of adapter default: 16, but ")


def test_lora_run_keeps_to_save_total_limit(tmp_path):
    adapted(tmp_path, steps=4, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ({"simcut_alpha": 3.0}, {}, ["simcut_alpha was 3.0, is now 0.0"]),
        (
            {"simcut_alpha": 3.0},
            {"r_drop_alpha": 5.0},
            ["simcut_alpha was 3.0", "r_drop_alpha was 0.0, is now 5.0"],
        ),
        ({"ema_decay": 0.9}, {"ema_decay": 0.5}, ["ema_decay was 0.9, is now 0.5"]),
        ({"ema_decay": 0.9}, {}, ["ema_decay was 0.9, is now 0.0"]),
        ({}, {"max_grad_norm": 5.0}, ["max_grad_norm was 1.0, is now 5.0"]),
        ({"simcut_alpha": 3.0}, {"simcut_alpha": 3.0}, []),
    ],
)
def test_resume_prints_each_change_of_the_objective(tmp_path, capsys, before, after, lines):
    trained(tmp_path, max_steps=1, **before)
    capsys.readouterr()
    trained(tmp_path, max_steps=2, resume=True, **after)
    printed = lines_with(capsys, "objective")
    assert len(printed) == len(lines)
    for part in lines:
        assert any(part in line for line in printed)


def test_collator_that_pads_on_the_left_is_refused(tmp_path):
    model = tiny_model()
    tokenizer = train_tokenizer(["a b"], 260)
    tokenizer.padding_side = "left"
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    assert "padding_side" in error_of(make_trainer, tmp_path, model=model, data_collator=collator)
