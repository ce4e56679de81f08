"""eole's model folders: small, with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, LAYERS, D
from tests.interop.restatement import Restatement
from tests.paper import paper_position

PEER = "NumPy restatement of eole 0.6"
SIZES = (9, 8)

SPECIAL = {"unk_token": "<unk>", "pad_token": "<blank>", "bos_token": "<s>", "eos_token": "</s>"}

EMBEDDINGS = {"source": "src_emb", "target": "tgt_emb"}

ATTENTION = {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"}

NORMS = {"self": "input_layernorm", "cross": "precontext_layernorm", "ffn": "post_attention_layernorm"}

# eole saves the options that were given, and those that it derives for the stacks.
STACK = {"layers": 2, "heads": HEADS, "hidden_size": D, "transformer_ff": FFN, "n_positions": None}

MODEL = {
    **{"architecture": "transformer", "heads": HEADS, "hidden_size": D, "transformer_ff": FFN},
    "embeddings": {"position_encoding": True},
    "encoder": {"encoder_type": "transformer", **STACK},
    "decoder": {"decoder_type": "transformer", "with_cross_attn": True, **STACK},
}


def weights(bias: bool = False, learned: bool = False) -> dict[str, Tensor]:
    """Random weights under eole's names; `bias` is of add_qkvbias, which final_linear has too, and of add_ffnbias."""
    shapes: dict[str, tuple[int, ...]] = {"generator.weight": (SIZES[1], D), "generator.bias": (SIZES[1],)}
    for side, size in zip(EMBEDDINGS.values(), SIZES, strict=True):
        shapes[f"{side}.embeddings.weight"] = (size, D)
        shapes |= {f"{side}.pe.weight": (30, D)} if learned else {}
    for stack, depth in zip(("encoder", "decoder"), LAYERS, strict=True):
        attentions = ("self_attn", "context_attn")[: 1 + (stack == "decoder")]
        for layer in (f"{stack}.transformer_layers.{number}" for number in range(depth)):
            linear = {f"{layer}.{kind}.{part}": (D, D) for kind in attentions for part in ATTENTION.values()}
            linear |= {f"{layer}.mlp.gate_up_proj": (FFN, D), f"{layer}.mlp.down_proj": (D, FFN)}
            shapes |= {f"{name}.weight": shape for name, shape in linear.items()}
            shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if bias}
            norms = [norm for kind, norm in NORMS.items() if kind != "cross" or stack == "decoder"]
            shapes |= {f"{layer}.{norm}.{part}": (D,) for norm in norms for part in ("weight", "bias")}
        shapes |= {f"{stack}.layer_norm.{part}": (D,) for part in ("weight", "bias")}
    generator = torch.Generator().manual_seed(6)
    tensors = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    table = torch.tensor(np.stack([paper_position(index, D) for index in range(50)])).float()[:, None]  # (P, 1, D)
    tensors |= {} if learned else {f"{side}.pe.pe": table.clone() for side in EMBEDDINGS.values()}
    return {**tensors, "decoder.transformer_layers.0.layer_scalar": torch.ones(1)}


def tokens(size: int, letter: str) -> list[str]:
    return [*SPECIAL.values(), *(f"{letter}{number}" for number in range(size - len(SPECIAL)))]


def save(folder: Path, tensors: dict[str, Tensor], model: dict[str, Any] | None = None, **sections: Any) -> None:
    """A model_path; `model` overrides options by their path, such as "encoder.layer_norm"."""
    folder.mkdir(exist_ok=True)
    config = json.loads(json.dumps(MODEL))
    for path, value in (model or {}).items():
        *section, name = path.split(".")
        (config[section[0]] if section else config)[name] = value
    content = {"model": config, "training": {"dropout": [0.2]}, **sections}
    (folder / "config.json").write_text(json.dumps(content))
    sides = {side: tokens(size, side[0]) for side, size in zip(("src", "tgt"), SIZES, strict=True)}
    vocabulary = {**sides, "decoder_start_token": "<s>", "specials": SPECIAL}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    save_file(tensors, folder / "model.00.safetensors")


def restated(tensors: dict[str, Tensor], learned: bool = False, **settings: Any) -> Restatement:
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            return arrays["generator.weight"].T, arrays["generator.bias"]
        if name.endswith("coder.norm"):
            name = name.replace("norm", "layer_norm")
            return arrays[f"{name}.weight"], arrays[f"{name}.bias"]
        stack, layer, kind, part = name.split(".")
        theirs = f"{stack}.transformer_layers.{layer}."
        if part == "norm":
            theirs += NORMS[kind]
            return arrays[f"{theirs}.weight"], arrays[f"{theirs}.bias"]
        if kind == "ffn":
            theirs += {"1": "mlp.gate_up_proj", "2": "mlp.down_proj"}[part]
        else:
            theirs += {"self": "self_attn.", "cross": "context_attn."}[kind] + ATTENTION[part]
        return arrays[f"{theirs}.weight"].T, arrays.get(f"{theirs}.bias", np.zeros(1))

    def position(index: int, side: str) -> np.ndarray:
        return arrays[f"{EMBEDDINGS[side]}.pe.weight"][index] if learned else paper_position(index, D)

    return Restatement(
        pair,
        embedding=lambda side: arrays[f"{EMBEDDINGS[side]}.embeddings.weight"],
        position=position,
        layers=LAYERS,
        heads=HEADS,
        scale=not learned,
        pre_norm=True,
        **settings,
    )
