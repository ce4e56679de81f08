"""fairseq's checkpoints: small, with random weights."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, LAYERS, D
from tests.interop.restatement import Restatement
from tests.paper import fairseq_position

PEER = "NumPy restatement of fairseq 0.12"

# What fairseq writes: the arguments of `transformer_iwslt_de_en`, and of the translation task.
OPTIONS = {
    "arch": "transformer_iwslt_de_en",
    "task": "translation",
    "source_lang": "en",
    "target_lang": "de",
    "encoder_embed_dim": D,
    "decoder_embed_dim": D,
    "decoder_input_dim": D,
    "decoder_output_dim": D,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "adaptive_softmax_cutoff": None,
    "activation_fn": "relu",
    "dropout": 0.3,
    "no_scale_embedding": False,
}


def weights(source_size: int, target_size: int, shared: bool = False) -> dict[str, Tensor]:
    """Random weights under fairseq's names, as `TransformerModel.state_dict()` of version 0.12 has them."""
    shapes: dict[str, tuple[int, ...]] = {"encoder.embed_tokens.weight": (source_size, D)}
    shapes["decoder.embed_tokens.weight"] = (target_size, D)
    shapes["decoder.output_projection.weight"] = (target_size, D)
    for stack, depth in zip(("encoder", "decoder"), LAYERS, strict=True):
        attentions = ["self_attn"] + ["encoder_attn"] * (stack == "decoder")
        for layer in (f"{stack}.layers.{i}" for i in range(depth)):
            for attention in attentions:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{layer}.{attention}.{projection}.weight"] = (D, D)
                    shapes[f"{layer}.{attention}.{projection}.bias"] = (D,)
            shapes[f"{layer}.fc1.weight"], shapes[f"{layer}.fc1.bias"] = (FFN, D), (FFN,)
            shapes[f"{layer}.fc2.weight"], shapes[f"{layer}.fc2.bias"] = (D, FFN), (D,)
            for norm in [f"{attention}_layer_norm" for attention in attentions] + ["final_layer_norm"]:
                shapes[f"{layer}.{norm}.weight"] = shapes[f"{layer}.{norm}.bias"] = (D,)
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    if shared:
        for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
            drawn[name] = drawn["encoder.embed_tokens.weight"]
    # saved with the weights
    drawn |= {f"{stack}.version": torch.tensor([3.0]) for stack in ("encoder", "decoder")}
    return drawn | {f"{stack}.embed_positions._float_tensor": torch.zeros(1) for stack in ("encoder", "decoder")}


def save(path: Path, model: dict[str, Tensor], **options: Any) -> None:
    """As fairseq before 0.10 did: options in a namespace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = {"optimizer_history": [{"num_updates": 7}], "extra_state": {"epoch": 1, "val_loss": 2.5}}
    torch.save({"args": Namespace(**{**OPTIONS, **options}), "model": model, **extra}, path)


def save_with_sections(path: Path, model: dict[str, Tensor], nested: bool = False, **search: Any) -> None:
    """As fairseq 0.12 does: options in sections, the model's in a namespace or, for `transformer` itself, in parts."""
    options: Any = Namespace(**OPTIONS)
    if nested:
        side = {"embed_dim": D, "ffn_embed_dim": FFN, "attention_heads": HEADS, "normalize_before": False}
        own = {"_name": "transformer", "activation_fn": "relu", "no_scale_embedding": False, "dropout": 0.3}
        options = {**own, "encoder": side, "decoder": {**side, "input_dim": D, "output_dim": D}, "base_layers": 0}
    task = {"_name": "translation", "source_lang": "en", "target_lang": "de"}
    search = {"beam": 7, "lenpen": 0.8, "max_len_a": 0.0, "max_len_b": 33, **search}
    torch.save({"args": None, "cfg": {"model": options, "task": task, "generation": search}, "model": model}, path)


def restated(model: dict[str, Tensor], position: Any = None, scale: bool = True, **settings: Any) -> Restatement:
    arrays = {name: tensor.double().numpy() for name, tensor in model.items()}
    attention = {"self": "self_attn", "cross": "encoder_attn"}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            return arrays["decoder.output_projection.weight"].T, np.zeros(1)
        if name.endswith("coder.norm"):
            return arrays[name.replace("norm", "layer_norm.weight")], arrays[name.replace("norm", "layer_norm.bias")]
        stack, layer, kind, part = name.split(".")
        theirs = f"{stack}.layers.{layer}."
        if part == "norm":
            theirs += "final_layer_norm" if kind == "ffn" else f"{attention[kind]}_layer_norm"
            return arrays[f"{theirs}.weight"], arrays[f"{theirs}.bias"]
        theirs += f"fc{part}" if kind == "ffn" else f"{attention[kind]}.{'out' if part == 'o' else part}_proj"
        return arrays[f"{theirs}.weight"].T, arrays[f"{theirs}.bias"]

    stacks = {"source": "encoder", "target": "decoder"}
    return Restatement(
        pair,
        embedding=lambda side: arrays[f"{stacks[side]}.embed_tokens.weight"],
        # positions count from the padding's id, which is 1
        position=position or (lambda index, _: fairseq_position(index + 2, D)),
        layers=LAYERS,
        heads=HEADS,
        scale=scale,
        **settings,
    )


def with_final_norms(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """As of a pre-norm model."""
    generator = torch.Generator().manual_seed(8)
    names = (f"{stack}.layer_norm.{part}" for stack in ("encoder", "decoder") for part in ("weight", "bias"))
    return model | {name: torch.randn(D, generator=generator) for name in names}


def write_dictionaries(folder: Path, sides: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for language, tokens in sides.items():
        (folder / f"dict.{language}.txt").write_text("".join(f"{token} 9\n" for token in tokens), encoding="utf-8")
