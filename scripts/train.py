#!/usr/bin/env python3
"""Train a translation model from a recipe. Every recipe field is also a command-line flag.

python scripts/train.py scripts/recipes/numbers_en_de.yaml --output_dir runs/numbers --max_steps 500
"""

import shlex
import sys

from hf_vanilla_transformer.errors import run_command


def main() -> None:
    from hf_vanilla_transformer.training.recipes import parse_recipe
    from hf_vanilla_transformer.training.run import run_training

    run_training(*parse_recipe(sys.argv[1:]), command=shlex.join(["python", "scripts/train.py", *sys.argv[1:]]))


if __name__ == "__main__":
    run_command(main)
