"""All measurements on one GPU, in nine minutes at most: `python -m scripts.benchmarks gpu OUT`.

Each section writes its figures to a JSON file, each figure as soon as it exists. A command that is killed leaves them
there, and the same command continues with the sections that are missing or unfinished. A section that cannot run, or
does not end in its time, records the reason, so that the others keep theirs.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset

from hf_vanilla_transformer.batches.batching import pair_lengths
from hf_vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.corpora import number_pairs
from hf_vanilla_transformer.corpora.readers import read_lines
from hf_vanilla_transformer.loss_vanilla_transformer import IGNORED
from hf_vanilla_transformer.training.run.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.trainer.loaders import packed_row_loader
from hf_vanilla_transformer.utils.atomic_write import atomic_file
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.markdown import markdown_table
from hf_vanilla_transformer.utils.system_info import describe_hardware, versions
from hf_vanilla_transformer.utils.untrusted import one_line

from . import decoding, training
from .arithmetic import size_and_flops
from .harness import check_choices
from .report import Measurement
from .training import RANDOM_LENGTH, TINY

Figures = dict[str, Any]
#: Yields its figures until then, each time that there is one more.
Section = Callable[[], Iterator[Figures]]

MINUTES = 9  # of the whole command
# seconds of each section
LIMITS = {
    "machine": 20,
    "fixed": 150,  # two models are compiled at once
    "training": 170,
    "model": 60,
    "decoding": 110,
    "ctranslate2": 100,
    "kernels": 120,
    "loader": 300,  # of a busy machine, because the figure is one of processor time
    "graphs": 120,
}


class TimeUp(BaseException):
    """A section has not ended in its time. No handler of `Exception` keeps it from ending."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the main thread if the context takes longer. 0 or less raises at once."""

    def stop(number: int, frame: Any) -> None:
        raise TimeUp(f"not done in {seconds:.0f} s")

    if seconds <= 0:
        raise TimeUp("no time was left")
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
    chosen: Sequence[str] | None = None  # keys of `LIMITS`: the sections to measure, by default all

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
    """Run every section without a finished file, and return the figures of all."""
    if check.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device: 'cuda' cannot be used here: torch sees no GPU; --device cpu --quick tries the command"
        )
    if (check.source is None) != (check.target is None):
        raise UserError("source and target go together; give both, or neither")
    chosen = LIMITS.keys() if check.chosen is None else {"machine", *check.chosen}
    check_choices(sections=(list(chosen), list(LIMITS)))
    check.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * MINUTES
    figures_of = {}
    for name, section in sections(check).items():
        if name not in chosen:
            continue
        file = check.output / f"{name}.json"
        if not is_finished(file):
            measure(name, section, file, min(LIMITS[name], end - time.monotonic()))
        figures_of[name] = read(file)
    return figures_of


def is_finished(file: Path) -> bool:
    """True for the file of a section that has ended, measured or not."""
    return file.exists() and "unfinished" not in read(file)


def read(file: Path) -> Figures:
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, figures: Figures) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")


def measure(name: str, section: Section, file: Path, seconds: float) -> None:
    """Run a section for at most some seconds, and write its figures as they come."""
    start = time.monotonic()
    figures: Figures = {}
    try:
        with time_limit(seconds):
            for current in section():
                figures = current
                write(file, {**figures, "unfinished": True})
    except TimeUp as error:  # the same command measures it again
        figures = {**figures, "not measured": str(error), "unfinished": True}
    except Exception as error:  # a missing library, for example, or a full GPU
        figures = {**figures, "not measured": one_line(error)}
    taken = round(time.monotonic() - start, 1)
    write(file, {**figures, "seconds": taken})
    print(f"{name}: {figures.get('not measured', 'measured')} ({taken} s)", flush=True)


def sections(check: Check) -> dict[str, Section]:
    """The sections, the most important ones first."""
    sizes = ("tiny",) if check.quick else ("base", "big")
    return {
        "machine": machine,
        "fixed": partial(train_on_random_pairs, check, sizes),
        "training": partial(train_on_text, check, sizes, TRAINERS),
        "model": partial(train_model, check, sizes[0]),
        "decoding": partial(decode, check, sizes[0], ENGINES[check.device]),
        "ctranslate2": partial(decode, check, sizes[0], AGAINST_CTRANSLATE2[check.device]),
        "kernels": partial(train_on_text, check, sizes[:1], OTHER_TRAINERS),
        "loader": partial(load, check),
        "graphs": partial(train_on_text, check, sizes[:1], GRAPH_TRAINERS),
    }


def machine() -> Iterator[Figures]:
    """The machine and the libraries."""
    yield {"hardware": describe_hardware(), **versions("ctranslate2", "flash-attn")}


# as users have them, and Marian without the plans of cuDNN
TRAINERS = ("ours_bf16", "marian_grouped_bf16", "marian_grouped_no_cudnn_bf16")
# what packing, compiling and leaving cuDNN out give by themselves
OTHER_TRAINERS = (
    "ours_eager_bf16",
    "ours_padded_bf16",
    "ours_padded_cudnn_bf16",
    "marian_bf16",
    "marian_no_cudnn_bf16",
)
# what CUDA graphs of the passes give. The first one is compiled already, by the sections above
GRAPH_TRAINERS = ("ours_bf16", "ours_graphs_bf16")


# in the precision that each device has
ENGINES = {"cuda": ("ours_bf16", "ours_fp16", "marian_bf16"), "cpu": ("ours_fp32", "marian_fp32")}
AGAINST_CTRANSLATE2 = {
    "cuda": ("ours_bf16", "ctranslate2_fp16"),
    "cpu": ("ours_fp32", "ctranslate2_fp32"),
}


def train_on_text(
    check: Check, presets: Sequence[str], engines: Sequence[str]
) -> Iterator[Figures]:
    """Target tokens per second in bf16 on real text."""
    return _figures(
        training.compare(engines, *check.text(), presets, device=check.device, **check.sizes)
    )


def train_on_random_pairs(check: Check, presets: Sequence[str]) -> Iterator[Figures]:
    """Speed and peak memory of an update of one shape, and the share of the device's peak arithmetic."""
    flops = {}
    for preset in presets:
        config = training.config_of(preset, check.sizes["vocab_size"])
        _, flops[preset] = size_and_flops(config, RANDOM_LENGTH, RANDOM_LENGTH)
    engines = ["ours_bf16", "marian_bf16"]
    measurements = training.compare(engines, preset=presets, device=check.device, **check.sizes)
    for figures in _figures(measurements):
        for one in figures.values():  # forward, and twice that backward
            of_token = 3 * flops[one["setting"]["preset"]] / RANDOM_LENGTH
            achieved = of_token * one["tokens_per_second"]
            one["share_of_peak_arithmetic"] = achieved / (check.peak * 1e12)
        yield figures


LOADER_EPOCHS = 3  # that are measured, after the first one


def load(check: Check) -> Iterator[Figures]:
    """Target tokens per second of one core's time, of the loader of packed rows as training uses it."""
    tokens = check.sizes["tokens"]
    with TemporaryDirectory() as folder:
        data = training.prepare(
            Path(folder), *check.text(), ["tiny"], check.sizes["vocab_size"], tokens
        )
        args = VanillaTransformerTrainingArguments(
            output_dir=folder,
            max_tokens_per_batch=tokens,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        config = training.config_of("tiny", check.sizes["vocab_size"])
        yield from _figures(measure_loader(args, data, config))


def measure_loader(
    args: VanillaTransformerTrainingArguments, data: Dataset, config: VanillaTransformerConfig
) -> Iterator[Measurement]:
    """Measure the first epoch, with the plan of its rows and the reading of the table, and the epochs after it."""
    target_tokens = int(pair_lengths(data)[1].sum())
    first = Measurement("loader, first epoch with its plan", {})
    later = Measurement("loader", {})
    start = time.process_time()
    loader: Any = packed_row_loader(args, data, config, batches_per_update=1)
    for epoch in range(1 + LOADER_EPOCHS):
        loader.batch_sampler.set_epoch(epoch)
        labels = sum(
            int(batch["labels"].ne(IGNORED).sum()) for update in loader for batch in update
        )
        if labels != target_tokens:
            raise RuntimeError(f"the loader made {labels} target tokens of {target_tokens}")
        end = time.process_time()
        (later if epoch else first).add(end - start, target_tokens, None)
        start = end
    yield first
    yield later


def train_model(check: Check, preset: str) -> Iterator[Figures]:
    """Train a model on the text for half a minute, so that it ends its sentences when it decodes.

    Compiling its updates would take longer.
    """
    shutil.rmtree(check.output / preset, ignore_errors=True)  # an earlier check's
    fields: Figures = {
        **(TINY if preset == "tiny" else {"preset": preset, "label_smoothing": 0.1}),
        "output_dir": check.output / preset,
        "vocab_size": 500 if check.quick else 10_000,
        "max_steps": 5 if check.quick else 1500,
        "max_minutes": 0.5,
        "torch_compile": False,
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
    names = ("train_updates", "train_seconds", "train_loss")
    yield {name: results[name] for name in names if name in results}


def decode(check: Check, preset: str, engines: Sequence[str]) -> Iterator[Figures]:
    """Target tokens per second with 4 beams and greedy, of batches and of one sentence."""
    source, _ = check.text()
    sentences = list(islice(read_lines(source), 8 if check.quick else 512))
    return _figures(
        decoding.compare(
            check.output / preset,
            sentences,
            engines,
            (4, 1) if check.quick else (64, 512, 1),
            (4, 1),
            rounds=1 if check.quick else 2,
            device=check.device,
            limit_single=2 if check.quick else 8,
        )
    )


def _figures(measurements: Iterable[Measurement]) -> Iterator[Figures]:
    """The figures by engine and setting after each measurement, and once more when all rounds have been added."""
    done: list[Measurement] = []
    for one in measurements:
        done.append(one)
        yield _by_name(done)
    yield _by_name(done)


def _by_name(measurements: Sequence[Measurement]) -> Figures:
    figures = {}
    for one in measurements:
        settings = [f"{name} {value}" for name, value in one.setting.items()]
        figures[", ".join([one.engine, *settings])] = one.as_dict()
    return figures


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
    machine = sections["machine"]
    header = f"{machine.get('hardware')}; torch {machine.get('torch')}"
    return f"{header}\n\n{markdown_table(['section', 'engine', 'target tokens/s', 'others'], rows)}"
