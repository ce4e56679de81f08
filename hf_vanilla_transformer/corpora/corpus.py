"""The sentence pairs of a run: load its splits, limit them, hold pairs out.

`text_keys` says which texts count as the same.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset

from ..text.language_codes import CodePair
from ..text.language_tokens import Direction
from ..text.source_form import SourceForm
from ..text.text_keys import TextKey, text_key
from ..utils.dataset_cache import batches_of, map_batches, selected
from ..utils.errors import UserError
from ..utils.system_info import counted
from .columns import Columns
from .data_arguments import DataArguments, has_two_tokenizers, run_task
from .directions import inputs_of, load_directions, parse_directions, part_names
from .inputs import DISTILLED, Input, parse_inputs
from .mixtures import PART, MixtureReport, load_pairs
from .pairs import PairReport

#: Lines about the training pairs, such as those of `cleaning.judging.sample_warnings`.
PairWarnings = Callable[[Dataset], Iterable[str]]

SPLITS = ("train", "validation", "test", "base_test")
ROWS_READ = 1000


@dataclass
class Corpus:
    """Sentence pairs by split, and a report on the rows that were dropped."""

    pairs: dict[str, Dataset] = field(default_factory=dict)
    #: of the splits that were loaded, not of held-out pairs
    reports: dict[str, PairReport | MixtureReport] = field(default_factory=dict)
    #: for a split that does not consist of all rows, their number and a digest of the row numbers
    selected: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: of a model of many languages, by split
    directions: dict[str, list[CodePair]] = field(default_factory=dict)
    #: names of directions or inputs that are scored apart
    parts: dict[str, list[str]] = field(default_factory=dict)
    #: digests of the sources of splits that `source_form` has changed
    forms: dict[str, str] = field(default_factory=dict)

    def select(self, split: str, pairs: Dataset, rows: np.ndarray) -> None:
        """Let a split consist of some rows of `pairs`."""
        known = f"{self.selected.get(split)} {len(pairs)} "
        digest = hashlib.blake2b(known.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(rows, dtype="<i8").data)
        self.pairs[split] = selected(pairs, rows)
        self.selected[split] = len(rows), digest.hexdigest()

    def texts(self, *columns: str, rows: np.ndarray | None = None) -> Iterator[tuple[str, int]]:
        """The training texts with their lines, of one column after the other, of all rows or of some."""
        pairs = self.pairs["train"]
        if rows is not None:
            pairs = selected(pairs, rows)
        for column in columns:
            # Read in batches: row by row, a million rows take 20 s.
            for batch in batches_of(pairs.select_columns([column, "line"]), ROWS_READ):
                yield from zip(batch[column], batch["line"], strict=True)

    def fingerprint(self, split: str) -> str:
        """Hash of the pairs of a split."""
        fingerprint = self.reports.get(split, self.reports["train"]).fingerprint
        form = self.forms.get(split if split in self.reports else "train", "")
        if split not in self.selected and not form:
            return fingerprint
        content = f"{fingerprint} {self.selected.get(split, '')}{form}"
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


def load_corpus(
    data_args: DataArguments,
    seed: int,
    languages: tuple[str, str] | None = None,
    say: Callable[[str], None] = print,
    pair_warnings: PairWarnings | None = None,
) -> Corpus:
    """Load and check every split that the arguments name.

    Args:
        data_args: of the run.
        seed: of the built-in corpora, and of what is drawn.
        languages: of the base model, for tables without columns for source and target.
        say: gets a line for each split, and warnings about the training data.
        pair_warnings: returns the warnings about training pairs of a language.

    Raises:
        UserError: no training data, or data that cannot be read (`load_pairs`).
    """
    if not data_args.train:
        raise UserError(
            "train: nothing to train on: give text files, a prefix or a dataset (--train train.en train.de)"
        )
    if data_args.bidirectional and has_two_tokenizers(data_args):
        raise UserError(
            "bidirectional=True needs a joint vocabulary: leave out separate_vocabularies, source_lowercase and "
            "tokens of one side"
        )
    if data_args.bidirectional and data_args.source_form:
        raise UserError(
            f"source_form: {data_args.source_form}: with bidirectional=True a target is a source too; leave one out"
        )
    corpus = Corpus()
    form = SourceForm(data_args.source_form, trusted=True) if data_args.source_form else None
    if form is not None and form.problem:
        raise UserError(form.problem)
    task = run_task(data_args)
    for split in SPLITS:
        if not getattr(data_args, split):
            continue
        _load_split(corpus, split, data_args, seed, languages)
        say(f"{split}: {corpus.reports[split].summary()}")
        if form is not None:
            say(_bring_to_form(corpus, split, form))
    if data_args.held_out_pairs and "validation" not in corpus.pairs:
        say(_hold_out(corpus, data_args, data_args.held_out_pairs, seed))
    for split, pairs in corpus.pairs.items():
        limit = data_args.max_test_samples
        if split == "validation":
            limit = data_args.max_eval_samples
        if split != "train" and limit:
            corpus.select(split, pairs, first_rows(pairs, limit))
    train = corpus.pairs["train"]
    if data_args.bidirectional:
        for split in corpus.pairs.keys() & {"train", "validation"}:
            pairs = corpus.pairs[split]
            corpus.pairs[split] = map_batches(pairs, both_directions, 2 * len(pairs))
    for warning in _overlaps(corpus, text_key(task)):
        say(warning)
    if task == "language" and pair_warnings is not None:
        for warning in pair_warnings(train):
            say(warning)
    return corpus


def _load_split(
    corpus: Corpus,
    split: str,
    data_args: DataArguments,
    seed: int,
    languages: tuple[str, str] | None,
) -> None:
    """Add the pairs of a split and their report. Directions, and several inputs for an evaluation, are parts of it."""
    inputs = getattr(data_args, split)
    training = split == "train"

    def load(inputs: list[str], direction: Direction) -> tuple[Dataset, PairReport | MixtureReport]:
        return load_pairs(
            inputs,
            weights=data_args.train_weights if training else None,
            split=split.removeprefix("base_"),
            field=split,
            source_lang=direction[0],
            target_lang=direction[1],
            source_column=data_args.source_column,
            target_column=data_args.target_column,
            line_pattern=data_args.line_pattern,
            languages=languages,
            numbers_size=data_args.numbers_size,
            seed=seed,
        )

    report: PairReport | MixtureReport
    if data_args.directions:
        of_directions = inputs_of(inputs, parse_directions(data_args.directions), training)
        corpus.directions[split] = list(of_directions)
        if not training:
            corpus.parts[split] = list(map("-".join, of_directions))
        temperature = data_args.sampling_temperature if training else 1.0
        pairs, report = load_directions(of_directions, load, temperature, seed)
    else:
        pairs, report = load(inputs, (data_args.source_lang, data_args.target_lang))
        if isinstance(report, MixtureReport) and not training:
            corpus.parts[split] = part_names(report.parts)
    corpus.pairs[split] = pairs
    corpus.reports[split] = report


def _bring_to_form(corpus: Corpus, split: str, form: SourceForm) -> str:
    """Bring the sources of a split to a form. Return a line about them."""
    before = corpus.pairs[split]
    after = before.map(
        lambda source: {"source": form(source)[0]},
        input_columns="source",
        load_from_cache_file=False,  # the code of the function may have changed
        desc="Source form",
    )
    corpus.pairs[split] = after
    digest = hashlib.blake2b(digest_size=16)
    changed = 0
    columns = [batches_of(data.select_columns("source"), ROWS_READ) for data in (before, after)]
    for old, new in zip(*columns, strict=True):
        changed += sum(map(str.__ne__, old["source"], new["source"]))
        digest.update("".join(f"{text}\0" for text in new["source"]).encode())
    if changed:
        corpus.forms[split] = f" {digest.hexdigest()}"
    return f"{split}: {form.name} has changed {changed:,} of {len(after):,} sources"


def part_numbers(data: Dataset) -> np.ndarray:
    """The number of each row's input or direction, (rows,)."""
    return (
        np.asarray(data.with_format("numpy")[PART][:])
        if PART in data.column_names
        else np.zeros(len(data), np.int32)
    )


def first_rows(data: Dataset, limit: int) -> np.ndarray:
    """The first rows of a table, of each of its parts a share."""
    parts = part_numbers(data)
    ends = np.cumsum(np.bincount(parts))
    shares = np.diff(ends * min(limit, len(data)) // len(data), prepend=0)
    return np.concatenate(
        [np.flatnonzero(parts == part)[:share] for part, share in enumerate(shares)]
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
    columns = Columns(
        data_args.source_column, data_args.target_column, line_pattern=data_args.line_pattern
    )
    if not data_args.directions:
        return parse_inputs(inputs, *languages, field=split, of_lines=columns.of_lines)
    of_directions = inputs_of(inputs, parse_directions(data_args.directions), split == "train")
    return [
        each
        for pair, values in of_directions.items()
        for each in parse_inputs(values, *pair, field=split, of_lines=columns.of_lines)
    ]


# Validation pairs from the training data, and evaluation data that is trained on


def _hold_out(corpus: Corpus, data_args: DataArguments, count: int, seed: int) -> str:
    """Move pairs of the training split, drawn by seed, to the validation split. Return a line about them."""
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
    held_out = counted(len(drawn), "pair")
    return f"validation: {held_out} held out of the training data{fewer}{others}"


def hold_out(
    pairs: Dataset,
    count: int,
    seed: int,
    distilled: np.ndarray,
    bidirectional: bool = False,
    task: str = "language",
) -> tuple[np.ndarray, np.ndarray]:
    """Draw validation pairs by distinct source, and leave out of training every pair that would give them away.

    These are all pairs with a held-out source, in a distilled input also those with a held-out target (of a
    back-translation), and for training in both directions all pairs with a held-out sentence on either side. Pairs
    of the N that are `distilled` (N,) are not drawn, and at most a tenth of the sources is. `task` decides which texts
    are the same. Return the row numbers of the training pairs and of the validation pairs.
    """
    key = text_key(task)
    sources = _keys(pairs, "source", key)
    first = _first_of_each(sources, ~distilled)
    count = min(count, len(first) // 10)
    if count == 0:
        raise UserError(
            f"held_out_pairs: {len(first)} distinct sources that no model translated are too few; give validation data"
        )
    drawn = np.sort(np.random.default_rng(seed).choice(first, count, replace=False))
    known = _among(sources, sources[drawn])
    if bidirectional or distilled.any():  # most corpora need no keys of the other side
        targets = _keys(pairs, "target", key)
        known |= distilled & _among(targets, targets[drawn])
    if bidirectional:
        sentences = np.concatenate([sources[drawn], targets[drawn]])
        known |= _among(sources, sentences) | _among(targets, sentences)
    kept = np.flatnonzero(~known)
    if not len(kept):
        raise UserError(
            "held_out_pairs: every pair shares a side with the validation pairs; give validation data"
        )
    return kept, drawn


def _first_of_each(keys: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """The rows that are the first with their key among those `counted` (N,), ascending.

    `np.unique` would take 40 bytes a key, twice as much.
    """
    order = np.argsort(keys, kind="stable")
    if not counted.all():
        order = order[counted[order]]
    is_first = np.ones(len(order), bool)
    sorted_keys = keys[order]
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=is_first[1:])
    del sorted_keys
    first = order[is_first]
    first.sort()
    return first


def _among(keys: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Whether each key is a chosen one, (N,). `np.isin` would sort all keys."""
    chosen = np.unique(chosen)
    places = np.searchsorted(chosen, keys).clip(max=len(chosen) - 1)
    return chosen[places] == keys


def _keys(pairs: Dataset, column: str, key: TextKey) -> np.ndarray:
    batches = batches_of(pairs.select_columns([column]), ROWS_READ)
    return np.fromiter(
        (key(text) for batch in batches for text in batch[column]), np.int64, len(pairs)
    )


def _overlaps(corpus: Corpus, key: TextKey) -> Iterator[str]:
    """A line for each evaluation split that has sources that are trained on. Held-out pairs have none."""
    evaluated = [split for split in corpus.reports if split != "train"]
    if not evaluated:
        return
    keys_of = {split: _keys(corpus.pairs[split], "source", key) for split in evaluated}
    known = set(np.concatenate(list(keys_of.values())).tolist())
    seen = {number for text, _ in corpus.texts("source") if (number := key(text)) in known}
    for split, keys in keys_of.items():
        if count := sum(number in seen for number in keys.tolist()):
            yield (
                f"warning: {count:,} of {len(keys):,} {split} pairs have a source that is trained on, so that "
                "their scores are too high"
            )
