"""Run by test_several_processes.py in each of several processes: python -m torch.distributed.run … D

Each job trains a tiny model with token batches, and rank 0 writes the results into the folder D.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed
from torch._dynamo.utils import counters

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.training.state.distributed import StopSignals
from hf_vanilla_transformer.training.trainer import forward_choice
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import tiny_model
from tests.trainer_helpers import (
    DESCENT,
    TINY_RUN,
    BadGradient,
    FailingBackward,
    as_flags,
    flat,
    random_pairs,
    trained,
    with_one_token,
)

STEPS = 20
# the flags of a whole run
# Test sentences fill the batches of two processes, so that the mean of their losses is that of one process.
# Without use_cpu, which a user of torchrun does not give: a machine without an accelerator must find it out.
FLAGS = as_flags(
    {
        **{name: value for name, value in TINY_RUN.items() if name != "use_cpu"},
        "numbers_size": 60,
        "max_tokens_per_batch": 200,
        "tokens_per_update": 400,
        "max_steps": 4,
        "average_last": 2,
        "eval_steps": 2,
        "save_steps": 2,
        "per_device_eval_batch_size": 4,
        "max_eval_samples": 15,
        "max_test_samples": 16,
        "auto_bf16": False,
        "load_best_model_at_end": False,
        "optim": "sgd",
        "learning_rate": 0.5,
        "warmup_steps": 1,
    }
)
ONE_BATCH = {"max_tokens_per_batch": 60}
BATCHES = {"max_tokens_per_batch": 40, "tokens_per_update": 150}
# name: number of pairs, and how they are split into batches
JOBS = {
    "one batch an update": (40, {**ONE_BATCH, "tokens_per_update": 60}),
    "several": (40, BATCHES),
    "packed rows": (40, {**BATCHES, "pack": True}),
    "fewer pairs than processes": (
        3,
        {"max_tokens_per_batch": 100, "tokens_per_update": 1000, "learning_rate": 0.1},
    ),
}
TO_RESUME = {**ONE_BATCH, "save_strategy": "steps", "save_steps": 7}
# packed runs that are resumed: as they are, with weights that are cast together as on a GPU, and compiled
PACKED = {
    "packed": {},
    "cast together": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


def train(
    folder: Path,
    count: int,
    resume: Path | None = None,
    tying: dict[str, bool] | None = None,
    **settings: Any,
) -> tuple[Tensor, list[float], VanillaTransformerForConditionalGeneration]:
    """The weights after some updates, the losses with and without smoothing, and the model."""
    given = {
        **DESCENT,
        "learning_rate": 0.5,
        "max_steps": STEPS,
        "ddp_find_unused_parameters": False,
    }
    model = tiny_model(label_smoothing=0.1, **tying or {})
    trainer = trained(folder, random_pairs(count), model, resume=resume, **given | settings)
    logged = [
        entry[name]
        for entry in trainer.state.log_history
        if "loss" in entry
        for name in ("loss", "nll_loss")
    ]
    return flat(model), logged, model


def resume_packed(folder: Path, **settings: Any) -> tuple[Tensor, Tensor, bool]:
    """The weights after a whole run and after a resumed one, and whether the update was compiled."""
    settings |= {
        **BATCHES,
        "pack": True,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 0.01,
        "optim": "adamw_torch",
    }

    def run(name: str, resume: Path | None = None) -> Any:
        model = tiny_model(label_smoothing=0.1, dropout=0.3)
        return trained(folder / name, random_pairs(40), model, resume=resume, **settings)

    whole = run("whole")
    resumed = run("resumed", folder / "whole" / "checkpoint-2")
    compiled = resumed.forwards.compiled
    return flat(whole.model), flat(resumed.model), compiled is not None and not compiled.failed


def agreements() -> list[list[Any]]:
    """What each rank learns at two calls of `agree`, the first after a signal to rank 1 and a flag of rank 0."""
    rank = distributed.get_rank()
    signals = StopSignals()
    signals.received = signal.SIGTERM if rank == 1 else None
    learned = []
    for flag in (rank == 0, False):
        found = signals.agree(torch.device("cpu"), flag, at_once=False)
        learned.append((found, signals.agreed))
    return gather_object([learned])


def refused_gradient(folder: Path) -> list[tuple[str, bool]]:
    """For each rank its error, of a gradient that one pair alone has, and whether its weights are finite after it."""

    class OfToken(BadGradient):
        update = None
        token = 39

    model = tiny_model()
    with pytest.raises(UserError) as caught:
        trained(folder, with_one_token(40), model, kind=OfToken, max_steps=8, **BATCHES)
    finite = bool(flat(model).isfinite().all())
    return gather_object([(str(caught.value), finite)])


def resume_without_a_compiler(folder: Path) -> tuple[Tensor, Tensor, bool]:
    """As `resume_packed`, where rank 1 cannot compile the backward pass."""

    def failing(function: Callable, **_: Any) -> Callable:
        def run(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            loss, nll_loss = function(batch)
            if distributed.get_rank() == 1:
                loss = FailingBackward.apply(loss)
            return loss, nll_loss

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", failing)
        return resume_packed(folder, **PACKED["compiled"])


def main(folder: Path) -> None:
    results = {}
    for name, (count, settings) in JOBS.items():
        results[name] = train(folder, count, **settings)[:2]
    # A checkpoint of one process in the middle of an epoch, whose `batches_per_update` is kept.
    results["resumed"] = train(folder, 40, folder / "one_process" / "checkpoint-7", **ONE_BATCH)[:2]
    results["to resume"] = train(folder / "several_processes", 40, **TO_RESUME)[:2]
    results["processes"] = distributed.get_world_size()
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # torch would split graphs at buckets
    for name, settings in PACKED.items():
        forward_choice.is_bound_by_launches = lambda device, name=name: name == "cast together"
        results[f"{name}, resumed"] = resume_packed(folder / name, **settings)
    results["graphs"] = counters["aot_autograd"]["total"]
    results["no compiler, resumed"] = resume_without_a_compiler(folder / "no compiler")
    results["agreements"] = agreements()
    results["gradient"] = refused_gradient(folder / "gradient")
    if distributed.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
