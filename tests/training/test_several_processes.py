"""The same updates in one, two and four processes; a run that goes on with another number of them; the command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_vanilla_transformer.training.checkpoints import complete_checkpoints
from tests.model_helpers import tiny_model
from tests.training import several_processes as worker

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TINY = """--numbers_size 60 --vocab_size 280 --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 16
--decoder_ffn_dim 16 --encoder_attention_heads 2 --decoder_attention_heads 2 --auto_bf16 false --disable_tqdm true
--use_cpu true --max_tokens_per_batch 200 --tokens_per_update 400 --max_steps 4 --eval_steps 2 --save_steps 2
--logging_steps 1 --average_last 2 --load_best_model_at_end false --max_eval_samples 15 --per_device_eval_batch_size 4
--generation_max_length 5 --optim sgd --learning_rate 0.5 --warmup_steps 1"""


def launch(repository, *command):
    environment = {**os.environ, "PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return run


def begin(folder):
    """A run of one process, with a checkpoint in the middle of its second epoch."""
    settings = {"save_strategy": "steps", "save_steps": 7, "max_tokens_per_batch": 60}
    whole = worker.train(folder / "begun", 40, **settings)
    assert (folder / "begun" / "checkpoint-7").is_dir()
    return whole


@pytest.fixture(scope="module", params=[2, 4])
def several(request, repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"{request.param}_processes")
    whole = begin(folder)
    launch(repository, *LAUNCH, f"--nproc_per_node={request.param}", worker.__file__, str(folder))
    results = torch.load(folder / "results.pt", weights_only=False)
    assert results["processes"] == request.param
    return results, whole, folder


def moved_alike(actual, expected):
    start = torch.cat([parameter.detach().flatten() for parameter in tiny_model().parameters()])
    assert (expected[0] - start).norm() > 0.1
    assert ((actual[0] - expected[0]).norm() / (expected[0] - start).norm()).item() <= 1e-5
    assert actual[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.parametrize("job", worker.JOBS)
def test_updates_are_those_of_one_process(several, job, tmp_path):
    count, settings = worker.JOBS[job]
    moved_alike(several[0][job], worker.train(tmp_path, count, **settings))


def test_more_processes_go_on_with_the_updates_of_one(several):
    results, whole, _ = several
    moved_alike(results["gone on with"], whole)


def test_one_process_goes_on_with_the_updates_of_several(several, tmp_path):
    """Updates of as many batches as there were processes, at the same place in the data."""
    results, _, folder = several
    resumed = worker.train(tmp_path, 40, folder / "ours" / "checkpoint-7", max_tokens_per_batch=60)
    moved_alike(resumed, results["begun"])


def test_the_command_gives_the_same_model_in_two_processes(repository, tmp_path):
    recipe = ["scripts/train.py", "scripts/recipes/numbers_en_de.yaml", *TINY.split(), "--output_dir"]
    launch(repository, sys.executable, *recipe, str(tmp_path / "one"))
    together = [sys.executable, "-m", "accelerate.commands.launch"]
    config = ["--config_file", "scripts/recipes/accelerate_2_cpus.yaml"]
    said = launch(repository, *together, *config, *recipe, str(tmp_path / "two")).stdout
    one, two = (json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("one", "two"))
    for name in ("eval_bleu", "eval_chrf", "test_chrf", "test_sentences", "averaged_checkpoints", "train_updates"):
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in first.items():
        assert torch.allclose(second[name], tensor, rtol=1e-5, atol=1e-6), name
    for line in ("model: ", "trained 4 updates", "test: BLEU", "model card: "):
        assert said.count(line) == 1, line
    assert said.count("'loss'") == 4
    assert [path.name for path in complete_checkpoints(tmp_path / "two")] == ["checkpoint-2", "checkpoint-4"]
    assert {path.name for path in (tmp_path / "two" / "checkpoint-4").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }


def test_a_mistake_is_told_once(repository, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    command = [*LAUNCH, "--nproc_per_node=2", "scripts/train.py", "scripts/recipes/numbers_en_de.yaml", *TINY.split()]
    environment = {**os.environ, "PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": ""}
    arguments = [*command, "--output_dir", str(tmp_path / "run")]
    run = subprocess.run(arguments, cwd=repository, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode != 0
    assert run.stderr.count("already has a run") == 1
    shutil.rmtree(tmp_path / "run")
    assert not Path(tmp_path / "run").exists()
