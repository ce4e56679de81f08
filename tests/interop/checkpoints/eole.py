"""eole's model folders: small, with random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, D, attention_names, random_weights, restatement
from tests.interop.restatement import Restatement
from tests.paper import paper_position

PEER = "NumPy restatement of eole 0.6"
SIZES = (9, 8)

SPECIAL = {"unk_token": "<unk>", "pad_token": "<blank>", "bos_token": "<s>", "eos_token": "</s>"}

EMBEDDINGS = {"source": "src_emb", "target": "tgt_emb"}

NAMES = {
    **{stack: f"{stack}.transformer_layers" for stack in ("encoder", "decoder")},
    **attention_names(
        {"self": "self_attn.", "cross": "context_attn."},
        {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"},
    ),
    "self.norm": "input_layernorm",
    "cross.norm": "precontext_layernorm",
    "ffn.norm": "post_attention_layernorm",
    "ffn.1": "mlp.gate_up_proj",
    "ffn.2": "mlp.down_proj",
    "norm": "layer_norm",
    "output": "generator",
}

# eole saves the options that were given, and those that it derives for the stacks.
STACK = {
    "layers": 2,
    "heads": HEADS,
    "hidden_size": D,
    "transformer_ff": FFN,
    "n_positions": None,
}

MODEL = {
    "architecture": "transformer",
    "heads": HEADS,
    "hidden_size": D,
    "transformer_ff": FFN,
    "embeddings": {"position_encoding": True},
    "encoder": {"encoder_type": "transformer", **STACK},
    "decoder": {"decoder_type": "transformer", "with_cross_attn": True, **STACK},
}


def weights(
    bias: bool = False, learned: bool = False, sizes: tuple[int, int] = SIZES
) -> dict[str, Tensor]:
    """Random weights under eole's names. `bias` is of add_qkvbias, which final_linear has too, and of add_ffnbias."""
    others = {"generator.weight": (sizes[1], D), "generator.bias": (sizes[1],)}
    for side, size in zip(EMBEDDINGS.values(), sizes, strict=True):
        others[f"{side}.embeddings.weight"] = (size, D)
        if learned:
            others[f"{side}.pe.weight"] = (30, D)
    tensors = random_weights(NAMES, others, lambda name: bias, final_norms=True)
    if not learned:
        rows = np.stack([paper_position(index, D) for index in range(50)])
        for side in EMBEDDINGS.values():
            tensors[f"{side}.pe.pe"] = torch.tensor(rows).float()[:, None]  # (P, 1, D)
    return {**tensors, "decoder.transformer_layers.0.layer_scalar": torch.ones(1)}


def tokens(size: int, letter: str) -> list[str]:
    return [*SPECIAL.values(), *(f"{letter}{number}" for number in range(size - len(SPECIAL)))]


def save(
    folder: Path, tensors: dict[str, Tensor], model: dict[str, Any] | None = None, **sections: Any
) -> None:
    """A model_path. `model` overrides options by their path, such as "encoder.layer_norm"."""
    folder.mkdir(exist_ok=True)
    config = copy.deepcopy(MODEL)
    for path, value in (model or {}).items():
        section, _, name = path.rpartition(".")
        target = config[section] if section else config
        target[name] = value
    content = {"model": config, "training": {"dropout": [0.2]}, **sections}
    (folder / "config.json").write_text(json.dumps(content))
    sides = {side: tokens(size, side[0]) for side, size in zip(("src", "tgt"), SIZES, strict=True)}
    vocabulary = {**sides, "decoder_start_token": "<s>", "specials": SPECIAL}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    save_file(tensors, folder / "model.00.safetensors")


def restated(tensors: dict[str, Tensor], learned: bool = False, **settings: Any) -> Restatement:
    def position(index: int, side: str) -> np.ndarray:
        if learned:
            return tensors[f"{EMBEDDINGS[side]}.pe.weight"][index].double().numpy()
        return paper_position(index, D)

    embeddings = {side: f"{name}.embeddings" for side, name in EMBEDDINGS.items()}
    return restatement(
        NAMES, tensors, embeddings, position, scale=not learned, pre_norm=True, **settings
    )
