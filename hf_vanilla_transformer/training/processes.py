"""Several processes, one run: who speaks and writes, and what all must agree on."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate.utils import broadcast_object_list
from datasets.utils.logging import disable_progress_bar as disable_progress_bars
from torch import distributed
from transformers.utils import logging

from ..errors import UserError

Value = TypeVar("Value")


def is_first() -> bool:
    """Whether this process is the one that speaks and writes; the launchers number them in RANK."""
    return int(os.environ.get("RANK", "0")) == 0


def hush_others() -> None:
    """Leave the progress bars and warnings of libraries to the first process."""
    if not is_first():
        disable_progress_bars()
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def say(message: str) -> None:
    """Tell the user, on standard output; of several processes the first does."""
    if is_first():
        print(message, flush=True)


def from_first(make: Callable[[], Value]) -> Value:
    """What the first process makes, in all of them: for what a clock or a random number decides."""
    made = [make() if is_first() else None]
    broadcast_object_list(made)
    return made[0]  # type: ignore[return-value]


def anywhere(*flags: bool, device: torch.device) -> list[bool]:
    """Whether each of these is so in any process; all must ask."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return [bool(each) for each in found.tolist()]


@contextmanager
def one_voice() -> Iterator[None]:
    """While all processes do the same and fail alike, only the first complains; the others leave in silence."""
    try:
        yield
    except UserError:
        if is_first():
            raise
        raise SystemExit(2) from None
