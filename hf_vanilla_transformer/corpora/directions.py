"""Sentence pairs of several directions in one table.

Pairs of rare directions occur several times in an epoch: a pair is of direction d with probability p_d ∝ n_d^(1/T),
for n_d pairs and a temperature T (Arivazhagan et al. 2019, arXiv 1907.05019). T = 1 is the text as it is, a large T
has all directions equally often. No pair is left out, so that an epoch is the same table in every run and resume.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..text.language_codes import CodePair
from ..utils.errors import UserError
from .inputs import InputNames
from .mixtures import MixtureReport, concatenated
from .pairs import PairReport

_CODE = r"[a-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*"
_DIRECTION = re.compile(rf"({_CODE})-({_CODE})")


def parse_directions(items: Sequence[str]) -> list[CodePair]:
    """Parse directions such as `en-de`, `eng_Latn-deu_Latn` and `en-pt_BR`, of two languages each."""
    directions: list[CodePair] = []
    for item in items:
        codes = item.split("-")
        if len(codes) != 2 or not all(re.fullmatch(_CODE, code) for code in codes):
            raise UserError(
                f"directions: {item}: SOURCE-TARGET is needed, such as en-de or en-pt_BR"
            )
        if codes[0] == codes[1] or (codes[0], codes[1]) in directions:
            raise UserError(
                f"directions: {item}: {'twice' if codes[0] != codes[1] else 'two languages are needed'}"
            )
        directions.append((codes[0], codes[1]))
    return directions


def inputs_of(
    inputs: InputNames,
    directions: Sequence[CodePair],
    training: bool = True,
) -> dict[CodePair, list[str]]:
    """The inputs of each direction: those that follow its mark, `en-de=`, and those before the first mark.

    Text for evaluation may have other directions than `directions`, and need not have all of them.
    """
    shared: list[str] = []
    groups: dict[CodePair, list[str]] = {}
    current = shared
    for value in map(str, [inputs] if isinstance(inputs, str | Path) else inputs):
        name, equals, rest = value.partition("=")
        if equals and _DIRECTION.fullmatch(name) and not Path(value).exists():
            direction = parse_directions([name])[0]
            if training and direction not in directions:
                known = ", ".join(map("-".join, directions))
                raise UserError(f"directions: {value}: {name} is not among {known}")
            current = groups.setdefault(direction, [])
            value = rest
        current.append(value)
    found: dict[CodePair, list[str]] = {}
    for direction in dict.fromkeys([*directions, *groups]):
        values = [*shared, *groups.get(direction, ())]
        if values:
            found[direction] = values
        elif training:
            name = "-".join(direction)
            raise UserError(f"directions: {name} has no input: add {name}=FILE")
    return found


def sampling_rates(sizes: Sequence[int], temperature: float) -> list[float]:
    """How often each pair of a direction occurs in an epoch, at least once, for directions of these sizes."""
    # p_d / n_d ∝ n_d^(1/T - 1), which is smallest for the largest direction
    return [(size / max(sizes)) ** (1 / temperature - 1) for size in sizes]


def load_directions(
    inputs: Mapping[CodePair, list[str]],
    load: Callable[[list[str], CodePair], tuple[Any, PairReport | MixtureReport]],
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[Dataset, MixtureReport]:
    """Load the pairs of several directions.

    Args:
        inputs: of `inputs_of`.
        load: loads the pairs of the inputs of one direction, as `load_pairs`.
        temperature: T, at least 1.
        seed: draws the pairs that an epoch has once more than others.

    Returns:
        The pairs, with columns `source`, `target`, `line` and `part`, the number of the direction. The report has a
        part for each direction.
    """
    loaded = [(direction, *load(values, direction)) for direction, values in inputs.items()]
    rates = sampling_rates([len(table) for _, table, _ in loaded], temperature)
    parts = list[PairReport | MixtureReport]()
    weights = list[float]()
    copies = list[tuple[int, Dataset]]()
    for part, ((direction, table, report), rate) in enumerate(zip(loaded, rates, strict=True)):
        copies += [(part, table)] * int(rate)
        if again := round(len(table) * (rate % 1)):
            rows = np.sort(np.random.default_rng((seed, part)).permutation(len(table))[:again])
            copies.append((part, table.select(rows)))
        parts.append(replace(report, name=f"{'-'.join(direction)}: {report.name}"))
        weights.append(int(rate) + again / len(table))
    report = MixtureReport(parts, weights)
    return concatenated(copies, report.fingerprint), report


def part_names(parts: Iterable[PairReport | MixtureReport]) -> list[str]:
    """Short names of the inputs of a split, for the names of scores: `dev` for `data/dev.tsv`.

    No two are the same, and none makes the name of a score that of its signature.
    """
    names: list[str] = []
    for part in parts:
        name = short = Path(part.name.split(" + ")[0]).name.split(".")[0]
        number = len(names) + 1
        while name in (*names, "signature"):
            name = f"{short}_{number}"
            number += 1
        names.append(name)
    return names
