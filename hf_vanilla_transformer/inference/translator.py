"""Translate lines of text with a trained model, in their order, in batches of similar length."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenizer_training import load_tokenizers
from ..errors import UserError
from ..generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE, chosen_settings, search_for
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..untrusted import one_line
from .alignment import Link, align, chosen_layer
from .loading import load_model
from .workers import in_threads, shares, worker_count

#: "We set the maximum output length during inference to input length + 50" (§6.1).
EXTRA_TOKENS = MAX_LENGTH_OVER_SOURCE

#: How many batches are read ahead, to be sorted by length: enough to waste little padding, few enough for a stream.
BATCHES_AHEAD = 16

#: Padded source tokens of a batch: 64 sentences of 64 tokens, so that only longer ones make it smaller. With 4 beams
#: the base model's caches then take about half a GiB in float32.
MAX_TOKENS = 4096

#: Scores below come from hypotheses that are not there: a tiny vocabulary cannot fill every beam.
_IMPOSSIBLE = -1e8

_MISSING = object()


@dataclass(frozen=True)
class Hypothesis:
    """One of the translations that a search found.

    `score` is what the search ranks by: the natural logarithm of the probability over the length penalty; None after
    greedy search, which ranks nothing. Words of a forced prefix count neither for the probability nor for the length.
    `alignment` has (source word, target word) pairs if asked for, otherwise None.
    """

    text: str
    score: float | None = None
    alignment: list[Link] | None = None

    @property
    def pharaoh(self) -> str:
        """The alignment as the decoder Pharaoh wrote it and every aligner does: `0-0 1-2`."""
        return " ".join(f"{source}-{target}" for source, target in self.alignment or [])


@dataclass(frozen=True)
class _Sentence:
    """Ids of a source, and of what its translation must begin with."""

    source: list[int]
    prefix: list[int]


class Translator:
    """A model with its tokenizers, ready to translate text.

    Args:
        model: a sequence-to-sequence model that can `generate`; it stays on its device.
        source_tokenizer: for the text that comes in.
        target_tokenizer: for the text that goes out; None means that one tokenizer serves both languages.
        ensemble: more models with the same tokenizers; a word's probability is the mean of all models'.
        workers: searches that run beside each other, each with `batch_size` sentences and its part of torch's
            threads; None is one for each of torch's threads on a CPU, up to 8.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        ensemble: Sequence[PreTrainedModel] = (),
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise UserError(f"workers: must be at least 1, not {workers}")
        self.model = model
        self.models = [model, *ensemble]
        self.workers = workers
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer or source_tokenizer

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        ensemble: Sequence[str | os.PathLike] = (),
        workers: int | None = None,
    ) -> "Translator":
        """Load a model folder: the model, its generation settings and its tokenizers.

        Args:
            directory: a folder that `save_pretrained` or a training run has written.
            device: such as "cpu" or "cuda:1"; None is the machine's accelerator if it has one.
            dtype: "float32", "bfloat16", "float16" or a torch dtype; "int8" has the decoder's matrices in 8 bits
                where few sentences are translated at once, on a CPU; "fastest" is float32 or bfloat16, whichever a few
                trial translations find faster here; None is the checkpoint's own.
            ensemble: folders of more models with the same tokenizers; the settings are the first one's.
            workers: as above.

        Raises:
            UserError: no such folder, no whole model in it, a device that is not there, an unknown dtype, or
                tokenizers that differ.
        """
        model = load_model(directory, device, dtype)
        source, target = _load_tokenizers(directory)
        members = []
        for other in ensemble:
            for mine, theirs in zip((source, target), _load_tokenizers(other), strict=True):
                if mine.get_vocab() != theirs.get_vocab():
                    raise UserError(f"{other}: its tokenizer differs from that of {directory}; an ensemble shares one")
            members.append(load_model(other, model.device, model.dtype))
        return cls(model, source, target, members, workers)

    def translate(
        self,
        sentences: Iterable[str],
        *,
        prefixes: Iterable[str] | None = None,
        batch_size: int = 64,
        max_tokens_per_batch: int = MAX_TOKENS,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
        length_penalty: float | None = None,
        first_line: int = 1,
        **generate_kwargs: Any,
    ) -> Iterator[str]:
        """Translate sentences one by one or from an endless stream.

        Args:
            sentences: text, one sentence each; an empty or blank one comes out empty, unseen by the model.
            prefixes: what each translation must begin with, as many as sentences; an empty one forces nothing. The
                last word of a prefix may come out longer. (A blank sentence comes out as its prefix.)
            batch_size: sentences per batch, at most. `BATCHES_AHEAD` times as many are read ahead; 1 reads none ahead.
            max_tokens_per_batch: source tokens per batch, padding included, at most; a longer sentence goes alone.
                The decoder's caches are `num_beams` times as long.
            num_beams: None, here and below, is what the checkpoint's `generation_config.json` says.
            max_new_tokens: if the checkpoint says nothing either, it is the longest source of the batch + 50 (§6.1).
            length_penalty: Hugging Face's, log P / length^length_penalty, instead of the checkpoint's.
            first_line: the number of the first sentence, for messages.
            **generate_kwargs: anything else for `model.generate`.

        Returns:
            An iterator of as many translations, in the same order.

        Raises:
            UserError: at once for an argument out of range; later for an item that is no string, one that is
                longer than the learned positions of the model, or a sentence without its prefix.
        """
        best = self.translate_nbest(
            sentences,
            prefixes=prefixes,
            batch_size=batch_size,
            max_tokens_per_batch=max_tokens_per_batch,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            first_line=first_line,
            scores=False,
            **generate_kwargs,
        )
        return (hypotheses[0].text for hypotheses in best)

    def translate_nbest(
        self,
        sentences: Iterable[str],
        n_best: int = 1,
        *,
        alignment: bool = False,
        alignment_layer: int | None = None,
        scores: bool = True,
        prefixes: Iterable[str] | None = None,
        batch_size: int = 64,
        max_tokens_per_batch: int = MAX_TOKENS,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
        length_penalty: float | None = None,
        first_line: int = 1,
        **generate_kwargs: Any,
    ) -> Iterator[list[Hypothesis]]:
        """Translate sentences; for each give its best translations with their scores.

        Args:
            n_best: how many, at most; not more than beams.
            alignment: whether to find the source word of each target word (`alignment.align`), by the first model
                of an ensemble.
            alignment_layer: the decoder layer whose attention tells it, counted from 1; None is the last but one.
            scores: whether they are wanted from transformers' own search too, which keeps the log-probabilities of
                all words at every step for them. It runs where ours does not cover the settings.
            others: those of `translate`.

        Returns:
            An iterator of as many lists as sentences, each with the best hypothesis first. A blank sentence has one.

        Raises:
            UserError: what `translate` raises; more hypotheses than beams, a layer that is not there, an ensemble
                with settings that only transformers' own search covers.
        """
        _check_sentences(sentences)
        counts = {"batch_size": batch_size, "max_tokens_per_batch": max_tokens_per_batch, "num_beams": num_beams}
        for name, value in (counts | {"max_new_tokens": max_new_tokens, "n_best": n_best}).items():
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, not {value}")
        given = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
        settings = {name: value for name, value in given.items() if value is not None} | generate_kwargs
        settings = self._search_settings(settings, n_best, scores)
        layer = chosen_layer(self.model, alignment_layer) if alignment else None
        pairs = with_prefixes(sentences, prefixes, first_line)
        return self._stream(pairs, first_line, (batch_size, max_tokens_per_batch), layer, settings)

    def describe(
        self,
        *,
        batch_size: int = 64,
        max_tokens_per_batch: int = MAX_TOKENS,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
        length_penalty: float | None = None,
    ) -> dict[str, Any]:
        """What `translate` does with these arguments, defaults filled in, to stand beside a score."""
        defaults = self.model.generation_config
        weights, dtype = getattr(defaults, "decoder_weights", None), str(self.model.dtype).removeprefix("torch.")
        return {
            "batch_size": batch_size,
            "max_tokens_per_batch": max_tokens_per_batch,
            "num_beams": num_beams or defaults.num_beams or 1,
            "max_new_tokens": max_new_tokens or defaults.max_new_tokens or f"source + {EXTRA_TOKENS}",
            "length_penalty": self._length_penalty(length_penalty),
            "device": str(self.model.device),
            "dtype": dtype if weights is None else f"{dtype}, decoder {weights}",
        }

    def _length_penalty(self, given: float | None) -> float | str:
        """What a hypothesis' log-probability is divided by: length^penalty, or the paper's formula (§6.1)."""
        defaults = self.model.generation_config
        alpha = getattr(defaults, "paper_length_penalty", None)
        for penalty in (given, chosen_settings(defaults).get("length_penalty")):
            if penalty is not None:
                return penalty
        return 1.0 if alpha is None else f"((5 + length) / 6)^{alpha}"

    def _search_settings(self, settings: dict[str, Any], n_best: int, scores: bool) -> dict[str, Any]:
        """What `generate` is told, from what the caller says; a UserError where it makes no sense."""
        beams = settings.get("num_beams") or self.model.generation_config.num_beams or 1
        if n_best > beams and not settings.get("do_sample"):
            raise UserError(f"n_best: {n_best} translations need num_beams to be at least {n_best}; it is {beams}")
        if settings.keys() & {"num_return_sequences", "return_dict_in_generate"}:
            raise UserError("drop num_return_sequences and return_dict_in_generate; n_best of translate_nbest is both")
        settings = settings | {"return_dict_in_generate": True}
        if n_best > 1:
            settings["num_return_sequences"] = n_best
        own = self._is_covered(settings)
        if scores and beams > 1 and not own:
            settings["output_scores"] = True
        if len(self.models) > 1:
            if not own:
                raise UserError(
                    "ensemble: these settings, or those of the checkpoint's generation_config.json, are left to "
                    "transformers' own search, which takes one model; drop what is not beam search"
                )
            settings["ensemble"] = self.models[1:]
        return settings

    def _is_covered(self, settings: dict[str, Any]) -> bool:
        """Whether this package's search does it."""
        if not isinstance(self.model, VanillaTransformerForConditionalGeneration):
            return False
        return search_for(self.model, settings.get("generation_config"), settings)[0] is not None

    def _stream(
        self,
        pairs: Iterator[tuple[str, str]],
        first_line: int,
        limits: tuple[int, int],
        layer: int | None,
        settings: dict[str, Any],
    ) -> Iterator[list[Hypothesis]]:
        """`limits` are sentences and tokens of a batch; `layer` is the one that aligns, if any."""
        number, ahead = first_line, limits[0] * BATCHES_AHEAD if limits[0] > 1 else 1
        while window := list(islice(pairs, ahead)):
            yield from self._translate_window(window, number, limits, layer, settings)
            number += len(window)

    def _translate_window(
        self,
        window: list[tuple[str, str]],
        number: int,
        limits: tuple[int, int],
        layer: int | None,
        settings: dict[str, Any],
    ) -> list[list[Hypothesis]]:
        results = [[Hypothesis(prefix, 0.0, None if layer is None else [])] for _, prefix in window]
        sentences = {
            index: _Sentence(self.encode(line, number + index), self.encode_prefix(prefix, number + index))
            for index, (line, prefix) in enumerate(window)
            if not _blank(line)
        }
        joined, stop = self._is_covered(settings), threading.Event()
        workers = 1 if not joined else self.workers or worker_count(self.model)

        def work(job: tuple[list[int], int]) -> list[list[Hypothesis]]:
            return self._translate_together([sentences[index] for index in job[0]], job[1], layer, settings, stop)

        jobs = list(_searches(sentences, *limits, joined, workers))
        was_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            for (indices, _), found in zip(jobs, in_threads(work, jobs, workers, stop), strict=True):
                for index, hypotheses in zip(indices, found, strict=True):
                    results[index] = hypotheses
        finally:
            for model, mode in zip(self.models, was_training, strict=True):
                model.train(mode)
        return results

    def encode(self, line: str, number: int) -> list[int]:
        """The ids of a source text; `number` names its line where it is too long for learned positions."""
        ids = self.source_tokenizer(line)["input_ids"]
        limit = self._position_limit()
        if limit is not None and len(ids) > limit:
            raise UserError(
                f"line {number}: {len(ids)} tokens, but the model has positions for {limit} only; split the line"
            )
        return ids

    def encode_prefix(self, prefix: str, number: int) -> list[int]:
        """The ids of the text that a translation begins with, without an end."""
        if not prefix.strip():
            return []
        ids = self.target_tokenizer(text_target=prefix.strip(), add_special_tokens=False)["input_ids"]
        limit = self._position_limit()
        if limit is not None and len(ids) >= limit:
            raise UserError(f"line {number}: a prefix of {len(ids)} tokens, but the model has {limit} positions only")
        return ids

    def _position_limit(self) -> int | None:
        limits = [limit for limit in map(_position_limit, self.models) if limit is not None]
        return min(limits, default=None)

    @torch.inference_mode()
    def _translate_together(
        self, batch: list[_Sentence], at_once: int, layer: int | None, settings: dict[str, Any], stop: threading.Event
    ) -> list[list[Hypothesis]]:
        """Translate sentences whose prefixes are of one length, so many at once, in one search, until told to stop."""
        ids = [sentence.source for sentence in batch]
        waiting = iter(ids)

        def more(room: int) -> tuple[torch.Tensor, torch.Tensor] | None:
            some = [] if stop.is_set() else list(islice(waiting, room))
            if not some:
                return None
            padded = self.source_tokenizer.pad({"input_ids": some}, return_tensors="pt").to(self.model.device)
            return padded["input_ids"], padded["attention_mask"]

        first = more(at_once)
        assert first is not None
        arguments: dict[str, Any] = {"input_ids": first[0], "attention_mask": first[1]}
        if at_once < len(batch):
            arguments["more"] = more
        prefix_length = len(batch[0].prefix)
        if prefix_length:
            start = self.model.config.decoder_start_token_id
            rows = [[start, *sentence.prefix] for sentence in batch]
            arguments["decoder_input_ids"] = torch.tensor(rows, device=self.model.device)  # (B, 1 + P)
        length = self._maximum_length(first[0].shape[1], prefix_length)
        output = self.model.generate(**arguments, **(length | settings))
        words, scores = output.sequences, getattr(output, "sequences_scores", None)
        texts = self.target_tokenizer.batch_decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        n_best = len(texts) // len(batch)
        if layer is None:
            alignments: list[Any] = [None] * len(texts)
        else:
            alignments = self._align([row for row in ids for _ in range(n_best)], words, 1 + prefix_length, layer)
        all_scores: list[Any] = [None] * len(texts) if scores is None else scores.tolist()
        found = list(map(Hypothesis, texts, all_scores, alignments))
        grouped = [found[start : start + n_best] for start in range(0, len(found), n_best)]
        return [
            [one for place, one in enumerate(group) if not place or one.score is None or one.score > _IMPOSSIBLE]
            for group in grouped
        ]

    def _align(self, sources: list[list[int]], words: torch.Tensor, begun: int, layer: int) -> list[list[Link]]:
        """Links of each row of words (B, T), of which `begun` were given."""
        ends, targets = set(_as_list(self.model.generation_config.eos_token_id)), []
        for row in words.tolist():
            end = next((place + 1 for place in range(begun, len(row)) if row[place] in ends), len(row))
            targets.append(row[1:end])  # without the start
        tokenizers = self.source_tokenizer, self.target_tokenizer
        return align(self.model, *tokenizers, sources, targets, layer)

    def _maximum_length(self, source_length: int, prefix_length: int) -> dict[str, int]:
        """The paper's maximum where positions end, so that decoding does; elsewhere our `generate` sees to it."""
        limit = self._position_limit()
        if limit is None or self.model.generation_config.max_new_tokens:
            return {}
        # the first word read is the start token, the last one written is read no more
        return {"max_new_tokens": min(source_length + EXTRA_TOKENS, limit - prefix_length)}


def translated_lines(
    translator: Translator,
    sentences: Iterable[str],
    *,
    n_best: int | None = None,
    alignment: bool = False,
    first_line: int = 1,
    **settings: Any,
) -> Iterator[str]:
    """Translate into lines of a text file, as Moses, Marian and fairseq write theirs.

    Args:
        n_best: None gives a line for each sentence: its translation, and after " ||| " its alignment, if asked for.
            A number gives a line for each hypothesis: `i ||| text ||| score`, or `i ||| text ||| score ||| alignment`,
            where i counts the sentences from 0.
        others: those of `Translator.translate_nbest`.

    Raises:
        UserError: what that raises, and as early; scores of a greedy search, which has none.
    """
    if n_best is not None and (settings.get("num_beams") or translator.model.generation_config.num_beams or 1) == 1:
        raise UserError("n_best: greedy search gives no scores; num_beams must be at least 2")
    if n_best is None and not alignment:
        return map(_on_one_line, translator.translate(sentences, first_line=first_line, **settings))
    found = translator.translate_nbest(sentences, n_best or 1, alignment=alignment, first_line=first_line, **settings)
    return (
        _line(None if n_best is None else number, one)
        for number, hypotheses in enumerate(found, start=first_line - 1)
        for one in hypotheses
    )


def _line(number: int | None, one: Hypothesis) -> str:
    fields = [_on_one_line(one.text)]
    if number is not None:
        fields = [str(number), *fields, "" if one.score is None else f"{one.score:.4f}"]
    return " ||| ".join(fields if one.alignment is None else [*fields, one.pharaoh])


def length_batches(lengths: Mapping[int, int], batch_size: int, max_tokens: int) -> Iterator[list[int]]:
    """Cut sentences into batches of like length, the longest first: what does not fit into memory fails at once.

    Args:
        lengths: tokens of each, by any number that names it.
        batch_size: sentences of a batch, at most.
        max_tokens: tokens of a batch, padding included, at most; a longer sentence goes alone.
    """
    batch: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__, reverse=True):
        # the first of a batch is its longest, to which the others are padded
        if batch and (len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _searches(
    sentences: dict[int, _Sentence], batch_size: int, max_tokens: int, joined: bool, workers: int
) -> Iterator[tuple[list[int], int]]:
    """What is searched together, and how many of it at once.

    Prefixes are of one length, since a search begins with as many words in every row.

    Args:
        joined: whether a search takes in sentences while it runs. Then the batches with `batch_size` sentences become
            one search for each worker; those that are smaller have long sentences, which come first.
    """
    for prefix_length in sorted({len(sentence.prefix) for sentence in sentences.values()}):
        group = {i: len(one.source) for i, one in sentences.items() if len(one.prefix) == prefix_length}
        batches = list(length_batches(group, batch_size, max_tokens))
        full = [len(batch) == batch_size for batch in batches]
        if joined and not prefix_length and True in full:
            start = full.index(True)
            batches[start:] = shares([index for batch in batches[start:] for index in batch], workers)
        yield from ((batch, min(batch_size, len(batch))) for batch in batches)


def with_prefixes(
    sentences: Iterable[str], prefixes: Iterable[str] | None, first_line: int = 1
) -> Iterator[tuple[str, str]]:
    """Each sentence with what its translation must begin with; "" where there are no prefixes.

    Raises:
        UserError: where one of the two ends before the other.
    """
    if prefixes is None:
        yield from ((sentence, "") for sentence in sentences)
        return
    pairs: Iterator[tuple[Any, Any]] = zip_longest(sentences, prefixes, fillvalue=_MISSING)
    for number, (sentence, prefix) in enumerate(pairs, start=first_line):
        if sentence is _MISSING or prefix is _MISSING:
            lacking, surplus = ("sentence", "prefix") if sentence is _MISSING else ("prefix", "sentence")
            raise UserError(f"prefixes: line {number} has a {surplus} but no {lacking}; each sentence needs its own")
        yield sentence, prefix


def _check_sentences(sentences: Any) -> None:
    if isinstance(sentences, str):
        raise UserError("sentences: an iterable of strings is needed, not one string; put it in a list")


def _blank(line: str) -> bool:
    if not isinstance(line, str):
        raise UserError(f"sentences: strings are needed, not {line!r}")
    return not line.strip()


def _on_one_line(text: str) -> str:
    """A model can make any character, but a line has to stay one line."""
    return text.replace("\n", " ")


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def _position_limit(model: PreTrainedModel) -> int | None:
    """How many positions the model knows; sinusoids have no end (§3.5)."""
    if str(getattr(model.config, "position_encoding_type", "")).startswith("sinusoidal"):
        return None
    return getattr(model.config, "max_position_embeddings", None)


def _load_tokenizers(folder: str | os.PathLike) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    try:
        return load_tokenizers(Path(folder))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot load the tokenizer ({one_line(error)})") from error
