"""Mistakes that implementations of the Transformer make: what differs, where the paper has it, and how it happens."""

from functools import partial
from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """An option of a place of `reference.Reference` that is wrong."""

    place: str
    section: str
    option: Any
    explanation: str


_scale = partial(Mistake, "embedding scale", "§3.4")
_position = partial(Mistake, "positions", "§3.5")
_head = partial(Mistake, "heads", "§3.2.2")
_factor = partial(Mistake, "attention scale", "§3.2.1, Eq. 1")
_softmax = partial(Mistake, "softmax", "§3.2.1, Eq. 1")
_causal = partial(Mistake, "causal mask", "§3.2.3")
_causality = partial(Mistake, "causality", "§3.2.3")
_padding = partial(Mistake, "padding", "§3.2.3")
_value = partial(Mistake, "mask value", "§3.2.3")
_memory = partial(Mistake, "memory", "§3.2.3")
_residual = partial(Mistake, "residual", "§3.1")
_norm = partial(Mistake, "norm", "§3.1")
_hidden = partial(Mistake, "activation", "§3.3, Eq. 2")
_input = partial(Mistake, "inputs", "§3.1")
_sublayer = partial(Mistake, "sublayers", "§3.1")

MISTAKES = (
    _scale("none", "embeddings are not multiplied by sqrt(d_model)"),
    _scale("d_model", "embeddings are multiplied by d_model, not by its square root"),
    _scale("1/sqrt(d_model)", "embeddings are divided by sqrt(d_model)"),
    _position("none", "positions are not added"),
    _position("none in the encoder", "positions are not added to the source"),
    _position("none in the decoder", "positions are not added to the target"),
    _position("swapped", "cosines are in the even dimensions and sines in the odd ones"),
    _position("only sines", "the odd dimensions have sines, not cosines"),
    _position("only cosines", "the even dimensions have cosines, not sines"),
    _position(
        "2i twice", "the exponent is 4i / d_model: i already counts by 2, and is doubled again"
    ),
    _position("no 2", "the exponent is i / d_model, not 2i / d_model"),
    _position(
        "every dimension",
        "a sine and its cosine have different frequencies: the exponent counts dimensions",
    ),
    _position(
        "every dimension twice",
        "the exponents are 4i / d_model for a sine, (4i + 4) / d_model for its cosine: 2i is doubled again",
    ),
    _position("multiplied", "positions are multiplied by 10000^(2i / d_model), not divided by it"),
    _position("from 1", "positions start at 1, not at 0"),
    _position("always 0", "every token gets position 0"),
    _position(
        "by sentence", "positions count the sentences of a batch, not the tokens of a sentence"
    ),
    _position("base 1000", "the base of the wavelengths is 1000, not 10000"),
    _position("base 100000", "the base of the wavelengths is 100000, not 10000"),
    _position(
        "scaled",
        "positions are multiplied by sqrt(d_model) too: scale the embeddings before the addition",
    ),
    _head(
        "not transposed",
        "heads are split by view(B, H, T, d_k), not a transposed view(B, T, H, d_k)",
    ),
    _head(
        "neither transposed", "heads are split and joined without transposes, which mixes positions"
    ),
    _head(
        "not transposed back",
        "heads are joined without a transpose back to (B, T, H, d_k), which mixes positions",
    ),
    _head("one", "the projections are not split into heads"),
    _factor("none", "scores are not divided by sqrt(d_k)"),
    _factor("sqrt(d_model)", "scores are divided by sqrt(d_model), not by sqrt(d_k)"),
    _factor("d_k", "scores are divided by d_k, not by its square root"),
    _factor("sqrt(keys)", "scores are divided by the root of the number of keys, not of d_k"),
    _factor("multiplied", "scores are multiplied by sqrt(d_k)"),
    _softmax(
        "over queries", "the softmax runs over the queries (dim=-2), not over the keys (dim=-1)"
    ),
    _softmax("over heads", "the softmax runs over the heads (dim=1), not over the keys (dim=-1)"),
    _causal(
        "none", "the decoder sees later target tokens: the causal mask is missing or has no effect"
    ),
    _causal(
        "one too many", "each position sees the next token too: the mask's diagonal is off by one"
    ),
    _causal("without itself", "a position does not see itself: the mask's diagonal is off by one"),
    _causal(
        "without itself, the first sees none",
        "a position does not see itself, and the first sees none: the diagonal is off by one",
    ),
    _causal("inverted", "a position sees later tokens alone: the causal mask is inverted"),
    _causal(
        "reversed",
        "a position sees itself and later ones: the causal mask is transposed or inverted",
    ),
    _causality(
        "in the encoder",
        "the encoder has a causal mask too, and sees no later tokens of the source",
    ),
    _causality("in cross-attention", "cross-attention has the causal mask of the target"),
    _padding("ignored", "padding of the source is attended to"),
    _padding("ignored in the encoder", "the encoder attends to padding"),
    _padding("ignored in cross-attention", "cross-attention attends to padding of the source"),
    _padding("inverted", "only padding is attended to: the padding mask is inverted"),
    _padding(
        "inverted in the encoder", "the encoder attends to padding alone: its mask is inverted"
    ),
    _padding(
        "inverted in cross-attention",
        "cross-attention attends to padding alone: its mask is inverted",
    ),
    _value("zero", "masked scores become 0, not minus infinity: exp(0) is 1"),
    _value(
        "after softmax", "the mask is applied after the softmax, so that weights do not add up to 1"
    ),
    _memory(
        "the decoder itself",
        "cross-attention takes keys and values from the decoder, not from the encoder",
    ),
    _memory(
        "the decoder itself, masked",
        "cross-attention is one more self-attention, with the causal mask",
    ),
    _memory(
        "the embeddings", "cross-attention reads the source's embeddings, not the encoder's output"
    ),
    Mistake("attention output", "§3.2.2", "not projected", "the output projection W^O is not used"),
    _residual("none", "no sublayer has a residual connection"),
    _residual("none around self-attention", "self-attention has no residual connection"),
    _residual("none around cross-attention", "cross-attention has no residual connection"),
    _residual("none around feed-forward", "the feed-forward network has no residual connection"),
    _residual("outside the norm", "x + LayerNorm(Sublayer(x)) is neither post-norm nor pre-norm"),
    _residual(
        "outside the norm around self-attention", "self-attention is x + LayerNorm(Sublayer(x))"
    ),
    _residual(
        "outside the norm around cross-attention", "cross-attention is x + LayerNorm(Sublayer(x))"
    ),
    _residual(
        "outside the norm around feed-forward",
        "the feed-forward network is x + LayerNorm(Sublayer(x))",
    ),
    _residual("of the norm", "the residual adds LayerNorm(x), not x"),
    _norm("none", "layers are not normalised"),
    _norm("variance", "LayerNorm divides by the variance, not by its square root"),
    _norm("unbiased variance", "LayerNorm divides by the variance, not by its square root"),
    _norm("over positions", "LayerNorm averages over positions, not over features"),
    _norm(
        "over positions and features",
        "LayerNorm averages over positions and features, not over features alone",
    ),
    _norm("no mean", "LayerNorm does not subtract the mean"),
    Mistake("epsilon", "§3.1", "large", "epsilon is so large that it changes the numbers"),
    Mistake("final norm", "§3.1", "unused", "the normalisation after the stacks is not used"),
    _hidden("none", "the feed-forward network has no activation"),
    _hidden("sigmoid", "the activation is a sigmoid, not ReLU"),
    Mistake("feed-forward", "§3.3, Eq. 2", "second ReLU", "a ReLU follows the second matrix too"),
    _input("decoder reads the source", "the decoder reads the source, not the target"),
    _input("encoder reads the target", "the encoder reads the target, not the source"),
    Mistake(
        "embeddings", "§3.4", "normalised", "a normalisation follows the embeddings and positions"
    ),
    Mistake("output scale", "§3.4", "1/sqrt(d_model)", "the logits are divided by sqrt(d_model)"),
    _sublayer("cross-attention first", "cross-attention comes before self-attention"),
    _sublayer("no self-attention", "self-attention is not called"),
    _sublayer("no cross-attention", "the decoder has no cross-attention"),
    _sublayer("no feed-forward", "the feed-forward network is not called"),
)
