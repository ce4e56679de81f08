"""Several inputs in one run, with weights.

A weight is the number of times that each pair of an input occurs in an epoch, so that an epoch is the same table in
every run and every resume: 2 : 1 doubles the first input. Inputs that are streamed have no known length: there,
weights are the numbers of pairs that are read from each input in turn, and an input that ends begins again until all
have been read once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset, concatenate_datasets

from ..errors import UserError
from .corpora import FEATURES, PairReport, load_pairs, moses_files
from .readers import file_format, is_readable
from .translation_memories import FORMATS

DISTILLED = "train.source.txt", "train.target.txt"  # the files of a folder that `distil` wrote


@dataclass
class MixtureReport:
    """The reports of the inputs of a mixture; see `PairReport`.

    Attributes:
        parts: one report for each input.
        weights: their weights.
    """

    parts: list[PairReport]
    weights: list[int]

    @property
    def fingerprint(self) -> str:
        """Hash of the pairs of all inputs and of the weights; empty before streams have been read."""
        if not all(part.fingerprint for part in self.parts):
            return ""
        text = " ".join(f"{part.fingerprint}×{weight}" for part, weight in zip(self.parts, self.weights, strict=True))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def summary(self) -> str:
        """One line, such as `a.tsv × 2: kept 998 of 1,000 pairs; b.tmx × 1: kept 7 of 7 pairs`."""
        reports = zip(self.parts, self.weights, strict=True)
        return "; ".join(f"{part.name} × {weight}: {part.summary()}" for part, weight in reports)


def load_mixture(
    inputs: Sequence[str], weights: Sequence[float] | None = None, *, streaming: bool = False, **settings: Any
) -> tuple[Dataset | IterableDataset, MixtureReport]:
    """Load several inputs as one.

    Args:
        inputs: each a file of a known format, the prefix of two files of parallel text, a folder that `distil` wrote,
            or a dataset's name or folder.
        weights: whole numbers from 1, one for each input; None is 1 for all. See above how they are realised.
        streaming: read while iterating.
        settings: the other arguments of `load_pairs`, for all inputs.

    Returns:
        The pairs, whose `line` counts on from one input, and from one copy of it, to the next, and the reports.

    Raises:
        UserError: what `load_pairs` raises, or weights that are no whole numbers or not as many as the inputs.
    """
    counts = _checked_weights(inputs, weights)
    loaded = [load_pairs(**_input(name, settings), **settings, streaming=streaming) for name in inputs]
    report = MixtureReport([part for _, part in loaded], counts)
    if streaming:
        return _interleaved([pairs for pairs, _ in loaded], counts), report
    tables, last_line = [], 0
    for (pairs, _), count in zip(loaded, counts, strict=True):
        for _ in range(count):
            lines = np.asarray(pairs.with_format("numpy")["line"][:]) + last_line
            columns = [pairs.select_columns(["source", "target"]), Dataset(pa.table({"line": lines}))]
            tables.append(concatenate_datasets(columns, axis=1))  # the text stays memory-mapped
            last_line = int(lines[-1])
    # `datasets` caches what is made of it under this name
    return Dataset(concatenate_datasets(tables).data, fingerprint=report.fingerprint), report


def _checked_weights(inputs: Sequence[str], weights: Sequence[float] | None) -> list[int]:
    weights = [1] * len(inputs) if weights is None else weights
    if len(weights) != len(inputs):
        raise UserError(f"weights: {len(weights)} numbers for {len(inputs)} inputs; give one for each")
    wrong = [weight for weight in weights if weight < 1 or weight != int(weight)]
    if wrong:
        raise UserError(f"weights: {wrong[0]} is no whole number from 1; give ratios as such, 3 and 2 for 1.5 and 1")
    return [int(weight) for weight in weights]


def _input(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `load_pairs` that a name stands for."""
    files = input_files(name, settings.get("source_lang"), settings.get("target_lang"))
    if len(files) == 2:
        return dict(zip(("source_file", "target_file"), files, strict=True))
    return {"file" if files else "dataset_name": name}


def input_files(name: str, source_lang: str | None, target_lang: str | None) -> list[Path]:
    """The file, or the two files of parallel text, that a name stands for; none for a dataset."""
    path = Path(name).expanduser()
    if path.is_file() or is_readable(path) or file_format(path) in FORMATS:
        return [path]
    if all((path / side).is_file() for side in DISTILLED):
        return [path / side for side in DISTILLED]
    ends = [f"{language}{zipped}" for language in (source_lang, target_lang) for zipped in ("", ".gz")]
    is_prefix = any(Path(f"{path}.{end}").is_file() for end in ends)
    return moses_files(name, source_lang, target_lang) if is_prefix else []


def _interleaved(streams: list[IterableDataset], counts: list[int]) -> IterableDataset:
    """Pairs of each stream in turn, numbered from 1, until all streams have been read once."""

    def read() -> Iterator[dict[str, Any]]:
        readers = [iter(stream) for stream in streams]
        finished, number = set[int](), 0
        while True:
            for index, count in enumerate(counts):
                for _ in range(count):
                    row = next(readers[index], None)
                    if row is None:
                        finished.add(index)
                        if len(finished) == len(streams):
                            return
                        readers[index] = iter(streams[index])
                        row = next(readers[index])
                    number += 1
                    yield {"source": row["source"], "target": row["target"], "line": number}

    return IterableDataset.from_generator(read, features=FEATURES)
