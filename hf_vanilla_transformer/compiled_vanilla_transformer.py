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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Weights are constants, products are the compiler's own (to choose them by measuring goes wrong on a busy machine, and
# oneDNN's are never better for so few rows), and nothing is looked at twice.
BACKEND = "inductor"
OPTIONS: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "size_asserts": False,
    "alignment_asserts": False,
}
_COMPILING, _NUMBERS = threading.Lock(), itertools.count()


class Program:
    """A module that is compiled when it is called for the first time, anew for each kind of call.

    Args:
        module: computes without gradients. Its parameters and buffers must stay as they are from now on.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.made: dict[tuple[Any, ...], nn.Module] = {}  # for each kind

    def __call__(self, *args: Any, kind: Any = None) -> Any:
        """What the module makes of these arguments.

        Args:
            kind: calls of one kind differ only in the sizes that `of_any_size` has named.

        Raises:
            ValueError: torch has no C++ compiler here.
        """
        kind = kind, torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        if kind in self.made:
            return self.made[kind](*args)
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor.exc import InductorError

        module = self._to_compile()
        try:
            with _compiling():
                found = module(*args)
        except (InductorError, BackendCompilerFailed) as error:
            if "C++ compiler" not in str(error):
                raise
            raise ValueError(
                "compiled: torch.compile finds no C++ compiler; install g++, name one in CXX, or leave this out"
            ) from error
        self.made[kind] = module
        return found

    def _to_compile(self) -> nn.Module:
        """A copy, which nobody changes, and whose calls are all of one kind: so nobody has to look at every call
        whether it is like the first, but for its sizes."""
        from torch._inductor import config

        module = copy.copy(self.module)
        module.forward = types.MethodType(_with_own_code(type(module).forward), module)
        options = {name: value for name, value in OPTIONS.items() if hasattr(config, name)}  # versions differ
        options["guard_filter_fn"] = _only_sizes
        module.compile(backend=BACKEND, dynamic=False, options=options)  # but for `of_any_size`
        return module


def _only_sizes(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


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
