"""Run by test_two_processes.py in each of two processes: python -m torch.distributed.run … two_process_worker.py D

It trains the same models on the same sentences as the test does in one process, and rank 0 writes the results into the
folder D.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import Seq2SeqTrainer

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import TYING_MODES, tiny_model
from tests.trainer_helpers import (
    DESCENT,
    collate,
    consistency_update,
    everything_on,
    flat,
    make_trainer,
    random_pairs,
    trained,
)

SENTENCES = 32
PROCESSES = 2
# Batch size per process and accumulation steps: two ways to split the 32 sentences of an update.
SPLITS = [(16, 1), (4, 4)]
SMOOTHINGS = [0.0, 0.1]
CONSISTENCY = ["simcut", "r_drop"]
STEPS = 3

FORMATS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def two_steps(size: int, steps: int) -> dict[str, Any]:
    """Plain gradient descent."""
    return {
        **DESCENT,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "max_steps": 2,
    }


def trained_update(
    smoothing: float, size: int, steps: int, folder: Path, **settings: Any
) -> tuple[Tensor, list[float]]:
    """The change of the weights in two updates of `Seq2SeqTrainer`, and the losses."""
    model = tiny_model(label_smoothing=smoothing)
    before = flat(model)
    rows = random_pairs(SENTENCES)
    trainer = trained(folder, rows, model, Seq2SeqTrainer, **two_steps(size, steps), **settings)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return flat(model) - before, losses


def documented_update(size: int, steps: int, folder: Path, **settings: Any) -> Tensor:
    """With the loss that the guide to extending shows."""
    guide = Path(__file__).parents[1] / "scripts" / "docs" / "extending.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class FocalTrainer" in block), names)
    model = tiny_model()
    before = flat(model)
    rows = random_pairs(SENTENCES)
    trained(folder, rows, model, names["FocalTrainer"], **two_steps(size, steps), **settings)
    return flat(model) - before


def everything_update(size: int, steps: int, folder: Path, **settings: Any) -> Tensor:
    plan = two_steps(size, steps) | settings
    before = everything_on(folder, **plan | {"learning_rate": 0.0})
    after = everything_on(folder, **plan | {"learning_rate": 0.1})
    return flat(after.model) - flat(before.model)


def evaluation_loss(folder: Path) -> float:
    """The loss of three batches, so that in two processes the second one repeats pairs at the end."""
    pairs = random_pairs(6, seed=6)
    trainer = make_trainer(folder, eval_dataset=pairs, per_device_eval_batch_size=2)
    return trainer.evaluate()["eval_loss"]


def tied_model(share: bool, tie: bool) -> VanillaTransformerForConditionalGeneration:
    return tiny_model(
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
        label_smoothing=0.1,
        lm_head_bias=True,
        final_layer_norm=True,
        position_encoding_type="learned",
    ).train()


def descend(
    model: VanillaTransformerForConditionalGeneration,
    wrapped: Callable,
    dtype: torch.dtype | None,
    share: slice,
) -> Tensor:
    """The change of the weights after a few updates in which `wrapped` reads the given sentences."""
    rows = random_pairs(SENTENCES)
    target_tokens = sum(len(row["labels"]) for row in rows)
    count = distributed.get_world_size() if distributed.is_initialized() else 1
    batch = collate(rows[share])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = flat(model)
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = wrapped(**batch, num_items_in_batch=target_tokens).loss
        # DDP averages the gradients over ranks, where the sum is needed
        (loss * count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model) - before


def main(folder: Path) -> None:
    results: dict[Any, Any] = {}
    settings = {"ddp_find_unused_parameters": False, "ddp_backend": "gloo"}
    for smoothing in SMOOTHINGS:
        for size, steps in SPLITS:
            results["trainer", smoothing, size] = trained_update(
                smoothing, size, steps, folder, **settings
            )
    for method in CONSISTENCY:
        results["consistency", method] = consistency_update(method, 16, 1, folder, **settings)
    for size, steps in SPLITS:
        results["everything", size] = everything_update(size, steps, folder, **settings)
        results["documented", size] = documented_update(size, steps, folder, **settings)
    results["evaluation"] = evaluation_loss(folder)
    assert distributed.get_world_size() == PROCESSES
    rank = distributed.get_rank()
    results["ranks"] = PROCESSES
    # shares with different numbers of tokens
    own = slice(0, 11) if rank == 0 else slice(11, SENTENCES)
    for share, tie in TYING_MODES:
        for name, dtype in FORMATS.items():
            model = tied_model(share, tie)
            results["ddp", share, tie, name] = descend(
                model, DistributedDataParallel(model), dtype, own
            )
    if rank == 0:
        torch.save(results, folder / "results.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
