"""Speed and memory of this checkout against another one, in turn: `python -m tests.speed.commits OTHER`.

OTHER is a checkout of an earlier commit (`git worktree add ../other COMMIT`). For each row both run in processes of
their own with the same random weights of the base size and the same random sentences, A B A B, so that other load on
the machine slows both. A ratio is this checkout's target tokens/s over the other's.

Two processes of the same code may differ by some percent for as long as they live, because their memory lies
elsewhere. So a row is the median over several pairs of processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

CHECKOUT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        work: "batches" of 64 sentences, refilled; "one by one"; "update": loss and gradients of 64 pairs.
        dtype: of the weights; of autocast in an update.
        workers: threads that translate with one model, each with one thread of torch.
    """

    name: str
    work: str
    dtype: str
    beams: int = 4
    quantization: str | None = None
    workers: int = 1


ROWS = (
    Row("64 × 4 beams", "batches", "float32"),
    Row("64 × 4 beams", "batches", "bfloat16"),
    Row("64 × 4 beams, two workers", "batches", "bfloat16", workers=2),
    Row("one sentence, greedy", "one by one", "bfloat16", beams=1),
    Row("one sentence, 4 beams", "one by one", "bfloat16"),
    Row("one sentence, int8, greedy", "one by one", "float32", beams=1, quantization="int8"),
    Row("one sentence, int8, 4 beams", "one by one", "float32", quantization="int8"),
    Row("update", "update", "float32"),
    Row("update", "update", "bfloat16"),
)


class Side:
    """A worker process that measures one row with the package of a checkout. A context manager."""

    def __init__(self, checkout: Path, row: dict[str, Any]):
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": str(row["threads"]),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(row)],
            env=environment,
            cwd=row["model"],  # not a checkout: its package would come before PYTHONPATH
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answers: list[
            tuple[int, float, float]
        ] = []  # target tokens, seconds, peak memory in MiB

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.communicate()

    def wait_until_ready(self) -> None:
        if self._line() != "ready":
            raise SystemExit(f"{self.process.args}: did not start; its message is above")

    def measure(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        self.answers.append(tuple(json.loads(self._line())))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds, _ in self.answers]

    def peak(self) -> float:
        return self.answers[-1][2]


def save_base_model(folder: Path) -> None:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig())
    model.save_pretrained(folder)


@dataclass
class Measurements:
    """Target tokens/s of a row, in turn, and peak memory in MiB of each process."""

    other: list[float] = field(default_factory=list)
    this: list[float] = field(default_factory=list)
    other_peaks: list[float] = field(default_factory=list)
    this_peaks: list[float] = field(default_factory=list)

    def add_pair(self, other: Side, this: Side, rounds: int) -> None:
        """Measure two processes in turn."""
        with other, this:
            for side in other, this:
                side.wait_until_ready()
            for _ in range(rounds):
                for side in other, this:
                    side.measure()
        self.other += other.speeds()
        self.this += this.speeds()
        self.other_peaks.append(other.peak())
        self.this_peaks.append(this.peak())

    def row(self, name: str) -> str:
        """A row of a table: this side's speed over the other's."""
        ratios = [new / old for old, new in zip(self.other, self.this, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        speeds = f"{median(self.other):,.0f} | {median(self.this):,.0f}"
        memory = f"{median(self.other_peaks):,.0f} | {median(self.this_peaks):,.0f}"
        return f"| {name} | {speeds} | {median(ratios):.3f} ({spread}) | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each process")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes of each row")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args()
    if not (args.other / "hf_vanilla_transformer").is_dir():
        parser.error(f"other: {args.other} is no checkout of this project")
    print(
        "| row | dtype | tokens/s, other | here | ratio, median (spread) | peak MiB, other | here |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_base_model(Path(folder))
        for row in ROWS:
            if args.only not in row.name:
                continue
            details = {**asdict(row), "threads": args.threads, "model": folder}
            measurements = Measurements()
            for _ in range(args.pairs):
                other = Side(args.other.resolve(), details)
                this = Side(CHECKOUT, details)
                measurements.add_pair(other, this, args.rounds)
            print(measurements.row(f"{row.name} | {row.dtype}"), flush=True)


if __name__ == "__main__":
    main()
