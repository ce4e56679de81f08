"""What a recipe needs on a cluster, computed and not run: parameters, memory, arithmetic, exchange, hours.

  python -m hf_vanilla_transformer.training.plan scripts/recipes/wmt14_en_de_base.yaml

prints a row of a table for each recipe. What is assumed about the machine are flags.
"""

import argparse
from typing import Any

import torch

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import run_command
from ..markdown import markdown_table
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .recipes import parse_recipe

#: bytes of a parameter while training: weight, gradient and both moments of Adam, in float32
STATE_BYTES = 16
GRADIENT_BYTES = 4


def forward_flops(config: VanillaTransformerConfig, source: int, target: int) -> int:
    """Floating-point operations of the matrix products of one pair, forward; a training step has three times as many.

    A product of (m, k) and (k, n) has 2·m·k·n. Attention is counted as if no position were masked; what is not a
    matrix product (softmax, norms, dropout) is left out.

    Args:
        source, target: tokens.
    """
    d, vocabulary = config.d_model, config.target_vocab_size
    encoder = _attention(config, config.encoder_attention_heads, source, source)
    encoder += 4 * source * d * config.encoder_ffn_dim
    decoder = _attention(config, config.decoder_attention_heads, target, target)
    decoder += _attention(config, config.decoder_attention_heads, target, source)
    decoder += 4 * target * d * config.decoder_ffn_dim
    return config.encoder_layers * encoder + config.decoder_layers * decoder + 2 * target * d * vocabulary


def _attention(config: VanillaTransformerConfig, heads: int, queries: int, keys: int) -> int:
    """One sub-layer (§3.2.2): four projections, scores, and the mean of the values."""
    key_width = heads * (config.head_dim or config.d_model // heads)
    value_width = heads * (config.value_head_dim or config.d_model // heads)
    projections = (queries + keys) * (key_width + value_width) * config.d_model
    return 2 * (projections + queries * keys * (key_width + value_width))


def exchanged_bytes(parameters: int, devices: int) -> float:
    """What each device sends, and receives, in an update: a ring passes 2·(N-1)/N of the gradients on."""
    return 2 * (devices - 1) / devices * GRADIENT_BYTES * parameters


def plan(recipe: str, machine: argparse.Namespace) -> list[str]:
    """A row of the table."""
    model_args, _, args = parse_recipe([recipe])
    chosen = {name: value for name, value in vars(model_args).items() if value is not None}
    preset = chosen.pop("preset", None)
    config = VanillaTransformerConfig.from_preset(preset, **chosen) if preset else VanillaTransformerConfig(**chosen)
    with torch.device("meta"):
        parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
    pairs = args.tokens_per_update / machine.length
    flops = 3 * pairs * forward_flops(config, machine.length, machine.length)
    bytes_ = exchanged_bytes(parameters, machine.devices)

    def hours(utilisation: float) -> float:
        computing = flops / (machine.devices * machine.peak * 1e12 * utilisation)
        return args.max_steps * (computing + bytes_ / (machine.bandwidth * 1e9)) / 3600

    return [
        recipe.rpartition("/")[2].removesuffix(".yaml"),
        f"{parameters / 1e6:.1f} M",
        f"{args.tokens_per_update:,} · {args.max_steps:,}",
        f"{STATE_BYTES * parameters / 1e9:.1f} GB",
        f"{flops / 1e12:.1f} TFLOP",
        f"{bytes_ / 1e6:,.0f} MB",
        " / ".join(f"{hours(utilisation):.1f}" for utilisation in machine.utilisation),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="with tokens_per_update and max_steps")
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="GPUs (default: %(default)s)")
    parser.add_argument("--peak", **number, default=989.0, help="TFLOP/s of one, bf16 (default: %(default)s, an H100)")
    parser.add_argument(
        "--utilisation", **number, nargs="+", default=[0.05, 0.1, 0.2, 0.4], help="share of it (default: %(default)s)"
    )
    parser.add_argument(
        "--bandwidth", **number, default=200.0, help="GB/s each way between GPUs (default: %(default)s, NVLink)"
    )
    parser.add_argument("--length", type=int, default=30, metavar="N", help="tokens a side (default: %(default)s)")
    machine = parser.parse_args()
    shares = " / ".join(f"{share:.0%}" for share in machine.utilisation)
    head = "recipe|parameters|target tokens an update · updates|weights, gradients, Adam|an update|exchanged"
    rows = [plan(recipe, machine) for recipe in machine.recipes]
    print(markdown_table([*head.split("|"), f"hours at {shares}"], rows))


if __name__ == "__main__":
    run_command(main)
