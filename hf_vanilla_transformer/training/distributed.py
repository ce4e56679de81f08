"""Runs of several processes: the rank that prints and writes, agreement of all ranks, FSDP."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from datasets.utils.logging import disable_progress_bar as disable_progress_bars
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.utils import logging

from ..errors import Interrupted, UserError

Value = TypeVar("Value")


def is_main_rank() -> bool:
    """Return True on rank 0, by the launcher's environment variable RANK."""
    return int(os.environ.get("RANK", "0")) == 0


def silence_other_ranks() -> None:
    """Disable progress bars and warnings of the libraries on all ranks but the main one."""
    if not is_main_rank():
        disable_progress_bars()
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def print_main(message: str) -> None:
    """Print to standard output on the main rank only."""
    if is_main_rank():
        print(message, flush=True)


def broadcast_from_main(make: Callable[[], Value]) -> Value:
    """Call `make` on the main rank and return its result on all ranks, for results that depend on time or chance."""
    results = [make() if is_main_rank() else None]
    broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]


def any_rank(*flags: bool, device: torch.device) -> list[bool]:
    """For each flag, True if it is set on any rank. A collective: all ranks must call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return list(flags)
    on_any = torch.tensor(flags, dtype=torch.int32, device=device)
    distributed.all_reduce(on_any, op=distributed.ReduceOp.MAX)
    return [bool(each) for each in on_any.tolist()]


@contextmanager
def errors_on_main_rank_only() -> Iterator[None]:
    """Report a `UserError` that all ranks raise alike only once: the other ranks exit silently."""
    try:
        yield
    except UserError as error:
        if is_main_rank():
            raise
        raise SystemExit(error.status if isinstance(error, Interrupted) else 2) from None


def shard_tied_modules(model: nn.Module, **settings: Any) -> None:
    """Make each set of modules with tied weights one FSDP2 unit. `settings` are arguments of `fully_shard`."""
    by_weight: dict[torch.Tensor, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear) and not isinstance(module, FSDPModule):
            by_weight.setdefault(module.weight, []).append(module)
    for tied in by_weight.values():
        if len(tied) > 1:
            fully_shard(tied, reshard_after_forward=False, **settings)


@contextmanager
def original_class(model: nn.Module) -> Iterator[None]:
    """Restore the class of a model while it is saved: FSDP2 replaces it, and checkpoints would name FSDP2's."""
    sharded: Any = type(model)
    model.__class__ = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded
