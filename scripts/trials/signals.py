"""Signals at random moments of a run: whatever it was doing, the resumed run must end as an undisturbed one.

    python -m scripts.trials.signals --trials 30 --processes 1 2

Each trial sends SIGINT, SIGTERM or SIGKILL in a random phase (reading, tokenizer training, training, evaluating,
saving, testing), to all processes or to one, then resumes with `--resume_from_checkpoint auto`. The weights of the
model folder must be the same bytes as those of an undisturbed run, and its scores the same. The interrupted run must
have printed at most one message and one error, without a traceback, and left no model that looks finished and is not.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.trials.forked_runs import (
    PHASES,
    SETTINGS,
    ForkedRun,
    empty_folder,
    import_libraries,
    write_pairs,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# How often a phase begins, about: a trial picks one of these.
TIMES = {
    "reading": 1,
    "tokenizer training": 1,
    "training": 12,
    "evaluating": 14,
    "saving": 3,
    "testing": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "best of checkpoints": {
        **{
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "steps",
            "save_steps": 4,
            "save_total_limit": 1,
        },
        "load_best_model_at_end": True,
    },
    "token batches, average": {
        **{"max_tokens_per_batch": 150, "tokens_per_update": 300, "average_last": 2},
        **{"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 5},
    },
    "nothing saved": {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "no"},
}
SCORES = ("eval_bleu", "eval_chrf", "eval_loss", "test_bleu", "test_chrf", "train_updates")
STATUSES = {signal.SIGINT: {130, -2}, signal.SIGTERM: {143, -15}, signal.SIGKILL: {-9}}


def outcome(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The weights and the scores of a finished run."""
    results = json.loads((folder / "all_results.json").read_text())
    return (folder / "model.safetensors").read_bytes(), {name: results.get(name) for name in SCORES}


def undisturbed(
    folder: Path, settings: dict[str, Any], processes: int
) -> tuple[bytes, dict[str, Any]]:
    run = ForkedRun(
        settings | {"output_dir": folder / "run"}, folder / "cache", folder / "log", processes
    )
    statuses = run.wait(300)
    assert not any(statuses), run.output()
    return outcome(folder / "run")


def trial(
    folder: Path,
    settings: dict[str, Any],
    processes: int,
    phase: str,
    dice: random.Random,
    expected: Any,
) -> str:
    """Interrupt a run and resume it. Returns a description. An AssertionError is a fault."""
    number = dice.choice(SIGNALS)
    times, delay = dice.randint(1, TIMES[phase]), dice.uniform(0, 0.15)
    rank = dice.choice([None, *range(processes)]) if processes > 1 else None
    settings = settings | {"output_dir": folder / "run"}
    run = ForkedRun(settings, folder / "cache", folder / "log", processes, slow=True)
    reached = run.wait_for(phase, times)
    time.sleep(delay)
    if reached:
        run.send(number, rank)
    statuses, printed = run.wait(), run.output()
    what = f"{signal.Signals(number).name} in {phase} ({times})"
    if set(statuses) == {0}:
        what += ": too late"
    else:
        permitted = STATUSES[number] | ({-9, 1, 2} if rank is not None else set())
        assert set(statuses) <= permitted, f"{what}: statuses {statuses}\n{printed}"
        if rank is None:
            assert "Traceback" not in printed, f"{what}\n{printed}"
        assert printed.count("stopping: ") <= 1 and printed.count("error: ") <= 1, (
            f"{what}\n{printed}"
        )
        if "is complete: resume" in printed:
            named = printed.split("; ")[-1].split(" is complete")[0].split()[-1]
            assert (Path(named) / "trainer_state.json").is_file(), printed
            what += ": saved"
        else:
            what += ": at once"
        assert not (folder / "run" / "all_results.json").exists(), (
            "an interrupted run looks finished"
        )
    resumed = ForkedRun(
        settings | {"resume_from_checkpoint": "auto"}, folder / "cache", folder / "log 2", processes
    )
    if any(resumed.wait(300)):
        raise AssertionError(
            f"{what}: the run does not resume\n{printed}\n--- resumed\n{resumed.output()}"
        )
    weights, scores = outcome(folder / "run")
    assert scores == expected[1], (
        f"{what}: {scores}, not {expected[1]}\n{printed}\n--- resumed\n{resumed.output()}"
    )
    assert weights == expected[0], (
        f"{what}: other weights\n{printed}\n--- resumed\n{resumed.output()}"
    )
    left = {path.name for path in (folder / "run").iterdir()} & {".saving", ".lock"}
    assert not left, f"{what}: left {left}"
    return what


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trials", type=int, default=30, help="for each number of processes (default 30)"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="default 1 2")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it runs in the background
    import_libraries()
    faults, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="signal_trials_") as temporary:
        root = Path(temporary)
        pairs = write_pairs(root)
        for processes in arguments.processes:
            dice, expected, counts = random.Random(f"{arguments.seed} {processes}"), {}, Counter()
            for number in range(arguments.trials):
                name = list(RUNS)[number % len(RUNS)]
                if number % len(PHASES) == 0:
                    phases = dice.sample(list(PHASES), len(PHASES))
                settings = {**SETTINGS, **pairs, **RUNS[name]}
                if name not in expected:
                    with empty_folder(root / "undisturbed") as folder:
                        expected[name] = undisturbed(folder, settings, processes)
                with empty_folder(root / "trial") as folder:
                    try:
                        what = trial(
                            folder, settings, processes, phases.pop(), dice, expected[name]
                        )
                        counts[what.rpartition(": ")[2]] += 1
                    except (AssertionError, TimeoutError) as error:
                        faults += 1
                        what = f"FAULT {error}"
                print(f"{processes} processes, trial {number + 1}, {name}: {what}", flush=True)
            counted = ", ".join(f"{count} {what}" for what, count in counts.items())
            print(f"{processes} processes: {arguments.trials} trials, {counted}", flush=True)
    print(f"{faults} faults in {time.monotonic() - start:.0f} s", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
