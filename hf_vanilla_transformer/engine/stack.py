"""The parts of an encoder or a decoder as the engine computes them: embeddings, sub-layers, and whole for few rows.

The formulas are in attention_ and layers_vanilla_transformer.py.

Shapes: R rows, B sentences, S source length, N places of a cache, D d_model, H heads, d_k and d_v their widths.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from ..arguments_vanilla_transformer import check_ids
from ..attention_vanilla_transformer import VanillaTransformerAttention
from ..masks_vanilla_transformer import token_positions
from .c_kernels import View
from .c_stack import CStack

#: Cache (B, N, H · (d_k + d_v)), what its rows see, and the places (R,) to write their keys and values to, or None.
Cached: TypeAlias = tuple[Tensor, View, Tensor | None]


class PositionEncodings:
    """A decoder's encodings of the last tokens of hypotheses, by the number of tokens. They are computed once."""

    def __init__(self, decoder: Any):
        self.decoder = decoder
        self.encodings = decoder.embed_tokens.weight.new_empty(0, decoder.config.d_model)
        self.shift: Tensor | None = None  # (D,), added to all. See `fold_biases`

    def __call__(self, count: int) -> Tensor:
        """Encodings (n, D) for at least `count` tokens. The first is of none, and unused, as is the last. Thread-safe.

        A hypothesis that has ended may have a token more than there are positions.
        """
        encodings = self.encodings
        config = self.decoder.config
        if count > len(encodings) - 2:
            learned = config.position_encoding_type == "learned"
            count = config.max_position_embeddings if learned else max(64, 2 * count)
            ids = torch.arange(count, device=encodings.device)[None]  # (1, n)
            nothing = encodings.new_zeros(1, count, config.d_model)
            encodings = self.decoder.embed(nothing, ids)[0]
            if self.shift is not None:
                encodings = encodings + self.shift
            encodings = F.pad(encodings, (0, 0, 1, 1))
            self.encodings = encodings
        return encodings


def packed_norm(norm: nn.LayerNorm, dtype: torch.dtype) -> nn.LayerNorm:
    return copy.deepcopy(norm).requires_grad_(False).to(dtype)


class Attention:
    """Queries of rows, and keys and values of the same rows if `is_cross` is False, up to the output projection."""

    in_c = True  # `run_stack` knows it

    def __init__(self, attention: VanillaTransformerAttention, is_cross: bool, pack: Callable):
        self.key_from = attention.q_proj.out_features
        heads = self.key_from // attention.head_dim
        self.widths = heads, attention.head_dim, attention.value_head_dim
        self.scaling = attention.scaling
        own = () if is_cross else (attention.k_proj, attention.v_proj)
        self.first = pack(attention.q_proj, *own)


class FeedForward:
    """The first half of the feed-forward network, `activation` included."""

    widths = 0, 0, 0  # of heads
    scaling = 0.0

    def __init__(self, layer: Any, pack: Callable):
        self.first = pack(layer.fc1)
        self.activation = layer.activation
        self.in_c = isinstance(layer.activation, nn.ReLU)


class Stack:
    """An encoder or a decoder for few rows.

    Args:
        stack: its modules.
        pack: linear layers with the same input as one product.
    """

    attention: type[Attention] = Attention
    feed_forward: type[FeedForward] = FeedForward

    def __init__(self, stack: Any, pack: Callable):
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
                sublayer = self.attention(attention, is_cross, pack)
                self.sublayers.append((sublayer, pack(attention.out_proj)))
                norms.append(packed_norm(norm, torch.float32))
            self.sublayers.append((self.feed_forward(layer, pack), pack(layer.fc2)))
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

    def __call__(self, x: Tensor, caches: Sequence[Cached]) -> tuple[Tensor, Any]:
        """States (R, D) of embeddings (R, D). `caches` belong to the attentions, in their order."""
        states, _ = self.in_c(x, caches)
        return (states if self.last is None else self.last(states)), None

    def encode(
        self, ids: Tensor, mask: Tensor, dtype: torch.dtype, cache_dtype: torch.dtype
    ) -> BaseModelOutput:
        """The source (B, S) as states (B, S, D), zeros for padding."""
        check_ids(ids, len(self.embedding), "input_ids")
        batch, length = ids.shape
        visible = mask.ne(0).contiguous()
        places = visible.flatten().nonzero()[:, 0]  # (R,)
        firsts = places // length * length
        tokens = ids.flatten()[places]
        positions = token_positions(ids, mask).flatten()[places]
        x = self.embed(tokens, positions + 1, length)  # (R, D)
        attentions = [sub for sub, _ in self.sublayers if isinstance(sub, Attention)]
        heads, key, value = attentions[0].widths
        cache = ids.new_empty(batch, length, heads * (key + value), dtype=cache_dtype)
        found, _ = self(x, [(cache, View(firsts, visible, firsts), places)] * len(attentions))
        states = found.new_zeros(batch * length, found.shape[1]).index_copy_(0, places, found)
        return BaseModelOutput(last_hidden_state=states.view(batch, length, -1).to(dtype))
