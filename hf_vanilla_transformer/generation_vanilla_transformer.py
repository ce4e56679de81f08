"""Decoding as in the paper (§6.1): beam 4, length penalty α = 0.6, at most 50 tokens more than the source has.

`generate` runs `beam_search`, through transformers' `custom_generate`, for greedy and beam search; whatever `COVERED`
does not name, such as sampling, runs in transformers' own loops. `Decoder` is the seam between the search, which
chooses tokens, and what computes their logits. The state of a search is tensors of fixed shape, read on the host only
every few steps: a step of search and decoder can be compiled, or captured as a CUDA graph, as one.

Shapes: B sentences in the batch, K beams, P tokens of the prefix, T capacity of a hypothesis in tokens, C capacity of
a sentence's KV cache in slots, S source length, D d_model, H heads, V target vocabulary, R hypotheses returned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .stacks_vanilla_transformer import check_ids

logger = logging.get_logger(__name__)

BEAMS, ALPHA = 4, 0.6
MAX_LENGTH_OVER_SOURCE = 50  # tokens

# Arguments of `generate`, and fields of a generation config, that `beam_search` covers.
COVERED = frozenset(
    {
        *("inputs", "input_ids", "inputs_embeds", "attention_mask", "encoder_outputs", "decoder_input_ids"),
        *("num_beams", "length_penalty", "paper_length_penalty", "early_stopping", "use_cache"),
        *("max_length", "max_new_tokens", "max_length_over_source", "num_return_sequences", "bos_token_id"),
        *("pad_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version"),
        "return_dict_in_generate",
        # of which `generate` makes logits processors
        *("logits_processor", "prefix_allowed_tokens_fn", "min_length", "min_new_tokens", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "repetition_penalty", "encoder_repetition_penalty", "bad_words_ids"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
        *("renormalize_logits", "remove_invalid_values", "exponential_decay_length_penalty"),
        # without effect where nothing is sampled
        *("temperature", "top_k", "top_p"),
    }
)

# Of which `generate` makes logits processors that know the sources of the first batch, or a sentence by its row.
_OF_FIRST_BATCH = frozenset({"encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "prefix_allowed_tokens_fn"})

_NO_BEAM = -1e9  # log-probability of a beam without a hypothesis
_COMPACT_SHARE, _REFILL_SHARE = 0.2, 0.1  # of finished rows: compacting copies the caches, refilling encodes
_SLOTS = 16  # by which a KV cache grows: few shapes, and whole tiles of matrix units
_CHUNK = 2**18  # logits that `topk_log_probs` reads at a time on a CPU: a megabyte stays in a core's cache


class VanillaTransformerGenerationConfig(GenerationConfig):
    """A generation config that does not take the library's defaults for choices: `Seq2SeqTrainer` fills them in after
    its first batch (`max_length=20`, `length_penalty=1.0`, …), and they would decode all later ones, and be saved."""

    _filled: frozenset[str] = frozenset()  # fields that hold a default of the library

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("_filled", self._filled - {name})
        super().__setattr__(name, value)

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        filled = {name for name in kwargs if defaults_only and getattr(self, name, None) is None}
        unused = super().update(defaults_only, allow_custom_entries, **kwargs)
        super().__setattr__("_filled", self._filled | filled)
        return unused

    def to_dict(self) -> dict[str, Any]:
        """Without the library's defaults."""
        fields = super().to_dict()
        return fields | dict.fromkeys(fields.pop("_filled", ()))


def paper_generation_config(config: VanillaTransformerConfig) -> GenerationConfig:
    """§6.1 as a `generation_config.json`, with the special tokens of `config`.

    A `length_penalty` that somebody sets wins over `paper_length_penalty` (α), with Hugging Face's meaning.
    """
    generation_config = VanillaTransformerGenerationConfig.from_model_config(config)
    generation_config.update(num_beams=BEAMS)
    generation_config.paper_length_penalty = ALPHA
    generation_config.max_length_over_source = MAX_LENGTH_OVER_SOURCE
    generation_config._from_model_config = False  # or `generate` would make it anew from the model's configuration
    return generation_config


# Arguments of `generate`


NextBatch: TypeAlias = Callable[[int], tuple[Tensor, Tensor] | None]  # brings ids (B, S) and their mask


def plan_search(
    model: PreTrainedModel,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    next_batch: NextBatch | None = None,
) -> tuple[partial | None, dict[str, Any], list[str]]:
    """What to do with the arguments of `generate`, which win over `model.generation_config`.

    Returns:
        `beam_search`, to be `custom_generate`, or None; the paper's limit (§6.1), and its α for transformers' own beam
        search; the names of what is not covered.
    """
    asked = model.generation_config.to_diff_dict()
    asked |= {} if generation_config is None else generation_config.to_diff_dict()
    asked |= {name: value for name, value in kwargs.items() if value is not None}
    settings: dict[str, Any] = {}
    over = None
    if asked.get("max_length") is None and asked.get("max_new_tokens") is None:
        over = asked.get("max_length_over_source", MAX_LENGTH_OVER_SOURCE)
        states, prefix = (kwargs.get("encoder_outputs") or [None])[0], kwargs.get("decoder_input_ids")
        sources = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), states)
        width = next((source.shape[1] for source in sources if source is not None), None)
        if width is not None:
            settings["max_length"] = _max_length(model.config, 1 if prefix is None else prefix.shape[1], width + over)
    penalty = LengthPenalty(asked.get("paper_length_penalty", ALPHA), "gnmt")
    if "length_penalty" in asked:
        penalty = LengthPenalty(asked["length_penalty"], "power")
    uncovered = _uncovered(model, asked, COVERED if next_batch is None else COVERED - _OF_FIRST_BATCH)
    if not uncovered:
        return partial(beam_search, penalty=penalty, over=over), settings, []
    if penalty.formula == "gnmt" and asked.get("num_beams", 1) > 1:
        settings["length_penalty"] = penalty.alpha
    if "gradient checkpointing" in uncovered:  # for which layers drop the cache
        settings["use_cache"] = False
    return None, settings, uncovered


def _max_length(config: VanillaTransformerConfig, prefix: int, new: int) -> int:
    """Tokens of a hypothesis, at least one of them new. Learned positions end, but its last token needs none."""
    length = prefix + max(new, 1)
    return min(length, config.max_position_embeddings + 1) if config.position_encoding_type == "learned" else length


def _uncovered(model: PreTrainedModel, asked: dict[str, Any], covered: frozenset[str]) -> list[str]:
    """What is asked for that only transformers' own loops do."""
    names = [name for name, value in asked.items() if isinstance(value, Tensor) or value]
    names = [name for name in names if name not in covered and not name.startswith("_")]
    prepare, backend = GenerationMixin.prepare_inputs_for_generation, model.config._attn_implementation
    training = [module for module in model.modules() if module.training]
    conditions = {
        "use_cache=False": not asked.get("use_cache", True),
        f"attn_implementation={backend!r}": backend not in ("eager", "sdpa"),
        # of a subclass, or of PEFT's prefix tuning
        "prepare_inputs_for_generation": getattr(model.prepare_inputs_for_generation, "__func__", None) is not prepare,
        "gradient checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in training),
        "a model sharded over processes": _is_sharded(model),
    }
    return names + [name for name, holds in conditions.items() if holds]


def _is_sharded(model: PreTrainedModel) -> bool:
    """Whether processes hold a model together, each with sentences of its own: all must then take every step."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    sharded = bool(names & {"FSDPModule", "FullyShardedDataParallel"}) or is_deepspeed_zero3_enabled()
    return torch.distributed.get_world_size() > 1 and sharded


def check_coverage(uncovered: list[str], **arguments: Any) -> None:
    """Log once what is left to transformers' loops; raise a ValueError where what is our own forbids that."""
    reasons = ", ".join(uncovered)
    for name in (name for name, value in arguments.items() if value and uncovered):
        raise ValueError(f"{name}: only this package's search has it, which does not cover {reasons}")
    if uncovered:
        scored = "a beam search then scores log P / length^length_penalty"
        logger.warning_once(f"generate: transformers' own loop decodes, because of {reasons}; {scored}")


# The search


@dataclass(frozen=True)
class LengthPenalty:
    """log P / penalty(length) compares hypotheses: "gnmt" is ((5 + length) / 6)^α (Wu et al. 2016, arXiv 1609.08144,
    Eq. 14), "power" is Hugging Face's length^α. The end token counts."""

    alpha: float
    formula: str

    def __call__(self, lengths: Tensor) -> Tensor:
        return ((5 + lengths) / 6 if self.formula == "gnmt" else lengths) ** self.alpha


class BeamState(NamedTuple):
    """The running hypotheses of a batch, the best first, and the best that have ended."""

    tokens: Tensor  # (B, K, T), the prefix included; K may be 1 at first
    next_tokens: Tensor  # (B, K), their last tokens, which the decoder has not read yet
    parents: Tensor  # (B, K), the beams of the previous step that they extend
    log_probs: Tensor  # (B, K)
    lengths: Tensor  # (B,), tokens of each running hypothesis
    limits: Tensor  # (B,), how many it may have
    ended_tokens: Tensor  # (B, K, T)
    ended_lengths: Tensor  # (B, K)
    ended_scores: Tensor  # (B, K), -inf where none has ended
    done: Tensor  # (B,), bool: what has ended is final
    penalties: Tensor  # (T + 1,), by length: data, so that one compiled step serves every α

    @classmethod
    def start(cls, prefix: Tensor, limits: Tensor, running: int, ended: int, penalties: Tensor) -> "BeamState":
        """`running` beams that have the prefix (B, P), of which one counts, and no hypothesis of `ended` yet."""
        (batch, length), capacity = prefix.shape, len(penalties) - 1
        log_probs = torch.zeros(batch, running, dtype=torch.float32, device=prefix.device)
        log_probs[:, 1:] = _NO_BEAM
        return cls(
            tokens=F.pad(prefix, (0, capacity - length))[:, None].repeat(1, running, 1),
            next_tokens=prefix[:, -1:].repeat(1, running),
            parents=prefix.new_zeros(batch, running),
            log_probs=log_probs,
            lengths=torch.full_like(limits, length),
            limits=limits,
            ended_tokens=prefix.new_zeros(batch, ended, capacity),
            ended_lengths=prefix.new_zeros(batch, ended),
            ended_scores=log_probs.new_full((batch, ended), -torch.inf),
            done=torch.zeros_like(limits, dtype=torch.bool),
            penalties=penalties,
        )

    @property
    def positions(self) -> Tensor:
        """Of `next_tokens`, (B,); a sentence that is done stays where it is."""
        return torch.minimum(self.lengths, self.limits - 1) - 1

    def select(self, rows: Tensor) -> "BeamState":
        """Keep these sentences."""
        return BeamState(*(each[rows] for each in self[:-1]), self.penalties)  # type: ignore[call-arg]

    def replace(self, rows: Tensor, other: "BeamState") -> "BeamState":
        """Put the sentences of another state in the place of these."""
        both = ((mine, rows, theirs) for mine, theirs in zip(self[:-1], other[:-1], strict=True))
        penalties = max(self.penalties, other.penalties, key=len)
        return BeamState(*(replace_rows(*each, -1) for each in both), penalties)  # type: ignore[call-arg]


@dataclass(frozen=True)
class SearchConfig:
    """The constants of a search, a key for compiled steps. Called, it extends all beams by a token (ibid., §7)."""

    num_beams: int
    num_return_sequences: int
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    forced_eos_token_id: int | None
    enough: int  # ended hypotheses, the last of which must beat all that run
    can_grow: bool  # whether a longer hypothesis can win by its penalty alone

    @classmethod
    def of(cls, generation_config: GenerationConfig, penalty: LengthPenalty) -> "SearchConfig":
        """From a generation config with all defaults filled in.

        The paper's search ends when no beam can win any more. With Hugging Face's penalty `early_stopping` decides; by
        default transformers compares at the present length, and may miss a longer hypothesis.
        """
        beams, wanted = generation_config.num_beams, generation_config.num_return_sequences or 1
        ends, forced = generation_config.eos_token_id, generation_config.forced_eos_token_id
        gnmt, early_stopping = penalty.formula == "gnmt", beams == 1 or generation_config.early_stopping
        return cls(
            num_beams=beams,
            num_return_sequences=wanted,
            early_stopping=early_stopping,
            eos_token_ids=() if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
            pad_token_id=generation_config.pad_token_id or 0,
            forced_eos_token_id=forced[0] if isinstance(forced, list) else forced,
            enough=wanted if gnmt else beams,
            can_grow=penalty.alpha > 0 and (gnmt or early_stopping == "never"),
        )

    @property
    def num_candidates(self) -> int:
        """Of the best continuations K may end with each end token; K more must be there to go on."""
        return 1 if self.num_beams == 1 else self.num_beams * max(2, 1 + len(self.eos_token_ids))

    def __call__(self, state: BeamState, logits: Tensor) -> BeamState:
        """The next state, from the logits (B, K, V) of the next tokens."""
        logits = self.force_eos(state, logits)
        count = min(self.num_candidates, logits.shape[2])
        return self.extend(state, *topk_log_probs(logits, count, normalize=self.num_beams > 1))

    def force_eos(self, state: BeamState, logits: Tensor) -> Tensor:
        """`forced_eos_token_id` at the limit of each sentence; the processor of that name knows the batch's only."""
        if self.forced_eos_token_id is None:
            return logits
        forced = torch.full_like(logits, -torch.inf)
        forced[..., self.forced_eos_token_id] = 0
        return torch.where((state.lengths + 1 == state.limits)[:, None, None], forced, logits)

    def extend(self, state: BeamState, log_probs: Tensor, tokens: Tensor) -> BeamState:
        """Go on with the best candidates (B, K, n) that do not end; keep those that do among the best K."""
        beams, (running, each) = self.num_beams, log_probs.shape[1:]
        total, tokens = (log_probs + state.log_probs[..., None]).flatten(1), tokens.flatten(1)  # (B, K · n)
        missing = max(0, self.num_candidates - total.shape[1])  # in a vocabulary smaller than the beam
        log_probs, index = F.pad(total, (0, missing), value=2 * _NO_BEAM).topk(self.num_candidates, dim=1)
        tokens = F.pad(tokens, (0, missing)).gather(1, index)  # (B, 2 K), as are all candidates; the best first
        parents = (index // each).clamp(max=running - 1)
        length = state.lengths + 1
        at_limit = length == state.limits
        ends = at_limit[:, None].expand_as(tokens)
        for eos in self.eos_token_ids:
            ends = ends | (tokens == eos)

        # Only the K best may end: the others are there to go on.
        scores = log_probs[:, :beams] / state.penalties[length][:, None]
        scores = scores.masked_fill(~ends[:, :beams] | state.done[:, None], -torch.inf)
        ended_scores, best = torch.cat([state.ended_scores, scores], dim=1).topk(beams, dim=1)  # (B, K)
        new, new_lengths = _append(state, parents[:, :beams], tokens[:, :beams]), length[:, None].expand(-1, beams)
        ended_tokens = torch.cat([state.ended_tokens, new], dim=1).gather(1, best[..., None].expand_as(new))

        log_probs, going = log_probs.masked_fill(ends, _NO_BEAM).topk(beams, dim=1)  # (B, K)
        parents, tokens = parents.gather(1, going), tokens.gather(1, going)
        bound = log_probs[:, 0] / state.penalties[state.limits if self.can_grow else length]
        done = state.done | at_limit | (bound <= ended_scores[:, self.enough - 1])
        if self.early_stopping is True:
            done = done | (ended_scores[:, beams - 1] > -torch.inf)
        return state._replace(
            tokens=_append(state, parents, tokens),
            next_tokens=tokens,
            parents=parents,
            log_probs=log_probs,
            lengths=torch.where(state.done, state.lengths, length),
            ended_tokens=ended_tokens,
            ended_lengths=torch.cat([state.ended_lengths, new_lengths], dim=1).gather(1, best),
            ended_scores=ended_scores,
            done=done,
        )


def _append(state: BeamState, parents: Tensor, tokens: Tensor) -> Tensor:
    """Hypotheses (B, K, T) that extend these beams by these tokens, (B, K) each."""
    past = state.tokens.gather(1, parents[..., None].expand(-1, -1, state.tokens.shape[2]))
    return past.scatter(2, state.lengths[:, None, None].expand(-1, parents.shape[1], 1), tokens[..., None])


def topk_log_probs(logits: Tensor, count: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """The highest log-probabilities (without `normalize`: logits) and their tokens, (…, count) each, of (…, V)."""
    rows = logits.flatten(0, -2)
    at_once = max(1, _CHUNK // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    found = []
    for chunk in map(Tensor.float, rows.split(at_once)):
        values, tokens = chunk.topk(count)
        if normalize:
            top = values[:, :1]
            values = values - top - (chunk - top).exp_().sum(dim=-1, keepdim=True).log_()
        found.append((values, tokens))
    values, tokens = (torch.cat(parts).unflatten(0, logits.shape[:-1]) for parts in zip(*found, strict=True))
    return values, tokens


Advance: TypeAlias = Callable[[BeamState, Tensor], BeamState]


class Decoder(Protocol):
    """What a search asks of what computes logits: the decoder and the KV caches of a batch of sentences."""

    initial_beams: int  # K of the first step

    def prefill(self, tokens: Tensor) -> None:
        """Read the first tokens (B, P - 1) of every beam: the prefix but for its last token."""

    def step(self, state: BeamState, advance: Advance) -> BeamState:
        """Read `state.next_tokens` and give their logits (B, K, V) to `advance`; one call, to be compiled as one."""

    def select(self, rows: Tensor) -> None:
        """Keep these sentences."""

    def replace(self, rows: Tensor, other: Any) -> None:
        """Put the sentences of another decoder, which has read its prefix, in the place of these."""


class SearchBatch(NamedTuple):
    """Sentences that begin together, how many tokens each may have (B,), and the most of them, known to the host."""

    decoder: Decoder
    limits: Tensor
    longest: int


class BeamSearch:
    """Find the best translations, which begin with `prefix` (B, P); greedy search is the case of one beam.

    Logits processors know a sentence by its row: with them none leaves the batch. `refill`, called with a number when
    sentences are done, brings at most so many others, with the first one's prefix, or None (continuous batching).
    """

    def __init__(
        self,
        batch: SearchBatch,
        prefix: Tensor,
        config: SearchConfig,
        penalty: LengthPenalty,
        processors: LogitsProcessorList | None = None,
        refill: Callable[[int], SearchBatch | None] | None = None,
        steps_at_once: int = 1,
    ):
        self.decoder, self.prefix, self.config, self.penalty = batch.decoder, prefix, config, penalty
        self.processors, self.refill, self.steps_at_once = processors or None, refill, steps_at_once
        self.sentences = list(range(len(prefix)))  # which one each row is
        self.begun, self.steps = len(prefix), 0
        self.found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # see `run`
        self.state = self._start(batch, prefix, batch.decoder.initial_beams, batch.longest)

    def _start(self, batch: SearchBatch, prefix: Tensor, running: int, longest: int) -> BeamState:
        if prefix.shape[1] > 1:
            batch.decoder.prefill(prefix[:, :-1])
        lengths = torch.arange(round_up(longest + 1, 2 * _SLOTS) + 1, device=prefix.device) - prefix.shape[1]
        penalties = self.penalty(lengths.clamp(min=1).float())
        return BeamState.start(prefix, batch.limits, running, self.config.num_beams, penalties)

    def run(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each sentence the best hypotheses: tokens (R, T), lengths (R,) and scores (R,)."""
        advance = self.config if self.processors is None else self._process_and_extend
        while self.sentences:
            for _ in range(self.steps_at_once):
                self.state = self.decoder.step(self.state, advance)
                self.steps += 1
            self._end_sentences()
        return [self.found[sentence] for sentence in range(self.begun)]

    def _process_and_extend(self, state: BeamState, logits: Tensor) -> BeamState:
        """`SearchConfig.__call__` with logits processors, for which all hypotheses have one length."""
        beams, running = self.config.num_beams, logits.shape[1]
        # transformers shows them logits in a greedy search, log-probabilities in a beam search
        scores = logits.float() if beams == 1 else logits.float().log_softmax(dim=-1)
        tokens = state.tokens[..., : self.prefix.shape[1] + self.steps]
        tokens, scores = (each.expand(-1, beams, -1).flatten(0, 1) for each in (tokens, scores))  # (B · K, ·)
        scores = self.processors(tokens, scores).unflatten(0, (-1, beams))[:, :running]  # type: ignore[misc]
        scores = self.config.force_eos(state, scores)
        return self.config.extend(state, *scores.topk(min(self.config.num_candidates, scores.shape[2]), dim=2))

    def _end_sentences(self) -> None:
        """Compact or refill the batch once enough of its sentences are done."""
        done = [row for row, is_done in enumerate(self.state.done.tolist()) if is_done]  # synchronises with the host
        share = _COMPACT_SHARE if self.refill is None else _REFILL_SHARE
        if len(done) < len(self.sentences) and (self.processors or len(done) < share * len(self.sentences)):
            return
        best, state = slice(self.config.num_return_sequences), self.state
        for row in done:
            ended = state.ended_tokens[row, best], state.ended_lengths[row, best], state.ended_scores[row, best]
            self.found[self.sentences[row]] = ended
        while done and self.refill is not None:
            batch = self.refill(len(done))
            if batch is None:
                self.refill = None
            else:
                done = self._replace(done, batch)
        if done:
            kept = sorted(set(range(len(self.sentences))) - set(done))
            self.sentences = [self.sentences[row] for row in kept]
            if kept:
                rows = torch.tensor(kept, device=self.prefix.device)
                self.state = self.state.select(rows)
                self.decoder.select(rows)

    def _replace(self, done: list[int], batch: SearchBatch) -> list[int]:
        """Begin other sentences in rows that are done; the rows that are left come back."""
        count = len(batch.limits)
        rows, prefix = torch.tensor(done[:count], device=self.prefix.device), self.prefix[:1].expand(count, -1)
        longest = max(batch.longest, self.state.tokens.shape[2] - 1)
        self.state = self.state.replace(rows, self._start(batch, prefix, self.config.num_beams, longest))
        if len(self.sentences) == 1:  # no other row has caches to keep
            self.decoder = batch.decoder
        else:
            self.decoder.replace(rows, batch.decoder)
        for row in done[:count]:
            self.sentences[row], self.begun = self.begun, self.begun + 1
        return done[count:]


# Decoders


class BeamCacheSlots:
    """Which slots of the KV cache of a sentence each of its beams sees.

    Keys and values are written once and never moved; a slot that no beam sees any more is written again. Beams differ
    in their last tokens, so that all need few more slots than one has tokens, where K caches need K times as many.
    """

    def __init__(self, batch: int, device: torch.device, beams: int = 1):
        self.visible = torch.zeros(batch, beams, 0, dtype=torch.bool, device=device)  # (B, K, C)
        self.bound = 0  # slots from here on are free; the host knows it without asking the device
        self.steps_at_once = steps_at_once(device)

    def reserve(self, beams: int) -> int:
        """The capacity C, enough for a step of so many beams; synchronises with the host where it may have to grow."""
        if self.bound + beams > self.visible.shape[2]:
            self.bound = length_of(self.visible.flatten(0, 1).any(dim=0))
            capacity = round_up(self.bound + beams * self.steps_at_once, _SLOTS)
            if not capacity <= self.visible.shape[2] <= capacity + _SLOTS:
                self.visible = resized(self.visible, capacity, 2)
        self.bound += beams
        return self.visible.shape[2]

    def append(self, parents: Tensor) -> Tensor:
        """The slots (B, K) of the next tokens, by `take_slots`."""
        self.visible, slots = take_slots(self.visible, parents)
        return slots

    def select(self, rows: Tensor) -> None:
        self.visible = self.visible[rows]

    def replace(self, rows: Tensor, other: "BeamCacheSlots") -> None:
        theirs = other.visible.expand(-1, self.visible.shape[1], -1)
        self.visible, self.bound = replace_rows(self.visible, rows, theirs, 2), max(self.bound, other.bound)


def take_slots(visible: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Go on from `parents` (B, K): each beam sees the slots (B, K, C) of its parent and one that was free, (B, K)."""
    visible = visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[2]))
    free = (~visible.any(dim=1)).cumsum(dim=1)  # (B, C), how many up to here
    nth = torch.arange(1, parents.shape[1] + 1, device=parents.device).expand_as(parents)
    slots = torch.searchsorted(free, nth.contiguous())  # the first K that are free
    return visible.scatter(2, slots[..., None], True), slots


def steps_at_once(device: torch.device) -> int:
    """Decoding steps between two looks of the host, each of which holds up what is queued on an accelerator."""
    return 1 if device.type == "cpu" else 16


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def length_of(visible: Tensor) -> int:
    """Up to the last True of a mask (N,)."""
    return int((visible * torch.arange(1, len(visible) + 1, device=visible.device)).max()) if len(visible) else 0


def resized(states: Tensor, size: int, dim: int) -> Tensor:
    """With so many entries in a dimension, zeros or False behind those that there are."""
    missing = size - states.shape[dim]
    return F.pad(states, (0, 0) * (states.dim() - 1 - dim % states.dim()) + (0, missing)) if missing else states


def replace_rows(mine: Tensor, rows: Tensor, theirs: Tensor, dim: int) -> Tensor:
    """With other rows, which may have more or fewer entries in a dimension, in the place of these."""
    if mine.dim() > 1:
        size = max(mine.shape[dim], theirs.shape[dim])
        mine, theirs = resized(mine, size, dim), resized(theirs, size, dim)
    return mine.index_copy(0, rows, theirs)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores: 0 where True, else the lowest number."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


class SlotCache(Cache):
    """Keys and values (B, H, C, ·) of the target, in the slots of a `BeamCacheSlots`."""

    slots: Tensor | None = None  # (B, K), of the next tokens; None: behind all that there are
    capacity = 0  # C

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write (B, H, K, ·) keys and values; all of them, (B, H, C, ·), come back."""
        if self.slots is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == len(self.layers):
            super().update(key_states[:, :, :0], value_states[:, :, :0], layer_idx)
        layer = self.layers[layer_idx]
        rows = torch.arange(len(key_states), device=key_states.device)[:, None]  # (B, 1)
        layer.keys, layer.values = (resized(each, self.capacity, 2) for each in (layer.keys, layer.values))
        layer.keys.transpose(1, 2)[rows, self.slots] = key_states.transpose(1, 2)
        layer.values.transpose(1, 2)[rows, self.slots] = value_states.transpose(1, 2)
        return layer.keys, layer.values


class ModuleDecoder:
    """A `Decoder` that calls the model: the beams of a sentence as one sequence, with a mask that parts them.

    `states` (B, S, D) are its encoder's, `mask` (B, S) has 0 for padding.
    """

    initial_beams = 1

    def __init__(self, model: PreTrainedModel, states: Tensor, mask: Tensor):
        self.model, self.states = model, states
        self.cache = EncoderDecoderCache(SlotCache(layer_class_to_replicate=DynamicLayer), DynamicCache())
        self.slots = BeamCacheSlots(len(states), states.device)
        self._set_mask(mask.to(states.device).ne(0))

    def _set_mask(self, visible: Tensor) -> None:
        self.visible, self.mask = visible, None  # (B, S), (B, 1, 1, S)
        if not bool(visible.all()):
            eager = self.model.config._attn_implementation == "eager"  # a Boolean mask hides whole rows, by zeros
            self.mask = (additive_mask(visible, self.states.dtype) if eager else visible)[:, None, None]

    def prefill(self, tokens: Tensor) -> None:
        self._forward(tokens)
        self.slots.visible, self.slots.bound = torch.ones_like(tokens[:, None], dtype=torch.bool), tokens.shape[1]

    def step(self, state: BeamState, advance: Advance) -> BeamState:
        cache = self.cache.self_attention_cache
        cache.capacity = self.slots.reserve(state.parents.shape[1])
        cache.slots = self.slots.append(state.parents)
        mask = additive_mask(self.slots.visible, self.states.dtype)[:, None]  # (B, 1, K, C)
        inputs = {"decoder_attention_mask": mask, "decoder_position_ids": state.positions[:, None]}  # (B, 1)
        return advance(state, self._forward(state.next_tokens, **inputs))

    def _forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        encoded = BaseModelOutput(last_hidden_state=self.states)
        kwargs |= {"past_key_values": self.cache, "use_cache": True, "return_dict": True}
        return self.model(encoder_outputs=encoded, attention_mask=self.mask, decoder_input_ids=tokens, **kwargs).logits

    def select(self, rows: Tensor) -> None:
        self.states = self.states[rows]
        self.slots.select(rows)
        self._set_mask(self.visible[rows])
        for cache in (self.cache.self_attention_cache, self.cache.cross_attention_cache):
            cache.batch_select_indices(rows)

    def replace(self, rows: Tensor, other: "ModuleDecoder") -> None:
        if not other.cache.is_updated:
            other._forward(torch.zeros_like(rows)[:, None])  # any token: a first call caches the source
        self.states = replace_rows(self.states, rows, other.states, 1)
        self.slots.replace(rows, other.slots)
        self._set_mask(replace_rows(self.visible, rows, other.visible, 1))
        for name in ("self_attention_cache", "cross_attention_cache"):
            layers = (getattr(decoder.cache, name).layers for decoder in (self, other))
            for mine, theirs in zip(*layers, strict=True):
                mine.keys = replace_rows(mine.keys, rows, theirs.keys, 2)
                mine.values = replace_rows(mine.values, rows, theirs.values, 2)


def beam_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    penalty: LengthPenalty,
    over: int | None = None,
    next_batch: NextBatch | None = None,
    **model_kwargs: Any,
) -> Any:
    """The best translations (N · R, T) of the batch and then of what `next_batch` brings; a `custom_generate`.

    Args:
        input_ids: (B · K, P), what each target begins with. model_kwargs: encoded source and mask, B · K times too.
        stopping_criteria: those of the length and the end tokens, which are known here.
        generation_config: with all defaults filled in. next_batch: that of `generate`.
        over: tokens that a translation may have more than its own source; None: `generation_config` has the limit.
    """
    beams, states = generation_config.num_beams, model_kwargs["encoder_outputs"][0]
    states, mask = states[::beams], model_kwargs.get("attention_mask")  # (B, S, D)
    mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device) if mask is None else mask[::beams]
    prefix = input_ids[::beams].to(states.device)  # where the source is, since an offloaded model is nowhere
    check_ids(prefix, model.config.target_vocab_size, "decoder_input_ids")

    def make_batch(mask: Tensor, states: Tensor) -> SearchBatch:
        decoder, longest = model.make_decoder(states, mask, beams, len(prefix)), generation_config.max_length
        limits = torch.full_like(mask[:, 0], longest, dtype=torch.long)
        if over is not None:  # by each sentence's own length; a later one may be longer than the first
            longest = _max_length(model.config, prefix.shape[1], mask.shape[1] + over)
            limits = (prefix.shape[1] + (mask.long().sum(dim=1) + over).clamp(min=1)).clamp(max=longest)
        return SearchBatch(decoder, limits.to(prefix.device), longest)

    def refill(count: int) -> SearchBatch | None:
        batch = None if next_batch is None else next_batch(count)
        if batch is None:
            return None
        if not 0 < len(batch[0]) <= count:
            raise ValueError(f"next_batch: asked for 1 to {count} sentences, it brought {len(batch[0])}; None ends")
        ids, mask = (each.to(prefix.device) for each in batch)
        return make_batch(mask, model.encode(ids, mask).last_hidden_state)

    config, steps = SearchConfig.of(generation_config, penalty), steps_at_once(states.device)
    batch: SearchBatch | None = make_batch(mask, states)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    while batch is not None:  # more than once only with processors, which count on rows of one length
        rows = prefix if not found else prefix[:1].expand(len(batch.limits), -1)
        refilled = refill if next_batch and not logits_processor else None
        found += BeamSearch(batch, rows, config, penalty, logits_processor, refilled, steps).run()
        batch = refill(len(prefix)) if logits_processor else None
    lengths, scores = (torch.cat(parts) for parts in list(zip(*found, strict=True))[1:])  # (N · R,)
    width = int(lengths.max())
    tokens = torch.cat([resized(tokens, width, 1) for tokens, _, _ in found])  # (N · R, T)
    tokens = tokens.masked_fill(torch.arange(width, device=tokens.device) >= lengths[:, None], config.pad_token_id)
    if not generation_config.return_dict_in_generate:
        return tokens
    if beams == 1:
        return GenerateEncoderDecoderOutput(sequences=tokens)
    return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores)
