"""Starting the processes of Hugging Face's distributed tests, in the place of a module that is not distributed."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Imported once, in the process from which all others are forked; otherwise that is most of such a test's time.
_PRELOADED = ["torch.distributed.tensor", "transformers.testing_utils", "hf_vanilla_transformer"]


def _get_distributed_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _get_distributed_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)


def _start_rank_processes(function: Callable, args: tuple, nprocs: int) -> None:
    """Call `function(rank, *args)` in `nprocs` processes and wait; an exception in one of them is raised here."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    torch.multiprocessing.start_processes(
        function, args=args, nprocs=nprocs, start_method="forkserver"
    )


def run_distributed(world_size: int) -> Callable[[Callable], Callable]:
    """Make `function(rank, *args)` one that is called without the rank, and runs in `world_size` processes."""

    def in_processes(function: Callable) -> Callable:
        def run(*args: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                _start_rank_processes(_run_rank, (function, args, world_size, folder), world_size)

        return run

    return in_processes


def _run_rank(rank: int, function: Callable, args: tuple, world_size: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    _set_rank_device(rank)
    dist.init_process_group(
        _get_distributed_backend(),
        init_method=f"file://{folder}/meeting_place",
        rank=rank,
        world_size=world_size,
    )
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
