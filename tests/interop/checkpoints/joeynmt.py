"""JoeyNMT's model folders: small, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, LAYERS, D
from tests.interop.restatement import Restatement
from tests.paper import paper_position

PEER = "NumPy restatement of JoeyNMT 2.3 and 1.5"
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>"]


def weights(sizes: tuple[int, int], tied: bool = False) -> dict[str, Tensor]:
    """Random weights under JoeyNMT's names (2.3)."""
    shapes: dict[str, tuple[int, ...]] = {"src_embed.lut.weight": (sizes[0], D), "trg_embed.lut.weight": (sizes[1], D)}
    shapes["decoder.output_layer.weight"] = (sizes[1], D)
    for stack, depth in zip(("encoder", "decoder"), LAYERS, strict=True):
        attentions = ["src_src_att"] if stack == "encoder" else ["trg_trg_att", "src_trg_att"]
        norms = ["layer_norm"] if stack == "encoder" else ["x_layer_norm", "dec_layer_norm"]
        for layer in (f"{stack}.layers.{i}" for i in range(depth)):
            linear = {f"{layer}.{a}.{part}_layer": (D, D) for a in attentions for part in ("q", "k", "v", "output")}
            linear[f"{layer}.feed_forward.pwff_layer.0"] = (FFN, D)
            linear[f"{layer}.feed_forward.pwff_layer.3"] = (D, FFN)
            for name, shape in linear.items():
                shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
            for norm in [*norms, "feed_forward.layer_norm"]:
                shapes |= {f"{layer}.{norm}.{part}": (D,) for part in ("weight", "bias")}
    generator = torch.Generator().manual_seed(6)
    drawn = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    if tied:
        drawn["trg_embed.lut.weight"] = drawn["decoder.output_layer.weight"] = drawn["src_embed.lut.weight"]
    table = torch.tensor(np.stack([paper_position(i, D) for i in range(50)])).float()[None]  # (1, P, D)
    return drawn | {f"{stack}.pe.pe": table for stack in ("encoder", "decoder")}


def options() -> dict[str, Any]:
    """A configuration as in JoeyNMT's examples."""
    stack = {
        "type": "transformer",
        "num_heads": HEADS,
        "embeddings": {"embedding_dim": D, "scale": True},
        "hidden_size": D,
        "ff_size": FFN,
        "dropout": 0.1,
        "layer_norm": "post",
    }
    side = {"level": "word", "lowercase": False, "normalize": False}  # split at white space
    return {
        "name": "test",
        "data": {"src": {"lang": "en", **side}, "trg": {"lang": "de", **side}},
        "testing": {"beam_size": 5, "beam_alpha": 1.0, "max_output_length": 40},
        "training": {"model_dir": "models/test"},
        "model": {"encoder": {**stack, "num_layers": 2}, "decoder": {**stack, "num_layers": 1}},
    }


def save(
    folder: Path, model: dict[str, Tensor], tokens: tuple[list[str], list[str]], given: dict[str, Any] | None = None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(given or options()))
    for side, lines in zip(("src", "trg"), tokens, strict=True):
        (folder / f"{side}_vocab.txt").write_text("\n".join([*SPECIAL, *lines]) + "\n", encoding="utf-8")
    state = {"model_state": model, "optimizer_state": {"state": {}, "param_groups": []}, "stats_state": {"steps": 7}}
    torch.save(state, folder / "best.ckpt")


def restated(model: dict[str, Tensor], **settings: Any) -> Restatement:
    arrays = {name: tensor.double().numpy() for name, tensor in model.items()}
    attention = {
        ("encoder", "self"): "src_src_att",
        ("decoder", "self"): "trg_trg_att",
        ("decoder", "cross"): "src_trg_att",
    }
    norm = {
        ("encoder", "self"): "layer_norm",
        ("decoder", "self"): "x_layer_norm",
        ("decoder", "cross"): "dec_layer_norm",
    }

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            return arrays["decoder.output_layer.weight"].T, np.zeros(1)
        if name.endswith("coder.norm"):
            return arrays[name.replace("norm", "layer_norm.weight")], arrays[name.replace("norm", "layer_norm.bias")]
        stack, layer, kind, part = name.split(".")
        theirs = f"{stack}.layers.{layer}."
        if part == "norm":
            theirs += "feed_forward.layer_norm" if kind == "ffn" else norm[stack, kind]
            return arrays[f"{theirs}.weight"], arrays[f"{theirs}.bias"]
        if kind == "ffn":
            theirs += f"feed_forward.pwff_layer.{0 if part == '1' else 3}"
        else:
            theirs += f"{attention[stack, kind]}.{'output' if part == 'o' else part}_layer"
        return arrays[f"{theirs}.weight"].T, arrays[f"{theirs}.bias"]

    sides = {"source": "src", "target": "trg"}
    return Restatement(
        pair,
        embedding=lambda side: arrays[f"{sides[side]}_embed.lut.weight"],
        position=lambda index, _: paper_position(index, D),
        layers=LAYERS,
        heads=HEADS,
        eps=1e-6,
        **settings,
    )


def named(count: int, letter: str) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]
