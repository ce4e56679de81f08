"""Train with each custom loss in both trainers, with a plain output layer and with ours, and compare the weights:
python -m torch.distributed.run … losses_worker.py FOLDER SETTING
"""

import os
import sys
from pathlib import Path

from torch import distributed
from transformers import Seq2SeqTrainer

from hf_vanilla_transformer import VanillaTransformerTrainer
from tests.model_helpers import assert_near
from tests.test_custom_losses import LOSSES, SETTINGS, trained

ALL = {
    **SETTINGS,
    "compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "two processes": {"ddp_find_unused_parameters": False, "ddp_backend": "gloo"},
}


def main(folder: Path, setting: str) -> None:
    compared = 0
    losses = LOSSES[:1] if setting == "compile" else LOSSES  # minutes for each
    for base in (Seq2SeqTrainer, VanillaTransformerTrainer):
        for loss in losses:
            plain, ours = (
                trained(base, loss, folder / "run", plain, **ALL[setting])
                for plain in (True, False)
            )
            for name, weight in ours.items():
                assert_near(
                    weight,
                    plain[name],
                    1e-2 if setting == "bf16" else 1e-6,
                    f"{loss.__name__} {name}",
                )
            compared += 1
    if os.environ.get("RANK", "0") == "0":
        (folder / "compared").write_text(str(compared))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
