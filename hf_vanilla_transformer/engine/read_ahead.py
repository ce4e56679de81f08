"""Sentences that are encoded on a GPU while it decodes others.

With captured steps the host waits for most of a search. In that time it launches the encoder, on a stream of its own,
for the sentences that will join next.

Shapes: n sentences, S source length, P first tokens of a translation.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..decoding_vanilla_transformer import EncodedSource
from ..search_vanilla_transformer import resized

Result = TypeVar("Result")
#: n encoded sentences, and the first tokens (n, P) of their translations.
Sentences: TypeAlias = tuple[EncodedSource, Tensor]


class CudaSideStream:
    """Work of a CUDA GPU that runs next to the rest. It starts after what the current stream was given until now."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = _stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, function: Callable[[], Result]) -> Result:
        """Start the operations of a function."""
        with torch.cuda.stream(self.stream):
            return function()

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let the device wait for the operations before it uses these tensors of theirs."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in tensors:
            # Memory is given away when both streams have used it, whichever has allocated it.
            tensor.record_stream(current)
            tensor.record_stream(self.stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all searches, because cuBLAS and torch's allocator keep memory for every stream."""
    return torch.cuda.Stream(device)


def side_stream_of(device: torch.device) -> CudaSideStream | None:
    """A side stream of a device, or None if the host computes everything itself."""
    return CudaSideStream(device) if device.type == "cuda" else None


class ReadAhead:
    """Sentences in their order, encoded before the search has room for them.

    At most as many wait as the search has rows. Their states then take as much memory as those of one batch.

    Args:
        read: encodes up to n sentences. None: there are no more.
        rows: of the search.
        stream: runs next to the search.
    """

    def __init__(
        self,
        read: Callable[[int], Sentences | None],
        rows: int,
        stream: CudaSideStream,
    ):
        self.read = read
        self.rows = rows
        self.stream = stream
        self.waiting: deque[Sentences] = deque()
        self.ended = False

    def fill(self) -> None:
        """Start to encode the sentences that are missing."""
        missing = self.rows - sum(len(first_tokens) for _, first_tokens in self.waiting)
        if self.ended or not missing:
            return
        sentences = self.stream.run(lambda: self.read(missing))
        if sentences is None:
            self.ended = True
        else:
            self.waiting.append(sentences)

    def take(self, count: int) -> Sentences | None:
        """Up to `count` sentences. None: there are no more."""
        if not self.waiting:
            self.fill()
        taken: list[Sentences] = []
        while count and self.waiting:
            sentences = self.waiting.popleft()
            rest = _rows(sentences, slice(count, None))
            if len(rest[1]):
                self.waiting.appendleft(rest)
            taken.append(_rows(sentences, slice(count)))
            count -= len(taken[-1][1])
        if not taken:
            return None
        for source, first_tokens in taken:
            self.stream.hand_over([source.states, source.mask, first_tokens])
        return _joined(taken)


def _rows(sentences: Sentences, rows: slice) -> Sentences:
    """Some of the sentences, without their ids."""
    source, first_tokens = sentences
    return EncodedSource(source.states[rows], source.mask[rows]), first_tokens[rows]


def _joined(parts: list[Sentences]) -> Sentences:
    """Sentences with sources of different width as one batch."""
    width = max(source.mask.shape[1] for source, _ in parts)
    states = torch.cat([resized(source.states, width, 1) for source, _ in parts])
    mask = torch.cat([resized(source.mask, width, 1) for source, _ in parts])
    return EncodedSource(states, mask), torch.cat([first_tokens for _, first_tokens in parts])
