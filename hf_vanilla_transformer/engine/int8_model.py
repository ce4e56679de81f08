"""Encoder and decoder in int8: every product in bytes, everything else in float32, and the KV caches in bfloat16.

The formulas are in attention_ and layers_vanilla_transformer.py. Between two products the rows of all sentences are
read once, by `c_kernels`. Rows of padding are left out.

Shapes: B sentences, K beams, R rows, C slots of a sentence's KV cache, S source length, D d_model, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from ..search_vanilla_transformer import BeamState, SearchConfig
from .c_kernels import Rows, View, attend, finish, write_cache
from .linear import INT8, packed_linear
from .packed_decoder import PackedDecoder
from .packed_weights import KV
from .stack import Attention, Cached, FeedForward, Stack


def _pack(*linears: nn.Linear) -> Any:
    return packed_linear(linears, torch.float32, INT8)


class Int8Attention(Attention):
    """An `Attention` in int8."""

    def __call__(
        self,
        rows: Rows,
        cache: KV,
        view: View,
        places: Tensor | None,
    ) -> Rows:
        """The heads of all rows. Their keys and values go to these `places` (R,) of the cache (B, N, ·)."""
        product = rows.times(self.first)
        bias = self.first.bias
        if places is not None:
            write_cache(
                product,
                self.key_from,
                rows.scales,
                bias,
                places,
                cache,
            )
        return attend(
            product,
            self.widths,
            self.scaling,
            cache,
            view,
            scales=rows.scales,
            bias=bias,
            quantized=True,
        )


class Int8FeedForward(FeedForward):
    """A `FeedForward` in int8."""

    def __call__(self, rows: Rows) -> Any:
        hidden = rows.times(self.first)
        relu = self.in_c
        found = finish(
            hidden,
            rows.scales,
            self.first.bias,
            relu,
            quantized=relu,
        )
        return found if relu else finish(self.activation(hidden))


class Int8Stack(Stack):
    """A `Stack` in int8, for any number of rows."""

    attention = Int8Attention
    feed_forward = Int8FeedForward

    def __call__(self, x: Tensor, caches: Sequence[Cached]) -> tuple[Tensor, Rows]:
        """States (R, D) of embeddings (R, D), also quantised. `caches` belong to the attentions, in their order."""
        if len(x) <= self.in_c.most_rows:
            x, rows = self.in_c(x, caches)
        else:
            x, rows = self._in_passes(x, caches)
        return x, rows if self.last is None else finish(x, norm=self.last)

    def _in_passes(self, x: Tensor, caches: Sequence[Cached]) -> tuple[Tensor, Rows]:
        rows = finish(x, norm=self.norms[0], norm_first=True)
        following = iter(caches)
        for index, (sublayer, last) in enumerate(self.sublayers, start=1):
            hidden = sublayer(
                rows, *(next(following) if isinstance(sublayer, Int8Attention) else ())
            )
            states = hidden.times(last)
            norm_first = self.pre_norm and index < len(self.sublayers)
            rows = finish(
                states,
                hidden.scales,
                last.bias,
                False,
                x,
                self.norms[index],
                norm_first,
            )
            x = states
        return x, rows


class Int8Weights:
    """A model packed in int8. Several searches may share one."""

    def __init__(self, model: PreTrainedModel):
        decoder: Any = model.get_decoder()
        self.dtype = model.dtype
        self.target_vocab_size = model.config.target_vocab_size
        self.encoder = Int8Stack(model.get_encoder(), _pack)
        self.decoder = Int8Stack(decoder, _pack)
        self.source_kv = [
            _pack(layer.cross_attn.k_proj, layer.cross_attn.v_proj) for layer in decoder.layers
        ]
        self.lm_head = _pack(model.lm_head)

    def encode(self, ids: Tensor, mask: Tensor) -> BaseModelOutput:
        """The source (B, S) as states (B, S, D), zeros for padding."""
        return self.encoder.encode(ids, mask, self.dtype, torch.bfloat16)

    def cross_kv(self, states: Tensor, visible: Tensor) -> list[KV]:
        """Keys and values (B, S, ·) of source states (B, S, D), for each layer."""
        places = visible.flatten().nonzero()[:, 0]  # (R,)
        rows = finish(states.flatten(0, 1)[places].float())
        found = []
        for linear in self.source_kv:
            product = rows.times(linear)
            cache = product.new_zeros(*states.shape[:2], product.shape[1], dtype=torch.bfloat16)
            write_cache(
                product,
                0,
                rows.scales,
                linear.bias,
                places,
                cache,
            )
            found.append(cache)
        return found


class Int8Decoder(PackedDecoder):
    """A `PackedDecoder` in int8."""

    def _source_kv(self, states: Tensor, visible: Tensor) -> list[KV]:
        return self.weights.cross_kv(states, visible)

    def step(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> BeamState:
        vocab_size = self.weights.target_vocab_size
        needs_all = self.output is None and config.num_candidates >= vocab_size
        if needs_all:
            return super().step(state, config, penalties)
        rows = self._rows(state)
        head = self._head
        product = rows.times(head)  # (R, V) or (R, n)
        return self.extend_by_best(state, config, penalties, product, rows.scales, head.bias)

    @property
    def _head(self) -> Any:
        return self.weights.lm_head if self.output is None else self.output.head

    def _logits(self, state: BeamState) -> Tensor:
        rows = self._rows(state)
        head = self._head
        logits = rows.times(head)
        finish(logits, rows.scales, head.bias, quantized=False)
        return logits.view(*state.next_tokens.shape, -1)

    def _rows(self, state: BeamState) -> Rows:
        """The decoder's states of the next tokens (B, K), quantised."""
        decoder = self.weights.decoder
        places = self.take_rows(state.parents)
        own, source = self.views()
        caches: list[Cached] = []
        for self_kv, cross_kv in zip(self.self_kv, self.cross_kv, strict=True):
            caches += [(self_kv, own, places), (cross_kv, source, None)]
        lengths = state.lengths.repeat_interleave(state.parents.shape[1])  # (R,)
        tokens = state.next_tokens.flatten()  # (R,)
        x = decoder.embed(tokens, lengths, state.tokens.shape[2])  # (R, D)
        return decoder(x, caches)[1]
