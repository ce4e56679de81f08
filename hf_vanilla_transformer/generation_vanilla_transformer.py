"""`generate` as in the paper (§6.1): beam 4, length penalty α = 0.6, at most 50 tokens more than the source has.

`generate` runs `beam_search`, through transformers' `custom_generate`, for greedy and beam search. Whatever `COVERED`
does not name, such as sampling, runs in transformers' loops. `ModuleDecoder` calls the model at each step.

Shapes: B sentences in the batch, K beams, P tokens of the prefix, T tokens of a hypothesis, S source length,
D d_model, R hypotheses returned, N sentences in all.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .arguments_vanilla_transformer import CACHE, check_ids, one_cache
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import EncodedSource, ModuleDecoder, encoder_output
from .search_vanilla_transformer import (
    REFILL_SHARE,
    BeamSearch,
    Decoder,
    Hypotheses,
    LengthPenalty,
    SearchBatch,
    SearchConfig,
    require_numbers,
    resized,
)

logger = logging.get_logger(__name__)

BEAMS = 4
ALPHA = 0.6
MAX_LENGTH_OVER_SOURCE = 50  # tokens
# Ids and mask (B, S), perhaps prefixes (B, P).
NextBatch: TypeAlias = Callable[[int], tuple[Tensor, ...] | None]

# Arguments of `generate`, and fields of a generation config, that `beam_search` covers.
COVERED = frozenset(
    {
        "inputs",
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "encoder_outputs",
        "decoder_input_ids",
        "bos_token_id",
        "pad_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "num_beams",
        "length_penalty",
        "paper_length_penalty",
        "counted_prefix",
        "beam_search_rule",
        "early_stopping",
        "use_cache",
        "max_length",
        "max_new_tokens",
        "max_length_over_source",
        "num_return_sequences",
        "transformers_version",
        "return_dict_in_generate",
        # logits processors
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "bad_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "renormalize_logits",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        # without effect where nothing is sampled
        "temperature",
        "top_k",
        "top_p",
    }
)

# Other settings have no effect if they are 0.
_SET_BY_ZERO = frozenset(
    {"assistant_early_exit", "guidance_scale", "max_time", "prompt_lookup_num_tokens"}
)

# Settings of a beam search that transformers' loop ignores, beside the paper's length penalty.
_OWN_BEAM_SEARCH = ("beam_search_rule", "counted_prefix")

# Settings with logits processors that are bound to the first batch or to row indices: incompatible with refill.
_OF_FIRST_BATCH = frozenset(
    {"encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "prefix_allowed_tokens_fn"}
)


class VanillaTransformerGenerationConfig(GenerationConfig):
    """Remembers which fields contain library defaults, so that they neither affect decoding nor get saved:
    `Seq2SeqTrainer` fills them in after its first batch (`max_length=20`, `length_penalty=1.0`, …).
    """

    _filled: frozenset[str] = frozenset()  # fields that hold a default of the library

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("_filled", self._filled - {name})
        super().__setattr__(name, value)

    def update(
        self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        filled = {name for name in kwargs if defaults_only and getattr(self, name, None) is None}
        unused = super().update(defaults_only, allow_custom_entries, **kwargs)
        super().__setattr__("_filled", self._filled | filled)
        return unused

    def to_dict(self) -> dict[str, Any]:
        """Leave out the library's defaults."""
        fields = super().to_dict()
        return fields | dict.fromkeys(fields.pop("_filled", ()))


def paper_generation_config(config: VanillaTransformerConfig) -> GenerationConfig:
    """§6.1 as a `generation_config.json`, with the special tokens of `config`. An explicit `length_penalty` wins over
    `paper_length_penalty` (α), with Hugging Face's meaning.
    """
    generation_config = VanillaTransformerGenerationConfig.from_model_config(config)
    generation_config.update(
        num_beams=BEAMS,
        pad_token_id=config.target_pad_token_id,
        eos_token_id=config.target_eos_token_id,
    )
    generation_config.paper_length_penalty = ALPHA
    generation_config.max_length_over_source = MAX_LENGTH_OVER_SOURCE
    # Or `generate` would make it anew from the model's configuration.
    generation_config._from_model_config = False
    return generation_config


def plan_search(
    model: PreTrainedModel,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    refill: bool = False,
) -> tuple[partial | None, dict[str, Any], list[str]]:
    """Choose the search for these arguments of `generate`, which override `model.generation_config`.

    Args:
        refill: sentences join a running batch.

    Returns:
        `beam_search` as a `custom_generate`, or None. The paper's limit (§6.1), and its α for transformers'
        beam search. The names of settings that are not covered.

    Raises:
        ValueError: a search of no beams, or for no translations.
    """
    requested = _requested(model, generation_config, kwargs)
    for name in ("num_beams", "num_return_sequences"):
        if requested.get(name, 1) < 1:
            raise ValueError(f"{name}: {requested[name]}: give at least 1")
    beams = requested.get("num_beams", 1)
    if beams > 1 and requested.get("assistant_model") is not None:
        raise ValueError(
            f"assistant_model: num_beams={beams}, but assisted decoding has one: give num_beams=1"
        )
    settings: dict[str, Any] = {}
    over = None
    if requested.get("max_length") is None and requested.get("max_new_tokens") is None:
        over = requested.get("max_length_over_source", MAX_LENGTH_OVER_SOURCE)
        width = _source_width(inputs, kwargs)
        if width is not None:
            prefix = kwargs.get("decoder_input_ids")
            given = 1 if prefix is None else prefix.shape[1]
            settings["max_length"] = min(given + max(width + over, 1), position_limit(model.config))

    alpha = requested.get("length_penalty", requested.get("paper_length_penalty", ALPHA))
    formula = "power" if "length_penalty" in requested else "gnmt"
    penalty = LengthPenalty(alpha, formula, requested.get("counted_prefix", 0))
    uncovered = _uncovered(model, requested, COVERED - _OF_FIRST_BATCH if refill else COVERED)
    if not uncovered:
        return partial(beam_search, penalty=penalty, over=over), settings, []
    if penalty.formula == "gnmt" and requested.get("num_beams", 1) > 1:
        settings["length_penalty"] = penalty.alpha
    if "gradient checkpointing" in uncovered:  # layers then drop the cache
        settings["use_cache"] = False
    return None, settings, uncovered


def _requested(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of `generate`, and below them the settings of both generation configs."""
    requested = model.generation_config.to_diff_dict()
    if generation_config is not None:
        requested |= generation_config.to_diff_dict()
    return requested | {name: value for name, value in kwargs.items() if value is not None}


def _source_width(inputs: Tensor | None, kwargs: dict[str, Any]) -> int | None:
    """The padded length S of the source, however it is given. None if it is not."""
    encoded = kwargs.get("encoder_outputs")
    states = None if encoded is None else encoder_output(encoded).last_hidden_state
    for source in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), states):
        if source is not None:
            return source.shape[1]
    return None


def position_limit(config: VanillaTransformerConfig) -> int:
    """The most tokens of a hypothesis. Only learned positions end, and the last token needs none."""
    if config.position_encoding_type == "learned":
        return config.max_position_embeddings + 1
    return sys.maxsize


def _uncovered(
    model: PreTrainedModel, requested: dict[str, Any], covered: frozenset[str]
) -> list[str]:
    """Requested settings that only transformers' loops support."""
    names = []
    for name, value in requested.items():
        # A cache is false while it is empty.
        is_set = isinstance(value, Tensor | Cache) or bool(value)
        is_set = is_set or (name in _SET_BY_ZERO and value is not None)
        if is_set and name not in covered and not name.startswith("_"):
            names.append(name)
    backend = model.config._attn_implementation
    training = [module for module in model.modules() if module.training]
    conditions = {
        "use_cache=False": not requested.get("use_cache", True),
        f"attn_implementation={backend!r}": backend not in ("eager", "sdpa"),
        "an export": _is_recorded(model),
        "gradient checkpointing": any(
            getattr(module, "gradient_checkpointing", False) for module in training
        ),
        "a model sharded over processes": _is_sharded(model),
    }
    names += [name for name, holds in conditions.items() if holds]
    return names + _replaced_methods(model)


def _replaced_methods(model: PreTrainedModel) -> list[str]:
    """The methods of `GenerationMixin` that a subclass or a caller has replaced. `beam_search` calls few of them."""

    def function_of(owner: Any, name: str) -> Any:
        method = getattr(owner, name)
        return getattr(method, "__func__", method)

    return [
        name
        for name in vars(GenerationMixin)
        if callable(getattr(GenerationMixin, name))
        and name not in vars(VanillaTransformerGenerationMixin)
        and function_of(model, name) is not function_of(GenerationMixin, name)
    ]


def _is_recorded(model: PreTrainedModel) -> bool:
    """Return whether an exporter of transformers records the calls of `forward`. It expects the usual loop."""
    forward = vars(model).get("forward")
    exporters = Path(transformers.__file__).parent / "exporters"
    return inspect.isfunction(forward) and exporters in Path(inspect.getfile(forward)).parents


def _is_sharded(model: PreTrainedModel) -> bool:
    """Return whether weights are sharded over ranks with different sentences. Every rank must then run every step."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ready or torch.distributed.get_world_size() == 1:
        return False
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"}) or is_deepspeed_zero3_enabled()


def uncovered_line(name: str, uncovered: list[str]) -> str:
    """Say why something that only this package's search has is refused."""
    reasons = ", ".join(uncovered)
    return f"{name}: only this package's search has it, and it does not cover {reasons}; leave that out"


def warn_of_loop(uncovered: list[str], requested: dict[str, Any]) -> None:
    """Warn once that transformers' loop decodes, and why.

    `requested` are all settings. The warning names those of a beam search that the loop does not have.
    """
    differences = ""
    if requested.get("num_beams", 1) > 1:
        ignored = [f"{name}={requested[name]}" for name in _OWN_BEAM_SEARCH if requested.get(name)]
        if "length_penalty" not in requested:
            differences += "; its beam search scores log P / length^length_penalty"
        if ignored:
            differences += f"; its beam search does not apply {', '.join(ignored)}"
    reasons = ", ".join(uncovered)
    logger.warning_once(f"generate: transformers' loop decodes, because of {reasons}{differences}")


# The loop of `generate`


def new_search(
    model: PreTrainedModel,
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    penalty: LengthPenalty,
    over: int | None,
) -> BeamSearch:
    """The search of these settings, without sentences. For the arguments see `beam_search`."""
    limit = position_limit(model.config)
    if over is None:
        limit = min(generation_config.max_length, limit)
    config = SearchConfig.of(generation_config, penalty)
    return BeamSearch(config, penalty, max_length=limit, over=over, processors=processors)


def beam_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    penalty: LengthPenalty,
    over: int | None = None,
    source: EncodedSource | None = None,
    next_batch: NextBatch | None = None,
    **model_kwargs: Any,
) -> Any:
    """The best translations (N · R, T) of the batch, then of `next_batch`. A `custom_generate`.

    Args:
        input_ids: (B · K, P), the prefix of each target.
        generation_config: with all defaults filled in.
        over: see `BeamSearch`. None: `generation_config` has the limit.
        source: the batch. None: `model_kwargs` have it.
        next_batch: as in `generate`.
        model_kwargs: encoded source and mask, B · K times too, and criteria for the end, known to the search.
    """
    beams = generation_config.num_beams
    given = _given_source(model_kwargs, beams)
    source = given if source is None else source._replace(mask=given.mask)
    # An offloaded model has no device.
    prefix = input_ids[::beams].to(source.states.device, torch.long)
    check_ids(prefix, model.config.target_vocab_size, "decoder_input_ids")
    rows = len(prefix)
    search = new_search(model, logits_processor, generation_config, penalty, over)
    # Processors may know a sentence by its row. New sentences then join when all are done.
    search.fixed_rows = bool(logits_processor)
    results: dict[int, Hypotheses] = {}

    def join(source: EncodedSource, prefix: Tensor) -> None:
        first = len(results) + len(search)
        batch = SearchBatch(
            decoder=model.make_decoder(source, beams),
            prefix=prefix,
            source_mask=source.mask.to(prefix.device),
            keys=range(first, first + len(prefix)),
            wanted=[generation_config.num_return_sequences or 1] * len(prefix),
        )
        search.join(batch)

    read = None
    if next_batch is not None:
        read = partial(_read, model, next_batch, prefix)
        ahead = model.read_ahead(read, rows)
        if ahead is not None:
            read = ahead.take
            search.meanwhile = ahead.fill
    least_free = rows if search.fixed_rows else REFILL_SHARE * rows
    join(source, prefix)
    while len(search):
        results |= search.step()
        free = rows - len(search)
        if read is None or free < least_free:
            continue
        sentences = read(free)
        if sentences is None:
            read = None
        else:
            join(*sentences)
    return _output([results[sentence] for sentence in range(len(results))], generation_config)


def _given_source(model_kwargs: dict[str, Any], beams: int) -> EncodedSource:
    """The source (B · K, S, ·) of a `custom_generate`, without its repetition for each beam."""
    states = model_kwargs["encoder_outputs"][0]  # (B · K, S, D)
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = states.new_ones(states.shape[:2], dtype=torch.long)
    return EncodedSource(states[::beams], mask[::beams])


def _read(
    model: PreTrainedModel,
    next_batch: NextBatch,
    prefix: Tensor,
    count: int,
) -> tuple[EncodedSource, Tensor] | None:
    """Return up to `count` sentences of `next_batch`, encoded, and the prefixes (n, P) of their translations.

    A `next_batch` without prefixes takes the one of the first batch, `prefix` (B, P). None: there are no more.

    Raises:
        ValueError: too many sentences, none, or prefixes of another width.
    """
    batch = next_batch(count)
    if batch is None:
        return None
    if not 0 < len(batch[0]) <= count:
        raise ValueError(
            f"next_batch: asked for 1 to {count} sentences, it brought {len(batch[0])}; None ends"
        )
    ids, mask, *own = (part.to(prefix.device) for part in batch)
    first_tokens = own[0] if own else prefix[:1].expand(len(ids), -1)
    if first_tokens.shape[1] != prefix.shape[1]:
        raise ValueError(
            f"next_batch: its prefixes have width {first_tokens.shape[1]}, not {prefix.shape[1]}"
        )
    return model.encode(ids, mask), first_tokens


def _output(hypotheses: list[Hypotheses], generation_config: GenerationConfig) -> Any:
    """The output of `generate` for the translations of all sentences."""
    lengths = torch.cat([each.lengths for each in hypotheses])  # (N · R,)
    scores = torch.cat([each.scores for each in hypotheses])
    width, has_nan = torch.stack([lengths.max(), scores.isnan().any()]).tolist()  # in one copy
    require_numbers(bool(has_nan))
    # (N · R, T). Slices first: to cut each would be a kernel for each.
    tokens = torch.cat([resized(each.tokens[:, :width], width, 1) for each in hypotheses])
    padding = torch.arange(width, device=tokens.device) >= lengths[:, None]
    tokens = tokens.masked_fill(padding, generation_config.pad_token_id or 0)
    if not generation_config.return_dict_in_generate:
        return tokens
    if generation_config.num_beams == 1:
        return GenerateEncoderDecoderOutput(sequences=tokens)
    return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores)


def as_list(token_ids: int | list[int] | None) -> list[int | None]:
    """The ids of a field of a configuration with one id or several."""
    return list(token_ids) if isinstance(token_ids, list) else [token_ids]


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`GenerationMixin` with the paper's search, and a place for the inference engine."""

    inference_engine: Any = None  # see the package's `optimize_for_inference`

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """`GenerationMixin.compute_transition_scores` with the target's vocabulary instead of the source's."""
        model = copy.copy(self)
        model.config = copy.copy(self.config)
        model.config.vocab_size = self.config.target_vocab_size
        return GenerationMixin.compute_transition_scores(model, *args, **kwargs)

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of `generate`. The special tokens of a separate target vocabulary stay the target's.

        `Trainer` aligns them with its tokenizer, the source's. This undoes it.
        """
        defaults = self._generation_config
        config = self.config
        pad = config.decoder_pad_token_id
        if pad is not None and defaults.pad_token_id == config.pad_token_id:
            defaults.pad_token_id = pad
        end = config.decoder_eos_token_id
        if end is None:
            return defaults
        targets = as_list(end)
        sources = as_list(config.eos_token_id)
        ends = as_list(defaults.eos_token_id)
        kept = [token for token in ends if token in targets or token not in sources]
        if kept != ends:
            defaults.eos_token_id = kept[0] if len(kept) == 1 else kept or end
        return defaults

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        if type(value) is GenerationConfig:
            # No copy: the caller may change it later, or give it to several models. A view with the same fields would
            # forget which of them `Seq2SeqTrainer` has filled in. The object behaves and is saved as before.
            value.__class__ = VanillaTransformerGenerationConfig
        elif not isinstance(value, VanillaTransformerGenerationConfig):
            value = VanillaTransformerGenerationConfig.from_dict(value.to_dict())
        self._generation_config = value

    def encode(self, input_ids: Tensor, mask: Tensor | None) -> EncodedSource:
        """Encode the source (B, S) with the encoder, or with the inference engine's. Without a mask all is read."""
        if mask is None:
            mask = torch.ones_like(input_ids)
        if self.inference_engine is not None:
            return self.inference_engine.encode(self, input_ids, mask)
        states = self.get_encoder()(input_ids, mask).last_hidden_state
        return EncodedSource(states, mask, input_ids)

    def make_decoder(self, source: EncodedSource, beams: int) -> Decoder:
        """A decoder of encoded sentences."""
        if self.inference_engine is None:
            return ModuleDecoder(self, source)
        return self.inference_engine.decoder(self, source, beams)

    def read_ahead(self, read: Callable[[int], Any], rows: int) -> Any:
        """Return the inference engine's `ReadAhead`: it calls `read` while a search of `rows` sentences goes on.

        None: the engine has none.
        """
        make = getattr(self.inference_engine, "read_ahead", None)
        return None if make is None else make(self, read, rows)

    def __getstate__(self) -> dict[str, Any]:
        # A copied or pickled model is not optimized.
        return {**vars(self), "inference_engine": None}

    def train(self, mode: bool = True) -> Any:
        if mode:
            self.inference_engine = None
        return super().train(mode)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        next_batch: NextBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        """Translate with `GenerationMixin.generate`, by default with the paper's search (§6.1).

        That is beam 4, score log P / ((5 + length) / 6)^0.6, at most 50 tokens more than the source. Arguments and
        fields of the model's generation config win, with Hugging Face's meaning: a `length_penalty` makes the score
        log P / length^length_penalty. The field `beam_search_rule` chooses the search of OpenNMT-py, "opennmt2" or
        "opennmt3": a hypothesis that ends takes the place of a beam for a step, and the search ends when the best
        candidate ends. With "joeynmt", JoeyNMT's, it keeps that place, and the search ends when one has ended in each
        place. A missing `attention_mask` is made from the pad token, as in `forward`.

        Args:
            next_batch: callback for continuous batching. `next_batch(n)` returns ids and mask of up to n more
                sentences, or None, and perhaps a third tensor, the prefixes of their translations, as wide as
                `decoder_input_ids`. The translations are appended.
            Other arguments: as in `GenerationMixin.generate`.

        Raises:
            ValueError: settings that do not go together, or a model whose logits are not finite.
        """
        kwargs.pop("labels", None)  # `Seq2SeqTrainer` hands over whole batches
        cache = one_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        if cache is not None:
            kwargs[CACHE] = cache
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        kwargs["attention_mask"] = self.source_mask(input_ids, kwargs.get("attention_mask"))
        search, settings, uncovered = plan_search(
            self, inputs, generation_config, kwargs, refill=next_batch is not None
        )
        if uncovered:
            needs_search = getattr(self.inference_engine, "search_only", None)
            if next_batch is not None:
                needs_search = "next_batch"
            if needs_search is not None:
                raise ValueError(uncovered_line(needs_search, uncovered))
            warn_of_loop(uncovered, _requested(self, generation_config, kwargs))

        source = None
        if kwargs.get("encoder_outputs") is not None:
            # It is repeated for each beam in place.
            kwargs["encoder_outputs"] = copy.copy(encoder_output(kwargs["encoder_outputs"]))
        elif search is not None and input_ids is not None and self.inference_engine is not None:
            source = self.encode(input_ids, kwargs["attention_mask"])
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=source.states)
        if search is not None:
            kwargs["custom_generate"] = partial(search, source=source, next_batch=next_batch)
            # The search has its own, and to make one transformers copies configurations.
            settings["use_cache"] = False
        if generation_config is None:
            kwargs.update(settings)
        else:  # transformers warns of one beside the other
            generation_config = copy.deepcopy(generation_config)
            generation_config.update(**settings)
        return super().generate(inputs, generation_config, **kwargs)
