"""Estimate what a recipe needs on a cluster: parameters, memory, FLOPs, all-reduce traffic, hours.

  python -m hf_vanilla_transformer.benchmarks.plan scripts/recipes/wmt14_en_de_base.yaml

prints a table with a row for each recipe, computed without training. Flags describe the machine.
"""

import argparse

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError, run_command
from ..markdown import markdown_table
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..training.arguments import model_config
from ..training.recipes import parse_recipe

#: bytes per parameter in training: weight, gradient and both moments of Adam, in float32
STATE_BYTES = 16
GRADIENT_BYTES = 4


def size_and_flops(config: VanillaTransformerConfig, source: int, target: int) -> tuple[int, int]:
    """Parameters, and FLOPs of the matrix products in the forward pass of a pair. Training needs three times as many.

    The pair has `source` and `target` tokens. Attention is counted without masking. Nothing is computed.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = VanillaTransformerForConditionalGeneration(config)
        source_embeds, target_embeds = (torch.empty(1, length, config.d_model) for length in (source, target))
        model(inputs_embeds=source_embeds, decoder_inputs_embeds=target_embeds)
    return model.num_parameters(), counter.get_total_flops()


def all_reduce_bytes(parameters: int, devices: int) -> float:
    """The bytes that each device sends and receives per update: a ring all-reduce moves 2·(N-1)/N of the gradients."""
    return 2 * (devices - 1) / devices * GRADIENT_BYTES * parameters


def read_recipe(recipe: str) -> tuple[VanillaTransformerConfig, int, int]:
    """The model of a recipe, its target tokens per update, and its updates."""
    model_args, _, args = parse_recipe([recipe])
    if args.tokens_per_update is None or args.max_steps <= 0:
        raise UserError(f"{recipe}: the estimate needs tokens_per_update and max_steps; add them")
    return model_config(model_args), args.tokens_per_update, args.max_steps


def table_row(recipe: str, machine: argparse.Namespace) -> list[str]:
    """The cells of a recipe."""
    config, tokens, updates = read_recipe(recipe)
    parameters, flops_per_pair = size_and_flops(config, machine.length, machine.length)
    flops = 3 * tokens / machine.length * flops_per_pair
    bytes_ = all_reduce_bytes(parameters, machine.devices)

    def hours(utilisation: float) -> float:
        computing = flops / (machine.devices * machine.peak * 1e12 * utilisation)
        return updates * (computing + bytes_ / (machine.bandwidth * 1e9)) / 3600

    return [
        recipe.rpartition("/")[2].removesuffix(".yaml"),
        f"{parameters / 1e6:.1f} M",
        f"{tokens:,} · {updates:,}",
        f"{STATE_BYTES * parameters / 1e9:.1f} GB",
        f"{flops / 1e12:.1f} TFLOP",
        f"{bytes_ / 1e6:,.0f} MB",
        " / ".join(f"{hours(utilisation):.1f}" for utilisation in machine.utilisation),
    ]


def recipe_parser(description: str | None, *numbers: tuple[str, float, str]) -> argparse.ArgumentParser:
    """A parser of recipes and of numbers, each with its flag, default and help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="must set tokens_per_update and max_steps")
    for name, default, about in numbers:
        parser.add_argument(name, type=type(default), default=default, metavar="X", help=f"{about} ({default})")
    return parser


def main() -> None:
    parser = recipe_parser(
        __doc__,
        ("--devices", 8, "GPUs"),
        ("--peak", 989.0, "bf16 TFLOP/s of a GPU, by default of an H100"),
        ("--bandwidth", 200.0, "GB/s each way between GPUs, by default of NVLink"),
        ("--length", 30, "tokens per sentence"),
    )
    about = "shares of the peak (%(default)s)"
    parser.add_argument("--utilisation", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4], metavar="X", help=about)
    machine = parser.parse_args()
    achieved = " / ".join(f"{share:.0%}" for share in machine.utilisation)
    head = "recipe|parameters|target tokens an update · updates|weights, gradients, Adam|an update|exchanged"
    rows = [table_row(recipe, machine) for recipe in machine.recipes]
    print(markdown_table([*head.split("|"), f"hours at {achieved}"], rows))


if __name__ == "__main__":
    run_command(main)
