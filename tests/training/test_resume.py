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
from hf_vanilla_transformer.training.state.checkpoints import complete_checkpoints
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
    write_pairs,
)

TOKENS = {"max_tokens_per_batch": 60, "tokens_per_update": 80}


def trained(folder, data=None, model=None, **settings):
    data = Dataset.from_list(random_pairs(32)) if data is None else data
    model = model or tiny_model(dropout=0.3, encoder_layers=1, decoder_layers=1)
    return trainer_helpers.trained(folder, data, model, **SAVING | settings)


def steps_of(checkpoints):
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints]


# 1. The last checkpoint of the run


def test_older_checkpoint_needs_a_new_output_dir(run, tmp_path):
    older = run / "checkpoint-1"
    message = error_of(trained, run, max_steps=3, resume=str(older), **TOKENS)
    assert "resume_from_checkpoint" in message and "checkpoint-2" in message and "output_dir" in message
    assert steps_of(complete_checkpoints(run)) == [1, 2]
    continued = trained(tmp_path / "new", max_steps=3, resume=older, **TOKENS)
    assert continued.state.global_step == 3 and steps_of(complete_checkpoints(tmp_path / "new")) == [2, 3]


# 2. What the checkpoint must contain


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    trained(folder, max_steps=2, **TOKENS)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a run with two checkpoints."""
    return shutil.copytree(finished, tmp_path / "run")


STATE = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]
DAMAGE = [("removed", name) for name in STATE]
DAMAGE += [(damage, name) for damage in ("cut", "changed") for name in (*STATE, "run_state.json")]


@pytest.mark.parametrize(("damage", "name"), [*DAMAGE, ("cut", "model.safetensors")])
def test_resume_from_a_damaged_checkpoint_is_refused(run, damage, name):
    file = run / "checkpoint-2" / name
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    if damage == "removed":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:middle])
    else:
        content[middle - 40 : middle] = b"\xff" * 40
        file.write_bytes(content)
    message = error_of(trained, run, max_steps=3, resume=True, **TOKENS)
    assert "checkpoint-2" in message
    if name != "model.safetensors":
        assert name in message
        assert damage == "removed" or "damaged" in message and "delete checkpoint-2" in message


def test_resume_with_weights_of_another_model_is_refused(run):
    message = error_of(
        trained, run, model=tiny_model(encoder_layers=2, dropout=0.3), max_steps=3, resume=True, **TOKENS
    )
    assert "checkpoint-2 was trained with 1" in message and "encoder_layers: 2" in message


def test_resume_does_not_report_tied_weights_as_missing(run, caplog):
    logger, model = logging.getLogger("transformers"), tiny_model(dropout=0.3, encoder_layers=1, decoder_layers=1)
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "eval_dataset": random_pairs(4)}
    logger.addHandler(caplog.handler)
    try:
        made = trained(run, model=model, max_steps=3, resume=True, per_device_eval_batch_size=4, **TOKENS, **best)
    finally:
        logger.removeHandler(caplog.handler)
    assert made.state.best_model_checkpoint and "missing keys" not in caplog.text
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
    message = error_of(trained, run, max_steps=3, resume=True, **TOKENS | {changed: value})
    name = "precision" if changed == "bf16" else changed
    assert message.startswith(f"{name}: ") and "checkpoint-2" in message
    of_data = changed in ("seed", "tokens_per_update", "max_tokens_per_batch")
    assert (f"model_name_or_path={run / 'checkpoint-2'}" in message) is not of_data


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["per_device_train_batch_size", "train_sampling_strategy"])
def test_resume_with_other_batches_is_refused(tmp_path, changed):
    settings = {"per_device_train_batch_size": 4, "max_steps": 2}
    value = {"train_sampling_strategy": "sequential"}.get(changed, 8)
    trained(tmp_path, **settings)
    message = error_of(trained, tmp_path, resume=True, **settings | {"max_steps": 3, changed: value})
    assert changed.replace("per_device_train_batch_size", "pairs per update") in message
    trained(tmp_path, resume=True, ignore_data_skip=True, **settings | {"max_steps": 3, changed: value})


PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four hundred", "vierhundert"), ("five", "fünf")]


def train(folder, **values):
    settings = {"per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 1, "warmup_steps": 2}
    return run_tiny(folder, **settings | values)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A whole run on text files, and the flags that name them."""
    folder = tmp_path_factory.mktemp("text")
    files = write_pairs(folder, PAIRS)
    train(folder / "run", **files)
    return folder / "run", files


def test_resume_with_moved_files_goes_on(text_run, tmp_path):
    run = shutil.copytree(text_run[0], tmp_path / "run")
    results = train(run, **write_pairs(tmp_path / "moved", PAIRS), max_steps=3, resume_from_checkpoint=True)
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
        ({"train files": PAIRS[:-1]}, "training data: 4 pairs"),
        ({"train files": [*PAIRS[:-1], ("six", "sechs")]}, "training data: 5 pairs"),
    ],
)
def test_resume_with_other_data_is_refused(text_run, tmp_path, changed, name):
    run, files = shutil.copytree(text_run[0], tmp_path / "run"), text_run[1]
    if "train files" in changed:
        files, changed = write_pairs(tmp_path / "others", changed["train files"]), {}
    message = error_of(train, run, **files, **changed, max_steps=3, resume_from_checkpoint=True)
    assert name in message
    assert steps_of(complete_checkpoints(run)) == [1, 2]


@pytest.mark.slow
def test_resume_with_another_tokenizer_is_refused(text_run, tmp_path):
    run, files = shutil.copytree(text_run[0], tmp_path / "run"), text_run[1]
    save_tokenizers(tmp_path / "other", train_tokenizer(["abc abc"] * 5, 270))
    resume = {"max_steps": 3, "resume_from_checkpoint": True}
    message = error_of(train, run, **files, **resume, tokenizer_name=tmp_path / "other")
    assert message.startswith("tokenizer_name: ")
    results = train(run, **files, **resume, tokenizer_name=run / "checkpoint-2")
    assert results["train_updates"] == 3


@pytest.mark.parametrize("faster", [False, True])
def test_precision_is_measured_once(tmp_path, monkeypatch, capsys, faster):
    files, answers = write_pairs(tmp_path, PAIRS), iter([faster])
    monkeypatch.setattr(precision, "bf16_is_faster", lambda model: next(answers))
    train(tmp_path / "run", **files, auto_bf16=True)
    train(tmp_path / "run", **files, auto_bf16=True, max_steps=3, resume_from_checkpoint=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("precision: ")]
    assert [line.split()[1] for line in lines] == ["bf16" if faster else "float32"] * 2
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert ("bf16: true" in card) is faster and "auto_bf16" not in card


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


@pytest.mark.parametrize("settings", [TOKENS, {"per_device_train_batch_size": 8}], ids=["tokens", "pairs"])
def test_finished_run_is_not_trained_further(tmp_path, capsys, settings):
    expected = trained(tmp_path, max_steps=6, **settings)  # not at the end of an epoch
    before = (tmp_path / "checkpoint-6" / "model.safetensors").read_bytes()
    assert "nothing left" not in capsys.readouterr().out
    resumed = trained(tmp_path, max_steps=6, resume=True, **settings)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nothing left to train" in line]
    assert "update 6 of 6" in line and f"model_name_or_path={tmp_path / 'checkpoint-6'}" in line
    assert resumed.state.global_step == 6 and not (tmp_path / "checkpoint-7").exists()
    assert torch.equal(flat(resumed.model), flat(expected.model))
    assert (tmp_path / "checkpoint-6" / "model.safetensors").read_bytes() == before


def judged(folder, scores, resume=None, patience=2, **settings):
    """A run whose evaluations score as given."""

    class Judged(VanillaTransformerTrainer):
        def evaluate(self, *args, **kwargs):
            found = {"eval_score": scores[self.state.global_step]}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

        def _validate_args(self):
            pass  # there is no evaluation data

    best = {"metric_for_best_model": "score", "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"callbacks": [EarlyStoppingCallback(patience)], **TOKENS, **best}
    return trained(folder, kind=Judged, resume=resume, **settings)


def test_early_stopping_counts_evaluations_before_a_resume(tmp_path, capsys):
    scores = {1: 5.0, 2: 4.0, 3: 3.0, 4: 9.0, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0, 9: 1.0}
    assert judged(tmp_path / "whole", scores, max_steps=9).state.global_step == 3
    judged(tmp_path / "resumed", scores, max_steps=2)
    resumed = judged(tmp_path / "resumed", scores, max_steps=9, resume=True)
    assert resumed.state.global_step == 3
    # stopped early: nothing is trained further, unless with more patience
    assert "nothing left" not in capsys.readouterr().out
    assert judged(tmp_path / "resumed", scores, max_steps=9, resume=True).state.global_step == 3
    assert "nothing left to train: it had stopped early" in capsys.readouterr().out
    patient = judged(tmp_path / "resumed", scores, max_steps=9, resume=True, patience=3)
    assert patient.state.global_step == 7


def test_best_checkpoint_is_found_in_a_moved_run(tmp_path):
    scores = {1: 5.0, 2: 4.0, 3: 3.0}
    judged(tmp_path / "run", scores, max_steps=2)
    (tmp_path / "run").rename(tmp_path / "moved")
    resumed = judged(tmp_path / "moved", scores, max_steps=3, resume=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")


@pytest.mark.slow
def test_early_stopping_can_be_added_by_a_resume(tmp_path):
    trained(tmp_path, max_steps=2, **TOKENS)
    scores = dict.fromkeys(range(1, 10), 1.0)
    assert judged(tmp_path, scores, resume=True, max_steps=9).state.global_step == 5


def test_time_limit_survives_restored_callback_states(text_run, tmp_path, capsys):
    run, files = shutil.copytree(text_run[0], tmp_path / "run"), text_run[1]
    settings = {"resume_from_checkpoint": True, "restore_callback_states_from_checkpoint": True, "max_steps": 40}
    results = train(run, **files, **settings, max_minutes=1e-6)
    assert results["train_updates"] == 2  # the time had been spent before
    printed = capsys.readouterr().out
    assert "nothing left to train: its max_minutes are over" in printed and "trained 2 updates" not in printed


def test_new_optimizer_starts_from_a_checkpoint(text_run, tmp_path):
    run, files = text_run
    settings = {"vocab_size": None, "learning_rate": 0.0, "lr_scheduler_type": "constant", "optim": "sgd", "seed": 5}
    results = train(tmp_path / "run", **files, **settings, model_name_or_path=run / "checkpoint-1", max_steps=3)
    assert results["train_updates"] == 3
    for other, equal in (("checkpoint-1", True), ("checkpoint-2", False)):
        first, second = (load_file(each / "model.safetensors") for each in (run / other, tmp_path / "run"))
        assert all(first[name].equal(second[name]) for name in first) is equal


# 5. LoRA


def adapted(folder, resume=None, alpha=8, **settings):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
    model = peft.get_peft_model(tiny_model(encoder_layers=1, decoder_layers=1), lora)
    settings |= {"lr_scheduler_type": "constant"}
    return trained(folder, random_pairs(32), model=model, resume=resume, **TOKENS, **settings)


def with_everything(folder, resume=None, **settings):
    return everything_on(folder, resume, dropout=0.2, **SAVING | TOKENS | {"lr_scheduler_type": "constant"} | settings)


@pytest.mark.parametrize("train", [adapted, *slow(with_everything)])
def test_lora_run_resumes_bit_identically(tmp_path, train):
    expected = train(tmp_path / "whole", max_steps=6)
    run = tmp_path / "resumed"
    train(run, max_steps=4)
    resumed = train(run, max_steps=6, resume=True)
    assert resumed.state.global_step == 6
    assert torch.equal(flat(resumed.model), flat(expected.model))
    for name, average in (expected.ema.average if expected.ema else {}).items():
        assert average.equal(resumed.ema.average[name])


def test_adapters_of_another_scale_are_refused(tmp_path):
    adapted(tmp_path, max_steps=1)
    message = error_of(adapted, tmp_path, max_steps=2, alpha=16, resume=True)
    assert message.startswith("lora_alpha of adapter default: 16, but ")


def test_lora_run_keeps_to_save_total_limit(tmp_path):
    adapted(tmp_path, max_steps=4, save_total_limit=2)
    assert steps_of(sorted(tmp_path.glob("checkpoint-*"))) == [3, 4]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ({"simcut_alpha": 3.0}, {}, ["simcut_alpha was 3.0, is now 0.0"]),
        ({"simcut_alpha": 3.0}, {"r_drop_alpha": 5.0}, ["simcut_alpha was 3.0", "r_drop_alpha was 0.0, is now 5.0"]),
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
    printed = [line for line in capsys.readouterr().out.splitlines() if "objective" in line]
    assert len(printed) == len(lines) and all(any(part in line for line in printed) for part in lines)


def test_collator_that_pads_on_the_left_is_refused(tmp_path):
    tokenizer, model = train_tokenizer(["a b"], 260), tiny_model()
    tokenizer.padding_side = "left"
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    assert "padding_side" in error_of(make_trainer, tmp_path, model=model, data_collator=collator)
