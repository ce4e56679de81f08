"""Time and memory of an update with SimCut, R-Drop or a teacher against the plain loss, in turn:
`python -m tests.speed.objectives`.

Loss and gradients of 256 random pairs with the model of scripts/recipes/multi30k_en_de_tiny.yaml, in two processes,
A B A B. A ratio is the time with the objective over the time without.
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers.utils import logging

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from scripts.benchmarks.training import TINY

from .commits import CHECKOUT, Measurements, Side

OBJECTIVES = "simcut", "r_drop", "teacher", "teacher_top"
PAIRS, VOCABULARY = 256, 9_700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--only", default="", help="the objective whose name contains this")
    args = parser.parse_args()
    print(
        "| objective | dtype | tokens/s with it | plain | times as long, median (spread) | peak MiB with it | plain |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        logging.disable_progress_bar()
        torch.manual_seed(0)
        VanillaTransformerForConditionalGeneration(
            VanillaTransformerConfig(vocab_size=VOCABULARY, **TINY)
        ).save_pretrained(folder)
        for name in (each for each in OBJECTIVES if args.only in each):
            for dtype in ("float32", "bfloat16"):
                row: dict[str, Any] = {"work": "update", "dtype": dtype, "pairs": PAIRS, "model": folder}
                row["threads"] = args.threads
                measurements = Measurements()
                measurements.add_pair(Side(CHECKOUT, {**row, "objective": name}), Side(CHECKOUT, row), args.rounds)
                print(measurements.row(f"{name} | {dtype}"), flush=True)


if __name__ == "__main__":
    main()
