"""How the paper decodes (§6.1): beam 4, length penalty α = 0.6, at most 50 tokens more than the source has.

`VanillaTransformerForConditionalGeneration.generate` comes here for greedy and beam search; everything else that
`generate` can do is done by transformers' own loops.

Shapes: B sentences still open, K beams, T words written so far, S source length, V target vocabulary, R hypotheses
wanted of each sentence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from transformers.modeling_utils import PreTrainedModel

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import BeamPlaces, Reader, reader_for

BEAMS, ALPHA = 4, 0.6
MAX_LENGTH_OVER_SOURCE = 50  # tokens

# `Seq2SeqTrainer` writes this default of the library into the generation config of the model that it evaluates.
_LIBRARY_MAX_LENGTH = 20

# Rows leave the batch when this share of them is finished: each time the caches are copied.
_FINISHED_SHARE = 0.2

_NOTHING = -1  # where a hypothesis has no word
_BLOCK = 64  # numbers, in `_largest`
_NUMBERS_AT_ONCE = 2**18  # a megabyte, in `likeliest`

# What `search_for` understands among the arguments of `generate` and the fields of its configuration. With anything
# else that is switched on, transformers' own loop runs.
_UNDERSTOOD = {
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "encoder_outputs", "decoder_input_ids"),
    *("ensemble", "num_beams", "length_penalty", "paper_length_penalty", "max_length_over_source", "early_stopping"),
    *("max_length", "max_new_tokens", "num_return_sequences", "return_dict_in_generate", "use_cache"),
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


def paper_max_new_tokens(
    generation_config: GenerationConfig, inputs: Tensor | None, kwargs: dict[str, Any], own: bool
) -> dict[str, int]:
    """The keyword argument that limits a translation to 50 tokens more than its source.

    Args:
        generation_config: what decides where `kwargs` do not.
        inputs, kwargs: the arguments of `generate`; the source is (B, S) ids, (B, S, D) embeddings or what the
            encoder made of them.
        own: whether it is the model's own generation config; a length of 20 is then taken out of it, because only
            the trainer can have written it.

    Returns:
        `{"max_new_tokens": S + 50}`; empty where the caller or the generation config limits the length already, or
        where there is no source.
    """
    lengths = kwargs.get("max_length"), kwargs.get("max_new_tokens"), generation_config.max_new_tokens
    if any(length is not None for length in lengths):
        return {}
    if own and generation_config.max_length == _LIBRARY_MAX_LENGTH:
        generation_config.max_length = None
    if generation_config.max_length is not None:
        return {}
    over = getattr(generation_config, "max_length_over_source", MAX_LENGTH_OVER_SOURCE)
    over = kwargs.get("max_length_over_source", over)
    for source in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if source is not None:
            return {"max_new_tokens": source.shape[1] + over}
    if kwargs.get("encoder_outputs") is not None:
        return {"max_new_tokens": kwargs["encoder_outputs"][0].shape[1] + over}
    return {}


# Which search


@dataclass(frozen=True)
class Score:
    """How hypotheses of different lengths are compared: log P / penalty(length).

    Args:
        alpha: α of the paper, or Hugging Face's `length_penalty`.
        of_paper: ((5 + length) / 6)^α (Wu et al. 2016, Eq. 14), and a search that ends when no running hypothesis
            can win any more; otherwise length^α and the ends that `early_stopping` names.
    """

    alpha: float
    of_paper: bool

    def penalty(self, length: int) -> float:
        """What the log-probability of `length` words, the end counted, is divided by."""
        return ((5 + length) / 6) ** self.alpha if self.of_paper else length**self.alpha

    def best_penalty(self, length: int, longest: int, early_stopping: bool | str) -> float:
        """The penalty with which a hypothesis that has `length` words now may come out best in the end.

        Log-probabilities only fall, so a longer end can win by its penalty alone. With `early_stopping=False`
        transformers looks at the present length instead, and may miss it.
        """
        may_grow = self.of_paper or early_stopping == "never"
        return self.penalty(longest if may_grow and self.alpha > 0 else length)


def search_for(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[Callable | None, dict[str, float]]:
    """Choose between this package's search and transformers' own loops.

    Args:
        generation_config, kwargs: the arguments of `generate`, which win over `model.generation_config`.

    Returns:
        `custom_generate` for `GenerationMixin.generate`, and nothing else. Or None, where this search does not cover
        what is asked for, and the `length_penalty` with which transformers' score comes near the paper's, unless the
        caller has one.
    """
    asked: dict[str, Any] = {}
    for settings in (model.generation_config, generation_config):
        asked |= {} if settings is None else settings.to_diff_dict()
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
    if covered:
        return partial(beam_search, score=score), {}
    return None, {"length_penalty": score.alpha} if score.of_paper and asked.get("num_beams", 1) > 1 else {}


def _steps_with_others(model: PreTrainedModel) -> bool:
    """Whether processes hold a model together, each with sentences of its own: then all must take every step."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return torch.distributed.get_world_size() > 1 and (
        bool(names & {"FSDPModule", "FullyShardedDataParallel"}) or is_deepspeed_zero3_enabled()
    )


def beam_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    score: Score,
    inputs_tensor: Tensor | None = None,
    ensemble: Sequence[PreTrainedModel] = (),
    **model_kwargs: Any,
) -> Tensor | GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput:
    """Find the best translations; greedy search is the case of one beam. `generate` calls this.

    Args:
        input_ids: (B · K, P), what each target begins with, once per beam.
        logits_processor: change the log-probabilities of the next word.
        stopping_criteria: only those that `generate` makes of the length and the end words, which are known here.
        generation_config: with all defaults filled in.
        score: how hypotheses are compared.
        inputs_tensor: (B, S), the source.
        ensemble: more models with the same two vocabularies; a word's probability is the mean of theirs.
        model_kwargs: `encoder_outputs` and `attention_mask`, once per beam.

    Returns:
        (B · R, T) words, each row padded behind its end; in an output object when asked for, with the scores of a
        beam search.

    Raises:
        ValueError: models of an ensemble whose vocabularies differ in size.
    """
    beams = generation_config.num_beams
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None else mask[::beams]
    source = model_kwargs["encoder_outputs"][0][::beams]
    readers = [reader_for(model, source, mask)]
    for member in ensemble:
        if member.config.target_vocab_size != model.config.target_vocab_size:
            raise ValueError(
                f"ensemble: a model with {member.config.target_vocab_size} target words beside one with "
                f"{model.config.target_vocab_size}; they need the same tokenizer"
            )
        readers.append(reader_for(member, member.get_encoder()(inputs_tensor, mask).last_hidden_state, mask))
    # where the source is, since a model that waits on a disk is nowhere
    prefix = input_ids[::beams].to(source.device)
    search = _Search(readers, prefix, logits_processor, generation_config, score)
    words, scores = search.run()  # (B, R, T), (B, R)
    words = words.flatten(0, 1)
    if not generation_config.return_dict_in_generate:
        return words
    if beams == 1:
        return GenerateEncoderDecoderOutput(sequences=words)
    return GenerateBeamEncoderDecoderOutput(sequences=words, sequences_scores=scores.flatten())


# The search


class _Search:
    """The hypotheses of all sentences that are still open.

    `words` (B, K, T) and `log_p` (B, K) are the running ones, the best first; `pasts` says where in the caches their
    pasts stand; `ended_words` and `ended_scores` hold the K best that have come to an end.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        prefix: Tensor,
        processors: LogitsProcessorList,
        settings: GenerationConfig,
        score: Score,
    ):
        self.readers, self.processors, self.score = readers, processors, score
        self.beams, self.wanted = settings.num_beams, settings.num_return_sequences or 1
        self.early_stopping = self.beams == 1 or settings.early_stopping
        ends = settings.eos_token_id
        self.ends = prefix.new_tensor([] if ends is None else [ends] if isinstance(ends, int) else list(ends))
        self.pad = settings.pad_token_id if settings.pad_token_id is not None else 0
        # Of the best 2 K continuations at most K end a sentence (with one end word), so K are left to go on.
        self.candidates = 1 if self.beams == 1 else self.beams * max(2, 1 + len(self.ends))

        batch, self.prefix_length = prefix.shape  # B, P
        self.longest = settings.max_length
        device = prefix.device
        self.words = prefix[:, None].expand(-1, self.beams, -1)  # (B, K, P)
        self.log_p = torch.zeros(batch, self.beams, device=device)
        self.log_p[:, 1:] = -1e9  # only one has begun
        self.pasts = BeamPlaces(batch, self.prefix_length, device)
        self.ended_words = prefix.new_full((batch, self.beams, self.longest), _NOTHING)
        self.ended_scores = self.log_p.new_full((batch, self.beams), -torch.inf)

        self.rows = torch.arange(batch, device=device)  # the caller's, of those still open
        self.open = torch.ones(batch, dtype=torch.bool, device=device)
        self.best_words = self.ended_words[:, : self.wanted].clone()  # (B, R, longest)
        self.best_scores = self.ended_scores[:, : self.wanted].clone()

    def run(self) -> tuple[Tensor, Tensor]:
        """The best words (B, R, T), padded behind their ends, and their scores (B, R)."""
        prefix = self.words[:, 0]  # (B, P)
        logits = self.mean([reader.read_prefix(prefix) for reader in self.readers])  # (B, 1, V)
        logits = logits.expand(-1, self.beams, -1)  # (B, K, V)
        self.pasts.spread(self.beams)
        while True:
            parents, words = self.advance(logits)  # (B, K) each
            if not len(self.rows):
                break
            places, position = self.pasts.append(parents), self.words.shape[2] - 1
            logits = self.mean([reader.read(words, places, self.pasts.seen, position) for reader in self.readers])
        longest = int(self.best_words.ne(_NOTHING).sum(dim=2).max())
        words = self.best_words[:, :, :longest]
        return words.masked_fill(words == _NOTHING, self.pad), self.best_scores

    def mean(self, logits: list[Tensor]) -> Tensor:
        """Of an ensemble (B, K, V), the logarithm of the mean of their probabilities."""
        if len(logits) == 1:
            return logits[0]
        log_p = torch.stack([each.float() for each in logits]).log_softmax(dim=-1)
        return log_p.logsumexp(dim=0) - math.log(len(logits))

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the next words; the parents and the new words (B, K) of the beams that go on."""
        log_p, parents, words = self.best_continuations(logits)  # (B, 2 K) each, the best first
        length = self.words.shape[2] + 1 - self.prefix_length
        last = self.words.shape[2] + 1 == self.longest
        ends = torch.ones_like(words, dtype=torch.bool) if last else torch.isin(words, self.ends)
        top = slice(None, self.beams)  # only the K best may end: the others are there to go on
        if bool(ends[:, top].any()):
            self.collect(log_p[:, top] / self.score.penalty(length), parents[:, top], words[:, top], ends[:, top])

        self.log_p, going = log_p.masked_fill(ends, -1e9).topk(self.beams, dim=1)  # (B, K)
        parents, words = parents.gather(1, going), words.gather(1, going)
        self.words = self.continued(parents, words)
        kept = self.close(length, last)
        return (parents, words) if kept is None else (parents[kept], words[kept])

    def continued(self, parents: Tensor, words: Tensor) -> Tensor:
        """Running hypotheses (B, K, T + 1), with one word more."""
        past = self.words.gather(1, parents[..., None].expand(-1, -1, self.words.shape[2]))
        return torch.cat([past, words[..., None]], dim=2)

    def best_continuations(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of all words after all beams the likeliest: log P, the beam and the word, (B, 2 K) each.

        A row's best words are those of its logits, so only they need the logarithm of the sum.
        """
        each = min(self.candidates, logits.shape[2])
        if self.processors:
            # transformers shows them logits in a greedy search, log-probabilities in a beam search
            scores = logits.float() if self.beams == 1 else logits.float().log_softmax(dim=-1)
            scores = self.processors(self.words.flatten(0, 1), scores.flatten(0, 1)).unflatten(0, logits.shape[:2])
            values, words = scores.topk(each, dim=2)
        else:
            values, words = likeliest(logits, each, normalised=self.beams > 1)  # (B, K, 2 K)
        total, words = (values + self.log_p[..., None]).flatten(1), words.flatten(1)  # (B, K · 2 K)
        missing = max(0, self.candidates - total.shape[1])  # in a vocabulary of one word
        total, words = F.pad(total, (0, missing), value=-2e9), F.pad(words, (0, missing))
        log_p, places = total.topk(self.candidates, dim=1)
        parents = (places // each).clamp(max=logits.shape[1] - 1)
        return log_p, parents, words.gather(1, places)

    def collect(self, scores: Tensor, parents: Tensor, words: Tensor, ends: Tensor) -> None:
        """Put the hypotheses (B, K) that end here among the K best of their sentence."""
        new = self.continued(parents, words)
        new = F.pad(new, (0, self.longest - new.shape[2]), value=_NOTHING)
        scores = torch.cat([self.ended_scores, scores.masked_fill(~ends, -torch.inf)], dim=1)  # (B, 2 K)
        self.ended_scores, best = scores.topk(self.beams, dim=1)
        both = torch.cat([self.ended_words, new], dim=1)
        self.ended_words = both.gather(1, best[..., None].expand(-1, -1, self.longest))

    def close(self, length: int, last: bool) -> Tensor | None:
        """Write down the sentences that are done; the rows that stay, where some leave the batch."""
        rank = self.wanted if self.score.of_paper else self.beams
        penalty = self.score.best_penalty(length, self.longest - self.prefix_length, self.early_stopping)
        done = self.log_p[:, 0] / penalty <= self.ended_scores[:, rank - 1]
        if self.early_stopping is True:
            done |= self.ended_scores[:, self.beams - 1] > -torch.inf
        done = (done | last) & self.open
        if not bool(done.any()):
            return None
        self.best_words[self.rows[done]] = self.ended_words[done, : self.wanted]
        self.best_scores[self.rows[done]] = self.ended_scores[done, : self.wanted]
        self.open &= ~done
        kept = self.open.nonzero().squeeze(1)
        if len(kept) > (1 - _FINISHED_SHARE) * len(self.rows):
            return None
        for name in ("rows", "open", "words", "log_p", "ended_words", "ended_scores"):
            setattr(self, name, getattr(self, name)[kept])
        for holder in (self.pasts, *self.readers):
            holder.select(kept)
        return kept


def likeliest(logits: Tensor, count: int, normalised: bool = True) -> tuple[Tensor, Tensor]:
    """The words with the highest log-probabilities, (…, count) each, of logits (…, V).

    A row's likeliest words are those with the largest logits, so only they need the logarithm of the sum.

    Args:
        normalised: otherwise the logits themselves come back, whose order is the same.
    """
    rows = logits.flatten(0, -2)
    # On a CPU some rows at a time, which then stay in its cache.
    some = max(1, _NUMBERS_AT_ONCE // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    found = [_likeliest(part.float(), count, normalised) for part in rows.split(some)]
    values, words = (torch.cat(parts).unflatten(0, logits.shape[:-1]) for parts in zip(*found, strict=True))
    return values, words


def _likeliest(logits: Tensor, count: int, normalised: bool) -> tuple[Tensor, Tensor]:
    values, words = _largest(logits, count)
    if normalised:
        top = values[:, :1]
        values = values - top - (logits - top).exp_().sum(dim=-1, keepdim=True).log_()
    return values, words


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`logits.topk(count)` (…, V), for a large V and a small count.

    The largest numbers stand in the blocks with the largest maxima. Looking for maxima is quick; torch's `topk` on a
    CPU copies and partly sorts whole rows.
    """
    whole = logits.shape[-1] // _BLOCK  # blocks; what is left over is looked at number by number
    if whole <= 4 * count:
        return logits.topk(count)
    blocks = logits[..., : whole * _BLOCK].unflatten(-1, (whole, _BLOCK))  # (…, V / 64, 64)
    best = blocks.amax(dim=-1).topk(count).indices[..., None]  # (…, count, 1)
    within = torch.arange(_BLOCK, device=logits.device)
    near = blocks.gather(-2, best.expand(*best.shape[:-1], _BLOCK)).flatten(-2)  # (…, count · 64)
    places = (best * _BLOCK + within).flatten(-2)
    rest = torch.arange(whole * _BLOCK, logits.shape[-1], device=logits.device)
    near = torch.cat([near, logits[..., whole * _BLOCK :]], dim=-1)
    places = torch.cat([places, rest.expand(*places.shape[:-1], -1)], dim=-1)
    values, chosen = near.topk(count)
    return values, places.gather(-1, chosen)
