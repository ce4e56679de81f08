"""One step of decoding: the encoded source, the slots of the KV cache, and the decoder that calls the model.

Shapes: B sentences in the batch, K beams, C capacity of a sentence's KV cache in slots, S source length, D d_model,
H heads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from .search_vanilla_transformer import BeamState, Decoder, replace_rows, resized, steps_at_once

# The encoded source


def encoder_output(given: Any) -> Any:
    """Return the output of an encoder of transformers as it is, and a dictionary or tuple as such an output."""
    if isinstance(given, ModelOutput):
        return given
    if isinstance(given, Mapping):
        given = [given.get(name) for name in ("last_hidden_state", "hidden_states", "attentions")]
    return BaseModelOutput(*given)


class EncodedSource(NamedTuple):
    """What a decoder gets of the source."""

    states: Tensor  # (B, S, D), the encoder's output
    mask: Tensor  # (B, S), 0 for padding
    ids: Tensor | None = None  # (B, S), unless the source was given as embeddings or states
    others: tuple[Tensor, ...] = ()  # the states of the other models of an ensemble


# The decoder that calls the model

SLOTS = 16  # the capacity of a KV cache is a multiple of it: few shapes, and whole tiles of matrix units


class BeamCacheSlots:
    """Which slots of the KV cache of a sentence each of its beams sees.

    Keys and values are written once and never moved. A slot that no beam sees any more is written again. Beams differ
    in their last tokens, so that all need few more slots than one has tokens, where K caches need K times as many.
    """

    def __init__(self, batch: int, device: torch.device):
        # (B, K, C). K is 1 at first
        self.visible = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        self.bound = 0  # no sentence uses more slots. The host knows it without asking the device
        self.steps_at_once = steps_at_once(device)

    def show_all(self, length: int) -> None:
        """Resize the cache to `length` slots, and let every beam see all of them."""
        self.visible = self.visible.new_ones(*self.visible.shape[:2], length)
        self.bound = length

    def used(self, parents: Tensor) -> Tensor:
        """The slots (B, C), Boolean, that are visible to the beams `parents` (B, K)."""
        return slots_in_use(visible_to(parents, self.visible))

    def reserve(self, parents: Tensor) -> int:
        """The capacity C, enough to go on from `parents` (B, K). The host waits if it may have to grow."""
        beams = parents.shape[1]
        size = self.visible.shape[2]
        if self.bound + beams > size:
            used = self.used(parents)
            self.bound = max(used.sum(dim=1).tolist(), default=0) if size else 0
            capacity = -(-(self.bound + beams * self.steps_at_once) // SLOTS) * SLOTS
            shrinks = capacity + SLOTS < size and not used[:, capacity:].any()
            if capacity > size or shrinks:
                self.visible = resized(self.visible, capacity, 2)
        self.bound += beams
        return self.visible.shape[2]

    def append(self, parents: Tensor) -> Tensor:
        """The slots (B, K) of the next tokens, by `take_slots`."""
        self.reserve(parents)
        self.visible, slots = take_slots(self.visible, parents, beam_numbers(parents))
        return slots

    def select(self, rows: Tensor) -> None:
        self.visible = self.visible[rows]

    def replace(self, rows: Tensor, other: "BeamCacheSlots") -> None:
        theirs = other.visible.expand(-1, self.visible.shape[1], -1)
        self.visible = replace_rows(self.visible, rows, theirs, 2)
        self.bound = max(self.bound, other.bound)


def beam_numbers(parents: Tensor) -> Tensor:
    """1 … K for each sentence of `parents` (B, K)."""
    numbers = torch.arange(1, parents.shape[1] + 1, device=parents.device)
    return numbers.expand_as(parents).contiguous()


def take_slots(visible: Tensor, parents: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Go on from `parents` (B, K): each beam sees the slots (B, K, C) of its parent and one that was free, (B, K).

    `numbers` are the `beam_numbers`.
    """
    visible = visible_to(parents, visible)
    free = (~slots_in_use(visible)).cumsum(dim=1)  # (B, C), how many up to here
    slots = torch.searchsorted(free, numbers)  # the first K that are free
    return visible.scatter_(2, slots[..., None], True), slots


def visible_to(parents: Tensor, visible: Tensor) -> Tensor:
    """The slots (B, K, C) that the beams `parents` (B, K) see."""
    if visible.device.type == "cpu":
        # Indexing copies rows. `gather` copies bytes, in forty times the time.
        sentences = torch.arange(len(parents), device=parents.device)[:, None]
        return visible[sentences, parents]
    return visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[2]))


def slots_in_use(visible: Tensor) -> Tensor:
    """The slots (B, C), Boolean, that a beam of `visible` (B, K, C) sees."""
    if visible.device.type == "cpu":
        # `any` takes thirty times as long as a maximum of bytes.
        return visible.byte().amax(dim=1).bool()
    return visible.any(dim=1)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to attention scores: 0 where `visible`, else the lowest number."""
    lowest = torch.finfo(dtype).min
    # On the host also with another default device: a graph cannot capture a copy.
    hidden = torch.tensor(lowest, dtype=dtype, device="cpu")
    return torch.add(hidden, visible, alpha=-lowest)  # one kernel


class SlotCache(DynamicCache):
    """Keys and values (B, H, C, ·) of the target, in the slots of a `BeamCacheSlots`."""

    slots: Tensor | None = None  # (B, K), of the next tokens. None: after all others
    capacity = 0  # C

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Write keys and values (B, H, K, ·); return the whole cache (B, H, C, ·)."""
        if self.slots is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == len(self.layers):
            super().update(key_states[:, :, :0], value_states[:, :, :0], layer_idx)
        layer = self.layers[layer_idx]
        rows = torch.arange(len(key_states), device=key_states.device)[:, None]  # (B, 1)
        layer.keys = resized(layer.keys, self.capacity, 2)
        layer.values = resized(layer.values, self.capacity, 2)
        layer.keys.transpose(1, 2)[rows, self.slots] = key_states.transpose(1, 2)
        layer.values.transpose(1, 2)[rows, self.slots] = value_states.transpose(1, 2)
        return layer.keys, layer.values


class ModuleDecoder(Decoder):
    """A `Decoder` that calls the model: the beams of a sentence as one sequence, with a mask that parts them."""

    def __init__(self, model: PreTrainedModel, source: EncodedSource):
        self.model = model
        self.states = source.states
        self.cache = EncoderDecoderCache(SlotCache(), DynamicCache())
        self.slots = BeamCacheSlots(len(self.states), self.states.device)
        self.has_one_beam = True  # so far: it sees all tokens, without slots and mask
        self._set_mask(source.mask.to(self.states.device).ne(0))

    def _set_mask(self, visible: Tensor) -> None:
        self.visible = visible  # (B, S)
        self.mask: Tensor | None = None  # (B, 1, 1, S)
        if visible.device.type == "cpu" and bool(visible.all()):
            # A GPU would have to be waited for.
            return
        self.mask = visible[:, None, None]

    def prefill(self, tokens: Tensor) -> None:
        self._forward(tokens)
        self.slots.show_all(tokens.shape[1])

    def logits(self, state: BeamState) -> Tensor:
        cache = self.cache.self_attention_cache
        mask = None
        self.has_one_beam = self.has_one_beam and state.parents.shape[1] == 1
        if self.has_one_beam:
            self.slots.show_all(self.slots.bound + 1)
        else:
            cache.slots = self.slots.append(state.parents)
            cache.capacity = self.slots.visible.shape[2]
            mask = additive_mask(self.slots.visible, self.states.dtype)[:, None]  # (B, 1, K, C)
        positions = state.positions[:, None]  # (B, 1)
        return self._forward(
            state.next_tokens, decoder_attention_mask=mask, decoder_position_ids=positions
        )

    def _forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
            attention_mask=self.mask,
            decoder_input_ids=tokens,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **kwargs,
        ).logits

    def select(self, rows: Tensor) -> None:
        self.states = self.states[rows]
        self.slots.select(rows)
        self._set_mask(self.visible[rows])
        self.cache.batch_select_indices(rows)

    def replace(self, rows: Tensor, other: "ModuleDecoder") -> None:
        for decoder in (self, other):
            if not decoder.cache.is_updated:
                # Any token: a first call caches the source.
                decoder._forward(torch.zeros_like(decoder.visible[:, :1], dtype=torch.long))
        self.has_one_beam = False
        self.states = replace_rows(self.states, rows, other.states, 1)
        self.slots.replace(rows, other.slots)
        self._set_mask(replace_rows(self.visible, rows, other.visible, 1))
        self._replace_layers(
            rows, self.cache.self_attention_cache, other.cache.self_attention_cache
        )
        self._replace_layers(
            rows, self.cache.cross_attention_cache, other.cache.cross_attention_cache
        )

    @staticmethod
    def _replace_layers(rows: Tensor, cache: DynamicCache, other: DynamicCache) -> None:
        for mine, theirs in zip(cache.layers, other.layers, strict=True):
            mine.keys = replace_rows(mine.keys, rows, theirs.keys, 2)
            mine.values = replace_rows(mine.values, rows, theirs.values, 2)
