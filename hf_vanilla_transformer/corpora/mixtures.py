"""Load sentence pairs from one input, or from several with weights.

A weight is the number of times that each pair of an input occurs in an epoch, so that an epoch is the same table in
every run and every resume: 2 : 1 doubles the first input.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, concatenate_datasets

from ..text.language_tokens import Direction
from ..utils.dataset_cache import number_columns
from ..utils.errors import UserError
from .columns import Columns
from .inputs import BUILT_IN, InputNames, parse_inputs
from .numbers import number_pairs
from .pairs import PairReport, Source, load_table, open_dataset
from .phonemes import phoneme_pairs

#: The column of a table of several inputs, or directions, with the number of each row's.
PART = "part"


@dataclass
class MixtureReport:
    """The reports of the inputs of a mixture, or of its directions."""

    #: one report for each input. A direction may have a mixture itself
    parts: "Sequence[PairReport | MixtureReport]"
    weights: Sequence[float]  #: how often a pair of each input occurs
    name: str = ""

    @property
    def kept(self) -> int:
        """The number of rows of the table."""
        return sum(
            round(part.kept * weight) for part, weight in zip(self.parts, self.weights, strict=True)
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the pairs of all inputs and of the weights."""
        text = " ".join(
            f"{part.fingerprint}×{weight}"
            for part, weight in zip(self.parts, self.weights, strict=True)
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def summary(self) -> str:
        """One line, such as `a.tsv × 2: kept 998 of 1,000 pairs; b.tmx × 1: kept 7 of 7 pairs`."""
        reports = zip(self.parts, self.weights, strict=True)
        return "; ".join(f"{part.name} × {weight:g}: {part.summary()}" for part, weight in reports)


def load_pairs(
    inputs: InputNames,
    *,
    weights: Sequence[float] | None = None,
    split: str = "train",
    field: str = "inputs",
    source_lang: str | None = None,
    target_lang: str | None = None,
    source_column: str | None = None,
    target_column: str | None = None,
    line_pattern: str | None = None,
    languages: tuple[str, str] | None = None,
    numbers_size: int = 20_000,
    seed: int = 0,
) -> tuple[Dataset, PairReport | MixtureReport]:
    """Load and validate sentence pairs from one input or several.

    Text is not changed, not even spaces at its ends. Only byte order marks and carriage returns at line ends are
    removed, and counted. Each input is written once, as an Arrow file in the cache of `datasets` named by a hash of
    the input's content, and memory-mapped.

    Args:
        inputs: as of `parse_inputs`. CSV and TSV files need a header, unless columns are numbers.
        weights: whole numbers from 1, one for each input, or None for 1. The module's docstring explains them.
        split: the split of datasets.
        field: the name of the argument in errors about inputs.
        source_lang, target_lang: keys in the column `translation`, names of columns, languages of a translation
            memory (`en` finds `en-GB`), suffixes of the files of a prefix, or languages of the built-in corpus.
        source_column, target_column, line_pattern: of `Columns`. If none of the five is given, the columns are
            `source` and `target`.
        languages: of a model, for tables without these columns and for memories if none of the five is given.
        numbers_size, seed: of the built-in corpus `numbers`.

    Returns:
        The pairs, with columns `source`, `target` and `line`, and the report. `line` is the line or row of the input,
        from 1, and counts on from one input, and from one copy of it, to the next. A table of several inputs has a
        column `part`, the number of each row's input. Rows with a missing, empty or non-text side, with bytes that are
        not UTF-8 or with a NUL character are dropped and counted.

    Raises:
        UserError: a missing, ambiguous or unreadable input, an encoding that is not UTF-8, parallel files of different
            lengths, a missing column or language, no valid pair, or wrong weights.
    """
    columns = Columns(
        source_column, target_column, source_lang, target_lang, languages, line_pattern
    )
    sources = open_sources(
        inputs,
        columns,
        split=split,
        field=field,
        numbers_size=numbers_size,
        seed=seed,
    )
    counts = _checked_weights(len(sources), weights)
    reports = [PairReport(source.input.name) for source in sources]
    loaded = list(map(load_table, sources, reports))
    if len(loaded) == 1 and weights is None:
        return loaded[0], reports[0]
    report = MixtureReport(reports, counts, ", ".join(part.name for part in reports))
    copies = [(part, loaded[part]) for part, count in enumerate(counts) for _ in range(count)]
    return concatenated(copies, f"{report.fingerprint}-{PART}"), report


def open_sources(
    inputs: InputNames,
    columns: Columns,
    *,
    split: str = "train",
    field: str = "inputs",
    numbers_size: int = 20_000,
    seed: int = 0,
) -> list[Source]:
    """Open inputs, as of `load_pairs`, without reading their pairs."""
    languages = columns.source_lang, columns.target_lang
    sources = []
    for chosen in parse_inputs(inputs, *languages, field, columns.of_lines):
        data: Any = None
        if chosen.dataset in BUILT_IN:
            data = _built_in(str(chosen.dataset), numbers_size, seed, languages)[split]
        elif chosen.dataset is not None:
            data = open_dataset(chosen, split, field)
        sources.append(Source(chosen, Columns() if chosen.dataset in BUILT_IN else columns, data))
    return sources


def _built_in(name: str, size: int, seed: int, languages: Direction) -> DatasetDict:
    """The splits of a built-in corpus."""
    if name == "cmudict":
        return phoneme_pairs()
    return number_pairs(size, seed, languages[0] or "en", languages[1] or "de")


def concatenated(tables: Iterable[tuple[int, Dataset]], fingerprint: str) -> Dataset:
    """Concatenate tables, each with the number of its part. The lines count on from one to the next.

    `datasets` caches the results of `map` under the name of the fingerprint.
    """
    copies = []
    last_line = 0
    for part, table in tables:
        lines = number_columns(table, ["line"])["line"] + last_line
        numbers = Dataset(pa.table({"line": lines, PART: np.full(len(lines), part, np.int32)}))
        # the text stays memory-mapped
        copies.append(
            concatenate_datasets([table.select_columns(["source", "target"]), numbers], axis=1)
        )
        last_line = int(lines[-1])
    return Dataset(concatenate_datasets(copies).data, fingerprint=fingerprint)


def _checked_weights(inputs: int, weights: Sequence[float] | None) -> list[int]:
    weights = [1] * inputs if weights is None else weights
    if len(weights) != inputs:
        raise UserError(
            f"train_weights: {len(weights)} numbers for {inputs} inputs; give one for each"
        )
    wrong = [weight for weight in weights if weight < 1 or weight != int(weight)]
    if wrong:
        raise UserError(
            f"train_weights: {wrong[0]} is no whole number from 1; give 3 and 2 for a ratio of 1.5"
        )
    return [int(weight) for weight in weights]
