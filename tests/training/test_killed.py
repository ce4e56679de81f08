"""A run that is killed (SIGKILL) at random times, also while saving, ends with the weights of an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_vanilla_transformer.training.checkpoints import complete_checkpoints
from tests.trainer_helpers import TINY_RUN, as_flags, assert_same_model

KILLS, STEPS = 10, 60
FLAGS = as_flags(
    TINY_RUN
    | dict.fromkeys(("train", "validation", "test"), "numbers")
    | {"numbers_size": 40, "dropout": 0.3, "bpe_dropout": 0.2, "simcut_alpha": 3, "ema_decay": 0.9, "muon": True}
    | {"max_tokens_per_batch": 150, "tokens_per_update": 300}
    | {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "eval_strategy": "no"}
    | {"learning_rate": 0.01, "warmup_steps": 1, "logging_steps": 10, "max_source_length": 200, "max_eval_samples": 2}
)
RUN = f"""
import sys, time
from hf_vanilla_transformer.training import checkpoints
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.run import run_training
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

def slowly(function):  # more kills while saving
    def wrapped(*arguments, **settings):
        time.sleep(0.02)
        return function(*arguments, **settings)
    return wrapped

for name in ("_save", "_save_optimizer_and_scheduler", "_save_rng_state"):
    setattr(VanillaTransformerTrainer, name, slowly(getattr(VanillaTransformerTrainer, name)))
flags = {FLAGS}
from hf_vanilla_transformer.training import finishing
finishing.score_test_split = lambda *arguments: {{}}  # nothing is translated
run_training(*parse_recipe(["--output_dir", sys.argv[1], "--resume_from_checkpoint", sys.argv[2], *flags]))
"""


def start(folder, resume):
    command = [sys.executable, "-c", RUN, str(folder), str(resume)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def step_of(folder):
    complete = complete_checkpoints(folder)
    return int(complete[-1].name.split("-")[1]) if complete else 0


@pytest.mark.slow
def test_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    undisturbed = start(tmp_path / "undisturbed", False)
    assert undisturbed.wait(600) == 0, undisturbed.stdout.read()
    rng = random.Random(0)
    folder, in_saving = tmp_path / "killed", 0
    for kill in range(KILLS):
        begun_at = step_of(folder)
        process = start(folder, begun_at > 0)
        wanted = begun_at + 2  # wait for progress, then kill at a random time
        while process.poll() is None and step_of(folder) < wanted:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, f"kill {kill} came too late or the run failed: {output}"
        in_saving += any((folder / ".saving").glob("checkpoint-*"))
        assert step_of(folder) >= wanted  # a complete checkpoint always exists
    assert in_saving >= 2, "some kills must happen while saving"
    last = start(folder, True)
    assert last.wait(600) == 0, last.stdout.read()
    assert_same_model(tmp_path / "undisturbed", folder)
    assert not (folder / ".saving").exists()
    assert os.listdir(tmp_path / "undisturbed") and len(complete_checkpoints(folder)) == 1
