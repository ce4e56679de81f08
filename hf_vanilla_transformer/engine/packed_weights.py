"""A decoder with packed weights: the computation of the layers, for one token of every beam at a time.

The formulas are in attention_ and layers_vanilla_transformer.py. Here q, k and v are one product, ReLU and residual
are fused into theirs, and all beams of a sentence attend in one call to the KV cache that they share.

Shapes: B sentences, K beams, R = B · K rows, C slots of a sentence's KV cache, S source length, D d_model, H heads,
d_k and d_v the widths of a head, V target vocabulary.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from ..attention_vanilla_transformer import attention_kernels
from ..layers_vanilla_transformer import VanillaTransformerDecoderLayer
from . import c_kernels
from .c_kernels import View, has_few_threads, kernels_compute
from .linear import FloatLinear, PlainLinear, mkl_is_slow, packed_linear
from .stack import Cached, PositionEncodings, Stack, packed_norm

KV = Tensor  # keys and values side by side, (B, N, H · (d_k + d_v))


class PackedLayer(nn.Module):
    """`VanillaTransformerDecoderLayer` on rows (R, D), the next tokens of all beams."""

    def __init__(
        self,
        layer: VanillaTransformerDecoderLayer,
        dtype: torch.dtype,
        quantization: str | None,
    ):
        super().__init__()

        def pack(*linears: nn.Linear) -> PlainLinear:
            return packed_linear(linears, dtype, quantization)

        attn = layer.self_attn
        cross = layer.cross_attn
        heads = attn.q_proj.out_features // attn.head_dim
        self.widths = heads, attn.head_dim, attn.value_head_dim
        self.kv_width = heads * (attn.head_dim + attn.value_head_dim)
        self.key_width = attn.k_proj.out_features
        self.scaling = attn.scaling
        self.cross_scaling = cross.scaling
        self.qkv_proj = pack(attn.q_proj, attn.k_proj, attn.v_proj)
        self.self_out_proj = pack(attn.out_proj)
        self.cross_q_proj = pack(cross.q_proj)
        self.cross_out_proj = pack(cross.out_proj)
        self.fc1 = pack(layer.fc1)
        self.fc2 = pack(layer.fc2)
        self.self_norm = packed_norm(layer.self_attn_layer_norm, dtype)
        self.cross_norm = packed_norm(layer.cross_attn_layer_norm, dtype)
        self.final_norm = packed_norm(layer.final_layer_norm, dtype)
        self.pre_norm = layer.pre_norm
        self.activation: Callable[[Tensor], Tensor] | None = layer.activation
        if isinstance(layer.activation, nn.ReLU):
            self.activation = None  # fused into the product

    def forward(
        self,
        x: Tensor,
        rows: Tensor,
        self_kv: KV,
        mask: Tensor | View | None,
        cross_kv: KV,
        source_mask: Tensor | View | None,
    ) -> Tensor:
        """The layer's output (R, D).

        Args:
            x: (R, D). rows: (R,), the slots of these tokens among the B · C of all sentences.
            self_kv: (B, C, ·). It receives the keys and values of these tokens. cross_kv: (B, S, ·).
            mask, source_mask: (B, 1, K, C), added to the scores, and (B, 1, 1, S), Boolean. None if all is visible.
                A `View` selects the kernel in C.
        """

        def self_attention(x: Tensor) -> Tensor:
            # (R, H · d_k), (R, H · (d_k + d_v)).
            query, kv = self.qkv_proj(x).tensor_split([self.key_width], dim=1)
            self_kv.view(-1, self_kv.shape[2]).index_copy_(0, rows, kv)  # (B, C, ·) -> (B · C, ·)
            return self.attend(query, self_kv, mask, self.scaling)

        def cross_attention(x: Tensor) -> Tensor:
            return self.attend(self.cross_q_proj(x), cross_kv, source_mask, self.cross_scaling)

        def feed_forward(x: Tensor) -> Tensor:
            if self.activation is None:
                return self.fc1.linear_relu(x)
            return self.activation(self.fc1(x))

        x = self.add_and_norm(x, self_attention, self.self_out_proj, self.self_norm)
        x = self.add_and_norm(x, cross_attention, self.cross_out_proj, self.cross_norm)
        return self.add_and_norm(x, feed_forward, self.fc2, self.final_norm)

    def attend(
        self,
        query: Tensor,
        kv: KV,
        mask: Tensor | View | None,
        scaling: float,
    ) -> Tensor:
        """Eq. 1 for the beams (R, H · d_k) of each sentence over the keys and values (B, N, ·) that they share."""
        if isinstance(mask, View):
            output = c_kernels.attend(
                query=query.float(),
                widths=self.widths,
                scaling=scaling,
                cache=kv,
                view=mask,
            )
            return output.to(query.dtype)
        return attend(query, kv, mask, self.widths[0], self.key_width, scaling)

    def add_and_norm(
        self,
        x: Tensor,
        sublayer: Callable[[Tensor], Tensor],
        last: PlainLinear,
        norm: nn.LayerNorm,
    ) -> Tensor:
        """`VanillaTransformerLayer.add_and_norm`, where `last` is the last product of the sub-layer."""
        if self.pre_norm:
            return last.linear_add(x, sublayer(norm(x)))
        return norm(last.linear_add(x, sublayer(x)))


def packed_encoder(model: PreTrainedModel, dtype: torch.dtype) -> nn.Module | None:
    """A copy of the encoder with packed float32 weights and the same embeddings. None if that gains nothing."""
    encoder: Any = model.get_encoder()
    weight = encoder.embed_tokens.weight
    if (
        dtype != torch.float32
        or weight.dtype != dtype
        or weight.device.type != "cpu"
        or not mkl_is_slow()
    ):
        return None
    linears = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    packed: dict[int, Any] = {id(linear): packed_linear([linear], dtype) for linear in linears}
    return copy.deepcopy(encoder, packed | {id(encoder.embed_tokens): encoder.embed_tokens})


def attend(
    query: Tensor,
    kv: KV,
    mask: Tensor | None,
    heads: int,
    key_width: int,
    scaling: float,
) -> Tensor:
    """Eq. 1 for the beams (R, H · d_k) of each sentence over the keys and values (B, N, ·) that they share."""
    batch = len(kv)

    def split_heads(states: Tensor) -> Tensor:
        # (B, H, ·, width)
        return states.reshape(batch, -1, heads, states.shape[-1] // heads).transpose(1, 2)

    key = split_heads(kv[..., :key_width])
    value = split_heads(kv[..., key_width:])  # (B, H, N, ·)
    output = F.scaled_dot_product_attention(
        split_heads(query),
        key,
        value,
        attn_mask=mask,
        scale=scaling,
    )
    # (B, H, K, d_v) -> (B, K, H · d_v) -> (R, H · d_v).
    return output.transpose(1, 2).flatten(2).flatten(0, 1)


class CrossKV:
    """Keys and values of the source, for each layer, with packed weights. Arguments as of `PackedWeights`."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        quantization: str | None,
    ):
        attentions = [layer.cross_attn for layer in model.get_decoder().layers]
        self.dtype = dtype
        self.projections = [
            packed_linear((each.k_proj, each.v_proj), dtype, quantization) for each in attentions
        ]

    def __call__(self, states: Tensor) -> list[KV]:
        """Keys and values of source states (B, S, D)."""
        x = states.to(self.dtype).flatten(0, 1)  # (B, S, D) -> (B · S, D)
        return [projection(x).unflatten(0, states.shape[:2]) for projection in self.projections]


def cache_rows(slots: Tensor, capacity: int) -> Tensor:
    """The rows (R,) of `slots` (B, K) among the B · C of a cache with this capacity of a sentence."""
    sentences = torch.arange(len(slots), device=slots.device)[:, None]
    return (slots + capacity * sentences).flatten()


class FewRows:
    """Encoder, decoder and output layer in C, for the few rows of a sentence or two."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        pack = partial(FloatLinear.of, dtype=dtype)
        self.encoder = Stack(model.get_encoder(), pack)
        self.decoder = Stack(model.get_decoder(), pack)
        self.lm_head = pack(model.lm_head)
        #: the most source tokens of a call. The modules, in its place, are slower than packed products
        self.most_tokens = 4 * self.encoder.in_c.most_rows


class PackedWeights(nn.Module):
    """A decoder and its output layer, packed for decoding in a dtype. Several searches may share one.

    See `optimize_for_inference` for `quantization`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        quantization: str | None,
    ):
        super().__init__()
        decoder: Any = model.get_decoder()
        self.config = decoder.config
        self.dtype = dtype
        self.embed_scale = decoder.embed_scale
        self.embedding = decoder.embed_tokens.weight.detach()
        layers = (PackedLayer(layer, dtype, quantization) for layer in decoder.layers)
        self.layers: Any = nn.ModuleList(layers)
        self.norm = packed_norm(decoder.layer_norm, dtype) if self.config.final_layer_norm else None
        self.lm_head = packed_linear([model.lm_head], dtype, quantization)
        self.cross_kv = CrossKV(model, dtype, quantization)
        self.position_encodings = PositionEncodings(decoder)
        # None: the model's own encoder is as fast.
        self.encoder = None if quantization else packed_encoder(model, dtype)
        self.few_rows: FewRows | None = None
        if quantization is None and kernels_compute(self.embedding.device, dtype):
            few = FewRows(model, dtype)
            self.few_rows = few if few.decoder.in_c.most_rows > 0 else None
        self.steps: Any = None  # see `engine.captured`

    def forward(
        self,
        embeds: Tensor,
        lengths: Tensor,
        encodings: Tensor,
        rows: Tensor,
        self_kv: list[KV],
        mask: Tensor | View | None,
        cross_kv: list[KV],
        source_mask: Tensor | View | None,
        lm_head: PlainLinear | None = None,
    ) -> Tensor:
        """Logits (B, K, V) of the tokens after these, whose keys and values are written into `self_kv`.

        Args:
            embeds: (B, K, D), of the tokens, unscaled.
            lengths: (B,), of the hypotheses, these tokens included. encodings: (n, D), by length.
            lm_head: another output layer.
            Other arguments: see `PackedLayer`.
        """
        x = torch.add(encodings[lengths][:, None], embeds, alpha=self.embed_scale)  # (B, K, D)
        x = x.flatten(0, 1)  # (R, D)
        head = self.lm_head if lm_head is None else lm_head
        few = self.few_rows
        if isinstance(mask, View) and few is not None and len(x) <= few.decoder.in_c.most_rows:
            caches: list[Cached] = []
            for kv, source_kv in zip(self_kv, cross_kv, strict=True):
                caches += [(kv, mask, rows), (source_kv, cast(View, source_mask), None)]
            states, _ = few.decoder(x.float(), caches)
            if lm_head is None and len(x) <= few.lm_head.plain_rows:
                logits = few.lm_head(states)
            else:
                logits = head(states.to(self.dtype))
            return logits.unflatten(0, embeds.shape[:2])
        x = x.to(self.dtype)
        with attention_kernels(self.config.attention_kernels, x.device), no_autocast(x.device.type):
            for layer, kv, source_kv in zip(self.layers, self_kv, cross_kv, strict=True):
                x = layer(
                    x,
                    rows,
                    kv,
                    mask,
                    source_kv,
                    source_mask,
                )
            x = x if self.norm is None else self.norm(x)
            logits = head(x)
        return logits.unflatten(0, embeds.shape[:2])

    def encode(self, ids: Tensor, mask: Tensor) -> BaseModelOutput | None:
        """The source (B, S) as states (B, S, D). None if the model's own encoder is as fast."""
        few = self.few_rows
        if few is not None and has_few_threads() and ids.numel() <= few.most_tokens:
            return few.encoder.encode(ids, mask, self.embedding.dtype, self.dtype)
        return None if self.encoder is None else self.encoder(ids, mask)


def no_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context without autocast. Packed weights have its dtype. On a GPU it would compute norms in float32,
    and it casts no inputs of `_addmm_activation` and of products in place."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def fold_biases(weights: PackedWeights) -> None:
    """Let the residual of each sub-layer contain the bias of its last product. A GPU then launches a kernel less.

    A post-norm sub-layer computes LayerNorm(x + W s + b). Here the LayerNorm before it, or the encodings of positions,
    give x + b, and its first product W' subtracts W' b.
    """
    before: Any = weights.position_encodings
    for layer in weights.layers:
        if layer.pre_norm:
            return  # x is no output of a LayerNorm
        sublayers = (
            (layer.qkv_proj, layer.self_out_proj, layer.self_norm),
            (layer.cross_q_proj, layer.cross_out_proj, layer.cross_norm),
            (layer.fc1, layer.fc2, layer.final_norm),
        )
        for first, last, norm in sublayers:
            if last.bias is not None and first.bias is not None:
                first.bias = (first.bias.double() - first.weight.double() @ last.bias.double()).to(
                    first.bias.dtype
                )
                if isinstance(before, PositionEncodings):
                    before.shift = last.bias.to(before.encodings.dtype)
                else:
                    before.bias = nn.Parameter(before.bias + last.bias, requires_grad=False)
                last.bias = None
            before = norm
