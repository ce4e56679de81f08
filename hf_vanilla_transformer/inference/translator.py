"""Translate sentences with a trained model, in their order, in batches of similar length."""

import copy
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.shared_copy import in_evaluation_mode, shared_copy
from ..generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE, plan_search, uncovered_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..search_vanilla_transformer import LengthPenalty, is_hypothesis
from ..text.cells import check_items, text_of
from ..text.language_tokens import Direction
from ..text.side_tokens import AS_TEXT, readable_tokens
from ..text.source_text import source_text
from ..text.token_kinds import (
    has_closed_vocabulary,
    recorded_form,
    tokenizer_task,
    unknown_symbols,
    without_margins,
)
from ..text.tokenizer_files import (
    load_tokenizers,
    recognising_added_tokens,
    require_same_tokenizers,
)
from ..text.words import WordSplitter, white_space_words, words
from ..utils.cpu_time import on_fitting_threads
from ..utils.errors import UserError, check_at_least_one, without_panic
from ..utils.shipped_models import model_folder
from ..utils.untrusted import one_line
from .alignment import align, chosen_layer, source_inputs
from .batching import (
    BATCHES_AHEAD,
    MAX_TOKENS,
    EncodedSentence,
    SearchJob,
    TranslationRequest,
    search_jobs,
    with_prefixes,
)
from .directions import Codes, Directions, PlacedDirection, next_places
from .hypothesis import Hypothesis
from .line_warnings import LineWarnings
from .loading import load_model
from .protected import Protected, has_words, knows_escapes, protect, white_space_links
from .token_probabilities import token_log_probabilities
from .workers import map_in_threads, worker_count

if TYPE_CHECKING:
    from ..text.source_form import SourceForm  # few models have one

logger = logging.getLogger(__name__)

#: The hypotheses of each sentence, best first.
NBest: TypeAlias = list[list[Hypothesis]]
#: A sentence, and the text that its translation must begin with.
Prefixed: TypeAlias = tuple[str, str]

#: A fault of an output, by the task of its model. Sequences such as SMILES repeat their n-grams by nature.
ENDLESS = {
    "language": "the output did not end before the length limit; no_repeat_ngram_size or repetition_penalty may help",
    "sequence": "the output did not end before the length limit; max_new_tokens raises it",
}

#: Encoding a target switches some tokenizers, such as Marian's, to a different vocabulary and back.
TOKENIZER_LOCK = threading.Lock()


class Translator:
    """A model with its tokenizers, ready to translate text.

    Args:
        model: a sequence-to-sequence model that can `generate`. It stays on its device.
        source_tokenizer: for the source language.
        target_tokenizer: for the target language. None means that one tokenizer serves both.
        ensemble: more models with the same tokenizers. Token probabilities are averaged over all models.
        workers: searches that run in parallel threads, each with `batch_size` sentences and its share of torch's
            threads. None is one per torch thread on a CPU, up to 8.
        shortlist: a file of `vanilla-transformer shortlist`. The output layer computes its candidates only.
        trust_remote_code: import the function that the tokenizer names as the form of its source (`source_form`), if
            it is not one of this package.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        ensemble: Sequence[PreTrainedModel] = (),
        workers: int | None = None,
        shortlist: str | os.PathLike | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        check_at_least_one(workers=workers)
        if ensemble and shortlist is not None:
            raise UserError(
                f"shortlist: {shortlist} is for one model; leave it out, or the other models"
            )
        self.model = model
        self.models = [model, *ensemble]
        self.workers = workers
        self.source_tokenizer = recognising_added_tokens(source_tokenizer)
        self.target_tokenizer = target_tokenizer or self.source_tokenizer
        #: whether the model reads text that Moses has escaped
        self.escaped = knows_escapes(source_tokenizer.get_vocab())
        #: the form of the source text, which `encode` makes
        self.source_form = _source_form(source_tokenizer, trust_remote_code)
        #: counts the lines with faults of all calls. None: each call warns of its own at its end
        self.line_warnings: LineWarnings | None = None
        self.shortlist = None
        if shortlist is not None:
            from .shortlist_files import read_shortlist

            self.shortlist = read_shortlist(shortlist, self)
        forced = model.generation_config.forced_bos_token_id if model.can_generate() else None
        #: the languages of a model of many
        self.directions = Directions(self.source_tokenizer, self.target_tokenizer, forced)
        if self.directions.prefix_length:
            # each sentence has a token of its language. A logits processor for all would exclude continuous batches
            self.model = self.models[0] = shared_copy(model)
            self.model.generation_config.counted_prefix = self.directions.prefix_length
            if self.directions.prefix(self.directions.default) == [forced]:
                self.model.generation_config.forced_bos_token_id = None

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        ensemble: Sequence[str | os.PathLike] = (),
        workers: int | None = None,
        trust_remote_code: bool = False,
        shortlist: str | os.PathLike | None = None,
    ) -> "Translator":
        """Load a model folder: the model, its generation config and its tokenizers.

        Args:
            directory: a folder that `save_pretrained` or a training run has written, or the name of a model of this
                package, such as `g2p_en`.
            device, dtype, trust_remote_code: as in `load_model`, and the latter as above.
            ensemble: folders of more models with the same tokenizers. The first model's generation config is used.
            workers, shortlist: as above.

        Raises:
            UserError: as in `load_model`, or for tokenizers that differ.
        """
        directory, *others = (model_folder(os.fspath(name)) for name in (directory, *ensemble))
        model = load_model(directory, device, dtype, trust_remote_code)
        source, target = load_tokenizers(Path(directory))
        members = []
        for other in others:
            require_same_tokenizers(
                directory, (source, target), other, load_tokenizers(Path(other)), "an ensemble"
            )
            members.append(load_model(other, model.device, model.dtype, trust_remote_code))
        return cls(model, source, target, members, workers, shortlist, trust_remote_code)

    @property
    def task(self) -> str:
        """The task of the model by its tokenizers, "language" or "sequence"."""
        return tokenizer_task(self.source_tokenizer, self.target_tokenizer)

    def directed(
        self, source_lang: str | None = None, target_lang: str | None = None
    ) -> "Translator":
        """A translator with the same model of many languages that translates in this direction by default.

        Raises:
            UserError: the model does not have a language.
        """
        directed = copy.copy(self)
        directed.directions = self.directions.changed(source_lang, target_lang)
        return directed

    def translate(self, sentences: Iterable[Any], **settings: Any) -> Iterator[str]:
        """Translate sentences one by one or from an endless stream.

        Args:
            sentences: text, one sentence each. Blank ones and missing values (`text.cells.text_of`) get an empty
                translation without reaching the model.
            settings: as in `translate_nbest`, such as `num_beams`, and any other argument of `model.generate`.

        Returns:
            An iterator of as many translations, in the same order.

        Raises:
            UserError: as in `translate_nbest`.
        """
        best = self.translate_nbest(sentences, scores=False, **settings)
        return (hypotheses[0].text for hypotheses in best)

    def translate_nbest(
        self,
        sentences: Iterable[Any],
        n_best: int = 1,
        *,
        source_lang: Codes = None,
        target_lang: Codes = None,
        alignment: bool = False,
        alignment_layer: int | None = None,
        probabilities: bool = False,
        alignment_words: WordSplitter = white_space_words,
        scores: bool = True,
        prefixes: Iterable[str] | None = None,
        batch_size: int = 64,
        max_tokens_per_batch: int = MAX_TOKENS,
        first_line: int | Sequence[int] = 1,
        protect: bool = True,
        in_form: bool = True,
        **generate_kwargs: Any,
    ) -> Iterator[list[Hypothesis]]:
        """Translate sentences, and return the best hypotheses of each, with their scores.

        Args:
            sentences: as in `translate`.
            n_best: hypotheses per sentence, at most as many as beams.
            source_lang, target_lang: for a model of many languages, the codes of all sentences, or an iterable with
                one for each. None is the default of the model or of `directed`, or the mark in a text (`>>de<< …`).
            alignment: align the words of each hypothesis with the source (`alignment.align`).
            alignment_layer: the decoder layer that aligns, counted from 1. None is the last but one.
            alignment_words: `text.words.white_space_words`, or `words`, which also splits scripts without spaces.
            probabilities: compute the probability of each token in one more pass of the decoder.
            scores: whether transformers' search, if it runs, returns scores, for which it keeps all log-probabilities.
            prefixes: text that each translation must begin with, one per sentence. "" forces nothing. The last word
                of a prefix may be continued.
            batch_size: sentences per batch, at most. `BATCHES_AHEAD` batches are read ahead, none with 1.
            max_tokens_per_batch: source tokens per batch, padding included, at most. A longer sentence goes alone.
                The decoder's KV caches are `num_beams` times as large.
            first_line: the line number of the first sentence, or of every sentence, for messages.
            protect: keep sentences without letters, and addresses, placeholders, markup, emoji and times, as they are.
                A sequence that is no language has none of these.
            in_form: bring each sentence to the form of the model's source text, if the model folder names one.
            **generate_kwargs: arguments of `model.generate`, such as `num_beams`. None takes the value of the
                checkpoint's `generation_config.json`. Without `max_new_tokens` there, a translation has at most as
                many tokens as the longest source of the batch, and 50 more (§6.1).

        Returns:
            An iterator of as many lists as sentences, best hypothesis first. A blank sentence has one, its prefix.

        Raises:
            UserError: at once for wrong arguments, later for a wrong item or one that is too long.
        """
        check_items("sentences", sentences)
        check_items("prefixes", prefixes)
        check_at_least_one(max_tokens_per_batch=max_tokens_per_batch, n_best=n_best)
        check_search({"batch_size": batch_size, **generate_kwargs})
        settings, penalty = self._search_settings(generate_kwargs, n_best, scores)
        request = TranslationRequest(
            batch_size=batch_size,
            max_tokens=max_tokens_per_batch,
            alignment_layer=chosen_layer(self.model, alignment_layer) if alignment else None,
            probabilities=probabilities,
            settings=settings,
            refill=penalty is not None,
            protect=protect and self.task == "language",
            in_form=in_form,
            words=alignment_words,
            marks=self.directions.marks(source_lang, target_lang),
            has_codes=not isinstance(source_lang, str | None)
            or not isinstance(target_lang, str | None),
            penalty=penalty or self._transformers_penalty(settings),
        )
        first = first_line if isinstance(first_line, int) else 1
        numbers = count(first) if isinstance(first_line, int) else iter(first_line)
        directions = self.directions.each(source_lang, target_lang)
        places = zip(numbers, directions, strict=False)
        return self._stream(with_prefixes(sentences, prefixes, first), places, request)

    def describe(
        self, batch_size: int = 64, max_tokens_per_batch: int = MAX_TOKENS, **given: Any
    ) -> dict[str, object]:
        """The settings that `translate` uses with these arguments, defaults filled in, to report with a score."""
        defaults = self.model.generation_config
        engine = getattr(self.model, "inference_engine", None)
        dtype = str(self.model.dtype).removeprefix("torch.")
        alpha = getattr(defaults, "paper_length_penalty", None)
        formula = 1.0 if alpha is None else f"((5 + length) / 6)^{alpha}"
        longest = given.get("max_new_tokens") or defaults.max_new_tokens
        penalty = given.get("length_penalty")
        if penalty is None:
            penalty = defaults.to_diff_dict().get("length_penalty", formula)
        if engine and engine.quantization:
            dtype = f"{dtype}, products in {engine.quantization}"
        return {
            "batch_size": batch_size,
            "max_tokens_per_batch": max_tokens_per_batch,
            "num_beams": given.get("num_beams") or defaults.num_beams or 1,
            "max_new_tokens": longest or f"source + {self._length_over_source()}",
            "length_penalty": penalty,
            "device": str(self.model.device),
            "dtype": dtype,
        }

    def _search_settings(
        self, settings: dict[str, Any], n_best: int, scores: bool
    ) -> tuple[dict[str, Any], LengthPenalty | None]:
        """Arguments of `generate`, and the length penalty of this package's search, None if it does not cover them."""
        settings = {name: value for name, value in settings.items() if value is not None}
        beams = settings.get("num_beams") or self.model.generation_config.num_beams or 1
        if n_best > beams and not settings.get("do_sample"):
            raise UserError(
                f"n_best: {n_best} hypotheses need num_beams to be at least {n_best}; it is {beams}"
            )
        if settings.keys() & {"num_return_sequences", "return_dict_in_generate"}:
            raise UserError(
                "drop num_return_sequences and return_dict_in_generate; n_best of translate_nbest is both"
            )
        settings = settings | {"return_dict_in_generate": True}
        uncovered = [type(self.model).__name__]
        if n_best > 1:
            settings["num_return_sequences"] = n_best
        if isinstance(self.model, VanillaTransformerForConditionalGeneration):
            search, planned, uncovered = plan_search(
                self.model, None, settings.get("generation_config"), settings
            )
            if search is not None:
                return settings, search.keywords["penalty"]
            if "length_penalty" in planned:
                settings["length_penalty"] = planned["length_penalty"]
        if scores and beams > 1:
            settings["output_scores"] = True
        if len(self.models) > 1 or self.shortlist:
            raise UserError(
                uncovered_line("shortlist" if self.shortlist else "ensemble", uncovered)
            )
        return settings, None

    def _transformers_penalty(self, settings: Mapping[str, Any]) -> LengthPenalty:
        """The divisor of transformers' beam search, length^α."""
        config = settings.get("generation_config") or self.model.generation_config
        alpha = settings.get("length_penalty", config.length_penalty)
        return LengthPenalty(1.0 if alpha is None else alpha, "power")

    def _stream(
        self,
        pairs: Iterator[Prefixed],
        places: Iterator[PlacedDirection],
        request: TranslationRequest,
    ) -> Iterator[list[Hypothesis]]:
        ahead = request.batch_size * BATCHES_AHEAD if request.batch_size > 1 else 1
        warnings = LineWarnings()
        translate = self._translate_protected if request.protect else self._translate_window
        try:
            while window := list(islice(pairs, ahead)):
                of_window = next_places(places, len(window))
                texts = [
                    (
                        text_of(item, f"sentences: line {line}") or "",
                        text_of(prefix, f"prefixes: line {line}") or "",
                    )
                    for (item, prefix), (line, *_) in zip(window, of_window, strict=True)
                ]
                yield from translate(texts, of_window, request, warnings)
        finally:  # also of a stream that is not read to its end
            self.report(warnings)
        if request.has_codes and next(places, None) is not None:
            raise UserError("source_lang, target_lang: there are more codes than sentences")

    def report(self, warnings: LineWarnings) -> None:
        """Add the faults of a call to `line_warnings`, or warn of them."""
        if self.line_warnings is None:
            warnings.warn()
        else:
            self.line_warnings.add(warnings)

    def _translate_protected(
        self,
        window: list[Prefixed],
        places: list[PlacedDirection],
        request: TranslationRequest,
        warnings: LineWarnings,
    ) -> NBest:
        """Translate the sentences without their protected spans, and put the spans back."""
        plain: list[Prefixed] = []
        shortened: list[Prefixed] = []
        spans: dict[int, Protected] = {}
        verbatim: list[int] = []
        for i, (line, prefix) in enumerate(window):
            protected = protect(line, self.escaped)
            if protected:
                spans[i] = protected
            elif not has_words(line):
                verbatim.append(i)
            kept = i not in spans and i not in verbatim
            plain.append((line if kept else "", prefix))
            shortened.append((protected.text if protected else "", prefix))
        results = self._translate_window(plain, places, request, warnings)
        for i in verbatim:
            line, prefix = window[i]
            links = None
            if request.alignment_layer is not None:
                links = [] if prefix else [(j, j) for j in range(len(request.words(line)))]
            results[i] = [replace(results[i][0], text=prefix or line.strip(), alignment=links)]
        if not spans:
            return results
        try:
            layer = request.alignment_layer or chosen_layer(self.model, None)
        except UserError:  # not a model of this package
            layer = None
        aligning = replace(request, alignment_layer=layer, words=words)
        aligned = self._translate_window(shortened, places, aligning, warnings)
        for i, sentence in spans.items():
            results[i] = []
            for one in aligned[i]:
                text, links = sentence.restore(one.text, one.alignment)
                if request.alignment_layer is None:
                    links = None
                elif request.words is not words:
                    links = white_space_links(links, sentence.sentence, text)
                results[i].append(replace(one, text=text, alignment=links))
        return results

    def _translate_window(
        self,
        window: list[Prefixed],
        places: list[PlacedDirection],
        request: TranslationRequest,
        warnings: LineWarnings,
    ) -> NBest:
        no_alignment: list[Any] | None = None if request.alignment_layer is None else []
        no_tokens: list[Any] | None = [] if request.probabilities else None
        results = [
            [Hypothesis(prefix, 0.0, no_alignment, no_tokens, no_tokens)] for _, prefix in window
        ]
        sentences = {
            i: EncodedSentence(
                self.encode(line, *place, in_form=request.in_form, warnings=warnings),
                self.encode_prefix(prefix, *place),
            )
            for i, ((line, prefix), place) in enumerate(zip(window, places, strict=True))
            if line.strip()
        }
        for i, sentence in sentences.items():
            prefix = window[i][1]
            warnings.check("prefix", self.target_tokenizer, prefix, sentence.prefix, places[i][0])
        workers = 1 if not request.refill else self.workers or worker_count(self.model)
        jobs = search_jobs(
            sentences, request.batch_size, request.max_tokens, request.refill, workers
        )
        stop = threading.Event()
        models = self._searched_models()

        def search(job: SearchJob) -> NBest:
            return self._search_in_memory(
                models, [sentences[i] for i in job.indices], job.batch_size, request, stop
            )

        found = map_in_threads(search, jobs, workers, stop)
        for job, translations in zip(jobs, found, strict=True):
            for i, hypotheses in zip(job.indices, translations, strict=True):
                results[i] = hypotheses
        if has_closed_vocabulary(self.source_tokenizer):
            unk = self.source_tokenizer.unk_token_id
            for i, hypotheses in enumerate(results):
                is_known = i not in sentences or unk not in sentences[i].source
                unknown = () if is_known else self.unknown_in(window[i][0], request.in_form)
                results[i] = [replace(one, unknown=tuple(unknown)) for one in hypotheses]
        set_here = {"max_new_tokens", "max_length"} & request.settings.keys()
        if set_here or self.model.generation_config.max_new_tokens:
            return results
        for i in sentences:
            if not results[i][0].ended:
                warnings.add_fault(ENDLESS[self.task], places[i][0])
        return results

    def _searched_models(self) -> list[PreTrainedModel]:
        """The models in evaluation mode, optimized. The first one searches with all of them.

        Other threads may use these models, so that their mode and engine are set on copies only.
        """
        from ..engine.optimize import optimize_if_possible

        models = [in_evaluation_mode(model) for model in self.models]
        for model in models:
            optimize_if_possible(model)
        if len(models) > 1:
            from ..engine.ensemble import with_ensemble

            models[0] = with_ensemble(models)
        if self.shortlist is not None:
            from ..engine.shortlist import with_shortlist

            models[0] = with_shortlist(models[0], self.shortlist)
        return models

    def source_line(
        self,
        line: str,
        line_number: int = 1,
        in_form: bool = True,
        warnings: LineWarnings | None = None,
    ) -> str:
        """The text of a line that is tokenized: in the form of the model's source, if it has one, and normalised.

        `warnings` counts texts that cannot be brought to that form and are taken as they are.
        """
        if in_form and self.source_form is not None:
            form, fault = self.source_form(line)
            if fault and warnings is not None:
                warnings.add_fault(fault, line_number)
            line = form
        return without_margins(self.source_tokenizer, source_text(line, self.source_tokenizer))

    def unknown_in(self, line: str, in_form: bool = True) -> list[str]:
        """The symbols of a source line that the model reads as `<unk>`. Only a closed vocabulary has such symbols."""
        if not has_closed_vocabulary(self.source_tokenizer):
            return []
        text = self.source_line(line, in_form=in_form)
        return unknown_symbols(self.source_tokenizer, text) if text.strip() else []

    def encode(
        self,
        line: str,
        line_number: int = 1,
        direction: Direction | None = None,
        *,
        in_form: bool = True,
        warnings: LineWarnings | None = None,
    ) -> list[int]:
        """Token ids of a source sentence, with the mark of its direction.

        `line_number` is for errors and `warnings`, which counts unknown symbols and what `source_line` says.
        """
        if self.directions.source is not None:
            self.directions.source.check_text(line, line_number)
        text = self.source_line(line, line_number, in_form, warnings)
        try:
            with TOKENIZER_LOCK:
                ids = self.source_tokenizer(text)["input_ids"]
        except BaseException as error:
            raise without_panic(error) from None
        if warnings is not None:
            warnings.check("source", self.source_tokenizer, text, ids, line_number)
        ids = self.directions.mark(ids, direction or self.directions.default, line_number)
        if len(ids) > (limit := self.position_limit() or math.inf):
            raise UserError(
                f"line {line_number}: {len(ids)} tokens, but the model has positions for {limit} only; split the line"
            )
        return ids

    def encode_prefix(
        self, prefix: str, line_number: int = 1, direction: Direction | None = None
    ) -> list[int]:
        """Token ids that a translation must begin with: the mark of its language, and the text of a prefix."""
        direction = direction or self.directions.default
        if not prefix.strip():
            return self.directions.prefix(direction)
        with TOKENIZER_LOCK:
            (ids,) = self.directions.encode_targets(
                self.target_tokenizer, [prefix.strip()], [direction], ends=False
            )
        if len(ids) >= (limit := self.position_limit() or math.inf):
            raise UserError(
                f"line {line_number}: a prefix of {len(ids)} tokens, but the model has {limit} positions only"
            )
        return ids

    def position_limit(self) -> int | None:
        """The fewest positions that a model has. Sinusoids have no end (§3.5)."""
        limits = (
            getattr(model.config, "max_position_embeddings", None)
            for model in self.models
            if not str(getattr(model.config, "position_encoding_type", "")).startswith("sinusoidal")
        )
        return min(filter(None, limits), default=None)

    def _length_over_source(self) -> int:
        return getattr(
            self.model.generation_config, "max_length_over_source", MAX_LENGTH_OVER_SOURCE
        )

    def _search_in_memory(
        self,
        models: list[PreTrainedModel],
        sentences: list[EncodedSentence],
        batch_size: int,
        request: TranslationRequest,
        stop: threading.Event,
    ) -> NBest:
        """`_search` with half the batch as long as the memory of a GPU does not suffice."""
        while True:
            try:
                if request.refill or batch_size >= len(sentences):
                    return self._search(models, sentences, batch_size, request, stop)
                hypotheses: NBest = []
                for start in range(0, len(sentences), batch_size):
                    part = sentences[start : start + batch_size]
                    hypotheses += self._search(models, part, len(part), request, stop)
                return hypotheses
            except torch.OutOfMemoryError:
                if batch_size == 1:
                    raise
            smaller = batch_size // 2
            logger.warning(
                "%s has no memory for %d sentences at once: translating %d",
                self.model.device,
                batch_size,
                smaller,
            )
            batch_size = smaller

    @torch.inference_mode()
    def _search(
        self,
        models: list[Any],
        sentences: list[EncodedSentence],
        batch_size: int,
        request: TranslationRequest,
        stop: threading.Event,
    ) -> NBest:
        """Translate sentences in one search, `batch_size` at a time, refilling finished rows until `stop` is set."""
        sources = [sentence.source for sentence in sentences]
        pending = iter(sentences)
        device = self.model.device
        prefix_length = len(sentences[0].prefix)
        start = self.model.config.decoder_start_token_id

        def padded(batch: list[EncodedSentence]) -> tuple[torch.Tensor, ...]:
            """Ids and mask (B, S) of the sources, and the first tokens (B, 1 + P) of the translations."""
            both = source_inputs(
                self.model, self.source_tokenizer, [sentence.source for sentence in batch]
            )
            prefixes = [[start, *sentence.prefix] for sentence in batch]
            return both["input_ids"], both["attention_mask"], torch.tensor(prefixes, device=device)

        def next_batch(count: int) -> tuple[torch.Tensor, ...] | None:
            batch = [] if stop.is_set() else list(islice(pending, count))
            return padded(batch) if batch else None

        input_ids, attention_mask, prefixes = padded(list(islice(pending, batch_size)))
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if batch_size < len(sentences):
            arguments["next_batch"] = next_batch
        if prefix_length:
            arguments["decoder_input_ids"] = prefixes
        limit = self.position_limit()
        if limit is not None and not self.model.generation_config.max_new_tokens:
            # the start token takes the first position. The last token is never fed back
            longest = input_ids.shape[1] + self._length_over_source()
            arguments["max_new_tokens"] = min(longest, limit - prefix_length)
        try:
            with on_fitting_threads():
                output = models[0].generate(**(arguments | request.settings))
        except UserError:
            raise
        # Settings that only transformers has are checked by nobody before they are used.
        except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
            raise UserError(
                f"generate refuses these settings, or those of generation_config.json ({one_line(error)})"
            ) from error
        return self._hypotheses(models, sources, output, 1 + prefix_length, request)

    def _hypotheses(
        self,
        models: list[Any],
        sources: list[list[int]],
        output: Any,
        given: int,
        request: TranslationRequest,
    ) -> NBest:
        """The output of `generate` for each source. The first `given` tokens of each sequence were forced."""
        sequences = output.sequences  # (N, T)
        shown = sequences[:, 1 + self.directions.prefix_length :]
        texts = self.target_tokenizer.batch_decode(shown, **AS_TEXT)
        targets = self.targets(sequences.tolist(), given)
        n_best = len(texts) // len(sources)
        repeated = [source for source in sources for _ in range(n_best)]
        alignments: list[Any] = [None] * len(texts)
        if request.alignment_layer is not None:
            alignments = align(
                models[0],
                self.source_tokenizer,
                self.target_tokenizer,
                repeated,
                targets,
                layer=request.alignment_layer,
                words=request.words,
                marks=request.marks,
            )
        of_tokens: list[Any] = [None] * len(texts)
        if request.probabilities:
            of_tokens = token_log_probabilities(models, self.source_tokenizer, repeated, targets)
        scores: list[Any] = [None] * len(texts)
        if getattr(output, "sequences_scores", None) is not None:
            scores = output.sequences_scores.tolist()
        hypotheses = []
        for i, target in enumerate(targets):
            tokens = None
            probabilities = None
            log_probability = None
            if of_tokens[i] is not None:
                tokens = readable_tokens(self.target_tokenizer, target)
                probabilities = [math.exp(log_p) for log_p in of_tokens[i]]
                log_probability = sum(of_tokens[i])
            if scores[i] is not None:
                length = len(target) + 1 - given
                log_probability = request.penalty.log_probability(scores[i], length)
            hypotheses.append(
                Hypothesis(
                    text=texts[i],
                    score=scores[i],
                    alignment=alignments[i],
                    tokens=tokens,
                    probabilities=probabilities,
                    log_probability=log_probability,
                    ended=len(target) >= given and target[-1] in self.end_tokens,
                )
            )
        grouped = [hypotheses[start : start + n_best] for start in range(0, len(texts), n_best)]
        return [
            [one for rank, one in enumerate(group) if not rank or is_hypothesis(one.score)]
            for group in grouped
        ]

    @property
    def end_tokens(self) -> set[int]:
        """The ids of the tokens that end a translation."""
        eos = self.model.generation_config.eos_token_id
        return {eos} if isinstance(eos, int) else set(eos or ())

    def targets(self, sequences: list[list[int]], given: int) -> list[list[int]]:
        """Sequences up to their end-of-sentence tokens. The first `given` tokens were forced."""
        ends = self.end_tokens
        targets = []
        for row in sequences:
            length = next((i + 1 for i in range(given, len(row)) if row[i] in ends), len(row))
            targets.append(row[1:length])  # without the start token
        return targets


def _source_form(tokenizer: PreTrainedTokenizerBase, trusted: bool) -> "SourceForm | None":
    """The form that a tokenizer names, if it names one. A warning says why it cannot be applied."""
    name = recorded_form(tokenizer)
    if name is None:
        return None
    from ..text.source_form import SourceForm

    form = SourceForm(name, trusted)
    if form.problem:
        logger.warning("%s", form.problem)
    return form


#: More would need more memory than a machine has.
_AT_MOST = {"num_beams": 1000, "max_new_tokens": 100_000, "batch_size": 1_000_000}


def check_search(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that are out of range, with a `UserError`."""
    check_at_least_one(**{name: settings.get(name) for name in _AT_MOST})
    for name, most in _AT_MOST.items():
        if (settings.get(name) or 0) > most:
            raise UserError(f"{name}: must be at most {most:,}, not {settings[name]}")
    for name in ("length_penalty", "repetition_penalty"):
        if not math.isfinite(settings.get(name) or 0.0):
            raise UserError(f"{name}: must be a finite number, not {settings[name]}")
    size = settings.get("no_repeat_ngram_size")
    penalty = settings.get("repetition_penalty")
    if size is not None and size < 0:
        raise UserError(f"no_repeat_ngram_size: must be at least 0, not {size}")
    if penalty is not None and not penalty > 0:
        raise UserError(f"repetition_penalty: must be more than 0, not {penalty}")
