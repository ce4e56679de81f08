"""Random sentence pairs, settings and launchers that the tests of training share."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_vanilla_transformer.training.objectives import consistency
from tests.model_helpers import PAD, padded, sentences

Rows = list[dict[str, list[int]]]

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
# Plain gradient descent: Adam would amplify rounding errors, because it normalises the gradients.
DESCENT = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}

# A whole run (`run_training`, `vanilla-transformer train`) whose steps take milliseconds.
TINY_RUN: dict[str, Any] = {
    "vocab_size": 280,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "logging_steps": 1,
    "generation_max_length": 5,
    "disable_tqdm": True,
    "use_cpu": True,
}

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def as_flags(fields: dict[str, Any]) -> list[str]:
    """Recipe fields as command-line flags."""
    values = {name: value if isinstance(value, list) else [value] for name, value in fields.items()}
    return [part for name, value in values.items() for part in (f"--{name}", *map(str, value))]


def random_pairs(count: int, seed: int = 0) -> Rows:
    """Random sentences of 1 to 12 tokens with random translations."""
    dice = random.Random(seed)
    sources = sentences([dice.randint(1, 12) for _ in range(count)], seed=seed)
    targets = sentences([dice.randint(1, 12) for _ in range(count)], seed=seed + 1)
    return [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]


def collate(rows: Rows) -> dict[str, Tensor]:
    source = padded([row["input_ids"] for row in rows])
    labels = padded([row["labels"] for row in rows], value=-100)
    return {"input_ids": source, "attention_mask": source.ne(PAD).long(), "labels": labels}


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters in one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@contextmanager
def fixed_second_pass(model: Any, method: str) -> Iterator[None]:
    """Make the second pass of SimCut or R-Drop differ from the first one by no random number, so that updates can be
    compared however a batch is split: SimCut zeroes certain tokens, and in place of dropout R-Drop's is scaled."""
    random_mask, hook = consistency.random_mask, None
    if method == "simcut":
        consistency.random_mask = lambda ids, probability: ids % 7 != 3
    else:

        def scale(module: Any, ids: Any, embeddings: Tensor) -> Tensor:
            first, second = embeddings.chunk(2)
            return torch.cat([first, 0.8 * second])

        hook = model.model.encoder.embed_tokens.register_forward_hook(scale)
    try:
        yield
    finally:
        consistency.random_mask = random_mask
        if hook is not None:
            hook.remove()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def launch(repository: Path, *command: str, succeeds: bool = True) -> subprocess.CompletedProcess:
    """Run a command on CPUs, with the package and the tests on its path."""
    environment = {**os.environ, "PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=900)
    assert (run.returncode == 0) is succeeds, run.stdout[-2000:] + run.stderr[-6000:]
    return run
