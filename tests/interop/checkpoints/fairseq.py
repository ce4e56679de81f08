"""fairseq's checkpoints: small, with random weights."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.interop.checkpoints import FFN, HEADS, D, attention_names, random_weights, restatement
from tests.interop.restatement import Restatement
from tests.paper import fairseq_position

PEER = "NumPy restatement of fairseq 0.12"

# fairseq writes the arguments of `transformer_iwslt_de_en`, and of the translation task.
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

NAMES = {
    **{stack: f"{stack}.layers" for stack in ("encoder", "decoder")},
    **attention_names(
        {"self": "self_attn.", "cross": "encoder_attn."},
        {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"},
    ),
    "self.norm": "self_attn_layer_norm",
    "cross.norm": "encoder_attn_layer_norm",
    "ffn.norm": "final_layer_norm",
    "ffn.1": "fc1",
    "ffn.2": "fc2",
    "norm": "layer_norm",
    "output": "decoder.output_projection",
}


def weights(source_size: int, target_size: int, shared: bool = False) -> dict[str, Tensor]:
    """Random weights under fairseq's names, as `TransformerModel.state_dict()` of version 0.12 has them."""
    others = {
        "encoder.embed_tokens.weight": (source_size, D),
        "decoder.embed_tokens.weight": (target_size, D),
        "decoder.output_projection.weight": (target_size, D),
    }
    drawn = random_weights(NAMES, others)
    if shared:
        for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
            drawn[name] = drawn["encoder.embed_tokens.weight"]
    for stack in ("encoder", "decoder"):  # saved with the weights
        drawn[f"{stack}.version"] = torch.tensor([3.0])
        drawn[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    return drawn


def save(path: Path, model: dict[str, Tensor], **options: Any) -> None:
    """As fairseq before 0.10 did: options in a namespace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "args": Namespace(**OPTIONS | options),
        "model": model,
        "optimizer_history": [{"num_updates": 7}],
        "extra_state": {"epoch": 1, "val_loss": 2.5},
    }
    torch.save(content, path)


def save_with_sections(
    path: Path, model: dict[str, Tensor], nested: bool = False, **search: Any
) -> None:
    """As fairseq 0.12 does: options in sections, the model's in a namespace or, for `transformer` itself, in parts."""
    options: Any = Namespace(**OPTIONS)
    if nested:
        side = {
            "embed_dim": D,
            "ffn_embed_dim": FFN,
            "attention_heads": HEADS,
            "normalize_before": False,
        }
        options = {
            "_name": "transformer",
            "activation_fn": "relu",
            "no_scale_embedding": False,
            "dropout": 0.3,
            "encoder": side,
            "decoder": {**side, "input_dim": D, "output_dim": D},
            "base_layers": 0,
        }
    task = {"_name": "translation", "source_lang": "en", "target_lang": "de"}
    search = {"beam": 7, "lenpen": 0.8, "max_len_a": 0.0, "max_len_b": 33, **search}
    sections = {"model": options, "task": task, "generation": search}
    torch.save({"args": None, "cfg": sections, "model": model}, path)


def restated(
    model: dict[str, Tensor], position: Any = None, scale: bool = True, **settings: Any
) -> Restatement:
    embeddings = {"source": "encoder.embed_tokens", "target": "decoder.embed_tokens"}
    # positions count from the padding's id, which is 1
    position = position or (lambda index, _: fairseq_position(index + 2, D))
    return restatement(NAMES, model, embeddings, position, scale=scale, **settings)


def with_final_norms(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """As of a pre-norm model."""
    generator = torch.Generator().manual_seed(8)
    names = (
        f"{stack}.layer_norm.{part}"
        for stack in ("encoder", "decoder")
        for part in ("weight", "bias")
    )
    return model | {name: torch.randn(D, generator=generator) for name in names}


def write_dictionaries(folder: Path, sides: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for language, tokens in sides.items():
        lines = "".join(f"{token} 9\n" for token in tokens)
        (folder / f"dict.{language}.txt").write_text(lines, encoding="utf-8")
