"""The data of a run: load the splits, load or train the tokenizers, encode the text."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data import (
    EncodingReport,
    Input,
    MixtureReport,
    PairReport,
    encode_pairs,
    load_pairs,
    load_tokenizers,
    parse_inputs,
    with_augmentation,
    with_bpe_dropout,
)
from ..data.augmentation import parse_augment
from ..data.batching import pair_lengths
from ..data.cleaning import sample_warnings
from ..data.corpora import DISTILLED, REPORTED_LINES, describe_dropped
from ..data.directions import Pair, inputs_of, load_directions, parse_directions, part_names
from ..data.encoding import name_end_token
from ..data.language_tokens import add_language_tokens
from ..data.mixtures import PART
from ..data.perturbations import Languages
from ..data.readers import file_format
from ..data.rewriting import Rewrite, with_rewriting
from ..data.symbol_tokenizers import train_any_tokenizer
from ..data.token_kinds import LANGUAGE_TOKENS, describe_tokenizer, task_of
from ..data.tokenizer_training import tokenizer_digest
from ..data.translation_memories import FORMATS, memory_languages
from ..evaluation.metrics import Groups
from ..inference.languages import NAMES, language_code, model_languages
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from ..utils.system_info import counted
from ..utils.untrusted import one_line
from ..utils.user_code import import_object
from .arguments import DataArguments, RunArguments, run_task
from .distributed import print_main
from .held_out import Overlap, hold_out

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]  # of source and target
SPLITS = ("train", "validation", "test", "base_test")
_LIMITS = {
    "train": "max_train_samples",
    "test": "max_test_samples",
    "base_test": "max_test_samples",
}
_ROWS_READ = 1000


@dataclass
class Corpus:
    """Sentence pairs by split, and a report on the rows that were dropped."""

    pairs: dict[str, Dataset | IterableDataset]
    reports: dict[str, PairReport | MixtureReport]
    #: for a split that does not consist of all rows, their number and a digest of the row numbers
    selected: dict[str, tuple[int, str]] = field(default_factory=dict)
    overlap: Overlap | None = None  #: of a stream and the evaluation data
    directions: dict[str, list[Pair]] = field(
        default_factory=dict
    )  #: of a model of many languages, by split
    parts: dict[str, list[str]] = field(
        default_factory=dict
    )  #: names of directions or inputs that are scored apart

    def select(self, split: str, pairs: Dataset, rows: np.ndarray) -> None:
        """Let a split consist of some rows of `pairs`."""
        known = f"{self.selected.get(split)} {len(pairs)} ".encode()
        digest = hashlib.blake2b(known + rows.astype("<i8").tobytes(), digest_size=16).hexdigest()
        self.pairs[split], self.selected[split] = pairs.select(rows), (len(rows), digest)

    def fingerprint(self, split: str) -> str:
        """Hash of the pairs of a split, or "" if they have not been read."""
        report = self.reports.get(split) or self.reports.get(
            "train"
        )  # held-out pairs have no report
        fingerprint = report.fingerprint if report is not None else ""
        if fingerprint and split in self.selected:
            return hashlib.blake2b(
                f"{fingerprint} {self.selected[split]}".encode(), digest_size=16
            ).hexdigest()
        return fingerprint

    def summary(self, split: str) -> str:
        """The report of a split, after the number of its pairs if it does not consist of all that were kept."""
        report, (count, _) = self.reports.get(split), self.selected.get(split, (None, ""))
        parts = (
            [f"{count:,} pairs"]
            if count is not None and (not report or count != report.kept)
            else []
        )
        return "; ".join(parts + ([report.summary()] if report else []))


@dataclass
class Run:
    """The arguments of a run, and its data and model."""

    model_args: Any
    data_args: DataArguments
    args: RunArguments
    checkpoint: Path | None  #: the one that it resumes from
    corpus: Corpus
    tokenizers: Tokenizers
    encoded: dict[str, Any]  #: the splits as token ids
    encoding: dict[str, EncodingReport]
    model: VanillaTransformerForConditionalGeneration
    facts: dict[str, Any] = field(
        default_factory=dict
    )  #: of the base model, and chosen by the run (`facts`)

    def groups(self, split: str) -> Groups | None:
        """The parts of an encoded evaluation split that are scored apart, or None."""
        names = self.corpus.parts.get(split)
        if not names or split not in self.encoded:
            return None
        return Groups(
            [names[part] for part in self.encoded[split][PART]], bool(self.corpus.directions)
        )


def load_corpus(data_args: DataArguments, args: RunArguments) -> Corpus:
    """Load and check every split that the arguments name, and report dropped rows."""
    if not data_args.train:
        raise UserError(
            "train: nothing to train on: give text files, a prefix or a dataset (--train train.en train.de)"
        )
    if data_args.bidirectional and data_args.separate_vocabularies:
        raise UserError(
            "bidirectional=True needs a joint vocabulary: leave out separate_vocabularies"
        )
    corpus = Corpus({}, {})
    for split in SPLITS:
        inputs = getattr(data_args, split)
        if not inputs:
            continue
        streaming = data_args.streaming and split == "train"
        pairs, report = _load_split(corpus, split, data_args, args)
        if not streaming:
            print_main(f"{split}: {report.summary()}")
        if split == "train" and not streaming and run_task(data_args) == "language":
            for warning in sample_warnings(pairs):
                print_main(warning)
        corpus.pairs[split], corpus.reports[split] = pairs, report
        _limit(corpus, split, data_args)
    if data_args.held_out_pairs and "validation" not in corpus.pairs:
        _hold_out(corpus, data_args, data_args.held_out_pairs, args.seed)
    if data_args.bidirectional:
        for split in corpus.pairs.keys() & {"train", "validation"}:
            corpus.pairs[split] = corpus.pairs[split].map(both_directions, batched=True)
    _compare_sources(corpus)
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
            streaming=data_args.streaming and training,
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


def _compare_sources(corpus: Corpus) -> None:
    """Warn of evaluation pairs whose source is trained on. A stream is compared while it is read."""
    train = corpus.pairs["train"]
    overlap = Overlap({split: pairs for split, pairs in corpus.pairs.items() if split != "train"})
    if isinstance(train, IterableDataset):
        corpus.overlap = overlap
        corpus.pairs["train"] = train.map(overlap.see, batched=True, features=train.features)
        return
    for batch in train.select_columns(["source"]).iter(_ROWS_READ):
        overlap.see(batch)
    for warning in overlap.warnings():
        print_main(warning)


def _limit(corpus: Corpus, split: str, data_args: DataArguments) -> None:
    """Keep the first pairs of a split. Validation is limited after it is encoded."""
    limit = getattr(data_args, _LIMITS[split]) if split in _LIMITS else None
    pairs = corpus.pairs[split]
    if limit is None:
        return
    if isinstance(pairs, IterableDataset):
        corpus.pairs[split] = pairs.take(limit)
    elif limit < len(pairs):
        corpus.select(split, pairs, _first_rows(pairs, limit))


def part_numbers(data: Dataset) -> np.ndarray:
    """The number of each row's input or direction, (rows,)."""
    return (
        np.asarray(data.with_format("numpy")[PART][:])
        if PART in data.column_names
        else np.zeros(len(data), int)
    )


def _first_rows(data: Dataset, limit: int) -> np.ndarray:
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
    if isinstance(train, IterableDataset):
        raise UserError(f"held_out_pairs: {count}: a stream has no length; give validation data")
    names = [tuple(file.name for file in each.files) for each in split_inputs(data_args, "train")]
    if (
        corpus.directions
    ):  # an input is a direction, and a sentence may be on either side of several
        names = [()] * len(corpus.directions["train"])
        corpus.directions["validation"] = corpus.directions["train"]
        corpus.parts["validation"] = list(map("-".join, corpus.directions["train"]))
    distilled = np.array([each == DISTILLED for each in names])[part_numbers(train)]
    both_sides = data_args.bidirectional or bool(corpus.directions)
    kept, drawn = hold_out(train, count, seed, distilled, both_sides)
    corpus.select("train", train, kept)
    corpus.select("validation", train, drawn)
    left_out = len(train) - len(kept) - len(drawn)
    others = (
        f"; {left_out:,} other pairs with their sentences left out of training" if left_out else ""
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


def choose_tokenizers(
    corpus: Corpus, model_args: Any, data_args: DataArguments, checkpoint: Path | None
) -> Tokenizers:
    """Load the tokenizers, or train them on the training split. A resumed run loads them from its checkpoint."""
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
        name = data_args.tokenizer_name
        if name and tokenizer_digest(load_tokenizers(name)) != tokenizer_digest(tokenizers):
            raise UserError(
                f"tokenizer_name: {name} is not the tokenizer of {checkpoint} that a resumed run keeps: "
                "leave it out, or start a new run"
            )
        return tokenizers
    if data_args.tokenizer_name:
        tokenizers = load_tokenizers(data_args.tokenizer_name)
        source, target = tokenizers
        name_end_token(target, data_args.tokenizer_name)
        if source is not target:
            name_end_token(source, data_args.tokenizer_name, required=False)
    else:
        tokenizers = _train_tokenizers(corpus, model_args, data_args)
        if corpus.directions:
            for tokenizer in dict.fromkeys(tokenizers):
                add_language_tokens(
                    tokenizer, corpus.directions["train"], data_args.language_token == "source"
                )
    described = " and ".join(f"{len(each):,}" for each in dict.fromkeys(tokenizers))
    print_main(f"tokenizer: {described} tokens{_missed(tokenizers, model_args, data_args)}")
    return tokenizers


def _side_tokens(data_args: DataArguments) -> tuple[str, str]:
    """The tokens of source and target, as `--tokens` names them."""
    return data_args.source_tokens or data_args.tokens, data_args.target_tokens or data_args.tokens


def _train_tokenizers(corpus: Corpus, model_args: Any, data_args: DataArguments) -> Tokenizers:
    """Train the tokenizers on the training split: a joint one, or one for each side if their tokens differ."""
    train = corpus.pairs["train"]
    # The fingerprint keys the tokenizer cache. A stream has none before it has been read.
    fingerprint = "" if data_args.streaming else corpus.fingerprint("train")
    kinds = _side_tokens(data_args)
    task = data_args.task or task_of(*kinds)

    def learn(tokens: str, *columns: str) -> PreTrainedTokenizerBase:
        content = f"{fingerprint} {' '.join(columns)} {len(train)}" if fingerprint else None
        # Read in batches: row by row, a million rows take 20 s.
        batches = (
            (column, train.select_columns([column, "line"]).iter(_ROWS_READ)) for column in columns
        )
        rows = (
            (text, line)
            for column, read in batches
            for batch in read
            for text, line in zip(batch[column], batch["line"], strict=True)
        )
        tokenizer = train_any_tokenizer(
            rows,
            tokens,
            vocab_size=model_args.vocab_size or VanillaTransformerConfig().vocab_size,
            min_frequency=data_args.min_frequency,
            lowercase=data_args.lowercase,
            content=content,
            side=columns[0] if len(columns) == 1 else "text",
        )
        describe_tokenizer(tokenizer, tokens, task)
        return tokenizer

    if data_args.separate_vocabularies or kinds[0] != kinds[1]:
        return learn(kinds[0], "source"), learn(kinds[1], "target")
    return (learn(kinds[0], "source", "target"),) * 2


def _missed(tokenizers: Tokenizers, model_args: Any, data_args: DataArguments) -> str:
    """The end of the line on the tokenizers, if the text has too few words for `vocab_size`."""
    size = model_args.vocab_size or VanillaTransformerConfig().vocab_size
    if data_args.tokenizer_name or set(_side_tokens(data_args)) - set(LANGUAGE_TOKENS):
        return ""
    return f"; vocab_size={size:,} needs more text" if min(map(len, tokenizers)) < size else ""


def encode_corpus(
    corpus: Corpus, tokenizers: Tokenizers, data_args: DataArguments, seed: int = 0
) -> tuple[dict[str, Any], dict[str, EncodingReport]]:
    """Tokenize all splits. Training pairs over the length limits are dropped and counted, evaluation pairs kept."""
    encoded: dict[str, Any] = {}
    reports = {}
    for split, pairs in corpus.pairs.items():
        training = split == "train"
        data, report = encode_pairs(
            pairs,
            *tokenizers,
            max_source_length=data_args.max_source_length,
            max_target_length=data_args.max_target_length,
            drop_too_long=training,
            directions=corpus.directions.get(split, ()),
        )
        if report.too_long:
            print_main(f"{split}: {report.summary()}")
        if not training:
            data = _leave_out_long(corpus, split, data, data_args.max_eval_length)
        if report.unknown:
            print_main(f"{split}: {report.describe_unknown()}")
        limits = data_args.max_source_length, data_args.max_target_length
        if training and data_args.rewrite:
            rewrite = import_rewrite(data_args.rewrite)
            data = with_rewriting(data, *tokenizers, rewrite=rewrite, seed=seed, limits=limits)
        if training and data_args.augment:
            augment = parse_augment(data_args.augment)
            languages: list[Languages] = [(data_args.source_lang, data_args.target_lang)]
            if corpus.directions:
                languages = list(corpus.directions["train"])
            data = with_augmentation(
                data, *tokenizers, augment=augment, seed=seed, limits=limits, languages=languages
            )
        if training and data_args.bpe_dropout:
            data = with_bpe_dropout(data, *tokenizers, dropout=data_args.bpe_dropout, seed=seed)
        encoded[split], reports[split] = data, report
    if "validation" in encoded and data_args.max_eval_samples:
        rows = _first_rows(encoded["validation"], data_args.max_eval_samples)
        for splits in (encoded, corpus.pairs):
            splits["validation"] = splits["validation"].select(rows)
    return encoded, reports


def import_rewrite(name: str) -> Rewrite:
    """Import the function MODULE:FUNCTION of `rewrite`."""
    try:
        function: Rewrite = import_object(name)
    except Exception as error:  # the code of the user
        raise UserError(f"rewrite: {name}: {one_line(error)}; give MODULE:FUNCTION") from error
    if not callable(function):
        raise UserError(f"rewrite: {name} is no function; give MODULE:FUNCTION")
    return function


def _leave_out_long(corpus: Corpus, split: str, encoded: Dataset, limit: int | None) -> Dataset:
    """Leave out evaluation pairs over a limit, also from the corpus, because its references are scored.

    A single sentence of 8,000 tokens makes its whole batch that long, in memory that training never needs.
    """
    lengths = encoded.with_format("numpy")["length"][:]
    short = np.flatnonzero(lengths <= (limit or np.inf))
    if len(short) == len(encoded):
        return encoded
    lines = [encoded[int(row)]["line"] for row in np.flatnonzero(lengths > limit)]
    reason = f"longer than max_eval_length={limit} tokens"
    left_out = describe_dropped(reason, len(lines), lines[:REPORTED_LINES])
    if not len(short):
        raise UserError(
            f"{split}: all {len(lines):,} pairs are {left_out}; raise it, or split them into sentences"
        )
    print_main(f"{split}: left out {len(lines):,} of {len(encoded):,} pairs: {left_out}")
    report = corpus.reports.get(split)
    if isinstance(report, PairReport):  # for the model card
        report.kept -= len(lines)
        report.dropped[reason], report.first_lines[reason] = len(lines), lines[:REPORTED_LINES]
    corpus.select(split, corpus.pairs[split], short)
    return encoded.select(short)


# Checks that tokenizers and configuration agree


def match_case(tokenizers: Tokenizers, data_args: DataArguments) -> None:
    """Ignore case in all scores if the target tokenizer lower-cases: it cannot write the capitals of a reference."""
    texts = (
        each.decode(each("A B C")["input_ids"], skip_special_tokens=True) for each in tokenizers
    )
    lowercases = [text.split() == ["a", "b", "c"] for text in texts]
    if data_args.lowercase and not all(lowercases):
        raise UserError(
            f"lowercase: True: the tokenizer {data_args.tokenizer_name or 'of the checkpoint'} keeps capitals; "
            "leave lowercase out, or train a tokenizer"
        )
    if lowercases[1] and not data_args.bleu_lowercase:
        data_args.bleu_lowercase = True
        print_main("scores ignore case, because the target tokenizer lower-cases all text")


def check_positions(run: Run) -> None:
    """Refuse sentences that learned positions cannot represent. Sinusoids have no end."""
    config = run.model.config
    data_args = run.data_args
    encoded = run.encoded
    limit = config.max_position_embeddings
    if config.position_encoding_type != "learned":
        return
    remedy = f"the learned positions end at max_position_embeddings={limit}"
    for name in ("max_source_length", "max_target_length"):
        value = getattr(data_args, name)
        if value is None or value > limit:
            raise UserError(
                f"{name}: {value}: {remedy}; set it to at most {limit}, or more positions"
            )
    if "validation" in encoded:
        data = encoded["validation"]
        longest = np.maximum(*pair_lengths(data))
        lines = [data[int(row)]["line"] for row in np.flatnonzero(longest > limit)[:5]]
        if lines:
            raise UserError(
                f"validation data: the lines {', '.join(map(str, lines))} have up to {longest.max()} tokens: {remedy}"
            )
    if data_args.bpe_dropout:
        longest_text = _longest_without_merges(encoded["train"], run.tokenizers)
        if longest_text > limit:
            raise UserError(
                f"bpe_dropout: {data_args.bpe_dropout}: without merges a sentence has up to {longest_text} tokens: "
                f"{remedy}; set more positions, or a lower max_source_length and max_target_length"
            )


def _longest_without_merges(data: Any, tokenizers: Tokenizers) -> float:
    """The largest number of tokens that BPE-dropout can make of a sentence: each symbol of its tokens is one."""
    data = getattr(data, "encoded", data)
    longest = 0
    if not isinstance(data, Dataset):
        return math.inf  # a stream is not read before training
    for side, tokenizer in zip(("input_ids", "labels"), tokenizers, strict=True):
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        symbols = np.array(
            [1 if token in tokenizer.all_special_tokens else len(token) for token in tokens]
        )
        for batch in data.select_columns([side]).iter(_ROWS_READ):
            longest = max(longest, *(int(symbols[ids].sum()) for ids in batch[side]))
    return longest
