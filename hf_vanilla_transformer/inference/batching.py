"""Batches of sentences of similar length, and their distribution over searches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..search_vanilla_transformer import LengthPenalty
from ..text.words import WordSplitter
from ..utils.errors import UserError
from .workers import shard_evenly

#: How many batches are read ahead and sorted by length: enough to waste little on padding, few enough for a stream.
BATCHES_AHEAD = 16

#: Padded source tokens per batch: 64 sentences of 64 tokens, so that only longer ones make a batch smaller. With 4
#: beams the base model's KV caches then take about half a GiB in float32.
MAX_TOKENS = 4096


@dataclass(frozen=True)
class EncodedSentence:
    """Token ids of a source sentence, and of the prefix that its translation must begin with."""

    source: list[int]
    prefix: list[int]


@dataclass(frozen=True)
class SearchJob:
    """Sentences that one search translates, `batch_size` at a time."""

    indices: list[int]
    batch_size: int


@dataclass(frozen=True)
class TranslationRequest:
    """Checked arguments of `Translator.translate_nbest`."""

    batch_size: int
    max_tokens: int
    alignment_layer: int | None  # None: no alignment
    probabilities: bool
    settings: dict[str, object]  # for `generate`
    refill: bool  # whether this package's search runs: it can replace finished sentences
    protect: bool
    in_form: bool  # whether sentences are brought to the form of the model's source
    words: WordSplitter  # for the alignment
    marks: frozenset[int]  # ids of a source that are not in its text
    has_codes: bool  # whether each sentence has its own languages
    penalty: LengthPenalty  # the divisor of log P in the scores


def length_batches(
    lengths: Mapping[int, int], batch_size: int, max_tokens: int
) -> Iterator[list[int]]:
    """Cut sentences into batches of similar length, longest first, so that running out of memory happens at once.

    `lengths` has the tokens of each sentence, by its index. A batch has at most `max_tokens`, padding included. A
    longer sentence goes alone.
    """
    batch: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__, reverse=True):
        # all sentences are padded to the first, which is the longest
        if batch and (
            len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > max_tokens
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def search_jobs(
    sentences: Mapping[int, EncodedSentence],
    batch_size: int,
    max_tokens: int,
    refill: bool,
    workers: int,
) -> list[SearchJob]:
    """Distribute sentences over searches. All prefixes of a search have the same length.

    With `refill`, a search can replace finished sentences by new ones (continuous batching). Full batches then become
    one search per worker. Smaller ones have long sentences and come first.
    """
    jobs = []
    for prefix_length in sorted({len(sentence.prefix) for sentence in sentences.values()}):
        group = {
            i: len(one.source) for i, one in sentences.items() if len(one.prefix) == prefix_length
        }
        batches = list(length_batches(group, batch_size, max_tokens))
        full = [len(batch) == batch_size for batch in batches]
        if refill and True in full:
            start = full.index(True)
            batches[start:] = shard_evenly(
                [index for batch in batches[start:] for index in batch], workers
            )
        jobs += [SearchJob(batch, min(batch_size, len(batch))) for batch in batches]
    return jobs


def with_prefixes(
    sentences: Iterable[str], prefixes: Iterable[str] | None, first_line: int = 1
) -> Iterator[tuple[str, str]]:
    """Pair each sentence with its target prefix, "" if `prefixes` is None."""
    if prefixes is None:
        yield from ((sentence, "") for sentence in sentences)
        return
    missing: Any = object()
    pairs = zip_longest(sentences, prefixes, fillvalue=missing)
    for number, (sentence, prefix) in enumerate(pairs, start=first_line):
        if sentence is missing:
            has = "a prefix but no source"
        elif prefix is missing:
            has = "a source but no prefix"
        else:
            yield sentence, prefix
            continue
        raise UserError(f"prefixes: line {number} has {has}; each source needs one")
