"""Run by test_sharded.py in each of two processes: python -m torch.distributed.run … sharded_processes.py D

accelerate shards a model (FSDP2) on accelerators only, so the CPU processes report a distributed type of GPUs.
"""

import os
import sys
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType

os.environ |= {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "VanillaTransformerEncoderLayer,VanillaTransformerDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
_initialise = PartialState.__init__


def _report_accelerators(state: PartialState, *args: Any, **kwargs: Any) -> None:
    _initialise(state, *args, **kwargs)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = _report_accelerators

import torch  # noqa: E402
from torch import distributed  # noqa: E402

from hf_vanilla_transformer.training.run.finishing import full_state_dict  # noqa: E402
from hf_vanilla_transformer.training.run.recipes import parse_recipe  # noqa: E402
from hf_vanilla_transformer.training.run.run import run_training  # noqa: E402
from tests.model_helpers import TYING_MODES, tiny_model  # noqa: E402
from tests.trainer_helpers import DESCENT, make_trainer, random_pairs  # noqa: E402
from tests.training.several_processes import BATCHES  # noqa: E402


def train(
    folder: Path,
    resume: Path | None = None,
    tying: dict[str, bool] | None = None,
    **settings: Any,
) -> Any:
    """The share of the parameters on this rank, and all weights after some updates of a sharded model."""
    model = tiny_model(label_smoothing=0.1, **tying or {})
    trainer = make_trainer(folder, random_pairs(40), model, **BATCHES, **settings)
    assert trainer.is_fsdp_enabled
    assert trainer.accelerator.is_fsdp2
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return held / sum(parameter.numel() for parameter in model.parameters()), full_state_dict(model)


def train_and_resume(folder: Path, **settings: Any) -> tuple[Any, Any]:
    saving = {"max_steps": 4, "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 2}
    whole = train(folder, **saving, **settings)
    resumed = train(
        folder.with_name(f"{folder.name}_resumed"),
        folder / "checkpoint-2",
        **saving,
        **settings,
    )
    return whole, resumed


def main(folder: Path) -> None:
    results = {}
    for share, tie in TYING_MODES:
        tying = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
        settings = {**DESCENT, "learning_rate": 0.5, "max_steps": 2}
        results[share, tie] = train(folder / "tied", tying=tying, **settings)
    for kind, state, packs in (
        ("SHARDED", "SHARDED", False),
        ("FULL", "FULL", False),
        ("packed", "FULL", True),
    ):
        os.environ["FSDP_STATE_DICT_TYPE"] = f"{state}_STATE_DICT"
        results[kind], results[kind, "resumed"] = train_and_resume(folder / kind, pack=packs)
    if distributed.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    run_training(*parse_recipe([*sys.argv[2:], "--output_dir", str(folder / "run")]))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
