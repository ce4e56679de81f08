"""`PackedDecoder`: a `Decoder` that computes with `PackedWeights`, and holds the KV caches of a batch.

Shapes: B sentences, K beams, R = B · K rows, C slots of a sentence's KV cache, S source length, D d_model, V target
vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..generation_vanilla_transformer import BeamCacheSlots, EncodedSource, additive_mask
from ..search_vanilla_transformer import (
    BeamState,
    Decoder,
    SearchConfig,
    replace_rows,
    resized,
    topk_log_probs,
)
from .c_kernels import View, best, library
from .linear import PlainLinear
from .packed_weights import KV, cache_rows

# With so many beams the slots that the beams of a sentence share are most of the work of a step.
WIDE = 8
# torch uses all its threads. With more than these it is faster than the kernels in C, which use one.
_MOST_THREADS = 2
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
_COMPACT_STEPS = 8  # steps after which the slots of a wide search may move together
# Of the slots, the most that may be in use then: a move copies the KV caches.
_COMPACT_SHARE = 0.7


@dataclass(frozen=True)
class OutputRows:
    """The rows of an output layer that a batch needs (`engine.shortlist`), n of V."""

    head: PlainLinear
    ids: Tensor  # (n,), their tokens
    hidden: Tensor  # (B, 1, n), Boolean: not a candidate of the sentence
    size: int  # V

    def advance(
        self,
        state: BeamState,
        logits: Tensor,
        config: SearchConfig,
        penalties: Tensor,
    ) -> BeamState:
        """`SearchConfig.advance` with the logits (B, K, n) of these rows, as if all others were -inf."""
        logits.masked_fill_(self.hidden, -torch.inf)
        count = min(config.num_candidates, logits.shape[2])
        log_probs, index = topk_log_probs(logits, count, normalize=config.num_beams > 1)
        return config.extend(state, log_probs, self.ids[index], penalties)

    def whole(self, logits: Tensor) -> Tensor:
        """The logits (B, K, V) of all tokens, -inf without a row."""
        logits.masked_fill_(self.hidden, -torch.inf)
        whole = logits.new_full((*logits.shape[:2], self.size), -torch.inf)
        return whole.scatter_reduce_(2, self.ids.expand_as(logits), logits, "amax")


class PackedDecoder(Decoder):
    """A `Decoder` with packed weights, and the KV caches of a batch."""

    output: OutputRows | None = None  # None computes all tokens

    def __init__(self, weights: Any, source: EncodedSource):
        self.weights = weights
        self.slots = BeamCacheSlots(len(source.states), source.states.device)
        self._steps = 0
        visible = source.mask.to(source.states.device).ne(0)
        cross_kv = self._source_kv(source.states, visible)
        self.self_kv = [kv[:, :0] for kv in cross_kv]  # (B, C, ·)
        self._hold_source(visible, cross_kv)

    def _source_kv(self, states: Tensor, visible: Tensor) -> list[KV]:
        return self.weights.cross_kv(states)

    def _hold_source(self, visible: Tensor, cross_kv: list[KV]) -> None:
        """Trim padding shared by all rows. The longest sentence may have left the batch."""
        trims = self._trims(visible)
        length = visible.shape[1]
        if trims:
            length = max(1, int(ends(visible.any(dim=0))))
        self.visible = visible[:, :length].contiguous()  # (B, S)
        self.cross_kv = [resized(kv, length, 1).contiguous() for kv in cross_kv]  # (B, S, ·)
        self.source_mask: Tensor | None = None  # (B, 1, 1, S)
        if not trims or not bool(self.visible.all()):
            self.source_mask = self._mask_of(self.visible)

    def _trims(self, visible: Tensor) -> bool:
        """Return whether to trim, and to leave out masks without effect. The host would have to wait for a GPU."""
        return visible.device.type == "cpu"

    def _mask_of(self, visible: Tensor) -> Tensor:
        """As torch makes one of a Boolean mask at each call: attention is zero where nothing is visible."""
        mask = torch.zeros_like(visible, dtype=self.weights.dtype).masked_fill_(
            ~visible, -torch.inf
        )
        return mask[:, None, None]

    def prefill(self, tokens: Tensor) -> None:
        for position in range(tokens.shape[1]):
            next_tokens = tokens[:, position, None]  # (B, 1)
            lengths = torch.full_like(tokens[:, 0], position + 1)
            self._logits(next_tokens, lengths, torch.zeros_like(next_tokens), tokens.shape[1])

    def logits(self, state: BeamState) -> Tensor:
        logits = self._logits(
            state.next_tokens, state.lengths, state.parents, state.tokens.shape[2]
        )
        return logits if self.output is None else self.output.whole(logits)

    def step(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> BeamState:
        logits = self._logits(
            state.next_tokens, state.lengths, state.parents, state.tokens.shape[2]
        )
        if self.output is not None:
            return self.output.advance(state, logits, config, penalties)
        selects_all = config.num_candidates >= logits.shape[2]
        if selects_all or not self._uses_kernels(logits.shape[1]):
            return config.advance(state, logits, penalties)
        rows = logits.flatten(0, 1).contiguous()  # (R, V)
        return self.extend_by_best(state, config, penalties, rows)

    def extend_by_best(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
        logits: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> BeamState:
        """`SearchConfig.advance` with the selection in C, for logits (R, V) or (R, n) of the rows in `output`.

        `scales` and `bias`: as of `best`.
        """
        count = min(config.num_candidates, logits.shape[1])
        log_probs, tokens = best(
            logits,
            count,
            normalize=config.num_beams > 1,
            scales=scales,
            bias=bias,
            hidden=None if self.output is None else self.output.hidden,
        )
        if self.output is not None:
            tokens = self.output.ids[tokens]
        shape = (*state.next_tokens.shape, count)  # (R, n) -> (B, K, n)
        return config.extend(state, log_probs.view(shape), tokens.view(shape), penalties)

    def _logits(
        self,
        tokens: Tensor,
        lengths: Tensor,
        parents: Tensor,
        longest: int,
    ) -> Tensor:
        """Logits (B, K, V), or (B, K, n) of the rows in `output`. No hypothesis is longer than `longest`."""
        slots = self.take_slots(parents)
        first_rows = cache_rows(slots, self.self_kv[0].shape[1])
        mask: Tensor | list[Tensor] | View
        source_mask: Tensor | View | None
        if self._uses_kernels(parents.shape[1]):
            mask, source_mask = self.views()
        else:
            mask, source_mask = self._self_mask(), self.source_mask
        return self.weights(
            embeds=F.embedding(tokens, self.weights.embedding),  # (B, K, D)
            lengths=lengths,
            encodings=self.weights.position_encodings(longest),
            rows=(slots + first_rows).flatten(),
            self_kv=self.self_kv,
            mask=mask,
            cross_kv=self.cross_kv,
            source_mask=source_mask,
            lm_head=None if self.output is None else self.output.head,
        )

    def take_slots(self, parents: Tensor) -> Tensor:
        """The slots (B, K) of the next tokens, after `parents` (B, K). The caches then have room for them."""
        beams = parents.shape[1]
        is_wide = beams >= WIDE and parents.device.type == "cpu"
        reads_visible = self._uses_kernels(beams)
        if is_wide and not reads_visible:
            self._steps += 1
            if self._steps % _COMPACT_STEPS == 0:
                self._move_slots_together(self.slots.used(parents))
        slots = self.slots.append(parents)
        self.make_room(spare=is_wide and reads_visible)
        return slots

    def _uses_kernels(self, beams: int) -> bool:
        """Return whether the kernels in C compute attention and select tokens, in place of torch's."""
        if self.visible.device.type != "cpu" or self.weights.dtype not in _KERNEL_DTYPES:
            return False
        is_faster = beams >= WIDE or torch.get_num_threads() <= _MOST_THREADS
        return is_faster and library() is not None

    def make_room(self, spare: bool) -> None:
        """Let the caches have room for all slots. With `spare`, a wide search grows them a few times only."""
        capacity = self.slots.visible.shape[2]
        room = self.self_kv[0].shape[1]
        if spare and capacity <= room <= 2 * capacity:
            return
        room = capacity + capacity // 2 if spare else capacity
        self.self_kv = [resized(kv, room, 1) for kv in self.self_kv]

    def _move_slots_together(self, used: Tensor) -> None:
        """Move the slots in use, (B, C), Boolean, to the front, if they are few.

        The first half of a search needs the most slots: beams that begin differently share no token. When most of them
        have been given up, the rest would stay spread over all the slots.
        """
        bound = int(used.sum(dim=1).max())
        batch, size = used.shape
        if bound > _COMPACT_SHARE * size:
            return
        order = used.byte().argsort(dim=1, descending=True, stable=True)[:, :bound]  # (B, n)
        visible = self.slots.visible
        self.slots.visible = visible.gather(2, order[:, None].expand(-1, visible.shape[1], -1))
        self.slots.bound = bound
        rows = (order + cache_rows(order, size)).flatten()  # (B · n,)
        self.self_kv = [
            kv.flatten(0, 1).index_select(0, rows).view(batch, bound, -1) for kv in self.self_kv
        ]

    def views(self) -> tuple[View, View]:
        """The visible keys of target and source for each row, for attention in C."""
        batch, beams, capacity = self.slots.visible.shape
        rows = torch.arange(batch * beams, device=self.visible.device)
        sentences = rows // beams  # (R,)
        room = self.self_kv[0].shape[1]
        length = self.visible.shape[1]
        target = View(sentences * room, self.slots.visible.contiguous(), rows * capacity)
        source = View(sentences * length, self.visible, sentences * length)
        return target, source

    def _self_mask(self) -> Tensor | list[Tensor]:
        """The mask of self-attention for `PackedLayer`."""
        visible = self.slots.visible
        mask = additive_mask(visible, self.weights.dtype)[:, None]  # (B, 1, K, C)
        if visible.shape[1] < WIDE or visible.device.type != "cpu":
            return mask
        lengths = ends(visible.any(dim=1)).tolist()
        return [each[..., :length] for each, length in zip(mask.split(1), lengths, strict=True)]

    def select(self, rows: Tensor) -> None:
        self.slots.select(rows)
        self.self_kv = [kv[rows] for kv in self.self_kv]
        self._hold_source(self.visible[rows], [kv[rows] for kv in self.cross_kv])

    def replace(self, rows: Tensor, other: "PackedDecoder") -> None:
        self.slots.replace(rows, other.slots)
        self.self_kv = _replaced(self.self_kv, rows, other.self_kv)
        visible = replace_rows(self.visible, rows, other.visible, 1)
        self._hold_source(visible, _replaced(self.cross_kv, rows, other.cross_kv))


def _replaced(
    caches: list[KV],
    rows: Tensor,
    others: list[KV],
) -> list[KV]:
    """Put `others` (n, C', ·) into rows of (B, C, ·), in the same memory unless a cache has to grow."""
    replaced = []
    for kv, other in zip(caches, others, strict=True):
        size = max(kv.shape[1], other.shape[1])
        replaced.append(resized(kv, size, 1).index_copy_(0, rows, resized(other, size, 1)))
    return replaced


def ends(visible: Tensor) -> Tensor:
    """The places (…) up to the last True of masks (…, N), 0 without one."""
    places = torch.arange(1, visible.shape[-1] + 1, device=visible.device)
    return (visible * places).amax(dim=-1)
