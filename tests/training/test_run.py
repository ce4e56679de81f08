"""Tiny runs: every recipe ends in a model folder, interrupted runs can be resumed, the better weights are kept."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import VanillaTransformerTrainer, generation_vanilla_transformer
from hf_vanilla_transformer.corpora.corpus import load_corpus
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.state.checkpoints import complete_checkpoints
from tests.model_helpers import error_of, slow
from tests.trainer_helpers import as_flags, assert_same_model, run_tiny, write_pairs

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes"
#: test_sequence_recipes.py has the others
SEQUENCES = ("g2p_en", "retrosynthesis", "retrosynthesis_gpu", "derivatives", "small_sequences")
RECIPES = {
    path.stem: path
    for path in FOLDER.glob("*.yaml")
    if not path.stem.startswith("accelerate_") and path.stem not in SEQUENCES
}
FAST = ["multi30k_en_de_tiny", "numbers_en_de", "small_corpus"]
SOURCES = ["one", "two", "three", "twenty-one", "two hundred", "thirty-three", "one hundred and two", "forty"]
TARGETS = ["eins", "zwei", "drei", "einundzwanzig", "zweihundert", "dreiunddreißig", "einhundertzwei", "vierzig"]

TINY = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "save_steps": 1,
    "auto_bf16": False,
    "bf16": False,
    "dataloader_num_workers": 0,
}


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """Flags that point at three splits of parallel text."""
    folder, pairs = tmp_path_factory.mktemp("text"), list(zip(SOURCES, TARGETS, strict=True))
    train, validation = write_pairs(folder, pairs), write_pairs(folder, pairs[:3], "validation")
    return train | validation | write_pairs(folder, pairs[2:6], "test")


def only_training(parallel):
    return {"train": parallel["train"]}


def train(folder, recipe=None, **values):
    return run_tiny(folder, *([recipe] if recipe else []), **TINY | values)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, parallel):
    """Each recipe trained for two steps, once: name -> (folder, results)."""
    runs = {}

    def finish(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp("runs") / name
            recipe = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
            data = {"numbers_size": 12, "max_eval_samples": 8} if "numbers_size" in recipe else dict(parallel)
            if base := recipe.get("model_name_or_path"):  # a second stage begins with the model of the first
                data["model_name_or_path"] = finish(Path(base).name)[0]
            if base := recipe.get("tokenizer_name"):
                data["tokenizer_name"] = finish(Path(base).name)[0]
            if teachers := recipe.get("teacher"):
                data["teacher"] = [finish(Path(each).name)[0] for each in teachers]
            runs[name] = folder, train(folder, RECIPES[name], eval_steps=1, **data)
        return runs[name]

    return finish


# 1. A finished run is a model folder


@pytest.mark.parametrize("name", [*FAST, *slow(*sorted(RECIPES.keys() - set(FAST)))])
def test_recipes_end_in_a_model_folder(finished, name, short_translations):
    folder, results = finished(name)
    recipe = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files
    assert {"tokenizer_config.json", "trainer_state.json", "all_results.json", "curve.png", "README.md"} <= files
    assert not {file for file in files if file.startswith((".", "average"))}
    written = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(results))
    for metric in ("eval_bleu", "eval_loss", "test_bleu", "test_chrf", "test_exact_match", "train_loss"):
        assert isinstance(written[metric], float), metric
    tokenize = recipe.get("bleu_tokenize", "13a")
    signature = written["test_bleu_signature"].split("|")
    case = "lc" if recipe.get("bleu_lowercase") else "mixed"
    assert {"BLEU", "nrefs:1", f"case:{case}", f"tok:{tokenize}"} <= set(signature)
    examples, card = written["test_examples"], (folder / "README.md").read_text(encoding="utf-8")
    assert len(examples) in (4, 5) and all(len(row) == 3 and row[0] in card for row in examples)
    sentences = 1000 if "numbers_size" in recipe else 4 * len(recipe.get("directions", "1"))
    assert (written["train_updates"], written["test_sentences"]) == (2, sentences)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and any("eval_bleu" in entry for entry in state["log_history"])
    generation = json.loads((folder / "generation_config.json").read_text())
    assert "assistant_lookbehind" not in generation, "the trainer's defaults are saved"
    assert generation.get("num_beams", 1) == recipe.get("test_num_beams", generation.get("num_beams", 1))
    # the saved model has no length limit of an evaluation, nor the library's default of 20
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert 5 < model.config.trained_source_length < 256
    model.generation_config.max_length_over_source = short_translations
    assert model.generate(torch.tensor([[9, 8, 2]]), min_new_tokens=30, num_beams=1).shape[1] > 30


def test_average_of_the_last_checkpoints_is_scored(finished):
    _, results = finished("multi30k_en_de_tiny")
    assert {"eval_bleu_single", "eval_bleu_averaged"} <= results.keys()
    assert results["eval_bleu"] == max(results["eval_bleu_single"], results["eval_bleu_averaged"])
    assert results["averaged_checkpoints"] in (0, 2)


# 2. Interrupted runs


def test_resumed_run_ends_with_the_same_weights(tmp_path, parallel, capsys):
    # two steps per epoch: stopped in the second epoch, resumed into the third
    settings = only_training(parallel) | {"dropout": 0.3, "learning_rate": 0.01, "warmup_steps": 1, "seed": 3}
    train(tmp_path / "uninterrupted", **settings, max_steps=5)
    train(tmp_path / "stopped", **settings, max_steps=3)
    run = tmp_path / "stopped"
    # incomplete checkpoints are not resumed from, and replaced when their update is saved
    for name, state in (("checkpoint-4", None), ("checkpoint-9", '{"global_step": 9, "log_hi')):
        (run / name).mkdir()
        (run / name / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
        if state:
            (run / name / "trainer_state.json").write_text(state)
    before = (run / "model.safetensors").read_bytes()
    capsys.readouterr()
    results = train(run, **settings, max_steps=5, resume_from_checkpoint=True)
    assert f"resuming from {run}/checkpoint-3\n" in capsys.readouterr().out
    assert len(list((run / "checkpoint-9").iterdir())) == 2
    assert [path.name for path in complete_checkpoints(run)] == [f"checkpoint-{step}" for step in range(1, 6)]
    assert results["train_updates"] == 5
    assert_same_model(run, tmp_path / "uninterrupted")
    assert (run / "model.safetensors").read_bytes() != before
    # from an older checkpoint into a new folder, too
    assert "output_dir" in error_of(train, run, **settings, max_steps=5, resume_from_checkpoint=run / "checkpoint-2")
    train(tmp_path / "new", **settings, max_steps=5, resume_from_checkpoint=run / "checkpoint-2")
    assert_same_model(tmp_path / "new", tmp_path / "uninterrupted")


def test_time_limit_ends_with_an_evaluation_and_a_checkpoint(tmp_path, parallel):
    settings = {"max_steps": 500, "save_steps": 400, "eval_strategy": "steps", "eval_steps": 400}
    results = train(tmp_path / "run", **parallel, **settings, max_minutes=1e-9)
    assert results["train_updates"] == 1
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert any("eval_bleu" in entry and entry["step"] == 1 for entry in state["log_history"])


def test_ctrl_c_after_training_keeps_the_checkpoints(tmp_path, parallel, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(VanillaTransformerTrainer, "predict", interrupted)
        train(run, **parallel)
    assert [path.name for path in complete_checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    # a resume adds the scores and the model folder without training again
    results = train(run, **parallel, resume_from_checkpoint=True)
    assert results["train_updates"] == 2 and "test_bleu" in results
    assert (run / "model.safetensors").is_file()


# 3. The saved weights


@pytest.mark.parametrize("average", ["average_last", "ema_decay", None])
def test_averages_without_validation_data_are_kept_and_said(parallel, tmp_path, average, capsys):
    flags = only_training(parallel) | ({average: 3 if average == "average_last" else 0.5} if average else {})
    results = train(tmp_path / "run", **flags, max_steps=3, eval_strategy="no", save_strategy="steps", save_steps=1)
    last = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(saved[name].equal(last[name]) for name in saved) is (average is None)
    printed = capsys.readouterr().out
    assert ("no validation data" in printed) is (average is not None)
    if average == "average_last":
        checkpoints = [load_file(tmp_path / "run" / f"checkpoint-{n}" / "model.safetensors") for n in (1, 2, 3)]
        for name, tensor in saved.items():
            torch.testing.assert_close(tensor, sum(each[name] for each in checkpoints) / 3)
        assert results["averaged_checkpoints"] == 3
    elif average:
        ema = load_file(tmp_path / "run" / "checkpoint-3" / "ema.safetensors")
        assert all(ema[name].equal(tensor) for name, tensor in saved.items() if name in ema)


def test_files_of_a_run_have_the_mode_of_the_umask(parallel, tmp_path):
    train(tmp_path / "run", **only_training(parallel), max_steps=1, save_strategy="steps", save_steps=1)
    folders = (tmp_path / "run", tmp_path / "run" / "checkpoint-1")
    modes = {path.stat().st_mode & 0o777 for folder in folders for path in folder.iterdir() if path.is_file()}
    assert modes == {(tmp_path / "run" / "config.json").stat().st_mode & 0o777} != {0o600}


def test_length_limit_of_the_test_score_is_that_of_the_saved_model(parallel, tmp_path):
    """A base model's limit becomes that of the run. Without one the paper's stays, and the test is scored with it."""
    train(tmp_path / "base", **parallel, max_steps=1)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    for limit in (None, 12):
        model.generation_config.max_length = limit
        model.save_pretrained(tmp_path / "base")
        flags = {
            "model_name_or_path": tmp_path / "base",
            "generation_max_length": 7,
            "output_dir": tmp_path / str(limit),
        }
        results = run_training(*parse_recipe(as_flags({**parallel, **flags, "max_steps": 1, "use_cpu": True})))
        saved = json.loads((tmp_path / str(limit) / "generation_config.json").read_text())
        assert saved.get("max_length") == (limit and 7)
        assert (results["test_gen_len"] > 7) is (limit is None)


@pytest.mark.parametrize("long_targets", [1, 2])
def test_search_ends_no_sooner_than_the_training_targets(long_targets, tmp_path, capsys):
    """One target of a hundred may be noise. With more, the longest one sets the limit."""
    limit = generation_vanilla_transformer.MAX_LENGTH_OVER_SOURCE
    longest = limit + 5
    extra = [longest, limit + 1][:long_targets]
    targets = ["a" + "b" * number for number in extra + [0] * (100 - long_targets)]
    pairs = write_pairs(tmp_path, [("a", target) for target in targets])
    train(tmp_path / "run", train=pairs["train"], tokens="chars", max_steps=1)
    saved = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    raised = long_targets > 1
    assert saved["max_length_over_source"] == (longest if raised else limit)
    assert (f"max_length_over_source: {longest}, not {limit}" in capsys.readouterr().out) is raised


# 4. Both directions


def test_bidirectional_training_reads_each_pair_both_ways(parallel):
    flags = as_flags({**parallel, "bidirectional": True, "output_dir": "unused"})
    _, data_args, args = parse_recipe(flags)
    pairs = load_corpus(data_args, args.seed).pairs
    found = [(row["source"], row["target"]) for row in pairs["train"]]
    forward = list(zip(SOURCES, TARGETS, strict=True))
    assert found == forward + [pair[::-1] for pair in forward]
    assert len(list(pairs["validation"])) == 6 and len(list(pairs["test"])) == 4


def test_bidirectional_training_needs_a_joint_vocabulary(parallel):
    flags = as_flags({**parallel, "bidirectional": True, "separate_vocabularies": True, "output_dir": "unused"})
    _, data_args, args = parse_recipe(flags)
    assert "bidirectional=True" in error_of(load_corpus, data_args, args.seed)


# 5. Held-out validation
