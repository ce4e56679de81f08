"""Run by test_two_hosts.py on each of two hosts: python -m torch.distributed.run … host.py DIES_AT FLAG…

The command `train`. On host b, the first call of each phase of DIES_AT kills the process and its launcher.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer
from vanilla_transformer_cli.main import main

#: phase -> the method of the trainer, and the updates before it
PHASES = {
    "update": ("training_step", 2),
    "save": ("_save_rng_state", 4),
    "evaluate": ("prediction_step", 6),
}
NOTES = Path(os.environ["NOTES"])


def die_at(phase: str) -> None:
    method, updates = PHASES[phase]
    original = getattr(VanillaTransformerTrainer, method)

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == updates and not (NOTES / phase).exists():
            (NOTES / phase).touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    setattr(VanillaTransformerTrainer, method, dying)


if __name__ == "__main__":
    for phase in sys.argv[1].split(",") if os.environ["HOST"] == "b" else ():
        if phase:
            die_at(phase)
    if version := os.environ.get("OTHER_VERSION"):
        import hf_vanilla_transformer

        hf_vanilla_transformer.__version__ = version
    main(["train", *sys.argv[2:]])
