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
from tests.model_helpers import error_of, slow
from tests.trainer_helpers import as_flags, assert_same_model, run_tiny, saved_steps, write_pairs

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes"
#: test_sequence_recipes.py has the others
SEQUENCES = ("g2p_en", "retrosynthesis", "retrosynthesis_gpu", "derivatives", "small_sequences")
RECIPES = {
    path.stem: path
    for path in FOLDER.glob("*.yaml")
    if not path.stem.startswith("accelerate_") and path.stem not in SEQUENCES
}
FAST = ["multi30k_en_de_tiny", "small_corpus"]
PAIRS = [
    ("one", "eins"),
    ("two", "zwei"),
    ("three", "drei"),
    ("twenty-one", "einundzwanzig"),
    ("two hundred", "zweihundert"),
    ("thirty-three", "dreiunddreißig"),
    ("one hundred and two", "einhundertzwei"),
    ("forty", "vierzig"),
]

TINY = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "save_steps": 1,
    "auto_bf16": False,
    "bf16": False,
    "dataloader_num_workers": 0,
}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A flag that points at parallel text."""
    return write_pairs(tmp_path_factory.mktemp("text"), PAIRS)


@pytest.fixture(scope="module")
def parallel(training, tmp_path_factory):
    """Flags that point at three splits of parallel text."""
    folder = tmp_path_factory.mktemp("splits")
    validation = write_pairs(folder, PAIRS[:3], "validation")
    return training | validation | write_pairs(folder, PAIRS[2:6], "test")


def train(folder, *recipe, **values):
    return run_tiny(folder, *recipe, **TINY | values)


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


def read_recipe(name):
    return yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, parallel):
    """Each recipe trained for two steps, once: name -> (folder, results)."""
    runs = {}

    def model_of(path):
        """The folder of the run that this recipe names as the one before it."""
        folder, _ = finish(Path(path).name)
        return folder

    def finish(name):
        if name in runs:
            return runs[name]
        recipe = read_recipe(name)
        data = (
            {"numbers_size": 12, "max_eval_samples": 8}
            if "numbers_size" in recipe
            else dict(parallel)
        )
        for field in ("model_name_or_path", "tokenizer_name"):
            if field in recipe:
                data[field] = model_of(recipe[field])
        if "teacher" in recipe:
            data["teacher"] = [model_of(each) for each in recipe["teacher"]]
        folder = tmp_path_factory.mktemp("runs") / name
        runs[name] = folder, train(folder, RECIPES[name], eval_steps=1, **data)
        return runs[name]

    return finish


# 1. A finished run is a model folder


@pytest.mark.parametrize("name", [*FAST, *slow(*sorted(RECIPES.keys() - set(FAST)))])
def test_recipes_end_in_a_model_folder(finished, name, short_translations):
    folder, results = finished(name)
    recipe = read_recipe(name)
    files = {path.name for path in folder.iterdir()}
    assert files >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
        "all_results.json",
        "curve.png",
        "README.md",
    }
    assert not {file for file in files if file.startswith((".", "average"))}
    written = read_json(folder / "all_results.json")
    assert written == json.loads(json.dumps(results))
    for metric in (
        "eval_bleu",
        "eval_loss",
        "test_bleu",
        "test_chrf",
        "test_exact_match",
        "train_loss",
    ):
        assert isinstance(written[metric], float), metric
    signature = written["test_bleu_signature"].split("|")
    case = "lc" if recipe.get("bleu_lowercase") else "mixed"
    assert {"BLEU", "nrefs:1", f"case:{case}", f"tok:{recipe.get('bleu_tokenize', '13a')}"} <= set(
        signature
    )
    card = (folder / "README.md").read_text(encoding="utf-8")
    examples = written["test_examples"]
    assert len(examples) in (4, 5)
    for row in examples:
        assert len(row) == 3
        assert row[0] in card
    assert written["train_updates"] == 2
    directions = recipe.get("directions", [None])
    assert written["test_sentences"] == (1000 if "numbers_size" in recipe else 4 * len(directions))
    state = read_json(folder / "trainer_state.json")
    assert state["global_step"] == 2
    assert any("eval_bleu" in entry for entry in state["log_history"])
    generation = read_json(folder / "generation_config.json")
    assert "assistant_lookbehind" not in generation, "the trainer's defaults are saved"
    assert generation.get("num_beams", 1) == recipe.get(
        "test_num_beams", generation.get("num_beams", 1)
    )
    # the saved model has no length limit of an evaluation, nor the library's default of 20
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert 5 < model.config.trained_source_length < 256
    model.generation_config.max_length_over_source = short_translations
    assert model.generate(torch.tensor([[9, 8, 2]]), min_new_tokens=30, num_beams=1).shape[1] > 30


def test_average_of_the_last_checkpoints_is_scored(finished):
    _, results = finished("multi30k_en_de_tiny")
    assert results["eval_bleu"] == max(results["eval_bleu_single"], results["eval_bleu_averaged"])
    assert results["averaged_checkpoints"] in (0, 2)


# 2. Interrupted runs


def test_resumed_run_ends_with_the_same_weights(tmp_path, training, capsys):
    def five_updates(folder, **values):
        return train(folder, **settings | {"max_steps": 5, **values})

    # two steps per epoch: stopped in the second epoch, resumed into the third
    settings = {**training, "dropout": 0.3, "learning_rate": 0.01, "warmup_steps": 1, "seed": 3}
    uninterrupted = tmp_path / "uninterrupted"
    run = tmp_path / "stopped"
    weights = run / "model.safetensors"
    five_updates(uninterrupted)
    five_updates(run, max_steps=3)
    before = weights.read_bytes()
    # incomplete checkpoints are not resumed from, and replaced when their update is saved
    for number in (4, 9):
        incomplete = run / f"checkpoint-{number}"
        incomplete.mkdir()
        (incomplete / "model.safetensors").write_bytes(before)
    (incomplete / "trainer_state.json").write_text('{"global_step": 9, "log_hi')
    capsys.readouterr()
    results = five_updates(run, resume_from_checkpoint=True)
    assert f"resuming from {run}/checkpoint-3\n" in capsys.readouterr().out
    assert len(list(incomplete.iterdir())) == 2
    assert saved_steps(run) == [1, 2, 3, 4, 5]
    assert results["train_updates"] == 5
    assert_same_model(run, uninterrupted)
    assert weights.read_bytes() != before
    # from an older checkpoint into a new folder, too
    older = {"resume_from_checkpoint": run / "checkpoint-2"}
    assert "output_dir" in error_of(five_updates, run, **older)
    five_updates(tmp_path / "new", **older)
    assert_same_model(tmp_path / "new", uninterrupted)


def test_time_limit_ends_with_an_evaluation_and_a_checkpoint(tmp_path, parallel):
    run = tmp_path / "run"
    results = train(
        run,
        **parallel,
        max_steps=500,
        save_steps=400,
        eval_strategy="steps",
        eval_steps=400,
        max_minutes=1e-9,
    )
    assert results["train_updates"] == 1
    assert saved_steps(run) == [1]
    history = read_json(run / "trainer_state.json")["log_history"]
    assert {entry["step"] for entry in history if "eval_bleu" in entry} == {1}


def test_ctrl_c_after_training_keeps_the_checkpoints(tmp_path, parallel, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(VanillaTransformerTrainer, "predict", interrupted)
        train(run, **parallel)
    assert saved_steps(run) == [1, 2]
    # a resume adds the scores and the model folder without training again
    results = train(run, **parallel, resume_from_checkpoint=True)
    assert results["train_updates"] == 2
    assert "test_bleu" in results
    assert (run / "model.safetensors").is_file()


# 3. The saved weights


@pytest.mark.parametrize(
    "average",
    [
        {"average_last": 3},
        {"ema_decay": 0.5},
        {},
    ],
    ids=str,
)
def test_averages_without_validation_data_are_kept_and_said(training, tmp_path, average, capsys):
    results = train(
        tmp_path,
        **training,
        **average,
        max_steps=3,
        eval_strategy="no",
        save_strategy="steps",
    )
    saved = load_file(tmp_path / "model.safetensors")
    checkpoints = [
        load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2, 3)
    ]
    assert all(saved[name].equal(tensor) for name, tensor in checkpoints[-1].items()) is not bool(
        average
    )
    assert ("no validation data" in capsys.readouterr().out) is bool(average)
    if "average_last" in average:
        for name, tensor in saved.items():
            torch.testing.assert_close(tensor, sum(each[name] for each in checkpoints) / 3)
        assert results["averaged_checkpoints"] == 3
    elif average:
        for name, tensor in load_file(tmp_path / "checkpoint-3" / "ema.safetensors").items():
            assert tensor.equal(saved[name])


def test_files_of_a_run_have_the_mode_of_the_umask(training, tmp_path):
    train(tmp_path, **training, max_steps=1, save_strategy="steps")
    files = [path for folder in (tmp_path, tmp_path / "checkpoint-1") for path in folder.iterdir()]
    modes = {path.stat().st_mode & 0o777 for path in files if path.is_file()}
    (tmp_path / "other").touch()
    assert modes == {(tmp_path / "other").stat().st_mode & 0o777}


@pytest.mark.parametrize(
    ("limit", "saved"),
    [
        (None, None),
        (12, 7),
    ],
)
def test_length_limit_of_the_test_score_is_that_of_the_saved_model(
    parallel, tmp_path, limit, saved
):
    """A base model's limit becomes that of the run. Without one the paper's stays, and the test is scored with it."""
    base = tmp_path / "base"
    run = tmp_path / "run"
    train(base, **parallel, max_steps=1)
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    model.generation_config.max_length = limit
    model.save_pretrained(base)
    flags = as_flags(
        {
            **parallel,
            "model_name_or_path": base,
            "generation_max_length": 7,
            "output_dir": run,
            "max_steps": 1,
            "use_cpu": True,
        }
    )
    results = run_training(*parse_recipe(flags))
    assert read_json(run / "generation_config.json").get("max_length") == saved
    assert (results["test_gen_len"] > 7) is (limit is None)


@pytest.mark.parametrize("long_targets", [1, 2])
def test_search_ends_no_sooner_than_the_training_targets(long_targets, tmp_path, capsys):
    """One target of a hundred may be noise. With more, the longest one sets the limit."""
    limit = generation_vanilla_transformer.MAX_LENGTH_OVER_SOURCE
    longest = limit + 5
    lengths = [longest, limit + 1][:long_targets] + [0] * (100 - long_targets)
    files = write_pairs(tmp_path, [("a", "a" + "b" * length) for length in lengths])
    train(tmp_path / "run", **files, tokens="chars", max_steps=1)
    saved = read_json(tmp_path / "run" / "generation_config.json")
    raised = long_targets > 1
    assert saved["max_length_over_source"] == (longest if raised else limit)
    assert (f"max_length_over_source: {longest}, not {limit}" in capsys.readouterr().out) is raised


# 4. Both directions


def bidirectional(parallel, **fields):
    """Arguments of `load_corpus`."""
    flags = as_flags({**parallel, **fields, "bidirectional": True, "output_dir": "unused"})
    _, data_args, args = parse_recipe(flags)
    return data_args, args.seed


def test_bidirectional_training_reads_each_pair_both_ways(parallel):
    pairs = load_corpus(*bidirectional(parallel)).pairs
    found = [(row["source"], row["target"]) for row in pairs["train"]]
    assert found == PAIRS + [(target, source) for source, target in PAIRS]
    assert len(list(pairs["validation"])) == 6
    assert len(list(pairs["test"])) == 4


def test_bidirectional_training_needs_a_joint_vocabulary(parallel):
    arguments = bidirectional(parallel, separate_vocabularies=True)
    assert "bidirectional=True" in error_of(load_corpus, *arguments)
