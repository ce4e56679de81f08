"""A recorder of steps on a CPU, in place of `CudaGraphs`: it repeats recorded operations on the same memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_vanilla_transformer import decoding_vanilla_transformer as decoding_step
from hf_vanilla_transformer import search_vanilla_transformer as search
from hf_vanilla_transformer.engine import captured, read_ahead

STEPS_AT_ONCE = 16  # as on a GPU

Operation = tuple[Any, tuple, dict[str, Any], Any]  # with its arguments and its result


class Recording(TorchDispatchMode):
    """Keeps the operations on tensors, and refuses those that a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), (
            f"{name} waits for a GPU"
        )
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class Recorder:
    """Records like a CUDA graph, which knows no Python: only operations on tensors, at their addresses."""

    def __init__(self) -> None:
        self.recorded = 0  # steps
        self.repeated = 0
        self.operations: list[Operation] = []  # of the last step

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # a CUDA graph warms up, too
        with Recording() as recording:
            function()
        self.recorded += 1
        self.operations = operations = recording.operations

        def repeat() -> None:
            self.repeated += 1
            repeat_operations(operations)

        return repeat


def repeat_operations(operations: list[Operation]) -> None:
    """Do as a CUDA graph does: the same operations on the same memory."""
    for func, args, kwargs, result in operations:
        _write(result, func(*args, **kwargs))


def _write(recorded: Any, repeated: Any) -> None:
    """Put a result where the recording had it. Views and results of in-place operations are there already."""
    for old, new in zip(tree_leaves(recorded), tree_leaves(repeated), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            assert old.shape == new.shape
            old.copy_(new)


class Eager:
    """A recorder that runs the function each time."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function


class LateStream:
    """A `CudaSideStream` whose results are there when the device waits for them. Until then they are NaN.

    Numbers other than floating-point ones may be the caller's own, and are there at once.
    """

    def __init__(self) -> None:
        self.late: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by address: memory, and what will be in it

    def run(self, function: Callable[[], Any]) -> Any:
        results = function()
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.late[each.untyped_storage().data_ptr()] = (each, each.clone())
                each.fill_(torch.nan)
        return results

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            memory, values = self.late.pop(tensor.untyped_storage().data_ptr(), (tensor, tensor))
            memory.copy_(values)


@contextmanager
def recording(recorder: Any, steps_at_once: int = STEPS_AT_ONCE) -> Iterator[Any]:
    """Let every search of a packed model on a CPU take captured steps by this recorder, and read sentences ahead."""

    def at_once(device: torch.device) -> int:
        return steps_at_once

    with (
        mock.patch.object(captured, "recorder_of", lambda device: recorder),
        mock.patch.object(read_ahead, "side_stream_of", lambda device: LateStream()),
        mock.patch.object(captured, "steps_at_once", at_once),
        mock.patch.object(decoding_step, "steps_at_once", at_once),
        mock.patch.object(search, "steps_at_once", at_once),
    ):
        yield recorder
