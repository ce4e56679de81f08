"""The paper's forward pass as a function of weights, with a choice at every place where implementations differ.

The first option of a place is the paper's. Other right options are in `ALLOWED`, mistakes in `mistakes.MISTAKES`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Place -> options that are right. A choice maps places to options, and a missing place is as in the paper.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "norm position": ("post", "pre"),
    "positions": ("interleaved", "split", "tensor2tensor"),
    "activation": ("relu", "gelu", "gelu by tanh", "silu"),
    "norm": ("biased", "unbiased", "rms"),
    "heads": ("blocks", "strides"),
}

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu by tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
}
# Exponents of d_model.
_SCALES = {"sqrt(d_model)": 0.5, "none": 0.0, "d_model": 1.0, "1/sqrt(d_model)": -0.5}


@dataclass(frozen=True)
class Reference:
    """The model of §3 with these weights, named as in this package."""

    weights: Mapping[str, Tensor]
    heads: int
    pad_token_id: int
    #: stack -> its table of positions (P, D)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    epsilon: float = 1e-5
    #: the epsilon of a normalisation that has one large enough to change the numbers, or 0
    large_epsilon: float = 0.0

    def __call__(self, source: Tensor, target: Tensor, choice: Mapping[str, Any]) -> Tensor:
        """Return the logits (B, T, V) of source (B, S) and decoder input (B, T)."""
        if choice.get("inputs") == "decoder reads the source":
            target = source[:, : target.shape[1]]
        if choice.get("inputs") == "encoder reads the target":
            source = target
        visible = source.ne(self.pad_token_id)[:, None, None, :]  # (B, 1, 1, S)
        option = choice.get("padding")

        def shown(where: str) -> Tensor:
            if option in ("ignored", f"ignored in {where}"):
                return torch.ones_like(visible)
            if option in ("inverted", f"inverted in {where}"):
                return ~visible
            if choice.get("causality") == f"in {where}":
                return visible & self.causal_mask(source.shape[1], {})
            return visible

        hidden = self.embed(source, "encoder", choice)
        memory = hidden
        for number in range(self.depth("encoder")):
            hidden = self.layer(
                hidden, None, shown("the encoder"), None, f"model.encoder.layers.{number}.", choice
            )
        if choice.get("memory") != "the embeddings":
            memory = self.final_norm(hidden, "encoder", choice)
        hidden = self.embed(target, "decoder", choice)
        if choice.get("inputs") == "shifted inside":
            hidden = self.shifted(target, choice)
        causal = self.causal_mask(target.shape[1], choice)
        for number in range(self.depth("decoder")):
            hidden = self.layer(
                hidden,
                memory,
                causal,
                shown("cross-attention"),
                f"model.decoder.layers.{number}.",
                choice,
            )
        return self.output(self.final_norm(hidden, "decoder", choice), choice)

    def output(self, hidden: Tensor, choice: Mapping[str, Any]) -> Tensor:
        """The logits (B, T, V) of the decoder's states (§3.4)."""
        logits = self.linear(hidden, "lm_head")
        if choice.get("output scale") == "1/sqrt(d_model)":
            return logits * hidden.shape[-1] ** -0.5
        return logits

    def shifted(self, target: Tensor, choice: Mapping[str, Any]) -> Tensor:
        """The embeddings of a target after a vector of zeros, without its last token, plus positions."""
        table = self.weights["model.decoder.embed_tokens.weight"]
        scale = table.shape[1] ** _SCALES[choice.get("embedding scale", "sqrt(d_model)")]
        vectors = functional.pad(table[target][:, :-1], (0, 0, 1, 0)) * scale
        return vectors + self.positions(
            target.shape[1], table.shape[1], "decoder", choice.get("positions", "")
        )

    def depth(self, stack: str) -> int:
        return sum(
            f"model.{stack}.layers.{number}.fc1.weight" in self.weights for number in range(64)
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def embed(self, ids: Tensor, stack: str, choice: Mapping[str, Any]) -> Tensor:
        """Scaled embeddings (§3.4) plus positions (§3.5), (B, T, D)."""
        table = self.weights[f"model.{stack}.embed_tokens.weight"]
        scale = table.shape[1] ** _SCALES[choice.get("embedding scale", "sqrt(d_model)")]
        option = choice.get("positions", "interleaved")
        vectors = table[ids] * scale
        if option == "scaled":
            vectors = (table[ids] + self.added(ids, stack, choice)) * scale
        elif option not in ("none", f"none in the {stack}"):
            vectors = vectors + self.added(ids, stack, choice)
        if choice.get("embeddings") == "normalised":
            return self.norm(vectors, f"model.{stack}.embedding_norm", choice)
        return vectors

    def added(self, ids: Tensor, stack: str, choice: Mapping[str, Any]) -> Tensor:
        """The vectors of positions (T, D) that are added to embeddings, or (B, 1, D) by a mistake."""
        width = self.weights[f"model.{stack}.embed_tokens.weight"].shape[1]
        option = choice.get("positions", "interleaved")
        if option == "by sentence":
            return self.positions(len(ids), width, stack, option)[:, None]
        vectors = self.positions(ids.shape[1], width, stack, option)
        is_step = stack == "decoder" and choice.get("steps") == "each at position 0"
        return vectors[:1] if is_step or option == "always 0" else vectors

    def positions(self, length: int, width: int, stack: str, option: str) -> Tensor:
        """The vectors (T, D) of positions 0, 1, …"""
        if stack in self.tables and option in ("interleaved", "scaled", "by sentence", "always 0"):
            return self.tables[stack][:length]
        numbers = torch.arange(length, dtype=torch.float64)[:, None]
        even = torch.arange(0, width, 2, dtype=torch.float64)  # 2i
        if option in ("split", "tensor2tensor"):
            exponents = even / width
            if option == "tensor2tensor":
                exponents = torch.linspace(0, 1, len(even), dtype=torch.float64)
            angles = numbers / 10000**exponents
            return torch.cat([angles.sin(), angles.cos()], dim=-1).float()
        if option == "from 1":
            numbers = numbers + 1
        base = {"base 1000": 1000.0, "base 100000": 100000.0}.get(option, 10000.0)
        odd = even
        if option == "every dimension":
            odd = even + 1
        if option == "every dimension twice":
            even, odd = 2 * even, 2 * even + 2
        even = {"2i twice": 2 * even, "no 2": even / 2, "multiplied": -even}.get(option, even)
        if option in ("2i twice", "no 2", "multiplied"):
            odd = even
        sines = (numbers / base ** (even / width)).sin()
        cosines = (numbers / base ** (odd / width)).cos()
        waves = {
            "swapped": (cosines, sines),
            "only sines": (sines, sines),
            "only cosines": (cosines, cosines),
        }
        return (
            torch.stack(waves.get(option, (sines, cosines)), dim=-1).flatten(-2)[:, :width].float()
        )

    @staticmethod
    def causal_mask(length: int, choice: Mapping[str, Any]) -> Tensor:
        """Which positions (T, T) a position may attend to: itself and earlier ones (§3.2.3)."""
        full = torch.ones(length, length, dtype=torch.bool)
        return {
            "none": full,
            "one too many": full.tril(1),
            "without itself": full.tril(-1)
            | torch.eye(length, dtype=torch.bool)[:1].expand(length, -1),
            "without itself, the first sees none": full.tril(-1),
            "reversed": full.triu(),
            "inverted": full.triu(1),
        }.get(choice.get("causal mask", ""), full.tril())

    def layer(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor,
        cross: Tensor | None,
        at: str,
        choice: Mapping[str, Any],
    ) -> Tensor:
        """One layer of the encoder, or with `memory` of the decoder (§3.1)."""

        def feed_forward(y: Tensor) -> Tensor:
            return self.feed_forward(y, at, choice)

        def self_attention(y: Tensor) -> Tensor:
            return self.attention(y, y, mask, f"{at}self_attn.", choice)

        def cross_attention(y: Tensor) -> Tensor:
            masks: Any = {
                "the decoder itself": torch.ones(1, dtype=torch.bool),
                "the decoder itself, masked": mask,
            }
            option = choice.get("memory")
            read = y if option in masks else memory
            return self.attention(y, read, masks.get(option, cross), f"{at}cross_attn.", choice)

        sublayers = [("self-attention", self_attention, "self_attn_layer_norm")]
        if memory is not None:
            sublayers.append(("cross-attention", cross_attention, "cross_attn_layer_norm"))
            if choice.get("sublayers") == "cross-attention first":
                sublayers.reverse()
        sublayers.append(("feed-forward", feed_forward, "final_layer_norm"))
        for name, function, norm in sublayers:
            if choice.get("sublayers") == f"no {name}":
                continue
            x = self.sublayer(x, function, f"{at}{norm}", name, choice)
        return x

    def feed_forward(self, x: Tensor, at: str, choice: Mapping[str, Any]) -> Tensor:
        """max(0, x W_1 + b_1) W_2 + b_2 (§3.3, Eq. 2)."""
        hidden = _ACTIVATIONS[choice.get("activation", "relu")](self.linear(x, f"{at}fc1"))
        output = self.linear(hidden, f"{at}fc2")
        return output.relu() if choice.get("feed-forward") == "second ReLU" else output

    def sublayer(
        self, x: Tensor, function: Any, norm: str, name: str, choice: Mapping[str, Any]
    ) -> Tensor:
        """LayerNorm(x + Sublayer(x)) (§3.1), or x + Sublayer(LayerNorm(x)) if pre-norm."""
        option = choice.get("residual")
        missing = option in ("none", f"none around {name}")
        if choice.get("norm position") == "pre":
            normed = self.norm(x, norm, choice)
            if missing:
                return function(normed)
            return (normed if option == "of the norm" else x) + function(normed)
        if option in ("outside the norm", f"outside the norm around {name}"):
            return x + self.norm(function(x), norm, choice)
        return self.norm(function(x) if missing else x + function(x), norm, choice)

    def norm(self, x: Tensor, name: str, choice: Mapping[str, Any]) -> Tensor:
        gain = self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias", torch.zeros(()))
        kind = choice.get("norm", "biased")
        if kind == "none":
            return x
        epsilon = choice.get("epsilon", self.epsilon)
        if epsilon == "large":
            if not self.large_epsilon:
                raise KeyError("the model has no large epsilon")
            epsilon = self.large_epsilon
        if kind == "rms":
            return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain + bias
        axes = {"over positions": (1,), "over positions and features": (1, 2)}.get(kind, (-1,))
        centred = x if kind == "no mean" else x - x.mean(axes, keepdim=True)
        variance = x.var(axes, keepdim=True, unbiased=kind.startswith("unbiased"))
        if kind == "unbiased":
            divisor = variance.sqrt() + epsilon
        elif kind.endswith("variance"):
            divisor = variance + epsilon
        else:
            divisor = (variance + epsilon).sqrt()
        return centred / divisor * gain + bias

    def final_norm(self, x: Tensor, stack: str, choice: Mapping[str, Any]) -> Tensor:
        name = f"model.{stack}.layer_norm"
        unused = choice.get("final norm") == "unused" or f"{name}.weight" not in self.weights
        return x if unused else self.norm(x, name, choice)

    def attention(
        self, x: Tensor, memory: Any, mask: Any, at: str, choice: Mapping[str, Any]
    ) -> Tensor:
        """Multi-head attention (§3.2.2) of x (B, T, D) to memory (B, S, D). `mask` is True where a key is visible."""
        batch, length, width = x.shape
        option = choice.get("heads", "blocks")

        def split(y: Tensor) -> Tensor:
            size = y.shape[-1] // self.heads
            if option == "one":
                return y[:, None]
            if option in ("not transposed", "neither transposed"):
                return y.reshape(batch, self.heads, -1, size)
            if option == "strides":  # head h has the features h, h + H, …
                return y.reshape(batch, -1, size, self.heads).permute(0, 3, 1, 2)
            return y.reshape(batch, -1, self.heads, size).transpose(1, 2)  # (B, H, T, d_k)

        q = split(self.linear(x, f"{at}q_proj"))
        k = split(self.linear(memory, f"{at}k_proj"))
        v = split(self.linear(memory, f"{at}v_proj"))
        size = len(self.weights[f"{at}q_proj.weight"]) // self.heads
        scales = {
            "none": 1.0,
            "sqrt(d_model)": width**-0.5,
            "d_k": 1 / size,
            "multiplied": size**0.5,
        }
        scales["sqrt(keys)"] = memory.shape[1] ** -0.5
        scale = scales.get(choice.get("attention scale", ""), size**-0.5)
        scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
        if choice.get("mask value") == "zero":
            scores = scores.masked_fill(~mask, 0.0)
        elif choice.get("mask value") != "after softmax":
            is_infinite = choice.get("softmax") is None and bool(mask.any(-1).all())
            scores = scores.masked_fill(~mask, -math.inf if is_infinite else -1e9)
        weights = scores.softmax(
            {"over queries": -2, "over heads": 1}.get(choice.get("softmax", ""), -1)
        )
        if choice.get("mask value") == "after softmax":
            weights = weights.masked_fill(~mask, 0.0)
        context = weights @ v  # (B, H, T, d_k)
        if option == "strides":
            context = context.permute(0, 2, 3, 1)
        elif option not in ("neither transposed", "not transposed back"):
            context = context.transpose(1, 2)
        merged = context.reshape(batch, length, -1)
        if choice.get("attention output") == "not projected":
            return merged
        return self.linear(merged, f"{at}out_proj")
