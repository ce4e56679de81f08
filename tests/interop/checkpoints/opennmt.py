"""OpenNMT-py's checkpoints: small, with random weights."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, LAYERS, D
from tests.interop.restatement import Restatement
from tests.paper import paper_position

PEER = "NumPy restatement of OpenNMT-py 3.5"
SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]

OPTIONS = {
    **{"encoder_type": "transformer", "decoder_type": "transformer", "heads": HEADS, "layer_norm": "standard"},
    **{"position_encoding": True, "max_relative_positions": 0, "self_attn_type": "scaled-dot", "dropout": [0.1]},
    **{"attention_dropout": [0.1], "pos_ffn_activation_fn": "relu", "add_qkvbias": False, "norm_eps": 1e-6},
}


def weights(sizes: tuple[int, int], qkv_bias: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights of model and generator, under the names of versions 1 to 3."""
    shapes: dict[str, tuple[int, ...]] = {}
    stacks = {"encoder": ("transformer", ["self_attn"], ["layer_norm"])}
    stacks["decoder"] = ("transformer_layers", ["self_attn", "context_attn"], ["layer_norm_1", "layer_norm_2"])
    for (stack, (layers, attentions, norms)), depth, size in zip(stacks.items(), LAYERS, sizes, strict=True):
        shapes[f"{stack}.embeddings.make_embedding.emb_luts.0.weight"] = (size, D)
        for layer in (f"{stack}.{layers}.{i}" for i in range(depth)):
            for name in (f"{layer}.{a}.{part}" for a in attentions for part in PARTS.values()):
                shapes |= {f"{name}.weight": (D, D)} | ({f"{name}.bias": (D,)} if qkv_bias else {})
            shapes |= {f"{layer}.feed_forward.w_1.weight": (FFN, D), f"{layer}.feed_forward.w_1.bias": (FFN,)}
            shapes |= {f"{layer}.feed_forward.w_2.weight": (D, FFN), f"{layer}.feed_forward.w_2.bias": (D,)}
            for norm in [*norms, "feed_forward.layer_norm"]:
                shapes |= {f"{layer}.{norm}.{part}": (D,) for part in ("weight", "bias")}
        shapes |= {f"{stack}.layer_norm.{part}": (D,) for part in ("weight", "bias")}
    generator = torch.Generator().manual_seed(6)
    model = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    table = torch.tensor(np.stack([paper_position(i, D) for i in range(50)])).float()[:, None]  # (P, 1, D)
    model |= {f"{stack}.embeddings.make_embedding.pe.pe": table for stack in stacks}
    head = {
        "weight": torch.randn(sizes[1], D, generator=generator),
        "bias": torch.randn(sizes[1], generator=generator),
    }
    return model, head


PARTS = {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"}


def save(path: Path, model: dict[str, Tensor], head: dict[str, Tensor], vocab: Any = None, **options: Any) -> None:
    content = {"model": model, "generator": head, "opt": Namespace(**{**OPTIONS, **options}), "optim": {"step": 7}}
    torch.save(content | ({} if vocab is None else {"vocab": vocab}), path)


def restated(model: dict[str, Tensor], head: dict[str, Tensor], **settings: Any) -> Restatement:
    arrays = {name: tensor.double().numpy() for name, tensor in (model | head).items()}
    layers = {"encoder": "transformer", "decoder": "transformer_layers"}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            return arrays["weight"].T, arrays["bias"]
        if name.endswith("coder.norm"):
            name = name.replace("norm", "layer_norm")
            return arrays[f"{name}.weight"], arrays[f"{name}.bias"]
        stack, layer, kind, part = name.split(".")
        theirs = f"{stack}.{layers[stack]}.{layer}."
        if part == "norm":
            number = {"self": "_1", "cross": "_2"}.get(kind, "") if stack == "decoder" else ""
            theirs += "feed_forward.layer_norm" if kind == "ffn" else f"layer_norm{number}"
            return arrays[f"{theirs}.weight"], arrays[f"{theirs}.bias"]
        if kind == "ffn":
            theirs += f"feed_forward.w_{part}"
        else:
            theirs += {"self": "self_attn.", "cross": "context_attn."}[kind] + PARTS[part]
        return arrays[f"{theirs}.weight"].T, arrays.get(f"{theirs}.bias", np.zeros(1))

    stacks = {"source": "encoder", "target": "decoder"}
    return Restatement(
        pair,
        embedding=lambda side: arrays[f"{stacks[side]}.embeddings.make_embedding.emb_luts.0.weight"],
        position=lambda index, _: paper_position(index, D),
        layers=LAYERS,
        heads=HEADS,
        eps=1e-6,
        pre_norm=True,
        **settings,
    )
