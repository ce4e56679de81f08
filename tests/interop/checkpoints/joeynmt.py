"""JoeyNMT's model folders: small, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, D, attention_names, random_weights, restatement
from tests.interop.restatement import Restatement
from tests.paper import paper_position

PEER = "NumPy restatement of JoeyNMT 2.3 and 1.5"
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>"]

NAMES = {
    **{stack: f"{stack}.layers" for stack in ("encoder", "decoder")},
    **attention_names(
        {
            "encoder.self": "src_src_att.",
            "decoder.self": "trg_trg_att.",
            "decoder.cross": "src_trg_att.",
        },
        {"q": "q_layer", "k": "k_layer", "v": "v_layer", "o": "output_layer"},
    ),
    "encoder.self.norm": "layer_norm",
    "decoder.self.norm": "x_layer_norm",
    "cross.norm": "dec_layer_norm",
    "ffn.1": "feed_forward.pwff_layer.0",
    "ffn.2": "feed_forward.pwff_layer.3",
    "ffn.norm": "feed_forward.layer_norm",
    "norm": "layer_norm",
    "output": "decoder.output_layer",
}


def weights(sizes: tuple[int, int], tied: bool = False) -> dict[str, Tensor]:
    """Random weights under JoeyNMT's names (2.3)."""
    others = {"src_embed.lut.weight": (sizes[0], D), "trg_embed.lut.weight": (sizes[1], D)}
    drawn = random_weights(NAMES, others | {"decoder.output_layer.weight": (sizes[1], D)})
    if tied:
        drawn["trg_embed.lut.weight"] = drawn["decoder.output_layer.weight"] = drawn[
            "src_embed.lut.weight"
        ]
    rows = np.stack([paper_position(index, D) for index in range(50)])
    table = torch.tensor(rows).float()[None]  # (1, P, D)
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
    folder: Path,
    model: dict[str, Tensor],
    tokens: tuple[list[str], list[str]] | None = None,
    given: dict[str, Any] | None = None,
) -> None:
    """A model_dir. Default of the tokens without the special ones: "a0", "a1" … and "b0", "b1" …."""
    if tokens is None:
        sizes = (len(model[f"{side}_embed.lut.weight"]) - len(SPECIAL) for side in ("src", "trg"))
        tokens = tuple(map(named, sizes, "ab"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(given or options()))
    for side, lines in zip(("src", "trg"), tokens, strict=True):
        (folder / f"{side}_vocab.txt").write_text(
            "\n".join([*SPECIAL, *lines]) + "\n", encoding="utf-8"
        )
    state = {
        "model_state": model,
        "optimizer_state": {"state": {}, "param_groups": []},
        "stats_state": {"steps": 7},
    }
    torch.save(state, folder / "best.ckpt")


def restated(model: dict[str, Tensor], **settings: Any) -> Restatement:
    embeddings = {"source": "src_embed.lut", "target": "trg_embed.lut"}
    return restatement(
        NAMES, model, embeddings, lambda index, _: paper_position(index, D), eps=1e-6, **settings
    )


def named(count: int, letter: str) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]
