"""`python -m scripts.trials.check FOLDER` checks public implementations of the Transformer, and plants mistakes.

FOLDER has a checkout of each repository of `public_transformers.IMPLEMENTATIONS`, named after its owner:

    git clone https://github.com/hkproj/pytorch-transformer FOLDER/hkproj

An implementation whose checkout is missing, incomplete or of another commit is left out, and the commands that make it
are printed. Each one is checked as it
was published, then with its true differences from the paper mended, with edits that leave it right, and with each
mistake of `public_plants.PLANTS`:

- read: the check reads it, or refuses it with the reason.
- false alarm: a mistake is reported where the published code does not differ from the paper.
- named: a planted mistake is found, and the report says what it is.
- placed: the report says where the numbers differ.
- stopped: the code or the check ends with a message, such as of shapes that do not fit.
- misplaced: it is found, and the report names another place.
- missed: the report does not change.

    python -m scripts.trials.check FOLDER --only hkproj harvardnlp
"""

import argparse
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from scripts.docs.lessons.check import checker, sandbox  # noqa: F401 (imported once, not in every process)
from scripts.docs.lessons.check.report import UNKNOWN
from scripts.trials.public_plants import HARMLESS, PLANTS, Plant
from scripts.trials.public_transformers import IMPLEMENTATIONS, Edit, Implementation, write

SECONDS = 120
FOUND = ("named", "placed", "stopped")
OUTCOMES = (*FOUND, "misplaced", "missed")


@dataclass
class Row:
    """What the check says of one implementation."""

    name: str
    refusal: str = ""
    alarms: list[str] = field(default_factory=list)
    planted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    lost: list[str] = field(default_factory=list)  # the plants that were not found in their place

    def count(self, plant: Plant, outcome: str, answer: dict[str, Any]) -> None:
        self.planted += 1
        self.outcomes[outcome] += 1
        self.by_kind[plant.kind][outcome] += 1
        if outcome not in FOUND:
            self.lost.append(f"{outcome}: {plant.kind}: {plant.edits[0].new!r}: {answer}")


def answer_of(adapter: Path) -> dict[str, Any]:
    """The answer of the sandbox for `Mine`, in a process forked after the imports."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(adapter, sender))
    process.start()
    answer = (
        receiver.recv() if receiver.poll(SECONDS) else {"crash": f"no answer in {SECONDS} seconds"}
    )
    process.kill()
    process.join()
    return answer


def _answer(adapter: Path, sender: Connection) -> None:
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            sender.send(sandbox.answer_of(str(adapter), "Mine", {}, {}))
        except BaseException as error:
            sender.send({"crash": repr(error)})


def outcome_of(plant: Plant, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Whether the report of code with a mistake tells it, compared with the report of the code without."""
    if "crash" in after:
        return "missed"
    if "error" in after:
        return "stopped"
    new = [each for each in after["mistakes"] if each not in before["mistakes"]]
    if not new:
        return "missed"
    if not re.search(plant.where, " ".join(new)):
        return "misplaced"
    return "placed" if all(UNKNOWN.explanation in each for each in new) else "named"


def try_implementation(name: str, implementation: Implementation, checkout: Path) -> Row:
    row = Row(name)

    def answer(edits: Collection[Edit]) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            return answer_of(write(implementation, checkout, Path(folder), edits))

    def alarms(answer: dict[str, Any], allowed: Collection[str]) -> list[str]:
        reported = [
            each for each in answer.get("mistakes", ()) if each.partition(" (")[0] not in allowed
        ]
        return reported + [answer[key] for key in ("error", "crash") if key in answer]

    published = answer(())
    if "error" in published or "crash" in published:
        row.refusal = published.get("error") or published["crash"]
        return row
    row.alarms = alarms(published, implementation.differences)
    allowed = () if implementation.repairs else implementation.differences
    before = answer(implementation.repairs)
    if implementation.repairs:
        row.alarms += alarms(before, allowed)
    for plant in HARMLESS.get(name, ()):
        edited = answer((*implementation.repairs, *plant.edits))
        row.alarms += [f"{plant.kind}: {each}" for each in alarms(edited, allowed)]
    for plant in PLANTS[name]:
        after = answer((*implementation.repairs, *plant.edits))
        row.count(plant, outcome_of(plant, before, after), after)
    return row


def table(rows: Iterable[Row]) -> str:
    lines = [
        "| implementation | read | false alarms | planted | " + " | ".join(OUTCOMES) + " |",
        "|---" * 9 + "|",
    ]
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    total = Row("all")
    for row in rows:
        lines.append(
            _line(row.name, row.refusal or "yes", str(len(row.alarms)), outcomes=row.outcomes)
        )
        total.alarms += row.alarms
        total.outcomes += row.outcomes
        for kind, outcomes in row.by_kind.items():
            kinds[kind] += outcomes
    lines.append(_line("all", "", str(len(total.alarms)), outcomes=total.outcomes))
    lines += ["", "| mistake | planted | " + " | ".join(OUTCOMES) + " |", "|---" * 7 + "|"]
    lines += [_line(kind, outcomes=kinds[kind]) for kind in sorted(kinds)]
    return "\n".join(lines)


def _line(*cells: str, outcomes: Counter[str]) -> str:
    counts = [outcomes.total(), *(outcomes[each] for each in OUTCOMES)]
    return f"| {' | '.join([*cells, *map(str, counts)])} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=sorted(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS)
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in arguments.only:
        implementation = IMPLEMENTATIONS[name]
        start = time.monotonic()
        try:
            row = try_implementation(name, implementation, arguments.folder / implementation.owner)
        except (OSError, ValueError) as error:
            print(f"{name}: left out ({error}): {implementation.commands}", flush=True)
            continue
        rows.append(row)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        for line in (*row.alarms, *row.lost):
            print(f"  {line}", flush=True)
    print(table(rows))
    return 1 if any(row.alarms or row.lost for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
