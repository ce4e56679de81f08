"""Estimate what many lines, or a corpus of WMT's size, cost on CPUs, from the figures that were measured here.

python -m hf_vanilla_transformer.benchmarks.cost scripts/recipes/wmt14_*.yaml
"""

from pathlib import Path

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import run_command
from ..markdown import markdown_table
from .plan import GRADIENT_BYTES, read_recipe, recipe_parser, size_and_flops

#: engine -> (row of README.md, column with its target tokens/s, cores that it took)
ENGINES = {
    "base, bfloat16, 4 beams": ("this package, bfloat16, two workers (the default of `translate`)", 1, 2),
    "base, int8, greedy": ("base, random weights, 64 random sentences", 2, 1),
    "tiny student, int8, greedy": ("multi30k_en_de_tiny_self_distilled, test_2016_flickr", 2, 1),
}
TRAINING = "this package, token batches", 3, 2
READER = "one process of `--ray` cuts and numbers lines"
GBITS = (10, 100, 400)  # of Ethernet
WEEK = 7 * 24


def measured(row: str, column: int = 1, cores: int = 1) -> float:
    """A figure of README.md for each core."""
    lines = Path(__file__).with_name("README.md").read_text(encoding="utf-8").splitlines()
    cells = next(line for line in lines if line.startswith(f"| {row} |")).split("|")
    return float(cells[column + 1].replace(",", "")) / cores


def translation_row(engine: str, lines: float, length: int, price: float) -> list[str]:
    """Core hours, their price, and lines per second if it takes a week."""
    hours, rate = lines * length / measured(*ENGINES[engine]) / 3600, lines / WEEK / 3600
    cells = [f"{hours:,.0f}", f"{hours * price:,.0f}", f"{hours / WEEK:,.0f}", f"{rate:,.0f}"]
    return [engine, *cells, f"{rate / measured(READER):.1%}"]


def training_row(recipe: str, length: int, price: float, cores: int) -> list[str]:
    """Core hours, their price, and the hosts with which exchanging gradients takes as long as computing them."""
    config, tokens, updates = read_recipe(recipe)
    parameters, flops = size_and_flops(config, length, length)
    measured_flops = size_and_flops(VanillaTransformerConfig(vocab_size=16_000), length, length)[1]  # the base size
    update = tokens / (measured(*TRAINING) * measured_flops / flops)  # seconds of one core
    hours = update * updates / 3600
    exchange = [2 * GRADIENT_BYTES * parameters / (gbit / 8 * 1e9) for gbit in GBITS]  # seconds, of a ring
    hosts = " / ".join(f"{update / cores / seconds:,.1f}" for seconds in exchange)
    return [Path(recipe).stem, f"{hours:,.0f}", f"{hours * price:,.0f}", hosts]


def main() -> None:
    parser = recipe_parser(
        __doc__,
        ("--lines", 1e10, "to translate"),
        ("--length", 30, "tokens of a line"),
        ("--price", 0.04, "of a core for an hour"),
        ("--cores", 64, "of a host"),
    )
    job = parser.parse_args()
    head = f"{job.lines:,.0f} lines with|core hours|price|cores for a week|lines/s|of one reader"
    rows = [translation_row(engine, job.lines, job.length, job.price) for engine in ENGINES]
    print(markdown_table(head.split("|"), rows), end="\n\n")
    head = f"training|core hours|price|hosts of {job.cores} cores at {' / '.join(map(str, GBITS))} Gbit/s"
    rows = [training_row(recipe, job.length, job.price, job.cores) for recipe in job.recipes]
    print(markdown_table(head.split("|"), rows))


if __name__ == "__main__":
    run_command(main)
