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
}
_initialise = PartialState.__init__


def _report_accelerators(state: PartialState, *args: Any, **kwargs: Any) -> None:
    _initialise(state, *args, **kwargs)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = _report_accelerators

import torch  # noqa: E402
from torch import Tensor, distributed  # noqa: E402

from hf_vanilla_transformer.training.run.finishing import full_state_dict  # noqa: E402
from hf_vanilla_transformer.training.run.recipes import parse_recipe  # noqa: E402
from hf_vanilla_transformer.training.run.run import run_training  # noqa: E402
from tests.model_helpers import TYING_MODES, tiny_model  # noqa: E402
from tests.trainer_helpers import DESCENT, make_trainer, random_pairs  # noqa: E402

TOKENS = {"max_tokens_per_batch": 40, "tokens_per_update": 150}
ADAM = {"learning_rate": 0.01}


def train(folder: Path, resume: Path | None = None, tying: dict[str, bool] | None = None, **settings: Any) -> Any:
    """The share of the parameters on this rank, and all weights after some updates of a sharded model."""
    model = tiny_model(label_smoothing=0.1, **tying or {})
    trainer = make_trainer(folder, random_pairs(40), model, **{**TOKENS, "max_steps": 4, **settings})
    assert trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return held / sum(parameter.numel() for parameter in model.parameters()), full_state_dict(model)


def main(folder: Path) -> None:
    results: dict[Any, tuple[float, dict[str, Tensor]]] = {}
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    for share, tie in TYING_MODES:
        tying = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
        results[share, tie] = train(folder / "tied", tying=tying, max_steps=2, **DESCENT | {"learning_rate": 0.5})
    saving = {**ADAM, "save_strategy": "steps", "save_steps": 2}
    for kind in ("FULL", "SHARDED"):
        os.environ["FSDP_STATE_DICT_TYPE"] = f"{kind}_STATE_DICT"
        results[kind] = train(folder / kind, **saving)
        results[kind, "resumed"] = train(folder / f"{kind}_resumed", folder / kind / "checkpoint-2", **saving)
    packed = {**saving, "pack": True}
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    results["packed"] = train(folder / "packed", **packed)
    results["packed", "resumed"] = train(folder / "packed_resumed", folder / "packed" / "checkpoint-2", **packed)
    if distributed.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    run_training(*parse_recipe([*sys.argv[2:], "--output_dir", str(folder / "run")]))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
