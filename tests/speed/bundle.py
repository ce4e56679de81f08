"""The remote code alone against transformers' own loop: `python -m tests.speed.bundle`.

The model is loaded with `trust_remote_code=True` from a folder, in a process that never imports the package. Its own
`generate` and that of `GenerationMixin` take turns with the same weights and sentences. A ratio is the loop's seconds
over the bundle's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

LIMIT = 32  # new tokens
Generate = Callable[..., Tensor]


def measure(folder: str, threads: int, rounds: int) -> None:
    """Print the table's rows."""
    from transformers import AutoModelForSeq2SeqLM, GenerationMixin
    from transformers.utils import logging
    from worker import BATCH, padded, random_sentences  # beside this file, which runs by its path

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()
        assert "hf_vanilla_transformer" not in sys.modules, "the package was imported"
        pad = model.config.pad_token_id
        sentences = random_sentences(model.config.vocab_size, model.config.eos_token_id)[:BATCH]
        ones = [padded([each], pad) for each in sentences[::8]]
        batch = [padded(sentences, pad)]
        for name, requests, beams in (
            ("one sentence, greedy", ones, 1),
            ("one sentence, 4 beams", ones, 4),
            ("64 × 4 beams", batch, 4),
        ):

            def translate(generate: Generate, requests: Any = requests, beams: int = beams) -> list[Tensor]:
                options = {"num_beams": beams, "max_new_tokens": LIMIT, "length_penalty": 1.0 if beams > 1 else None}
                return [generate(ids, attention_mask=mask, **options) for ids, mask in requests]

            def loop(*args: Any, model: Any = model, **options: Any) -> Tensor:
                return GenerationMixin.generate(model, *args, **options)

            print(f"| {name} | {dtype} | {_compare(translate, model.generate, loop, rounds, pad)} |", flush=True)


def _compare(
    translate: Callable[[Generate], list[Tensor]], ours: Generate, theirs: Generate, rounds: int, pad: int
) -> str:
    same = total = 0
    for one, other in zip(translate(ours), translate(theirs), strict=True):
        for row, expected in zip(one, other, strict=True):
            same += row[row.ne(pad)].tolist() == expected[expected.ne(pad)].tolist()
            total += 1
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        translate(ours)
        middle = time.perf_counter()
        translate(theirs)
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {same} of {total}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        measure(args.folder, args.threads, args.rounds)
        return
    from tests.speed.commits import save_base_model

    print("| row | dtype | ratio, median (spread) | same tokens |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_base_model(Path(folder))
        numbers = ["--threads", str(args.threads), "--rounds", str(args.rounds)]
        command = [sys.executable, str(Path(__file__)), "--folder", folder, *numbers]
        subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)}, check=True)


if __name__ == "__main__":
    main()
