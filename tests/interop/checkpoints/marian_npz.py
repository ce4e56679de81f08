"""Marian's .npz files: small, with random weights."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.interop.checkpoints import HEADS, LAYERS, D, pair_shapes
from tests.interop.restatement import Restatement

PEER = "NumPy restatement of Marian 1.12"

# Options that Marian writes for `--task transformer-base`, as far as it concerns the architecture.
OPTIONS = {
    "type": "transformer",
    "enc-depth": LAYERS[0],
    "dec-depth": LAYERS[1],
    "dim-emb": D,
    "transformer-heads": HEADS,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-ffn-depth": 2,
    "transformer-tied-layers": [],
    "transformer-train-positions": False,
    "transformer-guided-alignment-layer": "last",
    "tied-embeddings-all": True,
    "ulr": False,
    "version": "v1.12.0",
}


def array_names(name: str) -> tuple[str, str]:
    """Marian's names of a pair."""
    if name.endswith("coder.norm"):
        stack = name.removesuffix(".norm")
        return f"{stack}_top_ln_scale", f"{stack}_top_ln_bias"
    stack, layer, kind, part = name.split(".")
    theirs = f"{stack}_l{int(layer) + 1}_{'context' if kind == 'cross' else kind}"
    if part == "norm":
        theirs += "_ffn_ln" if kind == "ffn" else "_Wo_ln"
        return f"{theirs}_scale", f"{theirs}_bias"
    return f"{theirs}_W{part}", f"{theirs}_b{part}"


def weights(sizes: tuple[int, int], tying: str = "all") -> dict[str, np.ndarray]:
    """Random weights under Marian's names. `tying`: its option, "all", "src" (and not the output) or "none"."""
    shapes: dict[str, tuple[int, ...]] = {"decoder_ff_logit_out_b": (1, sizes[1])}
    if tying == "none":
        shapes |= {"encoder_Wemb": (sizes[0], D), "decoder_Wemb": (sizes[1], D)}
        shapes["decoder_ff_logit_out_Wt"] = (sizes[1], D)
    else:
        shapes["Wemb"] = (sizes[0], D)
        if tying == "src":  # an old model, with its output matrix transposed
            shapes["decoder_ff_logit_out_W"] = (D, sizes[1])
    for name, shape in pair_shapes().items():
        matrix, bias = array_names(name)
        shapes |= {matrix: shape[::-1] if len(shape) == 2 else (1, D), bias: (1, shape[0])}
    generator = np.random.default_rng(4)
    return {
        name: generator.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()
    }


def save(path: Path, arrays: dict[str, np.ndarray], separate: bool = False, **options: Any) -> None:
    """As Marian does: the options are text in an array that ends with a zero."""
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {name.replace("_", "-"): value for name, value in options.items()}
    text = yaml.safe_dump({**OPTIONS, **given})
    if separate:
        path.with_name(f"{path.name}.yml").write_text(text)
    else:
        arrays = arrays | {"special:model.yml": np.frombuffer(text.encode() + b"\0", dtype=np.int8)}
    np.savez(path, **arrays)


def marian_position(index: int, _: str = "") -> np.ndarray:
    """`sinusoidalPositionEmbeddings` of its node_initializers.cpp."""
    timescales = D / 2
    increment = math.log(10000) / (timescales - 1)
    angles = index * np.exp(np.arange(timescales) * -increment)
    return np.concatenate([np.sin(angles), np.cos(angles)])


def restated(arrays: dict[str, np.ndarray], **changes: Any) -> Restatement:
    numbers = {name: array.astype(float) for name, array in arrays.items()}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            tied = numbers.get("Wemb", numbers.get("decoder_ff_logit_out_Wt"))
            matrix = numbers.get("decoder_ff_logit_out_W", None if tied is None else tied.T)
            return matrix, numbers["decoder_ff_logit_out_b"]
        names = array_names(name)
        if f"{names[0]}_pre" in numbers:
            names = f"{names[0]}_pre", f"{names[1]}_pre"
        return numbers[names[0]], numbers[names[1]]

    stacks = {"source": "encoder", "target": "decoder"}

    def embedding(side: str) -> np.ndarray:
        """With a row for the start token, which conversion adds."""
        table = numbers.get("Wemb", numbers.get(f"{stacks[side]}_Wemb"))
        return np.pad(table, ((0, 1), (0, 0)))

    theirs = Restatement(
        pair,
        embedding,
        position=marian_position,
        layers=LAYERS,
        heads=HEADS,
        activation="silu",
        eps=1e-6,
        # the embedding of the start token is zero, whatever its id
        starts_from_zero=True,
    )
    for name, value in changes.items():
        setattr(theirs, name, value)
    return theirs
