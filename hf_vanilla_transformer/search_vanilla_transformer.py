"""Beam search (§6.1 of the paper), which chooses tokens; a `Decoder`, the seam, computes their logits.

The state of a search is tensors of fixed shape, read on the host only every few steps: a step of search and decoder
can be compiled, or captured as a CUDA graph, as one.

Shapes: B sentences in the batch, K beams, P tokens of the prefix, T capacity of a hypothesis in tokens, V target
vocabulary, R hypotheses returned, n best candidates of a beam.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList

_NO_BEAM = -1e9  # log-probability of a beam without a hypothesis
_COMPACT_SHARE, _REFILL_SHARE = 0.2, 0.1  # of finished rows: compacting copies the caches, refilling encodes
SLOTS = 16  # by which a KV cache grows: few shapes, and whole tiles of matrix units
_CHUNK = 2**19  # logits that `topk_log_probs` reads at a time on a CPU: two megabytes stay in the cores' caches
_BLOCK, _LARGE = 64, 2**14  # `topk` searches blocks of so many tokens, in a vocabulary from that size on


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
        default transformers compares at the present length, and may miss a longer hypothesis."""
        beams, wanted = generation_config.num_beams, generation_config.num_return_sequences or 1
        ends, forced = generation_config.eos_token_id, generation_config.forced_eos_token_id
        gnmt, early_stopping = penalty.formula == "gnmt", generation_config.early_stopping
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
        if self.num_beams == 1:
            return self._extend_greedily(state, tokens[:, :, 0])
        beams, (running, each) = self.num_beams, log_probs.shape[1:]
        total, tokens = (log_probs + state.log_probs[..., None]).flatten(1), tokens.flatten(1)  # (B, K · n)
        missing = self.num_candidates - total.shape[1]
        if missing > 0:  # in a vocabulary smaller than the beam
            total, tokens = F.pad(total, (0, missing), value=2 * _NO_BEAM), F.pad(tokens, (0, missing))
        log_probs, index = total.topk(self.num_candidates, dim=1)
        tokens = tokens.gather(1, index)  # (B, 2 K), as are all candidates; the best first
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

    def _extend_greedily(self, state: BeamState, tokens: Tensor) -> BeamState:
        """The most probable tokens (B, 1) go on. What has ended is final; what is written behind it does not count."""
        lengths = torch.where(state.done, state.lengths, state.lengths + 1)
        ends = [tokens[:, 0] == eos for eos in self.eos_token_ids]
        done = torch.stack([state.done, lengths == state.limits, *ends]).any(dim=0)
        written = state.tokens.scatter(2, state.lengths[:, None, None], tokens[..., None])  # (B, 1, T)
        found = {"ended_tokens": written, "ended_lengths": lengths[:, None]}
        return state._replace(tokens=written, next_tokens=tokens, lengths=lengths, done=done, **found)


def _append(state: BeamState, parents: Tensor, tokens: Tensor) -> Tensor:
    """Hypotheses (B, K, T) that extend these beams by these tokens, (B, K) each."""
    past = state.tokens.gather(1, parents[..., None].expand(-1, -1, state.tokens.shape[2]))
    return past.scatter(2, state.lengths[:, None, None].expand(-1, parents.shape[1], 1), tokens[..., None])


def topk_log_probs(logits: Tensor, count: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """The highest log-probabilities (without `normalize`: logits) and their tokens, (…, count) each, of (…, V)."""
    rows = logits.flatten(0, -2)
    at_once = max(1, _CHUNK // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    found = []
    for chunk in rows.split(at_once):
        scores = chunk.log_softmax(dim=-1, dtype=torch.float32) if normalize else chunk.float()
        found.append(topk(scores, count) if count > 1 else scores.max(dim=1, keepdim=True))  # which is faster
    values, tokens = (torch.cat(parts).unflatten(0, logits.shape[:-1]) for parts in zip(*found, strict=True))
    return values, tokens


def topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)` of (N, V); on a CPU only the blocks with the highest maxima are searched."""
    size, device = scores.shape[1], scores.device
    if device.type != "cpu" or size < max(_LARGE, 2 * count * _BLOCK):
        return scores.topk(count)
    whole = size // _BLOCK * _BLOCK  # tokens in blocks; the rest are always read
    blocks = scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=2).topk(count).indices  # (N, n)
    tokens = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)  # (N, n, 64) -> (N, n · 64)
    tokens = torch.cat([tokens, torch.arange(whole, size).expand(len(scores), -1)], dim=1)
    values, index = scores.gather(1, tokens).topk(count)
    return values, tokens.gather(1, index)


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
    sentences are done, brings at most so many others, with the first one's prefix, or None (continuous batching)."""

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
        lengths = torch.arange(round_up(longest + 1, 2 * SLOTS) + 1, device=prefix.device) - prefix.shape[1]
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


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


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
