"""Run Hugging Face's model tests on transformers' own Marian and on the models of this package, and compare them.

Called by scripts/conformance.sh: run.py FOLDER [PYTEST ARGUMENT…], with the folder of Hugging Face's tests.

Fails if a test of ours fails or is skipped that exceptions.py does not name, if a test of ours is skipped for good
although Marian passes it, or if exceptions.py names what no longer needs to be named.
"""

import os
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import transformers
from exceptions import DOES_NOT_APPLY, DOES_NOT_HOLD, NEEDS_ANOTHER_MACHINE

HERE = Path(__file__).resolve().parent
MARIAN, OURS = "marian", "vanilla_transformer"

# The test classes of a model's file, and the mixin that each of them runs.
MIXINS = {
    "ModelTests": "model",
    "OptionsTests": "model, other options",
    "EncoderTests": "model, encoder alone",
    "ClassifierTests": "model, classifier",
    "ConfigTests": "configuration",
    "TrainingTests": "training",
    "MemoryTests": "memory clean-up",
    "FsdpTests": "FSDP",
    "TensorParallelTests": "tensor parallel",
}
Outcomes = dict[str, str]  # "Class.test": "passed", "failed" or "skipped"


class Recorder:
    """A pytest plugin that keeps the outcome of every test, per model."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcomes] = {MARIAN: {}, OURS: {}}
        self.failures: list[str] = []  # of ours, as pytest describes them
        self._subtests: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, test_class, test = report.nodeid.split("::")
        known = self.outcomes[Path(file).stem]
        name = f"{test_class}.{test}"
        if report.failed:
            known[name] = "failed"
            if Path(file).stem == OURS:
                self.failures.append(f"{name}\n{report.longreprtext}\n{report.capstderr}")
        elif hasattr(report, "context"):  # a subtest
            self._subtests.setdefault(report.nodeid, set()).add(report.outcome)
        elif report.skipped or report.when == "call":
            # Where every part of a test was skipped, nothing was tested.
            outcome = (
                "skipped" if self._subtests.get(report.nodeid) == {"skipped"} else report.outcome
            )
            known.setdefault(name, outcome)


def table(outcomes: dict[str, Outcomes]) -> list[str]:
    """Passed, failed and skipped for each mixin, for Marian and for this package."""
    lines = [
        f"{'':22}{'Marian':^24}{'ours':^24}",
        f"{'':22}" + f"{'passed':>8}{'failed':>8}{'skipped':>8}" * 2,
    ]
    totals: Counter[tuple[str, str]] = Counter()
    for test_class, mixin in MIXINS.items():
        line = f"{mixin:22}"
        for model in (MARIAN, OURS):
            counts = Counter(
                outcome
                for name, outcome in outcomes[model].items()
                if name.split(".")[0] == test_class
            )
            totals.update({(model, outcome): count for outcome, count in counts.items()})
            line += "".join(
                f"{counts[o] if counts else '':>8}" for o in ("passed", "failed", "skipped")
            )
        lines.append(line)
    line = f"{'together':22}"
    line += "".join(
        f"{totals[model, o]:>8}"
        for model in (MARIAN, OURS)
        for o in ("passed", "failed", "skipped")
    )
    return [*lines, line]


def named(name: str, *lists: dict[str, str]) -> bool:
    return any(fnmatchcase(name, pattern) for exceptions in lists for pattern in exceptions)


def complaints(outcomes: dict[str, Outcomes], complete: bool) -> list[str]:
    """The differences from the expected results. `complete` says if all tests ran, of the pinned transformers."""
    marian, ours = outcomes[MARIAN], outcomes[OURS]
    found = []
    for name, outcome in ours.items():
        theirs = marian.get(name, "has none")
        if outcome == "failed" and not named(name, DOES_NOT_HOLD):
            found.append(f"{name} fails (Marian: {theirs})")
        elif outcome == "skipped" and not named(
            name, DOES_NOT_HOLD, DOES_NOT_APPLY, NEEDS_ANOTHER_MACHINE
        ):
            found.append(f"{name} is skipped and exceptions.py gives no reason (Marian: {theirs})")
        elif outcome == "skipped" and theirs == "passed" and not named(name, DOES_NOT_HOLD):
            found.append(f"{name} is skipped, but Marian passes it")
    if complete:
        missing = {name for name in marian if name not in ours}
        found += [f"{name} runs for Marian and not for ours" for name in sorted(missing)]
        for exceptions, needed in (
            (DOES_NOT_HOLD, ("failed", "skipped")),
            (DOES_NOT_APPLY, ("skipped",)),
            (NEEDS_ANOTHER_MACHINE, ("passed", "failed", "skipped")),
        ):
            for pattern in exceptions:
                if not any(
                    outcome in needed and fnmatchcase(name, pattern)
                    for name, outcome in ours.items()
                ):
                    found.append(f"exceptions.py names {pattern}, which no longer needs it")
    return found


def main(folder: str, *arguments: str) -> int:
    os.environ["HF_TESTS"] = folder
    # What a test leaves on a GPU, its mixin is to call an error.
    os.environ.update(
        TRANSFORMERS_TEST_MEMORY_LEAK_MIB="1", TRANSFORMERS_TEST_MEMORY_LEAK_MODE="error"
    )
    recorder = Recorder()
    files = [str(HERE / f"{model}.py") for model in (MARIAN, OURS)]
    # Hugging Face's marks are not registered here, and its warnings are about its own tests.
    options = [
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
    ]
    options += ["-rN", "--tb=no"]  # Marian's failures are not ours to look at
    status = pytest.main([*options, *arguments, *files], plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    print("", *recorder.failures, *table(recorder.outcomes), "", sep="\n")
    pinned = (HERE.parents[1] / "scripts" / "constraints.txt").read_text(encoding="utf-8")
    kept_for_this = f"transformers=={transformers.__version__};" in pinned
    found = complaints(recorder.outcomes, complete=kept_for_this and not arguments)
    for name, outcome in recorder.outcomes[MARIAN].items():
        if outcome == "failed":
            print(f"Marian itself fails {name}; ours: {recorder.outcomes[OURS].get(name)}")
    print(
        *found
        or ["No test that Marian passes fails here; exceptions.py gives the reasons for the rest."],
        sep="\n",
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
