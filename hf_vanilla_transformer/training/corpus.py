"""The sentence pairs of a run: load its splits, limit them, hold pairs out."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..data import (
    Input,
    MixtureReport,
    PairReport,
    load_pairs,
    parse_inputs,
)
from ..data.cleaning import sample_warnings
from ..data.directions import Pair, inputs_of, load_directions, parse_directions, part_names
from ..data.inputs import DISTILLED
from ..data.mixtures import PART
from ..data.readers import file_format
from ..data.translation_memories import FORMATS, memory_languages
from ..inference.languages import NAMES, language_code, model_languages
from ..utils.errors import UserError
from ..utils.system_info import counted
from .arguments import DataArguments, RunArguments, has_two_tokenizers, run_task
from .distributed import print_main
from .held_out import hold_out, overlap_warnings

SPLITS = ("train", "validation", "test", "base_test")
_LIMITS = {
    "train": "max_train_samples",
    "test": "max_test_samples",
    "base_test": "max_test_samples",
}
ROWS_READ = 1000


@dataclass
class Corpus:
    """Sentence pairs by split, and a report on the rows that were dropped."""

    pairs: dict[str, Dataset]
    reports: dict[str, PairReport | MixtureReport]
    #: for a split that does not consist of all rows, their number and a digest of the row numbers
    selected: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: of a model of many languages, by split
    directions: dict[str, list[Pair]] = field(default_factory=dict)
    #: names of directions or inputs that are scored apart
    parts: dict[str, list[str]] = field(default_factory=dict)

    def select(self, split: str, pairs: Dataset, rows: np.ndarray) -> None:
        """Let a split consist of some rows of `pairs`."""
        known = f"{self.selected.get(split)} {len(pairs)} ".encode()
        digest = hashlib.blake2b(known + rows.astype("<i8").tobytes(), digest_size=16).hexdigest()
        self.pairs[split], self.selected[split] = pairs.select(rows), (len(rows), digest)

    def fingerprint(self, split: str) -> str:
        """Hash of the pairs of a split, or "" if they have not been read."""
        # Held-out pairs have no report of their own.
        report = self.reports.get(split) or self.reports.get("train")
        fingerprint = report.fingerprint if report is not None else ""
        if not fingerprint or split not in self.selected:
            return fingerprint
        content = f"{fingerprint} {self.selected[split]}"
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def summary(self, split: str) -> str:
        """The report of a split, after the number of its pairs if it does not consist of all that were kept."""
        report = self.reports.get(split)
        count, _ = self.selected.get(split, (None, ""))
        parts = []
        if count is not None and (not report or count != report.kept):
            parts.append(f"{count:,} pairs")
        if report:
            parts.append(report.summary())
        return "; ".join(parts)


def load_corpus(data_args: DataArguments, args: RunArguments) -> Corpus:
    """Load and check every split that the arguments name, and report dropped rows."""
    if not data_args.train:
        raise UserError(
            "train: nothing to train on: give text files, a prefix or a dataset (--train train.en train.de)"
        )
    if data_args.bidirectional and has_two_tokenizers(data_args):
        raise UserError(
            "bidirectional=True needs a joint vocabulary: leave out separate_vocabularies, source_lowercase and "
            "tokens of one side"
        )
    corpus = Corpus({}, {})
    for split in SPLITS:
        inputs = getattr(data_args, split)
        if not inputs:
            continue
        pairs, report = _load_split(corpus, split, data_args, args)
        print_main(f"{split}: {report.summary()}")
        if split == "train" and run_task(data_args) == "language":
            for warning in sample_warnings(pairs):
                print_main(warning)
        corpus.pairs[split], corpus.reports[split] = pairs, report
        _limit(corpus, split, data_args)
    if data_args.held_out_pairs and "validation" not in corpus.pairs:
        _hold_out(corpus, data_args, data_args.held_out_pairs, args.seed)
    if data_args.bidirectional:
        for split in corpus.pairs.keys() & {"train", "validation"}:
            corpus.pairs[split] = corpus.pairs[split].map(both_directions, batched=True)
    _compare_sources(corpus, run_task(data_args))
    return corpus


def _load_split(
    corpus: Corpus, split: str, data_args: DataArguments, args: RunArguments
) -> tuple[Any, Any]:
    """The pairs of a split and the report. Directions, and several inputs for an evaluation, are parts of it."""
    inputs = getattr(data_args, split)
    training = split == "train"

    def load(inputs: list[str], direction: tuple[str | None, str | None]) -> tuple[Any, Any]:
        return load_pairs(
            inputs,
            weights=data_args.train_weights if training else None,
            split=split.removeprefix("base_"),
            field=split,
            source_lang=direction[0],
            target_lang=direction[1],
            source_column=data_args.source_column,
            target_column=data_args.target_column,
            languages=model_languages(args.model_name_or_path) if args.model_name_or_path else None,
            numbers_size=data_args.numbers_size,
            seed=args.seed,
        )

    if data_args.directions:
        of_directions = inputs_of(inputs, parse_directions(data_args.directions), training)
        corpus.directions[split] = list(of_directions)
        if not training:
            corpus.parts[split] = list(map("-".join, of_directions))
        temperature = data_args.sampling_temperature if training else 1.0
        pairs, report = load_directions(of_directions, load, temperature, args.seed)
    else:
        pairs, report = load(inputs, (data_args.source_lang, data_args.target_lang))
        if isinstance(report, MixtureReport) and not training:
            corpus.parts[split] = part_names(report.parts)
    return pairs, report


def _compare_sources(corpus: Corpus, task: str) -> None:
    """Warn of evaluation pairs whose source is trained on.

    Held-out pairs have no report of their own, and no source that is trained on.
    """
    evaluated = {split: corpus.pairs[split] for split in corpus.reports if split != "train"}
    if not evaluated:
        return
    for warning in overlap_warnings(corpus.pairs["train"], evaluated, task):
        print_main(warning)


def _limit(corpus: Corpus, split: str, data_args: DataArguments) -> None:
    """Keep the first pairs of a split. Validation is limited after it is encoded."""
    limit = getattr(data_args, _LIMITS[split]) if split in _LIMITS else None
    pairs = corpus.pairs[split]
    if limit is not None and limit < len(pairs):
        corpus.select(split, pairs, first_rows(pairs, limit))


def part_numbers(data: Dataset) -> np.ndarray:
    """The number of each row's input or direction, (rows,)."""
    return (
        np.asarray(data.with_format("numpy")[PART][:])
        if PART in data.column_names
        else np.zeros(len(data), int)
    )


def first_rows(data: Dataset, limit: int) -> np.ndarray:
    """The first rows of a table, of each of its parts a share."""
    parts = part_numbers(data)
    ends = np.cumsum(np.bincount(parts))
    shares = np.diff(ends * min(limit, len(data)) // len(data), prepend=0)
    return np.concatenate(
        [np.flatnonzero(parts == part)[:share] for part, share in enumerate(shares)]
    )


def _hold_out(corpus: Corpus, data_args: DataArguments, count: int, seed: int) -> None:
    """Move pairs of the training split, drawn by seed, to the validation split."""
    train = corpus.pairs["train"]
    names = [tuple(file.name for file in each.files) for each in split_inputs(data_args, "train")]
    if corpus.directions:
        # An input is a direction, and a sentence may be on either side of several.
        names = [()] * len(corpus.directions["train"])
        corpus.directions["validation"] = corpus.directions["train"]
        corpus.parts["validation"] = list(map("-".join, corpus.directions["train"]))
    distilled = np.array([each == DISTILLED for each in names])[part_numbers(train)]
    both_sides = data_args.bidirectional or bool(corpus.directions)
    task = run_task(data_args)
    kept, drawn = hold_out(train, count, seed, distilled, both_sides, task)
    corpus.select("train", train, kept)
    corpus.select("validation", train, drawn)
    left_out = len(train) - len(kept) - len(drawn)
    items = "sentences" if task == "language" else "sequences"
    others = (
        f"; {left_out:,} other pairs with their {items} left out of training" if left_out else ""
    )
    fewer = f" (a tenth, less than held_out_pairs={count:,})" if len(drawn) < count else ""
    print_main(
        f"validation: {counted(len(drawn), 'pair')} held out of the training data{fewer}{others}"
    )


def both_directions(batch: dict[str, list]) -> dict[str, list]:
    """Append the pairs with source and target exchanged, for the first stage of Bi-SimCut (Gao et al. 2022, arXiv
    2206.02368): one model that translates in both directions."""
    doubled = {name: [*values, *values] for name, values in batch.items()}
    return doubled | {
        "source": [*batch["source"], *batch["target"]],
        "target": [*batch["target"], *batch["source"]],
    }


def split_inputs(data_args: DataArguments, split: str) -> list[Input]:
    """The inputs of a split, of all directions."""
    inputs = getattr(data_args, split) or []
    languages = (data_args.source_lang, data_args.target_lang)
    if not data_args.directions:
        return parse_inputs(inputs, *languages, field=split)
    of_directions = inputs_of(inputs, parse_directions(data_args.directions), split == "train")
    return [
        each
        for pair, values in of_directions.items()
        for each in parse_inputs(values, *pair, field=split)
    ]


def run_languages(data_args: DataArguments, args: RunArguments) -> tuple[str, str] | None:
    """The languages of a run: of the recipe, of the base model, of the files' names or of a memory, of the folder.

    None if they are unknown, or several directions.
    """
    if data_args.directions:
        return None
    if data_args.source_lang and data_args.target_lang:
        return data_args.source_lang, data_args.target_lang
    if args.model_name_or_path and (languages := model_languages(args.model_name_or_path)):
        return languages
    for files in (each.files for each in split_inputs(data_args, "train")):
        if len(files) == 1 and file_format(files[0]) in FORMATS:
            return memory_languages(files[0], data_args.source_lang, data_args.target_lang)
        suffixes = [Path(file.name.removesuffix(".gz")).suffix[1:] for file in files]
        for names in (suffixes, [data_args.source_column, data_args.target_column]):
            codes = [
                code
                for name in names
                if (code := language_code(name)) and code.split("-")[0] in NAMES
            ]
            if len(set(codes)) == 2:
                return codes[0], codes[1]
    return model_languages(Path(args.output_dir))
