"""OpenNMT-py's checkpoints: small, with random weights."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.interop.checkpoints import HEADS, D, attention_names, random_weights, restatement
from tests.interop.restatement import Restatement
from tests.paper import paper_position

PEER = "NumPy restatement of OpenNMT-py 3.5"
SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]

OPTIONS = {
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "heads": HEADS,
    "layer_norm": "standard",
    "position_encoding": True,
    "max_relative_positions": 0,
    "self_attn_type": "scaled-dot",
    "dropout": [0.1],
    "attention_dropout": [0.1],
    "pos_ffn_activation_fn": "relu",
    "add_qkvbias": False,
    "norm_eps": 1e-6,
}

NAMES = {
    "encoder": "encoder.transformer",
    "decoder": "decoder.transformer_layers",
    **attention_names(
        {"self": "self_attn.", "cross": "context_attn."},
        {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"},
    ),
    "encoder.self.norm": "layer_norm",
    "decoder.self.norm": "layer_norm_1",
    "cross.norm": "layer_norm_2",
    "ffn.1": "feed_forward.w_1",
    "ffn.2": "feed_forward.w_2",
    "ffn.norm": "feed_forward.layer_norm",
    "norm": "layer_norm",
    "output": "generator",
}
EMBEDDING = "embeddings.make_embedding.emb_luts.0"


def weights(
    sizes: tuple[int, int], qkv_bias: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights of model and generator, under the names of versions 1 to 3."""
    stacks = ("encoder", "decoder")
    others = {
        f"{stack}.{EMBEDDING}.weight": (size, D) for stack, size in zip(stacks, sizes, strict=True)
    }
    model = random_weights(
        NAMES, others, lambda name: qkv_bias or ".ffn." in name, final_norms=True
    )
    rows = np.stack([paper_position(index, D) for index in range(50)])
    table = torch.tensor(rows).float()[:, None]  # (P, 1, D)
    model |= {f"{stack}.embeddings.make_embedding.pe.pe": table for stack in stacks}
    generator = torch.Generator().manual_seed(7)
    shapes = {"weight": (sizes[1], D), "bias": (sizes[1],)}
    return model, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(
    path: Path, model: dict[str, Tensor], head: dict[str, Tensor], vocab: Any = None, **options: Any
) -> None:
    content = {
        "model": model,
        "generator": head,
        "opt": Namespace(**OPTIONS | options),
        "optim": {"step": 7},
    }
    if vocab is not None:
        content["vocab"] = vocab
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def restated(model: dict[str, Tensor], head: dict[str, Tensor], **settings: Any) -> Restatement:
    tensors = model | {f"generator.{name}": tensor for name, tensor in head.items()}
    embeddings = {"source": f"encoder.{EMBEDDING}", "target": f"decoder.{EMBEDDING}"}
    settings = {"eps": 1e-6, "pre_norm": True, **settings}
    return restatement(
        NAMES, tensors, embeddings, lambda index, _: paper_position(index, D), **settings
    )
