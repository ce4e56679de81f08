"""`torch.cuda` as `engine.captured` and `engine.read_ahead` use it, with torch's rules, on a CPU.

The rules are those of `torch.cuda.graph` (torch/cuda/graphs.py), of the streams (c10/cuda/CUDAStream.h) and of
`create_or_incref_pool` (c10/cuda/CUDACachingAllocator.cpp).
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.engine import captured, read_ahead
from tests.engine.recorded_steps import Operation, Recording, repeat_operations
from tests.model_helpers import six_layers

STREAMS = 32  # of a device and a priority
NO_END = 1499  # a token that the narrow model never writes


def narrow_model() -> VanillaTransformerForConditionalGeneration:
    """A translator for the counts of a pretended GPU."""
    return six_layers(NO_END + 1).eval()


class Stream:
    """One of the streams of a device. The default stream has no priority."""

    def __init__(
        self,
        device: torch.device,
        priority: int | None,
        index: int,
    ):
        self.device = device
        self.key = (device, priority, index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def wait_stream(self, other: "Stream") -> None:
        """Nothing: everything runs at once."""


class Graph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def replay(self) -> None:
        assert self.operations, "nothing was captured"
        repeat_operations(self.operations)


class PretendedCuda:
    """The state of torch and the driver."""

    def __init__(self) -> None:
        self.streams: Counter[tuple[torch.device, int]] = Counter()
        self.local = threading.local()
        self.pools = count()
        self.users: Counter[int] = Counter()  # graphs that use each pool
        self.capturing = False
        self.captured: list[Stream] = []  # the stream of each capture

    def make_stream(
        self,
        device: torch.device,
        priority: int = 0,
    ) -> Stream:
        self.streams[device, priority] += 1
        return Stream(device, priority, self.streams[device, priority] % STREAMS)

    def default_stream(self, device: torch.device) -> Stream:
        return Stream(device, None, 0)

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self.local, "stream", None) or self.default_stream(device)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self.local, "stream", None)
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before

    @contextmanager
    def graph(
        self,
        graph: Graph,
        pool: int,
        stream: Stream,
        capture_error_mode: str,
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if pool in self.users and not self.users[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.capturing = True
        self.captured.append(stream)
        before = getattr(self.local, "stream", None)
        self.local.stream = stream  # and there it stays, if the capture fails
        try:
            with Recording() as recording:
                yield
        finally:
            self.capturing = False
        self.local.stream = before
        graph.operations = recording.operations
        self.users[pool] += 1
        weakref.finalize(graph, self.release, pool)

    def release(self, pool: int) -> None:
        # The workspace of cuBLAS stays in the pool, which is therefore not forgotten.
        self.users[pool] -= 1


@contextmanager
def pretended_cuda() -> Iterator[PretendedCuda]:
    """Let steps be captured and sentences be read ahead with this `torch.cuda`, for models on the CPU."""
    cuda = PretendedCuda()
    names: dict[str, Any] = {
        "Stream": cuda.make_stream,
        "stream": cuda.stream,
        "current_stream": cuda.current_stream,
        "default_stream": cuda.default_stream,
        "CUDAGraph": Graph,
        "graph": cuda.graph,
        "graph_pool_handle": lambda: next(cuda.pools),
    }
    caches = (captured._capture_stream, read_ahead._stream)
    with ExitStack() as stack:
        for name, function in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for each in caches:
            each.cache_clear()
            stack.callback(each.cache_clear)
        yield cuda
