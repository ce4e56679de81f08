"""How the paper decodes (§6.1): beam 4, length penalty α = 0.6, at most 50 tokens more than the source has.

`VanillaTransformerForConditionalGeneration.generate` comes here for greedy and beam search; everything else that
`generate` can do is done by transformers' own loops.

Shapes: B sentences still open, K beams, T words written so far, S source length, V target vocabulary, R hypotheses
wanted of each sentence.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    GenerationConfig,
    LogitsProcessorList,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import StepReader, reader_for
from .products_vanilla_transformer import EIGHT_BITS
from .search_vanilla_transformer import Group, Score, Search
from .sentence_vanilla_transformer import SentencePrograms, SentenceReader, SentenceSearch, programs_for

BEAMS, ALPHA = 4, 0.6
MAX_LENGTH_OVER_SOURCE = 50  # tokens

# `Seq2SeqTrainer` writes this default of the library into the generation config of the model that it evaluates.
_LIBRARY_MAX_LENGTH = 20

# What `search_for` understands among the arguments of `generate` and the fields of its configuration. With anything
# else that is switched on, transformers' own loop runs.
_UNDERSTOOD = {
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "encoder_outputs", "decoder_input_ids"),
    *("ensemble", "num_beams", "length_penalty", "paper_length_penalty", "max_length_over_source", "early_stopping"),
    *("max_length", "max_new_tokens", "num_return_sequences", "return_dict_in_generate", "use_cache", "more"),
    *("decoder_weights", "compiled"),
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version"),
    # turned into logits processors by `generate`
    *("logits_processor", "prefix_allowed_tokens_fn", "min_length", "min_new_tokens", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "repetition_penalty", "encoder_repetition_penalty", "bad_words_ids"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("renormalize_logits", "remove_invalid_values", "exponential_decay_length_penalty"),
    # of no effect without sampling
    *("temperature", "top_k", "top_p"),
}


def paper_generation_config(config: VanillaTransformerConfig) -> GenerationConfig:
    """§6.1 as a `generation_config.json`.

    `num_beams` is Hugging Face's field; `paper_length_penalty` (α) and `max_length_over_source` are ours. A
    `length_penalty`, where somebody sets one, wins over α and has Hugging Face's meaning, log P / length^penalty.

    Args:
        config: gives the special words.
    """
    generation_config = GenerationConfig.from_model_config(config)
    generation_config.update(num_beams=BEAMS)
    generation_config.paper_length_penalty = ALPHA
    generation_config.max_length_over_source = MAX_LENGTH_OVER_SOURCE
    generation_config._from_model_config = False  # or `generate` would make it anew from the model's configuration
    return generation_config


def paper_limit(
    generation_config: GenerationConfig, inputs: Tensor | None, kwargs: dict[str, Any], own: bool
) -> tuple[int, int] | None:
    """How long translations may become: 50 tokens more than their sources.

    Args:
        generation_config: what decides where `kwargs` do not.
        inputs, kwargs: the arguments of `generate`; the source is (B, S) ids, (B, S, D) embeddings or what the
            encoder made of them.
        own: whether it is the model's own generation config; a length of 20 is then taken out of it, because only
            the trainer can have written it.

    Returns:
        The new tokens of the longest source of a batch, S + 50, and how many that is over the source. None where the
        caller or the generation config limits the length already, or where there is no source.
    """
    lengths = kwargs.get("max_length"), kwargs.get("max_new_tokens"), generation_config.max_new_tokens
    if any(length is not None for length in lengths):
        return None
    if own and generation_config.max_length == _LIBRARY_MAX_LENGTH:
        generation_config.max_length = None
    if generation_config.max_length is not None:
        return None
    over = getattr(generation_config, "max_length_over_source", MAX_LENGTH_OVER_SOURCE)
    over = kwargs.get("max_length_over_source", over)
    sources = (
        inputs,
        kwargs.get("input_ids"),
        kwargs.get("inputs_embeds"),
        (kwargs.get("encoder_outputs") or [None])[0],
    )
    return next(((source.shape[1] + over, over) for source in sources if source is not None), None)


# Which search


def search_for(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[partial | None, dict[str, float]]:
    """Choose between this package's search and transformers' own loops.

    Args:
        generation_config, kwargs: the arguments of `generate`, which win over `model.generation_config`.

    Returns:
        `custom_generate` for `GenerationMixin.generate`, and nothing else. Or None, where this search does not cover
        what is asked for, and the `length_penalty` with which transformers' score comes near the paper's, unless the
        caller has one.

    Raises:
        ValueError: `decoder_weights` that nobody knows; these or `compiled`, where the caller wants them but
            transformers' own loop runs; `compiled` on another device than a CPU.
    """
    asked = chosen_settings(model.generation_config)
    asked |= {} if generation_config is None else generation_config.to_diff_dict()
    asked |= {name: value for name, value in kwargs.items() if value is not None}
    score = Score(asked.get("paper_length_penalty", ALPHA), of_paper=True)
    if "length_penalty" in asked:
        score = Score(asked["length_penalty"], of_paper=False)
    others = {name: value for name, value in asked.items() if name not in _UNDERSTOOD and not name.startswith("_")}
    covered = (
        not any(isinstance(value, Tensor) or value for value in others.values())
        and asked.get("use_cache", True)
        and model.config._attn_implementation in ("eager", "sdpa")
        and not _steps_with_others(model)
    )
    weights = asked.get("decoder_weights")
    if weights not in (None, EIGHT_BITS):
        raise ValueError(f"decoder_weights: {weights!r} is not {EIGHT_BITS!r}; None computes with the model's own")
    compiled = bool(asked.get("compiled"))
    if compiled and model.device.type != "cpu":
        raise ValueError(f"compiled: programs are for a CPU; the model is on {model.device}; leave this out")
    if covered:
        return partial(beam_search, score=score, decoder_weights=weights, compiled=compiled), {}
    for name in ("decoder_weights", "compiled"):
        if kwargs.get(name):
            raise ValueError(f"{name}: with these settings transformers' own loop translates, which does not know it")
    return None, {"length_penalty": score.alpha} if score.of_paper and asked.get("num_beams", 1) > 1 else {}


def chosen_settings(own: GenerationConfig) -> dict[str, Any]:
    """What the model's own generation config has that somebody chose.

    `Seq2SeqTrainer` fills every empty field with the library's default once it has evaluated, and saves that. Those
    defaults say nothing; the field that nobody would ever set tells that they were filled in. A `length_penalty` of
    1.0, which may be a choice, counts where there is no `paper_length_penalty` beside it.
    """
    said = own.to_diff_dict()
    if own.target_lookbehind is None:
        return said
    silent = own._get_default_generation_params()
    if "paper_length_penalty" not in said:
        del silent["length_penalty"]
    return {name: value for name, value in said.items() if name not in silent or value != silent[name]}


def _steps_with_others(model: PreTrainedModel) -> bool:
    """Whether processes hold a model together, each with sentences of its own: then all must take every step."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return torch.distributed.get_world_size() > 1 and (
        bool(names & {"FSDPModule", "FullyShardedDataParallel"}) or is_deepspeed_zero3_enabled()
    )


Source = tuple[Tensor, Tensor]  # ids (B, S) and their mask
Output: TypeAlias = Any  # words (N, T), or an output object of transformers around them
Request = tuple[dict[str, Any], dict[str, Any]]  # see `plain_request`


def beam_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    score: Score,
    over: int | None = None,
    more: Callable[[int], Source | None] | None = None,
    inputs_tensor: Tensor | None = None,
    ensemble: Sequence[PreTrainedModel] = (),
    decoder_weights: str | None = None,
    compiled: bool = False,
    read: tuple[SentencePrograms, list[Tensor]] | None = None,
    request: Request | None = None,
    **model_kwargs: Any,
) -> Output:
    """Find the best translations; greedy search is the case of one beam. `generate` calls this.

    Args:
        input_ids: (B · K, P), what each target begins with, once per beam.
        logits_processor: change the log-probabilities of the next word.
        stopping_criteria: only those that `generate` makes of the length and the end words, which are known here.
        generation_config: with all defaults filled in.
        score: how hypotheses are compared.
        over: tokens that a translation may have more than its own source; None: `generation_config` has the limit.
        more: called with a number when some sentences are done; brings at most so many others, which take their
            room, or None when there are no more.
        inputs_tensor: (B, S), the source.
        ensemble: more models with the same two vocabularies; a word's probability is the mean of theirs.
        decoder_weights: "int8" has 8 bits for each number of the decoder's matrices and of what they multiply, as far
            as the processor is fast at it (see `Product`) and the decoder is nothing but our modules. Sentences that
            are searched together then have a little influence on each other. None has the model's own precision.
        compiled: sentences that come one at a time are read by `Program`s; those of an ensemble are not. The first
            call makes them, which takes a minute. Weights must then not be changed through `.data`, which torch does
            not count.
        read: of a sentence that is read by programs, by which, and what they made of it; see `source_read`.
        request: what `generate` is asked for, where that is plain.
        model_kwargs: `encoder_outputs` and `attention_mask`, once per beam.

    Returns:
        (N · R, T) words of the B sentences and then of those that `more` brought, each row padded behind its end; in
        an output object when asked for, with the scores of a beam search.

    Raises:
        ValueError: models of an ensemble whose vocabularies differ in size.
    """
    beams = generation_config.num_beams
    for member in ensemble:
        if member.config.target_vocab_size != model.config.target_vocab_size:
            raise ValueError(
                f"ensemble: a model with {member.config.target_vocab_size} target words beside one with "
                f"{model.config.target_vocab_size}; they need the same tokenizer"
            )
    states = model_kwargs["encoder_outputs"][0][::beams]  # (B, S, D)
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device) if mask is None else mask[::beams]
    # where the source is, since a model that waits on a disk is nowhere
    prefix = input_ids[::beams].to(states.device)

    job = _Job((model, *ensemble), prefix, (logits_processor, generation_config, score), over, more, decoder_weights)
    if read is None:
        return job.output(job.together(inputs_tensor, mask, states))
    if request is not None and not logits_processor:
        _LAST[model] = copy.deepcopy(request), replace(job, models=())  # which would keep the model alive
    return job.output(job.one_by_one(*read, mask))


@dataclass
class _Job:
    """What `beam_search` is asked for. Both ways of doing it find words (N, R, T) and scores (N, R) of sentences, the
    first ones of which have been encoded as `states` (B, S, D), and then of those that `more` brings."""

    models: Sequence[PreTrainedModel]
    prefix: Tensor  # (B, P), what the translations of the first sentences begin with
    rules: tuple[LogitsProcessorList, GenerationConfig, Score]
    over: int | None
    more: Callable[[int], Source | None] | None
    decoder_weights: str | None

    def together(self, ids: Tensor | None, mask: Tensor, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Many sentences in one search."""
        first = self.group(ids, mask, states)
        may_refill = not self.rules[0] and all(isinstance(reader, StepReader) for reader in first.readers)
        found = [Search(first, self.prefix, *self.rules, self.refill if may_refill else None).run()]
        while not may_refill and (group := self.refill(len(self.prefix))) is not None:
            prefix = self.prefix[:1].expand(len(group.limits), -1)
            found.append(Search(group, prefix, *self.rules).run())
        return found

    def one_by_one(
        self, programs: SentencePrograms, source: list[Tensor], mask: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Each sentence in a search of its own, by programs, the first one of which have read the source already."""
        found = [self.alone(programs, source, mask)]
        while (sentence := self.following(1)) is not None:
            ids, mask = sentence
            found.append(self.alone(programs, programs.source(ids[mask.ne(0)][None]), mask))
        return found

    def alone(self, programs: SentencePrograms, source: list[Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        reader = SentenceReader(programs, source, self.rules[1].num_beams)
        return SentenceSearch(reader, self.prefix[0].tolist(), int(self.limits(mask)), *self.rules).run()

    def output(self, found: list[tuple[Tensor, Tensor]]) -> Output:
        """What `generate` returns of all that was found."""
        settings = self.rules[1]
        words, scores = joined(found, 0 if settings.pad_token_id is None else settings.pad_token_id)
        words = words.flatten(0, 1)  # (N, R, T) -> (N · R, T)
        if not settings.return_dict_in_generate:
            return words
        if settings.num_beams == 1:
            return GenerateEncoderDecoderOutput(sequences=words)
        return GenerateBeamEncoderDecoderOutput(sequences=words, sequences_scores=scores.flatten())

    def group(self, ids: Tensor | None, mask: Tensor, states: Tensor | None = None) -> Group:
        readers = []
        for model in self.models:
            if states is None:
                states = model.get_encoder()(ids, mask).last_hidden_state
            readers.append(reader_for(model, states, mask, self.decoder_weights))
            states = None
        return Group(readers, self.limits(mask))

    def limits(self, mask: Tensor) -> Tensor:
        """How many words each translation may have, (B,)."""
        prefix, config = self.prefix.shape[1], self.models[0].config
        if self.over is None:
            return torch.full(mask.shape[:1], self.rules[1].max_length, device=self.prefix.device)
        # a later sentence may be longer than those that `generate` has seen
        limits = prefix + mask.long().sum(dim=1).to(self.prefix.device) + self.over
        learned = config.position_encoding_type == "learned"
        return limits.clamp(max=prefix + config.max_position_embeddings) if learned else limits

    def following(self, room: int) -> Source | None:
        found = None if self.more is None else self.more(room)
        return None if found is None else (found[0].to(self.prefix.device), found[1].to(self.prefix.device))

    def refill(self, room: int) -> Group | None:
        found = self.following(room)
        return None if found is None else self.group(*found)


def joined(found: list[tuple[Tensor, Tensor]], pad: int) -> tuple[Tensor, Tensor]:
    """The words (N, R, T) and scores (N, R) of several searches."""
    width = max(words.shape[2] for words, _ in found)
    words = torch.cat([F.pad(words, (0, width - words.shape[2]), value=pad) for words, _ in found])
    return words, torch.cat([scores for _, scores in found])


# One sentence alone

# For each model the last request that programs have served, and what was made of it.
_LAST: WeakKeyDictionary[PreTrainedModel, tuple[Request, _Job]] = WeakKeyDictionary()


def plain_request(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> Request | None:
    """All that decides how `generate` translates, but for the sentence: what it is given, and what the model's own
    generation config has. None where there is more to it than numbers and names."""
    given = {name: value for name, value in kwargs.items() if name not in ("input_ids", "attention_mask")}
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in given.values())
    return (given, vars(model.generation_config)) if plain and generation_config is None else None


def translated_again(
    model: PreTrainedModel, request: Request | None, ids: Tensor | None, mask: Tensor | None
) -> Output | None:
    """What `generate` returns, where the request is that of the last time and programs read the sentence (1, S).

    transformers takes longer to check and complete the settings of one sentence than a search takes for a word.
    """
    if request is None or ids is None or model not in _LAST or _LAST[model][0] != request:
        return None
    job = replace(_LAST[model][1], models=(model,))
    read = source_read(model, job.decoder_weights, ids, mask)
    return None if read is None else job.output(job.one_by_one(*read, torch.ones_like(ids) if mask is None else mask))


def read_by_programs(model: PreTrainedModel, search: partial, ids: Tensor | None, kwargs: dict[str, Any]) -> partial:
    """The search, which goes on from what programs have made of the source where they may and can read it.

    Args:
        search: what `search_for` has chosen. ids: (B, S).
        kwargs: the other arguments of `generate`. `encoder_outputs` then comes to them, with the shape of the batch
            and nothing else, so that nobody asks the encoder.
    """
    asked = search.keywords["compiled"] and not kwargs.get("ensemble") and kwargs.get("encoder_outputs") is None
    if not asked or ids is None:
        return search
    read = source_read(model, search.keywords["decoder_weights"], ids, kwargs["attention_mask"])
    if read is None:
        return search
    kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.empty(*ids.shape, 0))
    return partial(search, read=read)


def source_read(
    model: PreTrainedModel, decoder_weights: str | None, ids: Tensor, mask: Tensor | None
) -> tuple[SentencePrograms, list[Tensor]] | None:
    """The model's programs, and what they make of a sentence (1, S); None where it is not one, or not theirs."""
    shown = torch.ones_like(ids) if mask is None else mask
    if len(ids) != 1 or shown.shape != ids.shape or not bool(shown.any()):
        return None
    programs = programs_for(model, decoder_weights)
    return None if programs is None else (programs, programs.source(ids[shown.ne(0)][None]))
