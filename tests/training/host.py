"""Run by test_two_hosts.py on each of two hosts: python -m torch.distributed.run … host.py DEATHS FLAG…

The command `train`. DEATHS are HOST:PHASE:UPDATES:SECONDS, with commas between them. Each kills the process and its
launcher so many seconds after the first call of a method after these updates. With SHARDED_STATE, FSDP2 trains.
FULL_DISK limits files to 8 KB from the "start", or from the first "update".
"""

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

if os.environ.get("SHARDED_STATE"):
    from tests.training import sharded_processes  # noqa: F401

    os.environ["FSDP_STATE_DICT_TYPE"] = os.environ["SHARDED_STATE"]

from hf_vanilla_transformer import VanillaTransformerTrainer
from vanilla_transformer_cli.main import main

METHODS = {"update": "training_step", "save": "_save_checkpoint", "evaluate": "prediction_step"}
NOTES = Path(os.environ["NOTES"])


def die() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(note: Path, phase: str, updates: int, seconds: float) -> None:
    original = getattr(VanillaTransformerTrainer, METHODS[phase])

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == updates and not note.exists():
            note.touch()
            threading.Timer(seconds, die).start()
        return original(self, *args, **kwargs)

    setattr(VanillaTransformerTrainer, METHODS[phase], dying)


def fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def fill_disk_at_first_update() -> None:
    original = VanillaTransformerTrainer.training_step

    def filling(self: Any, *args: Any, **kwargs: Any) -> Any:
        fill_disk()
        return original(self, *args, **kwargs)

    VanillaTransformerTrainer.training_step = filling


if __name__ == "__main__":
    for number, death in enumerate(sys.argv[1].split(",")):
        host, phase, updates, seconds = death.split(":") if death else [""] * 4
        if host == os.environ["HOST"]:
            die_at(NOTES / f"{number} {death}", phase, int(updates), float(seconds))
    if version := os.environ.get("OTHER_VERSION"):
        from hf_vanilla_transformer.utils import version as version_module

        version_module.__version__ = version
    if os.environ.get("FULL_DISK") == "start":
        fill_disk()
    elif os.environ.get("FULL_DISK") == "update":
        fill_disk_at_first_update()
    main(["train", *sys.argv[2:]])
