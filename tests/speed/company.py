"""Training and translating with default settings, alone, next to a busy process, and with half of the cores' time.

`python -m tests.speed.company` runs each case in turn with the reference, one thread alone, and prints the ratios of
target tokens/s. The control group needs root.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.inference.workers import worker_count
from hf_vanilla_transformer.training.callbacks import FitThreads
from hf_vanilla_transformer.utils.cpu_time import on_fitting_threads, usable_cores
from scripts.benchmarks.decoding_engines import OurEngine
from scripts.benchmarks.training import config_of
from tests.speed.worker import random_sentences

VOCAB = {"tiny": 9700, "base": 16_000}
PAIRS, LENGTH = {"tiny": 256, "base": 64}, 16  # of an update
CASES = ("alone", "busy", "group")
GROUPS = Path("/sys/fs/cgroup")


def training(size: str) -> Callable[[], int]:
    """Updates in bfloat16, with the callback of `train` that chooses the threads."""
    model = VanillaTransformerForConditionalGeneration(config_of(size, VOCAB[size])).train()
    optimizer, threads = torch.optim.AdamW(model.parameters()), FitThreads()
    ids = torch.randint(5, VOCAB[size], (PAIRS[size], LENGTH))

    def update() -> int:
        threads.on_step_begin(SimpleNamespace(device=model.device), None, None)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return ids.numel()

    return update


def translating(size: str) -> Callable[[], int]:
    """64 sentences at a time in float32, in as many workers as `translate` has."""
    model = VanillaTransformerForConditionalGeneration(config_of(size, VOCAB[size])).eval()
    engine = OurEngine(model, workers=True)
    sentences = random_sentences(VOCAB[size], model.config.eos_token_id, 64)

    def translate() -> int:
        engine.workers = worker_count(model)
        with on_fitting_threads():
            return sum(map(len, engine.translate(sentences, 64, 1)))

    return translate


def work(kind: str, size: str, seconds: float) -> None:
    """Print target tokens/s, and target tokens per second of processor time."""
    unit = {"train": training, "translate": translating}[kind](size)
    unit()
    tokens, start, cpu = 0, time.monotonic(), time.process_time()
    while time.monotonic() - start < seconds:
        tokens += unit()
    print(json.dumps([tokens / (time.monotonic() - start), tokens / (time.process_time() - cpu)]))


@contextmanager
def company(case: str) -> Iterator[Callable[[], Any] | None]:
    """What a process has to do to run in this case."""
    if case == "busy":
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            yield None
        finally:
            busy.kill()
            busy.wait()
    elif case == "group":
        quota, old = len(usable_cores()) * 50_000, (GROUPS / "cpu").is_dir()
        group = (GROUPS / "cpu" if old else GROUPS) / f"company-{os.getpid()}"
        group.mkdir()
        (group / ("cpu.cfs_quota_us" if old else "cpu.max")).write_text(str(quota) if old else f"{quota} 100000")
        try:
            yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        finally:
            group.rmdir()
    else:
        yield None


def measure(case: str, kind: str, size: str, seconds: float, threads: str | None) -> list[float]:
    environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": threads}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-m", __spec__.name, "--work", kind, size, "--seconds", str(seconds)]
    with company(case) as join:
        done = subprocess.run(command, env=environment, preexec_fn=join, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=VOCAB, default=[*VOCAB])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parsed = parser.parse_args()
    if parsed.work:
        kind, size = parsed.work
        work(kind, size, parsed.seconds)
        return
    for size in parsed.sizes:
        for kind in ("train", "translate"):
            figures: dict[str, list[list[float]]] = {name: [] for name in ("one thread", *parsed.cases)}
            for _ in range(parsed.rounds):
                for name, rounds in figures.items():
                    case, threads = ("alone", "1") if name == "one thread" else (name, None)
                    rounds.append(measure(case, kind, size, parsed.seconds, threads))
            medians = {name: list(map(median, zip(*rounds, strict=True))) for name, rounds in figures.items()}
            for name, (wall, cpu) in medians.items():
                one_wall, one_cpu = medians["one thread"]
                ratios = f"ratio {wall / one_wall:.2f}, by processor time {cpu / one_cpu:.2f}"
                print(f"{size}, {kind}, {name}: {wall:,.0f} target tokens/s, {ratios}", flush=True)


if __name__ == "__main__":
    main()
