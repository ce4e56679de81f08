"""Programs that `torch.compile` makes of a module for one sentence at a time, on a CPU.

A word of one sentence is little work: half of the time goes into calling one operation after the other. A program has
fewer of them, and products that are made for this processor, for so few rows and for these weights, which are
constants to it. It takes a minute to make; torch keeps it on disk for the next process.
"""

import copy
import itertools
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Weights are constants, products are chosen by measuring.
BACKEND, OPTIONS = "inductor", {"freezing": True, "max_autotune": True}
_COMPILING, _NUMBERS = threading.Lock(), itertools.count()


class Program:
    """A module that is compiled when it is called for the first time.

    Args:
        module: computes without gradients. Its parameters and buffers must stay as they are from now on.
    """

    def __init__(self, module: nn.Module):
        # Nobody changes this copy, so that nobody has to look at every call whether it was changed.
        self.module = copy.copy(module)
        self.module.forward = types.MethodType(_with_own_code(type(module).forward), self.module)
        guards = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        self.module.compile(backend=BACKEND, dynamic=False, options=OPTIONS | guards)  # but for `of_any_size`
        self.kinds: set[tuple[Any, ...]] = set()  # of calls for which there is a program

    def __call__(self, *args: Any, kind: Any = None) -> Any:
        """What the module makes of these arguments.

        Args:
            kind: calls of one kind differ only in the sizes that `of_any_size` has named.

        Raises:
            ValueError: torch has no C++ compiler here.
        """
        kind = kind, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        if kind in self.kinds:
            return self.module(*args)
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor.exc import InductorError

        try:
            with _compiling():
                found = self.module(*args)
        except (InductorError, BackendCompilerFailed) as error:
            if "C++ compiler" not in str(error):
                raise
            raise ValueError(
                "compiled: torch.compile finds no C++ compiler; install g++, name one in CXX, or leave this out"
            ) from error
        self.kinds.add(kind)
        return found


@contextmanager
def _compiling() -> Iterator[None]:
    """While the compiler reads a call it has to know that weights are constants, which it looks up for all of torch.

    It also prints, and warns of itself.
    """
    from torch._inductor import config, select_algorithm

    settings = {"freezing": True, "max_autotune_report_choices_stats": False}
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    with _COMPILING, warnings.catch_warnings(), config.patch(known):
        warnings.simplefilter("ignore")
        printing, select_algorithm.PRINT_AUTOTUNE = select_algorithm.PRINT_AUTOTUNE, False
        try:
            yield
        finally:
            select_algorithm.PRINT_AUTOTUNE = printing


def _with_own_code(function: Any) -> types.FunctionType:
    """The same function. The compiler keeps programs beside the code they were made of, and cannot tell modules apart
    that nobody looks at."""
    code = function.__code__.replace(co_name=f"{function.__qualname__}_{next(_NUMBERS)}".replace(".", "_"))
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def of_any_size(states: Tensor, dim: int) -> Tensor:
    """The same tensor, marked: its size in this dimension is another in another call of a `Program`."""
    torch._dynamo.mark_dynamic(states, dim)
    return states
