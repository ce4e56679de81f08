"""Give a trained small model the base size of the paper without changing its translations.

`python -m tests.speed.widen SMALL OUT` writes a model with the cost of the base size (6 + 6 layers, d_model 512,
8 heads, d_ff 2,048) and the logits of SMALL, to rounding. Engines that get the same weights can then be measured at
this size with translations of natural lengths and with a BLEU, without a training of days.

Every feature is repeated (Chen et al. 2016, arXiv 1511.05641, Net2WiderNet). The layer norm of repeated features is
the repeated layer norm. More layers follow the last one. Both their outputs are zero, so that their layer norms only
normalise what is normalised already. The gain and bias of the last layer norm move to the last added layer.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer.layers_vanilla_transformer import sinusoidal_positions

LAYERS, WIDTH, HEADS, FFN = 6, 512, 8, 2048
POSITIONS = 256  # repeated sinusoids are not those of the wider model, so they become a table
Weights = dict[str, torch.Tensor]


def widen(
    small: VanillaTransformerForConditionalGeneration,
) -> VanillaTransformerForConditionalGeneration:
    """Return a model of the base size with the logits of a post-LN model with one vocabulary and sinusoids."""
    old = small.config
    sizes = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "d_model": WIDTH}
    sizes |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": FFN for side in ("encoder", "decoder")}
    positions = {"position_encoding_type": "learned", "max_position_embeddings": POSITIONS}
    fields = old.to_diff_dict() | sizes | positions
    wide = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields)).eval()
    weights = small.state_dict()
    result = {
        name: _embedding(name, weights, old) for name in wide.state_dict() if ".layers." not in name
    }
    for stack, layers in (("encoder", old.encoder_layers), ("decoder", old.decoder_layers)):
        for layer in range(LAYERS):
            prefix, source = (
                f"model.{stack}.layers.{index}." for index in (layer, min(layer, layers - 1))
            )
            names = [
                name.removeprefix(prefix) for name in wide.state_dict() if name.startswith(prefix)
            ]
            result |= {
                prefix + name: _repeated(name, weights[source + name], old) for name in names
            }
        # The tied projection sums WIDTH / d_model copies of the states, of embeddings divided by the root of that.
        _add_identities(
            result,
            f"model.{stack}.layers.",
            layers,
            (old.d_model / WIDTH) ** 0.5 if stack == "decoder" else 1,
        )
    wide.load_state_dict(result)
    return wide


def _repeated(name: str, weight: torch.Tensor, old: Any) -> torch.Tensor:
    """A parameter of a layer with the outputs repeated, and the inputs repeated and divided by their number."""
    heads, head_dim = old.encoder_attention_heads, old.d_model // old.encoder_attention_heads
    place = torch.arange(WIDTH)
    features = place % old.d_model
    attended = place // (WIDTH // heads) * head_dim + place % head_dim
    hidden = torch.arange(FFN) % old.encoder_ffn_dim
    rows = (
        hidden
        if "fc1" in name
        else attended
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        else features
    )
    weight = weight[rows]
    if weight.dim() == 2:
        columns = hidden if "fc2" in name else attended if "out_proj" in name else features
        weight = weight[:, columns] * (weight.shape[1] / len(columns))
    if "q_proj" in name:  # softmax(q·k / sqrt(d_k)), with sums over repeated features
        weight = weight * (head_dim / (WIDTH // HEADS)) ** 0.5
    return weight.clone()


def _embedding(name: str, weights: Weights, old: Any) -> torch.Tensor:
    features = torch.arange(WIDTH) % old.d_model
    if "embed_positions" in name:
        return sinusoidal_positions(torch.arange(POSITIONS)[None], old.d_model)[0][:, features]
    return (
        weights[name][:, features] * (old.d_model / WIDTH) ** 0.5
    )  # embeddings are scaled by sqrt(d_model) (§3.4)


def _add_identities(weights: Weights, stack: str, layers: int, scale: float) -> None:
    """Let the layers from `layers` on return their input, and scale the output of the last one."""
    last = {
        end: weights[f"{stack}{layers - 1}.final_layer_norm.{end}"] * scale
        for end in ("weight", "bias")
    }
    for name, weight in weights.items():
        if not name.startswith(stack) or int(name.removeprefix(stack).split(".")[0]) < layers - 1:
            continue
        added = not name.startswith(f"{stack}{layers - 1}.")
        if added and ("out_proj" in name or "fc2" in name):
            weights[name] = torch.zeros_like(weight)
        elif "layer_norm" in name and (added or "final" in name):
            weights[name] = torch.full_like(weight, float(name.endswith("weight")))
    weights |= {
        f"{stack}{LAYERS - 1}.final_layer_norm.{end}": weight for end, weight in last.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path, help="folder of a trained model")
    parser.add_argument("out", type=Path, help="new folder")
    parsed = parser.parse_args()
    widen(
        VanillaTransformerForConditionalGeneration.from_pretrained(parsed.small).eval()
    ).save_pretrained(parsed.out)
    for file in (*parsed.small.glob("tokenizer*"), parsed.small / "generation_config.json"):
        shutil.copy(file, parsed.out)


if __name__ == "__main__":
    main()
