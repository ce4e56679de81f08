"""The leaderboard: BLEU by minutes of a CPU core. `python -m hf_vanilla_transformer.hub.leaderboard` prints it."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..markdown import markdown_table


class Entry(NamedTuple):
    """A run: what it was tested on, its recipe, its score and its cost."""

    test: str  #: a part of the name of the test set
    recipe: str
    bleu: float
    core_minutes: float  #: of training, with the stages before: wall time times threads


def entries() -> list[Entry]:
    """Return the runs of `leaderboard.csv`, by test set and cost."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    minutes = [float(row["core_minutes"]) + float(row["base_core_minutes"]) for row in rows]
    runs = [Entry(row["test"], row["recipe"], float(row["bleu"]), m) for row, m in zip(rows, minutes, strict=True)]
    return sorted(runs, key=lambda run: (run.test, run.core_minutes))


def leaderboard(runs: Sequence[Entry]) -> str:
    """Return a Markdown table."""
    rows = [[run.test, f"{run.core_minutes:.1f}", f"{run.bleu:.2f}", run.recipe] for run in runs]
    return markdown_table(["test set", "core-minutes", "BLEU", "recipe"], rows)


def standing(test: Sequence[str], bleu: float, core_minutes: float) -> str:
    """Return the leaderboard of the test set with these inputs, with this run. Raises a UserError if it has none."""
    others = [run for run in entries() if any(run.test in name for name in test)]
    if not others:
        known = ", ".join(sorted({run.test for run in entries()}))
        raise UserError(
            f"--compare: the leaderboard has no runs on {' '.join(test) or 'no test set'}, only on {known}"
        )
    run = Entry(others[0].test, "**this run**", bleu, core_minutes)
    better = [other for other in others if other.bleu >= bleu and other.core_minutes <= core_minutes]
    verdict = f"{better[0].recipe} is better and no slower" if better else "no run is better without more time"
    return f"{leaderboard(sorted([*others, run], key=lambda other: other.core_minutes))}\n\n{verdict}"


if __name__ == "__main__":
    print(leaderboard(entries()))
