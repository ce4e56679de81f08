"""Captured steps: a decoding step on a GPU, its search included, is recorded once and repeated with one launch.

A step of the base model launches over a hundred kernels of a few microseconds each, so that the GPU waits for the
host. A CUDA graph repeats recorded kernels on the same memory. A step therefore runs on static memory: the state of
the search, the slots and the caches. Their sizes are rounded up to few. A graph is recorded at the first use of a
size, and the most recently used graphs are kept.

What a recorded step cannot do takes the step of `PackedDecoder`. `CapturedDecoder` logs the reason at debug level.

Shapes: B sentences, B' rows of static memory, K beams, C slots of a sentence's KV cache, S source length, T capacity
of a hypothesis.
"""

import logging
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoding_vanilla_transformer import EncodedSource, additive_mask, beam_numbers, take_slots
from ..search_vanilla_transformer import BeamState, SearchConfig, resized, steps_at_once
from .packed_decoder import PackedDecoder, ends
from .packed_weights import KV, PackedWeights, cache_rows

logger = logging.getLogger(__name__)

#: Bytes of the static memory of all steps of a model, of the sentences that wait to join, and of the pool that the
#: steps have in common, at most. A step that needs more is not captured.
MAX_BYTES = 4 * 2**30
MAX_STEPS = 16  # kept for a model

# Sizes are rounded up to one of these, and beyond to a multiple of the last.
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
SLOTS = (32, 64, 96, 128, 192, 256, 384, 512)
SOURCE_LENGTHS = (16, 32, 64, 128, 256, 512)
CAPACITIES = (64, 128, 256, 512)  # of hypotheses

# Of the steps of all models: torch captures one graph at a time. A garbage collection may return a step anywhere.
_LOCK = threading.RLock()


def rounded_up(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that is not below `size`."""
    for rounded in sizes:
        if size <= rounded:
            return rounded
    return -(-size // sizes[-1]) * sizes[-1]


class CudaGraphs:
    """Records steps as CUDA graphs, which have one pool of memory for their intermediate results."""

    def __init__(self, device: torch.device):
        self.stream = _capture_stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        # Torch cannot capture into a pool that no graph uses any more.
        self.first = self.record(lambda: torch.zeros(1, device=device))

    def record(self, function: Callable[[], object]) -> Callable[[], None]:
        """Run the function, and return a function that repeats its operations on the same memory."""
        function()  # libraries load kernels at a first call, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` does not leave its stream if a capture fails.
        with (
            torch.cuda.stream(self.stream),
            torch.cuda.graph(
                graph,
                pool=self.pool,
                stream=self.stream,
                capture_error_mode="thread_local",
            ),
        ):
            function()
        return graph.replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all steps of a device are captured.

    A graph keeps the address of the workspace that cuBLAS has for this stream, so that nothing else may compute on it.
    Torch hands out the same 32 streams of a priority again and again. Other work takes those of the usual priority.
    """
    return torch.cuda.Stream(device, priority=-1)


def recorder_of(device: torch.device) -> CudaGraphs | None:
    """The recorder of a device, or None if its steps cannot be recorded."""
    if device.type != "cuda":
        return None
    with _LOCK:
        return CudaGraphs(device)


def is_on_default_stream(device: torch.device) -> bool:
    """Return whether this thread's operations on a device follow each other and those of the other threads."""
    if device.type != "cuda":
        return True
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


class Sizes(NamedTuple):
    """A kind of captured steps: their search, and the sizes of static memory."""

    config: SearchConfig
    rows: int  # B'
    slots: int  # C
    source: int  # S
    tokens: int  # T


class Memory(NamedTuple):
    """What a step reads and writes, of B sentences."""

    state: BeamState
    visible: Tensor  # (B, K, C)
    self_kv: list[KV]  # of each layer, (B, C, ·)
    cross_kv: list[KV]  # (B, S, ·)
    source_mask: Tensor  # (B, 1, 1, S)

    @classmethod
    def of(cls, weights: PackedWeights, sizes: Sizes, device: torch.device) -> "Memory":
        """Memory with a state that a step can start from: no index in it is out of range."""
        rows = sizes.rows
        beams = sizes.config.num_beams
        prefix = torch.zeros(rows, 1, dtype=torch.long, device=device)
        ones = torch.ones_like(prefix[:, 0])

        def caches(length: int) -> list[KV]:
            like: dict[str, Any] = {"dtype": weights.dtype, "device": device}
            return [torch.zeros(rows, length, each.kv_width, **like) for each in weights.layers]

        source_mask = torch.zeros(rows, 1, 1, sizes.source, dtype=weights.dtype, device=device)
        return cls(
            state=BeamState.start(
                prefix=prefix,
                limits=2 * ones,
                penalties=torch.ones(sizes.tokens + 1, device=device),
                decisive=ones - 1,
                running=beams,
                ended=beams,
            ),
            visible=torch.zeros(rows, beams, sizes.slots, dtype=torch.bool, device=device),
            self_kv=caches(sizes.slots),
            cross_kv=caches(sizes.source),
            source_mask=source_mask,
        )

    def tensors(self) -> list[Tensor]:
        return [*self.state, self.visible, *self.self_kv, *self.cross_kv, self.source_mask]

    def first(self, rows: int) -> "Memory":
        """Views of the first rows."""
        return Memory(
            BeamState(*(part[:rows] for part in self.state)),
            self.visible[:rows],
            [kv[:rows] for kv in self.self_kv],
            [kv[:rows] for kv in self.cross_kv],
            self.source_mask[:rows],
        )


class CapturedStep:
    """Static memory, and the recorded step on it. A search has it for itself."""

    def __init__(self, weights: PackedWeights, sizes: Sizes, nbytes: int, recorder: CudaGraphs):
        self.sizes = sizes
        self.nbytes = nbytes
        device = weights.embedding.device
        with torch.inference_mode(False), torch.no_grad():
            self.penalties = torch.ones(sizes.tokens + 1, device=device)
            self.memory = Memory.of(weights, sizes, device)
            self.numbers = beam_numbers(self.memory.state.parents)
            first_slots = torch.zeros_like(self.numbers)
            self.first_rows = cache_rows(first_slots, sizes.slots)  # (B' · K,)
            self.encodings = weights.position_encodings(sizes.tokens)
            self.repeat = recorder.record(lambda: self._step(weights))

    def _step(self, weights: PackedWeights) -> None:
        """`PackedDecoder.step` on the static memory."""
        state, visible, self_kv, cross_kv, source_mask = self.memory
        seen, slots = take_slots(visible, state.parents, self.numbers)
        logits = weights(
            embeds=F.embedding(state.next_tokens, weights.embedding),
            lengths=state.lengths,
            encodings=self.encodings,
            rows=slots.flatten() + self.first_rows,
            self_kv=self_kv,
            mask=additive_mask(seen, weights.dtype)[:, None],  # (B', 1, K, C)
            cross_kv=cross_kv,
            source_mask=source_mask,
        )
        after = self.sizes.config.advance(state, logits, self.penalties)
        for old, new in zip(state, after, strict=True):
            if old is not new:
                old.copy_(new)
        visible.copy_(seen)


def static_bytes(weights: PackedWeights, sizes: Sizes) -> int:
    """The static memory of a step, and the states of the sentences that wait to join it (`engine.read_ahead`).

    At most as many wait as it has rows.
    """
    memory = Memory.of(weights, sizes, torch.device("meta"))
    waiting = sizes.rows * sizes.source * weights.config.d_model * weights.dtype.itemsize
    return sum(tensor.nbytes for tensor in memory.tensors()) + waiting


def pool_bytes(weights: PackedWeights, sizes: Sizes) -> int:
    """The memory of a step's intermediate results: the logits, and then the hypotheses of all candidates."""
    # As computed, in float32, and normalised.
    logit = weights.dtype.itemsize + 2 * torch.float32.itemsize
    # Of 2 K candidates, 4 K to choose from and 2 K chosen ones.
    token = 8 * torch.long.itemsize
    beam = weights.config.target_vocab_size * logit + sizes.tokens * token
    return sizes.rows * sizes.config.num_beams * beam


class CapturedSteps:
    """The captured steps of packed weights. Thread-safe."""

    def __init__(self, recorder: CudaGraphs):
        self.recorder = recorder
        self.idle: dict[Sizes, CapturedStep] = {}  # the most recently used last
        self.in_use = 0  # bytes
        self.pool = 0  # bytes, for the largest step
        self.failure: str | None = None  # why none can be recorded

    def take(self, weights: PackedWeights, sizes: Sizes) -> CapturedStep | str:
        """A step for a search, recorded if there is none. If it cannot be recorded, the reason."""
        with _LOCK:
            step = self.idle.pop(sizes, None) or self._record(weights, sizes)
            if isinstance(step, CapturedStep):
                self.in_use += step.nbytes
            return step

    def _record(self, weights: PackedWeights, sizes: Sizes) -> CapturedStep | str:
        """Record a step, in the memory of idle ones if it has to. If it cannot, return the reason."""
        if self.failure is not None:
            return self.failure
        needed = static_bytes(weights, sizes)
        pool = max(self.pool, pool_bytes(weights, sizes))
        total = needed + self.in_use + pool
        if total > MAX_BYTES:
            return f"memory of {total:,} bytes exceeds {MAX_BYTES:,}"
        self.pool = pool
        self._keep(MAX_STEPS - 1, MAX_BYTES - needed)
        try:
            return CapturedStep(weights, sizes, needed, self.recorder)
        except torch.OutOfMemoryError:
            if not self.idle:
                return "out of memory"
        except RuntimeError as error:  # of an operation that cannot be captured here
            self.failure = f"no step can be captured: {error}"
            logger.warning("decoding takes several times as long: %s", self.failure)
            return self.failure
        self.idle.clear()
        return self._record(weights, sizes)

    def give_back(self, step: CapturedStep) -> None:
        """End the use of a step."""
        with _LOCK:
            self.in_use -= step.nbytes
            self.idle[step.sizes] = step
            self._keep(MAX_STEPS, MAX_BYTES)

    def _keep(self, count: int, nbytes: int) -> None:
        """Free the steps that were not used for the longest time."""
        while self.idle and (len(self.idle) > count or self.nbytes() > nbytes):
            del self.idle[next(iter(self.idle))]

    def nbytes(self) -> int:
        """The static memory of all steps and their pool."""
        idle = list(self.idle.values())  # a collection may return a step meanwhile
        return self.in_use + self.pool + sum(step.nbytes for step in idle)


class CapturedDecoder(PackedDecoder):
    """A `PackedDecoder` whose steps are captured.

    It starts as a `PackedDecoder`. From the first step on, which has all beams, its caches and the state of the search
    are views of static memory.
    """

    def __init__(
        self,
        weights: Any,
        source: EncodedSource,
        steps: CapturedSteps,
        beams: int,
    ):
        self.initial_beams = beams
        self.longest_source = source.states.shape[1]  # of a sentence that is being translated
        self.highest_slot = 0  # no slot from this one on is visible
        self.steps = steps
        self.captured: CapturedStep | None = None
        self.view: Memory | None = None  # of the static memory: the rows of the B sentences
        self.penalties: Tensor | None = None  # in the static memory
        self.moves = True  # the next step looks for memory, and finds a smaller one
        self.refused: dict[Sizes, str] = {}  # with the reasons
        self.reasons: set[str] = set()  # that were logged
        super().__init__(weights, source)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.captured is not None and not is_finalizing():
            self.steps.give_back(self.captured)

    # A step

    def step(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> BeamState:
        if not self._is_in_place(state, config, penalties):
            reason = self._eager_reason(state) or self._move(state, config, penalties)
            if reason is not None:
                self._log(reason)
                return super().step(self._leave(state), config, penalties)
        assert self.captured is not None and self.view is not None
        self.captured.repeat()
        self.slots.bound += config.num_beams
        return self.view.state

    def _is_in_place(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> bool:
        """Return whether everything is in static memory with room for another token."""
        if self.captured is None or self.view is None or self.moves:
            return False
        if state is not self.view.state or penalties is not self.penalties:
            return False
        if self.captured.sizes.config != config:
            return False
        return self.slots.bound + config.num_beams <= self.captured.sizes.slots

    def logits(self, state: BeamState) -> Tensor:
        self._log("logits processors, constraints or an ensemble read the logits")
        return super().logits(state)

    def _eager_reason(self, state: BeamState) -> str | None:
        """Why this step cannot be captured, or None."""
        if self.output is not None:
            return "a shortlist selects rows of the output layer"
        if not is_on_default_stream(state.done.device):
            return "steps of several streams would overwrite each other's results"
        return None

    def _log(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.add(reason)
            logger.debug("decoding without a captured step: %s", reason)

    # Into static memory and out of it

    def _move(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> str | None:
        """Put everything into static memory that has room for the next steps. If there is none, return the reason."""
        rows, beams = state.parents.shape
        slots = max(self.slots.bound + beams * steps_at_once(state.done.device), self.highest_slot)
        needed = Sizes(
            config,
            rows=self.computed_rows(rows),
            slots=rounded_up(slots, SLOTS),
            source=rounded_up(self.longest_source, SOURCE_LENGTHS),
            tokens=rounded_up(state.tokens.shape[2], CAPACITIES),
        )
        step = self.captured
        if step is None or not _fits(step.sizes, needed):
            if needed in self.refused:
                return self.refused[needed]
            taken = self.steps.take(self.weights, needed)
            if isinstance(taken, str):
                self.refused[needed] = taken
                return taken
            step = taken
        if step is not self.captured or self.view is None or len(self.view.visible) != rows:
            view = step.memory.first(rows)
        else:
            view = self.view
        assert self.source_mask is not None  # nothing is trimmed
        held = Memory(
            state,
            self.slots.visible,
            self.self_kv,
            self.cross_kv,
            self.source_mask,
        )
        self._fill(step, view, held)
        _copy_into(step.penalties, penalties, 1)
        if self.captured is not None and self.captured is not step:
            self.steps.give_back(self.captured)
        self.captured = step
        self.penalties = penalties
        self._see(view)
        return None

    def _fill(
        self,
        step: CapturedStep,
        view: Memory,
        held: Memory,
    ) -> None:
        """Copy what is not yet there into the rows of the sentences, and end the other rows."""
        for static, part in zip(view.tensors(), held.tensors(), strict=True):
            _copy_into(static, part, -torch.inf if static is view.source_mask else 0)
        rows = len(view.visible)
        step.memory.state.done[rows:] = True
        step.memory.visible[rows:] = False

    def _see(self, view: Memory) -> None:
        """Let the attributes of a `PackedDecoder` be views of the static memory."""
        self.view = view
        self.moves = False
        self.slots.visible = view.visible
        self.self_kv = view.self_kv
        self.cross_kv = view.cross_kv
        self.source_mask = view.source_mask
        self.visible = resized(self.visible, view.source_mask.shape[3], 1)

    def _leave(self, state: BeamState) -> BeamState:
        """Give the static memory back, and return the state in memory of its own."""
        step = self.captured
        if step is None:
            return state
        self.captured = None
        self.view = None
        self.moves = True
        self.slots.visible = self.slots.visible.clone()
        self.self_kv = [kv.clone() for kv in self.self_kv]
        self.cross_kv = [kv.clone() for kv in self.cross_kv]
        state = BeamState(*(part.clone() for part in state))
        self.steps.give_back(step)
        return state

    # Between steps

    def _hold_source(self, visible: Tensor, cross_kv: list[KV]) -> None:
        super()._hold_source(visible, cross_kv)
        self.moves = True
        self.source_lengths = ends(self.visible)  # (B,)

    def _trims(self, visible: Tensor) -> bool:
        return False

    def computed_rows(self, count: int) -> int:
        # A product of one row would take a kernel more for its bias, and another for its ReLU.
        least = 2 if self.initial_beams == 1 else 1
        return rounded_up(max(count, least), ROWS)

    def replace(self, rows: Tensor, other: PackedDecoder) -> None:
        self.longest_source = max(self.longest_source, other.visible.shape[1])
        self.highest_slot = max(self.highest_slot, other.slots.visible.shape[2])
        super().replace(rows, other)

    def read_done(self, state: BeamState) -> list[bool]:
        """`state.done` on the host, and with it how much room the sentences need that are not done."""
        done = state.done
        # A sentence that is done would keep its slots, and so would the rows of a step that have none.
        if self.captured is None:
            self.slots.visible.masked_fill_(done[:, None, None], False)
        else:
            memory = self.captured.memory
            memory.visible.masked_fill_(memory.state.done[:, None, None], False)
        used = self.slots.used(state.parents)  # (B, C)
        sources = self.source_lengths.masked_fill(done, 1)
        # One wait for all numbers.
        numbers = torch.stack([done.long(), used.sum(dim=1), ends(used), sources])
        is_done, slots, slot_ends, source_lengths = numbers.tolist()
        self.slots.bound = max(slots)
        self.highest_slot = max(slot_ends)
        self.longest_source = max(source_lengths)
        source = rounded_up(self.longest_source, SOURCE_LENGTHS)
        if self.captured is not None and 2 * source <= self.captured.sizes.source:
            self.moves = True
        return [bool(each) for each in is_done]


def _fits(sizes: Sizes, needed: Sizes) -> bool:
    """Return whether there is room, and not too much: rows are computed whether there are sentences in them or not."""
    if sizes.config != needed.config or sizes.rows != needed.rows:
        return False
    if sizes.slots < needed.slots or sizes.tokens < needed.tokens:
        return False
    return needed.source <= sizes.source < 2 * needed.source


def _copy_into(
    static: Tensor,
    part: Tensor,
    rest: float,
) -> None:
    """Copy a tensor that may be smaller, and fill the rest, unless it is there already."""
    if part is static:
        return
    place = tuple(slice(min(own, new)) for own, new in zip(static.shape, part.shape, strict=True))
    if part.shape != static.shape:
        static.fill_(rest)
    static[place].copy_(part[place])
