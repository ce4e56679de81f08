"""Encoder and decoder in int8: every product in bytes, everything else in float32, and the KV caches in bfloat16.

The formulas are in layers_vanilla_transformer.py. Between two products the rows of all sentences are read once, by
`c_kernels`. Rows of padding are left out.

Shapes: B sentences, K beams, R rows, C slots of a sentence's KV cache, S source length, D d_model, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from ..arguments_vanilla_transformer import check_ids
from ..layers_vanilla_transformer import VanillaTransformerAttention
from ..masks_vanilla_transformer import token_positions
from ..search_vanilla_transformer import BeamState, SearchConfig
from .c_kernels import Rows, View, attend, finish, write_cache
from .c_stack import CStack
from .linear import INT8, packed_linear
from .packed_decoder import PackedDecoder
from .packed_weights import KV, PositionEncodings, packed_norm


def _pack(*linears: nn.Linear) -> Any:
    return packed_linear(linears, torch.float32, INT8)


class Int8Attention:
    """Queries of rows, and keys and values of the same rows if `is_cross` is False, up to the output projection."""

    in_c = True  # `run_stack` knows it

    def __init__(self, attention: VanillaTransformerAttention, is_cross: bool):
        queries = attention.q_proj.out_features
        self.widths = queries // attention.head_dim, attention.head_dim, attention.value_head_dim
        self.key_from = queries
        self.scaling = attention.scaling
        own = () if is_cross else (attention.k_proj, attention.v_proj)
        self.first = _pack(attention.q_proj, *own)

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


class Int8FeedForward:
    """The first half of the feed-forward network, `activation` included."""

    widths = 0, 0, 0  # of heads
    scaling = 0.0

    def __init__(self, layer: Any):
        self.first = _pack(layer.fc1)
        self.activation = layer.activation
        self.in_c = isinstance(layer.activation, nn.ReLU)

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


class Int8Stack:
    """The layers of an encoder or a decoder."""

    def __init__(self, stack: Any):
        self.position_encodings = PositionEncodings(stack)
        self.embedding = stack.embed_tokens.weight.detach()
        self.embed_scale = stack.embed_scale
        self.pre_norm = stack.config.layer_norm_position == "pre"
        self.sublayers: list[tuple[Any, Any]] = []  # each with its last product
        norms: list[nn.LayerNorm | None] = []
        for layer in stack.layers:
            attentions = [(layer.self_attn, layer.self_attn_layer_norm, False)]
            if hasattr(layer, "cross_attn"):
                attentions.append((layer.cross_attn, layer.cross_attn_layer_norm, True))
            for attention, norm, is_cross in attentions:
                self.sublayers.append(
                    (Int8Attention(attention, is_cross), _pack(attention.out_proj))
                )
                norms.append(packed_norm(norm, torch.float32))
            self.sublayers.append((Int8FeedForward(layer), _pack(layer.fc2)))
            norms.append(packed_norm(layer.final_layer_norm, torch.float32))
        last = (
            packed_norm(stack.layer_norm, torch.float32) if stack.config.final_layer_norm else None
        )
        # norms[i] comes before sub-layer i, and the last one after all
        self.norms = [*norms, last] if self.pre_norm else [None, *norms]
        self.last = None if self.pre_norm else last
        self.in_c = CStack(self.sublayers, self.norms, self.pre_norm)

    def embed(
        self,
        tokens: Tensor,
        lengths: Tensor,
        longest: int,
    ) -> Tensor:
        """Embeddings (R, D) in float32 of tokens (R,), the last ones of so many (R,), `longest` at most."""
        embeds = F.embedding(tokens, self.embedding).float()
        encodings = self.position_encodings(longest)[lengths]
        return torch.add(encodings, embeds, alpha=self.embed_scale)

    def __call__(
        self, x: Tensor, caches: Sequence[tuple[KV, View, Tensor | None]]
    ) -> tuple[Tensor, Rows]:
        """States (R, D) of embeddings (R, D), also quantised. `caches` belong to the attentions, in their order."""
        if len(x) <= self.in_c.most_rows:
            x, rows = self.in_c(x, caches)
        else:
            x, rows = self._in_passes(x, caches)
        return x, rows if self.last is None else finish(x, norm=self.last)

    def _in_passes(
        self, x: Tensor, caches: Sequence[tuple[KV, View, Tensor | None]]
    ) -> tuple[Tensor, Rows]:
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
        self.vocab_size = model.config.vocab_size
        self.target_vocab_size = model.config.target_vocab_size
        self.encoder = Int8Stack(model.get_encoder())
        self.decoder = Int8Stack(decoder)
        self.source_kv = [
            _pack(layer.cross_attn.k_proj, layer.cross_attn.v_proj) for layer in decoder.layers
        ]
        self.lm_head = _pack(model.lm_head)

    def encode(self, ids: Tensor, mask: Tensor) -> BaseModelOutput:
        """The source (B, S) as states (B, S, D), zeros for padding."""
        check_ids(ids, self.vocab_size, "input_ids")
        (batch, length), visible = ids.shape, mask.ne(0).contiguous()
        places = visible.flatten().nonzero()[:, 0]  # (R,)
        firsts = places // length * length
        tokens = ids.flatten()[places]
        positions = token_positions(ids, mask).flatten()[places]
        x = self.encoder.embed(tokens, positions + 1, length)  # (R, D)
        attentions = [sub for sub, _ in self.encoder.sublayers if isinstance(sub, Int8Attention)]
        width = attentions[0].widths[0] * sum(attentions[0].widths[1:])
        cache = ids.new_empty(batch, length, width, dtype=torch.bfloat16)
        found, _ = self.encoder(
            x, [(cache, View(firsts, visible, firsts), places)] * len(attentions)
        )
        states = found.new_zeros(batch * length, found.shape[1]).index_copy_(0, places, found)
        return BaseModelOutput(last_hidden_state=states.view(batch, length, -1).to(self.dtype))

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
        caches: list[tuple[KV, View, Tensor | None]] = []
        for self_kv, cross_kv in zip(self.self_kv, self.cross_kv, strict=True):
            caches += [(self_kv, own, places), (cross_kv, source, None)]
        lengths = state.lengths.repeat_interleave(state.parents.shape[1])  # (R,)
        tokens = state.next_tokens.flatten()  # (R,)
        x = decoder.embed(tokens, lengths, state.tokens.shape[2])  # (R, D)
        return decoder(x, caches)[1]
