"""Random recipes: each must end trained and saved, or in one line with status 2, and lose no file that was there.

  python -m scripts.trials.recipes --runs 300                    # prints the figures and every failure
  python -m scripts.trials.recipes --runs 1 --first 17 --show    # one case, with its recipe and its output

A case is a recipe of a tiny run of two updates, of which one to four fields are replaced by valid, edge or absurd
values. Each case runs in a process of its own, forked after the imports, with a limit of its memory.
"""

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import yaml

from hf_vanilla_transformer.training.run.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
)
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.utils.errors import run_command
from tests.trainer_helpers import TINY_RUN, write_pairs

SECONDS = 120  # a case that takes longer hangs
MEMORY = 12 * 2**30
SAVED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "all_results.json",
}
SPLITS, SIDES = ("train", "validation", "test"), ("source", "target")

BASE: dict[str, Any] = TINY_RUN | {
    "output_dir": "run",
    "max_steps": 2,
    "save_steps": 1,
    "warmup_steps": 1,
    "per_device_train_batch_size": 4,
    **{split: [f"{split}.{side}" for side in SIDES] for split in SPLITS},
}
# Fields that are left alone, each with its reason.
LEFT_OUT = {
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_strategy", "model_name_or_path"), "ask the Hub"
    ),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), "compile for a minute"
    ),
    **dict.fromkeys(
        ("use_cpu", "tf32", "fp16_full_eval", "bf16_full_eval"), "concern accelerators"
    ),
    **dict.fromkeys(
        ("disable_tqdm", "log_level", "log_level_replica", "output_dir"), "concern this trial"
    ),
    "ddp_timeout": "waits for other processes",
}
NUMBERS: dict[type, list[Any]] = {
    int: [1, 2, 3, 8, 0, -1, 17, 2**31, 10**12],
    float: [0, 0.1, 0.5, 1, 2, -1, 1e-9, 1e30, float("nan"), float("inf")],
}
TEXTS = [
    "",
    "no",
    "null",
    "x",
    "../x",
    "a b",
    "☃",
    "-1",
    "1e3",
    "[",
    "train.source",
    "train.jsonl",
    ".",
    "none",
]
# Values that mean something for a field, so that more recipes are trained.
CHOSEN: dict[str, list[Any]] = {
    "preset": ["base", "E", "C1", "gigantic"],
    "vocab_size": [260, 300, 259, 3_000_000_000],
    "d_model": [8, 16, 18, 7, 10**9],
    "activation_function": ["gelu", "silu", "relu", "sigmoidal"],
    "position_encoding_type": ["learned", "sinusoidal_split", "sinusoidal_fairseq", "polar"],
    "max_steps": [1, 2, 3, 0, -7],
    "max_tokens_per_batch": [20, 50, 1, 0],
    "tokens_per_update": [30, 100, 1, -1],
    "numbers_size": [10, 0, -3],
    "train": [
        *(
            ["train.jsonl"],
            ["numbers"],
            ["train.source", "train.target", "train.jsonl"],
            ["twice.csv"],
        ),
        *(
            ["train.source"],
            ["notes.txt", "train.target"],
            ["missing.jsonl"],
            ["x"],
            ["."],
            ["-1"],
            ["☃", "a b"],
        ),
    ],
    "train_weights": [[1], [2, 1], [0]],
    "tokenizer_name": ["tokenizer", "notes.txt", "missing"],
    "source_lang": ["en", "no", "tlh"],
    "target_lang": ["de", "no", "xx"],
    "lr_scheduler_kwargs": [{}, {"timescale": 5}, {"timescale": 0}, {"min_lr": 0.1}, "x"],
    "optim": ["adamw_torch", "sgd", "adafactor", "adamw_bnb_8bit", "rmsprop", "adamax"],
    "report_to": ["none", "tensorboard", "wandbb", "all"],
    "bleu_tokenize": ["13a", "none", "char", "zh", "ja-mecab", "moses"],
    "metric_for_best_model": ["bleu", "chrf", "loss", "eval_loss", "blue"],
    "resume_from_checkpoint": [True, False, "elsewhere", "run/checkpoint-1"],
    "dataloader_num_workers": [0, 1, 2, -1],
    "generation_config": ["tokenizer", "missing"],
    "train_sampling_strategy": ["random", "sequential", "group_by_length", "sideways"],
    "ddp_backend": ["gloo", "nccl", "smoke"],
    "deepspeed": [{}, "ds.json"],
    "fsdp": ["full_shard", "x"],
}
SOURCES = [
    "one",
    "two",
    "three",
    "twenty-one",
    "two hundred",
    "thirty-three",
    "one hundred and two",
    "forty",
]
TARGETS = [
    "eins",
    "zwei",
    "drei",
    "einundzwanzig",
    "zweihundert",
    "dreiunddreißig",
    "einhundertzwei",
    "vierzig",
]


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        status: of the process. A negative number is a signal.
        output: standard output and error together.
        faults: of the outcome.
    """

    status: int
    output: str
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """For the figures."""
        return (
            "failed"
            if self.faults
            else "refused in one line"
            if self.status
            else "trained and saved"
        )

    @property
    def message(self) -> str:
        return next(
            (line for line in reversed(self.output.splitlines()) if line.startswith("error: ")), ""
        )


def candidates() -> dict[str, list[Any]]:
    """The values to choose from, for each field."""
    found: dict[str, list[Any]] = {}
    for each in (ModelArguments, DataArguments, RunArguments):
        hints = get_type_hints(each)
        for name in (each_field.name for each_field in fields(each)):
            if name not in LEFT_OUT and not name.startswith(("hub_", "trackio_")):
                found[name] = (
                    CHOSEN.get(name, []) + values_of(hints[name]) * (name not in CHOSEN) + [None]
                )
    return found


def values_of(hint: Any) -> list[Any]:
    """Values of a type: valid ones, edges and absurd ones."""
    kinds = [hint, *get_args(hint)]
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, Enum)]
    if enums:
        return [choice.value for choice in enums[0]] + ["sideways"]
    for kind in (bool, float, int):
        if kind in kinds:
            return [True, False, True, "maybe"] if kind is bool else NUMBERS[kind]
    return TEXTS + ([{}, {"a": 1}] if any("dict" in str(each) for each in kinds) else [])


def make_case(number: int, seed: int) -> tuple[dict[str, Any], str]:
    """The recipe of a case, and the earlier content of its output folder."""
    dice, pool = random.Random(f"{seed} {number}"), candidates()
    recipe = dict(BASE)
    for name in dice.sample(sorted(pool), dice.choice([1, 1, 1, 2, 2, 3, 4])):
        recipe[name] = pool[name][
            int(len(pool[name]) * dice.random() ** 1.7)
        ]  # more of the first, valid ones
    before = dice.choices(
        ["nothing", "an empty folder", "notes", "a run", "a file"], [6, 3, 3, 5, 1]
    )[0]
    if before == "a run" and dice.random() < 0.9:
        recipe["resume_from_checkpoint"] = True
    return recipe, before


def write_text(folder: Path) -> None:
    """The three splits as parallel text."""
    pairs = list(zip(SOURCES, TARGETS, strict=True))
    for split, rows in (("train", pairs), ("validation", pairs[:3]), ("test", pairs[2:6])):
        write_pairs(folder, rows, split)


def prepare(folder: Path, before: str, finished: Path) -> None:
    """Write data, and the earlier content of the output folder."""
    write_text(folder)
    rows = [json.dumps({"source": a, "target": b}) for a, b in zip(SOURCES, TARGETS, strict=True)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "twice.csv").write_text("source,target,target\na,b,c\n")
    (folder / "notes.txt").write_text("no data\n")
    (folder / "ds.json").write_text("{}\n")
    shutil.copytree(finished, folder / "tokenizer")
    run = folder / "run"
    if before == "a file":
        run.write_text("mine\n")
    elif before == "a run":
        shutil.copytree(finished, run)
    elif before != "nothing":
        run.mkdir()
    if before in ("a run", "notes"):
        (run / "notes.txt").write_text("mine\n")
    if before == "notes":
        (run / "README.md").write_text("mine\n")


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def train(folder: Path, recipe: dict[str, Any]) -> Outcome:
    """Train in a forked process that sees nothing of the others."""
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8"
    )
    log, start = folder / "output.log", time.monotonic()
    child = os.fork()
    if not child:
        os._exit(in_child(folder, log))
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - start > SECONDS:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    output = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    return Outcome(os.waitstatus_to_exitcode(ended[1]), output, seconds=time.monotonic() - start)


def in_child(folder: Path, log: Path) -> int:
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(sink, stream)
        sys.stdout, sys.stderr = (
            os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2)
        )
        run_command(lambda: run_training(*parse_recipe(["recipe.yaml"])) and None)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # as an interpreter prints before it ends with status 1
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 1


def judge(outcome: Outcome, folder: Path, before: str, files: dict[str, bytes]) -> None:
    """Note the faults of an outcome."""
    now, faults = files_in(folder), outcome.faults
    lost = [name for name, content in files.items() if now.get(name) != content]
    if before == "a run" and (outcome.status == 0 or "the loss of update" in outcome.message):
        # It was to be resumed or replaced, and training had begun.
        lost = [name for name in lost if not name.startswith("run/") or name == "run/notes.txt"]
    if outcome.status == 0:
        missing = sorted(
            SAVED - {name.removeprefix("run/") for name in now if name.startswith("run/")}
        )
        if missing:
            faults.append(f"trained, but there is no {missing[0]}")
    elif outcome.status == 2:
        errors = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
        if len(errors) != 1 or "Traceback" in outcome.output:
            faults.append(
                f"{len(errors)} lines of error"
                + " and a traceback" * ("Traceback" in outcome.output)
            )
        elif outcome.output.rstrip().splitlines()[-1] != errors[0]:
            faults.append("the error has more than one line")
    else:
        last = outcome.output.rstrip().splitlines()[-1:] or [""]
        faults.append(f"status {outcome.status}: {last[0][:200]}")
    if lost:
        faults.append(f"changed or lost: {', '.join(lost[:3])}")


def make_template(folder: Path) -> Path:
    """A finished run: the earlier content of some output folders, and a tokenizer."""
    for library in ("matplotlib.pyplot", "sacrebleu"):  # once, not in every case
        importlib.import_module(library)
    folder.mkdir()
    write_text(folder)
    outcome = train(folder, BASE)
    assert outcome.status == 0, outcome.output
    return folder / "run"


def run_cases(
    numbers: Iterable[int], seed: int, folder: Path
) -> Iterator[tuple[int, dict[str, Any], str, Outcome]]:
    """Run the cases in turn. Yields number, recipe, the earlier content of the output folder, and the outcome."""
    finished = make_template(folder / "template")
    for number in numbers:
        recipe, before = make_case(number, seed)
        with TemporaryDirectory(dir=folder) as name:
            case = Path(name)
            prepare(case, before, finished)
            files = files_in(case)
            outcome = train(case, recipe)
            judge(outcome, case, before, files)
        yield number, recipe, before, outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print recipe and output of every case")
    arguments = parser.parse_args()
    ended: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        cases = range(arguments.first, arguments.first + arguments.runs)
        for number, recipe, before, outcome in run_cases(cases, arguments.seed, Path(folder)):
            ended[outcome.kind] += 1
            changes = {
                name: value
                for name, value in recipe.items()
                if name not in BASE or value != BASE[name]
            }
            print(
                f"{number:4} {outcome.seconds:5.1f} s {outcome.kind}: {changes}, before: {before}",
                flush=True,
            )
            if outcome.message:
                print(f"     {outcome.message}", flush=True)
            for fault in outcome.faults:
                print(f"     FAULT {fault}", flush=True)
            if arguments.show or outcome.faults:
                print(
                    "\n".join(f"     | {line}" for line in outcome.output.splitlines()[-12:]),
                    flush=True,
                )
    print(
        f"{arguments.runs} recipes: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(ended.items()))
    )
    return 1 if ended["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
