"""One, two and four processes: the same updates, resuming with another number of processes, the command."""

import json
import re
import signal
import sys

import pytest
import torch

from hf_vanilla_transformer.text.perturbations import PERTURBATIONS
from hf_vanilla_transformer.training.state.checkpoints import complete_checkpoints
from tests.model_helpers import tiny_model
from tests.trainer_helpers import (
    TORCHRUN,
    as_flags,
    assert_same_model,
    flat,
    launch,
    relative_error,
)
from tests.training import several_processes as worker

pytestmark = pytest.mark.slow

TRAIN = ["-m", "vanilla_transformer_cli", "train"]


def train_in_one_process(folder):
    """Saves a checkpoint in the middle of the second epoch."""
    results = worker.train(folder / "one_process", 40, **worker.TO_RESUME)
    assert (folder / "one_process" / "checkpoint-7").is_dir()
    return results


@pytest.fixture(scope="module")
def several(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three_processes")
    single = train_in_one_process(folder)
    launch(repository, *TORCHRUN, "--nproc_per_node=3", worker.__file__, str(folder))
    results = torch.load(folder / "results.pt", weights_only=False)
    assert results["processes"] == 3
    return results, single, folder


def assert_same_updates(actual, expected):
    start = flat(tiny_model())
    actual_weights, actual_losses, *_ = actual
    weights, losses, *_ = expected
    assert (weights - start).norm() > 0.1
    assert relative_error(actual_weights - start, weights - start) <= 1e-5
    assert actual_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("job", worker.JOBS)
def test_updates_equal_those_of_one_process(several, job, tmp_path):
    count, settings = worker.JOBS[job]
    assert_same_updates(several[0][job], worker.train(tmp_path, count, **settings))


def test_run_of_one_process_resumes_in_several(several):
    results, single, _ = several
    assert_same_updates(results["resumed"], single)


def test_run_of_several_processes_resumes_in_one(several, tmp_path):
    """`batches_per_update` and the position in the data come from the checkpoint."""
    results, _, folder = several
    resumed = worker.train(
        tmp_path,
        40,
        folder / "several_processes" / "checkpoint-7",
        **worker.ONE_BATCH,
    )
    assert_same_updates(resumed, results["to resume"])


def test_graph_is_not_split_at_the_buckets_of_gradients(several):
    assert several[0]["graphs"] == 1


def test_ranks_learn_of_a_stop_at_the_same_update(several):
    """One call later, so that no device is waited for."""
    results, _, _ = several
    assert (
        results["agreements"]
        == [[([False], None), ([True], signal.SIGTERM)]] * results["processes"]
    )


def test_ranks_stop_together_at_a_gradient_that_is_not_finite(several):
    """With the lines of the one batch, wherever it was."""
    results, _, _ = several
    ((message, finite),) = set(results["gradient"])
    lines = message.split("contains the lines ")[1].split(";")[0].split(", ")
    assert finite
    assert len(results["gradient"]) == results["processes"]
    assert "18" in lines
    assert len(lines) < 10  # of 40


@pytest.mark.parametrize("name", [*worker.PACKED, "no compiler"])
def test_packed_run_of_several_processes_resumes_to_the_same_weights(several, name):
    whole, resumed, compiled = several[0][f"{name}, resumed"]
    assert compiled == (name == "compiled")
    assert torch.equal(whole, resumed)
    if name == "no compiler":  # on rank 1
        assert torch.equal(whole, several[0]["packed, resumed"][0])


DIRECTIONS = {
    "directions": ["en-de", "en-fr"],
    "language_token": "target",
    "source_lang": "null",
    "target_lang": "null",
    "sampling_temperature": 2.0,
    "tokens_per_update": 250,
    "augment": [f"{name}=0.1" for name in PERTURBATIONS],
}


@pytest.mark.parametrize("fields", [{}, DIRECTIONS], ids=["one", "directions"])
def test_train_command_gives_the_same_model_in_two_processes(repository, tmp_path, fields):
    recipe = [*TRAIN, "numbers_en_de", *worker.FLAGS, *as_flags(fields), "--output_dir"]
    launch(repository, sys.executable, *recipe, str(tmp_path / "one"))
    together = launch(
        repository,
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", "scripts/recipes/accelerate_2_cpus.yaml"),
        *recipe,
        str(tmp_path / "two"),
    )
    one, two = (
        json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("one", "two")
    )
    for name in (
        "eval_bleu",
        "eval_chrf",
        "test_chrf",
        "test_sentences",
        "averaged_checkpoints",
        "train_updates",
    ):
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
    assert_same_model(tmp_path / "one", tmp_path / "two", rtol=1e-5, atol=1e-6)
    for line in ("model: ", "trained 4 updates", "test: BLEU", "model card: "):
        assert together.stdout.count(line) == 1, line
    assert len(re.findall(r"^update \d+ of \d+  loss ", together.stdout, re.M)) == 4
    assert [path.name for path in complete_checkpoints(tmp_path / "two")] == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    states = {path.name for path in (tmp_path / "two" / "checkpoint-4").glob("rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}
    launch(
        repository,
        sys.executable,
        *recipe,
        str(tmp_path / "resumed"),
        *("--resume_from_checkpoint", str(tmp_path / "one" / "checkpoint-2")),
    )
    assert_same_model(tmp_path / "one" / "checkpoint-4", tmp_path / "resumed" / "checkpoint-4")


def test_user_errors_are_printed_by_the_main_rank_only(repository, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    recipe = [*TRAIN, "numbers_en_de", *worker.FLAGS, "--output_dir", str(tmp_path / "run")]
    run = launch(repository, *TORCHRUN, "--nproc_per_node=2", *recipe, succeeds=False)
    assert run.stderr.count("is not empty") == 1
