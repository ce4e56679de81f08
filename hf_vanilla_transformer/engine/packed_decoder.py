"""`PackedDecoder`: a `Decoder` that computes with `PackedWeights`, and holds the KV caches of a batch.

Shapes: B sentences, K beams, R = B · K rows, C slots of a sentence's KV cache, S source length, D d_model, V target
vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoding_vanilla_transformer import BeamCacheSlots, EncodedSource, additive_mask
from ..search_vanilla_transformer import (
    BeamState,
    Decoder,
    SearchConfig,
    replace_rows,
    resized,
    topk_log_probs,
)
from .c_kernels import View, best, has_few_threads, kernels_compute
from .linear import PlainLinear
from .packed_weights import KV, cache_rows

# With so many beams the slots that the beams of a sentence share are most of the work of a step.
WIDE = 8


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
        for state in BeamState.of_prefix(tokens):
            self._logits(state)

    def logits(self, state: BeamState) -> Tensor:
        logits = self._logits(state)
        return logits if self.output is None else self.output.whole(logits)

    def step(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> BeamState:
        logits = self._logits(state)
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

    def _logits(self, state: BeamState) -> Tensor:
        """Logits (B, K, V), or (B, K, n) of the rows in `output`."""
        rows = self.take_rows(state.parents)
        mask: Tensor | View
        source_mask: Tensor | View | None
        if self._uses_kernels(state.parents.shape[1]):
            mask, source_mask = self.views()
        else:
            visible = self.slots.visible
            mask = additive_mask(visible, self.weights.dtype)[:, None]  # (B, 1, K, C)
            source_mask = self.source_mask
        return self.weights(
            embeds=F.embedding(state.next_tokens, self.weights.embedding),  # (B, K, D)
            lengths=state.lengths,
            encodings=self.weights.position_encodings(state.tokens.shape[2]),
            rows=rows,
            self_kv=self.self_kv,
            mask=mask,
            cross_kv=self.cross_kv,
            source_mask=source_mask,
            lm_head=None if self.output is None else self.output.head,
        )

    def take_rows(self, parents: Tensor) -> Tensor:
        """The rows (R,) of the caches for the next tokens, after `parents` (B, K). The caches then have them."""
        slots = self.slots.append(parents)
        beams = parents.shape[1]
        capacity = self.slots.visible.shape[2]
        room = self.self_kv[0].shape[1]
        if beams < WIDE or not self._uses_kernels(beams):
            room = capacity
        elif not capacity <= room <= 2 * capacity:
            room = capacity + capacity // 2  # a wide search grows its caches a few times only
        self.self_kv = [resized(kv, room, 1) for kv in self.self_kv]
        return cache_rows(slots, room)

    def _uses_kernels(self, beams: int) -> bool:
        """Return whether the kernels in C compute attention and select tokens, in place of torch's."""
        if not kernels_compute(self.visible.device, self.weights.dtype):
            return False
        return beams >= WIDE or has_few_threads()

    def views(self) -> tuple[View, View]:
        """The visible keys of target and source for each row, for attention in C."""
        batch, beams, capacity = self.slots.visible.shape
        rows = torch.arange(batch * beams, device=self.visible.device)
        sentences = rows // beams  # (R,)
        first_slots = sentences * self.self_kv[0].shape[1]
        first_tokens = sentences * self.visible.shape[1]
        target = View(first_slots, self.slots.visible.contiguous(), rows * capacity)
        return target, View(first_tokens, self.visible, first_tokens)

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
