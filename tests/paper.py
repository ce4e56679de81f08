"""The paper's equations restated in NumPy, in float64, one sentence and one head at a time: the judge of every model.

Nothing here is batched, padded or masked unless an equation says so. A model has to give the same numbers with
its batches. Sections and equations are the paper's (Vaswani et al. 2017). The variants that other implementations
have, and our configuration names, are restated from their own definitions.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from hf_vanilla_transformer import VanillaTransformerConfig

Array = np.ndarray
Weights = dict[str, Array]  # by our parameters' names

ERF = np.vectorize(math.erf, otypes=[float])
ACTIVATIONS = {
    "relu": lambda x: np.maximum(0, x),
    "gelu": lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def weights_of(module: torch.nn.Module) -> Weights:
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: each.detach().double().numpy() for name, each in parameters}


def paper_position(pos: int, d_model: int, layout: str = "sinusoidal") -> Array:
    """§3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same)."""
    if layout == "sinusoidal_fairseq":
        return fairseq_position(pos, d_model)
    angles = [pos / 10000 ** (2 * i / d_model) for i in range(math.ceil(d_model / 2))]
    sines = [math.sin(angle) for angle in angles]
    cosines = [math.cos(angle) for angle in angles[: d_model // 2]]
    if layout == "sinusoidal_split":
        return np.array(sines + cosines)
    position = np.empty(d_model)
    position[0::2] = sines
    position[1::2] = cosines
    return position


def fairseq_position(pos: int, d_model: int) -> Array:
    """fairseq's `SinusoidalPositionalEmbedding`, row `pos` of its table. Undefined where d_model is below 4.

    With half = d_model // 2, the angle of column i is pos · exp(-i · log(10000) / (half - 1)). The sines of all angles
    come first, then their cosines, and a zero where d_model is odd.
    """
    half = d_model // 2
    step = math.log(10000) / (half - 1)
    angles = pos * np.exp(-step * np.arange(half))
    rest = np.zeros(d_model % 2)
    return np.concatenate([np.sin(angles), np.cos(angles), rest])


def paper_positions(length: int, config: VanillaTransformerConfig) -> Array:
    """The positions of a sentence (length, D); fairseq's first token has position pad_token_id + 1."""
    layout = config.position_encoding_type
    first = config.pad_token_id + 1 if layout == "sinusoidal_fairseq" else 0
    positions = range(first, first + length)
    return np.stack([paper_position(pos, config.d_model, layout) for pos in positions])


def paper_softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def paper_attention(q: Array, k: Array, v: Array, visible: Array | None = None) -> Array:
    """Eq. 1, softmax(Q K^T / sqrt(d_k)) V, with -inf where a connection is illegal (§3.2.3)."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    return paper_softmax(scores) @ v


def linear(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def paper_multi_head(
    w: Weights,
    name: str,
    x: Array,
    y: Array,
    heads: int,
    visible: Array | None = None,
) -> Array:
    """§3.2.2: Concat(head_1 … head_h) W^O, head_i = Attention(x W_i^Q, y W_i^K, y W_i^V)."""
    q = np.split(linear(w, f"{name}.q_proj", x), heads, axis=1)
    k = np.split(linear(w, f"{name}.k_proj", y), heads, axis=1)
    v = np.split(linear(w, f"{name}.v_proj", y), heads, axis=1)
    outputs = [paper_attention(q[i], k[i], v[i], visible) for i in range(heads)]
    return linear(w, f"{name}.out_proj", np.concatenate(outputs, axis=1))


def paper_layer_norm(w: Weights, name: str, x: Array, eps: float = 1e-5) -> Array:
    """Ba et al. 2016, the paper's reference: (x - mean) / sqrt(variance) · gain + bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def paper_ffn(w: Weights, name: str, x: Array, activation: str = "relu") -> Array:
    """Eq. 2: max(0, x W_1 + b_1) W_2 + b_2."""
    hidden = linear(w, f"{name}.fc1", x)
    return linear(w, f"{name}.fc2", ACTIVATIONS[activation](hidden))


def paper_embedding(
    w: Weights, name: str, tokens: list[int], config: VanillaTransformerConfig
) -> Array:
    """§3.4 and §3.5: sqrt(d_model) · embedding + position."""
    scale = math.sqrt(config.d_model) if config.scale_embedding else 1
    learned = w.get(f"{name}.embed_positions.weight")  # Table 3, row E
    positions = paper_positions(len(tokens), config) if learned is None else learned[: len(tokens)]
    return scale * w[f"{name}.embed_tokens.weight"][tokens] + positions


def paper_add_and_norm(
    w: Weights,
    name: str,
    x: Array,
    sublayer: Callable[[Array], Array],
    config: VanillaTransformerConfig,
) -> Array:
    """§3.1: LayerNorm(x + Sublayer(x)). Pre-norm (Wang et al. 2019, arXiv 1906.01787): x + Sublayer(LayerNorm(x))."""
    if config.layer_norm_position == "pre":
        return x + sublayer(paper_layer_norm(w, name, x, config.layer_norm_eps))
    return paper_layer_norm(w, name, x + sublayer(x), config.layer_norm_eps)


def paper_stack(
    w: Weights,
    name: str,
    tokens: list[int],
    config: VanillaTransformerConfig,
    memory: Array | None = None,
) -> Array:
    """Figure 1: the encoder, or with its output the decoder."""
    kind = "encoder" if memory is None else "decoder"
    heads = getattr(config, f"{kind}_attention_heads")
    visible = None if memory is None else np.tri(len(tokens), dtype=bool)
    x = paper_embedding(w, name, tokens, config)
    for i in range(getattr(config, f"{kind}_layers")):
        layer = f"{name}.layers.{i}"

        def attend(x: Array, layer: str = layer) -> Array:
            return paper_multi_head(w, f"{layer}.self_attn", x, x, heads, visible)

        def attend_to_source(x: Array, layer: str = layer) -> Array:
            assert memory is not None
            return paper_multi_head(w, f"{layer}.cross_attn", x, memory, heads)

        def feed(x: Array, layer: str = layer) -> Array:
            return paper_ffn(w, layer, x, config.activation_function)

        x = paper_add_and_norm(w, f"{layer}.self_attn_layer_norm", x, attend, config)
        if memory is not None:
            x = paper_add_and_norm(w, f"{layer}.cross_attn_layer_norm", x, attend_to_source, config)
        x = paper_add_and_norm(w, f"{layer}.final_layer_norm", x, feed, config)
    if config.final_layer_norm:
        x = paper_layer_norm(w, f"{name}.layer_norm", x, config.layer_norm_eps)
    return x


class PaperOutput(NamedTuple):
    memory: Array  # (S, D)
    logits: Array  # (T, V)
    loss: float  # the sum of the tokens' cross-entropies


def paper_translation(model: torch.nn.Module, source: list[int], target: list[int]) -> PaperOutput:
    """Figure 1 for one pair of sentences, with the weights of our model. The loss is without label smoothing."""
    w = weights_of(model)
    config = model.config
    memory = paper_stack(w, "model.encoder", source, config)
    # the decoder reads the target one position later (§3.1)
    inputs = [config.decoder_start_token_id, *target[:-1]]
    states = paper_stack(w, "model.decoder", inputs, config, memory)
    logits = linear(w, "lm_head", states)
    right = paper_softmax(logits)[np.arange(len(target)), target]
    return PaperOutput(memory, logits, -np.log(right).sum())
