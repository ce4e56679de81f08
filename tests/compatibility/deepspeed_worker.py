"""Three updates with DeepSpeed's ZeRO on CPUs, or with DDP: python -m torch.distributed.run … FOLDER MODEL STAGE"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.compatibility.scripts import MODELS, stock_trainer

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main(folder: Path, kind: str, stage: int) -> None:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "optim": "adamw_torch",
        "ddp_backend": "gloo",
    }
    if stage:
        settings["deepspeed"] = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "zero_force_ds_cpu_optimizer": False,
        }
    trainer = stock_trainer(MODELS[kind](), folder, **settings)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        torch.save(losses, folder / "losses.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
