"""All measurements on one GPU, in eight minutes at most: `python -m scripts.benchmarks gpu OUT`.

Each section writes its figures to a JSON file. If a time limit stops the command, the same command continues with the
missing sections. A section that cannot run, or does not end in its time, records the reason, so that the others keep
theirs.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hf_vanilla_transformer.data import number_pairs
from hf_vanilla_transformer.data.readers import read_lines
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.run import run_training
from hf_vanilla_transformer.utils.atomic_write import atomic_file
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.markdown import markdown_table
from hf_vanilla_transformer.utils.system_info import describe_hardware, versions

from . import decoding, training
from .arithmetic import size_and_flops
from .report import Measurement
from .training import RANDOM_LENGTH, TINY

Figures = dict[str, Any]

MINUTES = 8  # of the whole command
# seconds of a section, by the first word of its name
LIMITS = {"machine": 20, "memory": 60, "training": 100, "model": 60, "decoding": 80}


class TimeUpError(Exception):
    """A section has not ended in its time."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a TimeUpError in the main thread if the context takes longer. 0 or less raises at once."""

    def stop(number: int, frame: Any) -> None:
        raise TimeUpError(f"not done in {seconds:.0f} s")

    if seconds <= 0:
        raise TimeUpError("no time was left")
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Check:
    """The measurements to make."""

    output: Path  # folder of the JSON files and of the trained model
    device: str  # "cuda", or "cpu" to try the command without a GPU
    # Parallel text to train on and to translate. None generates number words.
    source: str | Path | None = None
    target: str | Path | None = None
    quick: bool = False  # sizes for two minutes on a CPU. The figures have no meaning
    peak: float = 989.0  # bf16 TFLOP/s of the device, for the utilisation

    @property
    def sizes(self) -> Figures:
        """Arguments of the training benchmark."""
        if self.quick:
            return {"vocab_size": 500, "tokens": 256, "updates": 1, "rounds": 1, "warm_up": 1}
        return {"vocab_size": 37_000, "tokens": 16_384, "updates": 10, "rounds": 3, "warm_up": 5}

    def text(self) -> tuple[str | Path, str | Path]:
        """Files of source and target sentences."""
        if self.source is not None and self.target is not None:
            return self.source, self.target
        files = self.output / "numbers.en", self.output / "numbers.de"
        pairs = number_pairs(400 if self.quick else 50_000, 1, "en", "de")["train"]
        for file, side in zip(files, ("source", "target"), strict=True):
            file.write_text("\n".join(pairs[side]) + "\n", encoding="utf-8")
        return files


def run(check: Check) -> dict[str, Figures]:
    """Run every section without a file, and return the figures of all."""
    if check.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device: 'cuda' cannot be used here: torch sees no GPU; --device cpu --quick tries the command"
        )
    if (check.source is None) != (check.target is None):
        raise UserError("source and target go together; give both, or neither")
    check.output.mkdir(parents=True, exist_ok=True)
    figures_of = {}
    end = time.monotonic() + 60 * MINUTES
    for name, section in sections(check).items():
        file = check.output / f"{name}.json"
        if not file.exists():
            start = time.monotonic()
            limit = LIMITS.get(name.split("_")[0], 60)
            try:
                with time_limit(min(limit, end - start)):
                    figures = section()
            # a missing library, out of memory, or out of time
            except (UserError, ImportError, RuntimeError, TimeUpError) as error:
                figures = {"not measured": " ".join(str(error).split())[:300]}
            figures["seconds"] = round(time.monotonic() - start, 1)
            with atomic_file(file) as temporary:
                temporary.write_text(
                    json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8"
                )
            print(
                f"{name}: {figures.get('not measured', 'measured')} ({figures['seconds']} s)",
                flush=True,
            )
        figures_of[name] = json.loads(file.read_text(encoding="utf-8"))
    return figures_of


def sections(check: Check) -> dict[str, Callable[[], Figures]]:
    """The sections, the most important ones first."""
    named: dict[str, Callable[[], Figures]] = {
        "machine": lambda: {
            "hardware": describe_hardware(),
            **versions("ctranslate2", "flash-attn"),
        }
    }
    sizes = ("tiny",) if check.quick else ("base", "big")
    for size in sizes:
        named[f"memory_{size}"] = partial(train_on_random_pairs, check, size)
    for size in sizes:
        named[f"training_{size}"] = partial(train_on_text, check, size)
    named[f"model_{sizes[0]}"] = partial(train_model, check, sizes[0])
    named[f"decoding_{sizes[0]}"] = partial(decode, check, sizes[0])
    return named


def train_on_text(check: Check, preset: str) -> Figures:
    """Target tokens per second in bf16, against transformers' trainer in random order and grouped by length."""
    engines = ["ours_bf16", "marian_bf16", "marian_grouped_bf16"]
    return _figures(
        training.compare(engines, *check.text(), preset, device=check.device, **check.sizes)
    )


def train_on_random_pairs(check: Check, preset: str) -> Figures:
    """Peak memory of an update without padding, and the share of the device's peak arithmetic."""
    engines = ["ours_bf16", "marian_bf16"]
    figures = _figures(training.compare(engines, preset=preset, device=check.device, **check.sizes))
    config = training.config_of(preset, check.sizes["vocab_size"])
    _, flops = size_and_flops(config, RANDOM_LENGTH, RANDOM_LENGTH)
    for one in figures.values():  # forward, and twice that backward
        achieved = 3 * flops / RANDOM_LENGTH * one["tokens_per_second"]
        one["share_of_peak_arithmetic"] = achieved / (check.peak * 1e12)
    return figures


def train_model(check: Check, preset: str) -> Figures:
    """Train a model on the text for a minute, so that it ends its sentences when it decodes."""
    shutil.rmtree(check.output / preset, ignore_errors=True)  # an earlier check's
    fields: Figures = {
        **(TINY if preset == "tiny" else {"preset": preset, "label_smoothing": 0.1}),
        "output_dir": check.output / preset,
        "vocab_size": 500 if check.quick else 10_000,
        "max_steps": 5 if check.quick else 1500,
        "max_tokens_per_batch": 512 if check.quick else 8192,
        "learning_rate": 0.001,
        "warmup_steps": 200,
        "eval_strategy": "no",
        "save_strategy": "no",
        "bf16": check.device == "cuda",
        "use_cpu": check.device == "cpu",
        "disable_tqdm": True,
    }
    flags = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    results = run_training(*parse_recipe(["--train", *map(str, check.text()), *flags]))
    return {
        name: results[name]
        for name in ("train_updates", "train_seconds", "train_loss")
        if name in results
    }


def decode(check: Check, preset: str) -> Figures:
    """Target tokens per second, greedy and with 4 beams, of one sentence and of batches."""
    source, _ = check.text()
    sentences = list(islice(read_lines(source), 8 if check.quick else 1024))
    engines = ["ours_bf16", "ours_fp16", "marian_bf16", "marian_fp16", "ctranslate2_fp16"]
    if check.device == "cpu":
        engines = ["ours_fp32", "marian_fp32"]
    return _figures(
        decoding.compare(
            check.output / preset,
            sentences,
            engines,
            (1, 4) if check.quick else (1, 64, 512),
            (1, 4),
            rounds=1 if check.quick else 2,
            device=check.device,
            limit_single=2 if check.quick else 20,
        )
    )


def _figures(measurements: Iterable[Measurement]) -> Figures:
    """The figures of all rounds by engine and setting."""
    return {
        ", ".join(
            [one.engine, *(f"{name} {value}" for name, value in one.setting.items())]
        ): one.as_dict()
        for one in list(measurements)
    }


def report(sections: dict[str, Figures]) -> str:
    """The figures as a Markdown table."""
    rows = []
    for name, figures in sections.items():
        if "not measured" in figures:
            rows.append([name, "", "", f"not measured: {figures['not measured']}"])
        engines = {engine: one for engine, one in figures.items() if isinstance(one, dict)}
        for engine, one in engines.items():
            share = one.get("share_of_peak_arithmetic")
            memory = one["peak_mib"]
            notes = [f"{share:.0%} of the peak arithmetic"] if share else []
            notes += [f"{memory:,.0f} MiB"] if memory else []
            rows.append([name, engine, f"{one['tokens_per_second']:,.0f}", ", ".join(notes)])
    machine = f"{sections['machine']['hardware']}; torch {sections['machine']['torch']}"
    return (
        f"{machine}\n\n{markdown_table(['section', 'engine', 'target tokens/s', 'others'], rows)}"
    )
