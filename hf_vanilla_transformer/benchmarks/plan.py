"""Estimate what a recipe needs on a cluster: parameters, memory, FLOPs, all-reduce traffic, hours.

  python -m hf_vanilla_transformer.benchmarks.plan scripts/recipes/wmt14_en_de_base.yaml

prints a table with a row for each recipe, computed without training. Flags describe the machine.
"""

import argparse
from typing import Any

import torch

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError, run_command
from ..markdown import markdown_table
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..training.arguments import model_config
from ..training.recipes import parse_recipe

#: bytes per parameter in training: weight, gradient and both moments of Adam, in float32
STATE_BYTES = 16
GRADIENT_BYTES = 4


def forward_flops(config: VanillaTransformerConfig, source: int, target: int) -> int:
    """FLOPs of the matrix products in the forward pass of a pair. Training needs three times this number.

    The pair has `source` and `target` tokens. A product of (m, k) and (k, n) takes 2·m·k·n. Attention is counted
    without masking; softmax, norms and dropout are left out.
    """
    d, vocabulary = config.d_model, config.target_vocab_size
    encoder = _attention(config, config.encoder_attention_heads, source, source)
    encoder += 4 * source * d * config.encoder_ffn_dim
    decoder = _attention(config, config.decoder_attention_heads, target, target)
    decoder += _attention(config, config.decoder_attention_heads, target, source)
    decoder += 4 * target * d * config.decoder_ffn_dim
    return config.encoder_layers * encoder + config.decoder_layers * decoder + 2 * target * d * vocabulary


def _attention(config: VanillaTransformerConfig, heads: int, queries: int, keys: int) -> int:
    """FLOPs of one attention sub-layer (§3.2.2): four projections, scores, and the weighted sum of the values."""
    key_width = heads * (config.head_dim or config.d_model // heads)
    value_width = heads * (config.value_head_dim or config.d_model // heads)
    projections = (queries + keys) * (key_width + value_width) * config.d_model
    return 2 * (projections + queries * keys * (key_width + value_width))


def all_reduce_bytes(parameters: int, devices: int) -> float:
    """The bytes that each device sends and receives per update: a ring all-reduce moves 2·(N-1)/N of the gradients."""
    return 2 * (devices - 1) / devices * GRADIENT_BYTES * parameters


def table_row(recipe: str, machine: argparse.Namespace) -> list[str]:
    """The cells of a recipe."""
    model_args, _, args = parse_recipe([recipe])
    if args.tokens_per_update is None or args.max_steps <= 0:
        raise UserError(f"{recipe}: the estimate needs tokens_per_update and max_steps; add them")
    config = model_config(model_args)
    with torch.device("meta"):
        parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
    pairs = args.tokens_per_update / machine.length
    flops = 3 * pairs * forward_flops(config, machine.length, machine.length)
    bytes_ = all_reduce_bytes(parameters, machine.devices)

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
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="must set tokens_per_update and max_steps")
    for name, kind, default, about in (
        ("--devices", int, 8, "GPUs"),
        ("--peak", float, 989.0, "bf16 TFLOP/s of a GPU, by default of an H100"),
        ("--bandwidth", float, 200.0, "GB/s each way between GPUs, by default of NVLink"),
        ("--length", int, 30, "tokens per sentence"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar="X", help=f"{about} (default: %(default)s)")
    shares: dict[str, Any] = {"type": float, "nargs": "+", "default": [0.05, 0.1, 0.2, 0.4]}
    parser.add_argument("--utilisation", **shares, metavar="X", help="shares of the peak (default: %(default)s)")
    machine = parser.parse_args()
    achieved = " / ".join(f"{share:.0%}" for share in machine.utilisation)
    head = "recipe|parameters|target tokens an update · updates|weights, gradients, Adam|an update|exchanged"
    rows = [table_row(recipe, machine) for recipe in machine.recipes]
    print(markdown_table([*head.split("|"), f"hours at {achieved}"], rows))


if __name__ == "__main__":
    run_command(main)
