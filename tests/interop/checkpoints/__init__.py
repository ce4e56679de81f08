"""Small random checkpoints in the layouts of other toolkits, and restatements of their models in NumPy.

A dictionary describes a toolkit. Its keys are parts of the names of a `Restatement`: "encoder" and "decoder" (the
prefix of their layers), "norm" (after a stack), "output", "self.q" to "ffn.norm", and such a part with its stack
("decoder.self.norm") if the stacks differ.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.interop.restatement import Pair, Restatement

#: d_model, d_ff, layers of encoder and decoder, and heads of all these models
D, FFN, LAYERS, HEADS = 12, 20, (2, 1), 3

Shapes = dict[str, tuple[int, ...]]


def attention_names(kinds: dict[str, str], projections: dict[str, str]) -> dict[str, str]:
    """Describe projections by the module of each kind ("self", "encoder.self") and the part of q, k, v and o in it."""
    return {
        f"{kind}.{part}": module + name
        for kind, module in kinds.items()
        for part, name in projections.items()
    }


def stem(names: dict[str, str], name: str) -> str:
    """The toolkit's name of a pair, without "weight" or "bias"."""
    if name in names:
        return names[name]
    stack, *rest = name.split(".")
    if rest == ["norm"]:
        return f"{stack}.{names['norm']}"
    part = ".".join(rest[1:])
    return f"{names[stack]}.{rest[0]}.{names.get(f'{stack}.{part}') or names[part]}"


def pair_shapes(layers: tuple[int, int] = LAYERS, final_norms: bool = False) -> Shapes:
    """The pairs of a `Restatement` except the output: (out, in) of each matrix, (D,) of each normalisation."""
    shapes: Shapes = {}
    attentions = {"encoder": ["self"], "decoder": ["self", "cross"]}
    for (stack, kinds), depth in zip(attentions.items(), layers, strict=True):
        for number in range(depth):
            layer = f"{stack}.{number}"
            for kind in kinds:
                shapes |= {f"{layer}.{kind}.{part}": (D, D) for part in "qkvo"}
            shapes[f"{layer}.ffn.1"] = (FFN, D)
            shapes[f"{layer}.ffn.2"] = (D, FFN)
            shapes |= {f"{layer}.{kind}.norm": (D,) for kind in (*kinds, "ffn")}
        if final_norms:
            shapes[f"{stack}.norm"] = (D,)
    return shapes


def random_weights(
    names: dict[str, str],
    others: Shapes,
    biased: Callable[[str], bool] = lambda name: True,
    **shape: Any,
) -> dict[str, Tensor]:
    """Random weights under a toolkit's names.

    Args:
        others: names and shapes of embeddings and the output.
        biased: if the matrix of this pair has a bias.
        **shape: of `pair_shapes`.
    """
    shapes = dict(others)
    for name, size in pair_shapes(**shape).items():
        shapes[f"{stem(names, name)}.weight"] = size
        if len(size) == 1 or biased(name):
            shapes[f"{stem(names, name)}.bias"] = size[:1]
    generator = torch.Generator().manual_seed(6)
    return {name: torch.randn(size, generator=generator) * 0.4 for name, size in shapes.items()}


def restatement(
    names: dict[str, str],
    tensors: dict[str, Tensor],
    embeddings: dict[str, str],
    position: Any,
    **settings: Any,
) -> Restatement:
    """The model of these tensors. A missing bias is 0. `embeddings` names the matrices of "source" and "target"."""
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def pair(name: str) -> Pair:
        theirs = stem(names, name)
        return arrays[f"{theirs}.weight"].T, arrays.get(f"{theirs}.bias", np.zeros(1))

    return Restatement(
        pair,
        lambda side: arrays[f"{embeddings[side]}.weight"],
        position,
        layers=LAYERS,
        heads=HEADS,
        **settings,
    )
