"""Beam search (§6.1 of the paper): `BeamSearch` chooses the tokens, a `Decoder` computes their logits.

The state of a search is tensors of fixed shape, which the host reads only every few steps. A step of search and
decoder can therefore be compiled as one, or captured as a CUDA graph.

Shapes: B sentences in the batch, K beams, P tokens of the prefix, T capacity of a hypothesis in tokens, V target
vocabulary, R hypotheses returned, n best candidates of a beam.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList

REFILL_SHARE = 0.1  # of the batch that joins at once: each time costs an encoder pass and copies the KV caches
_COMPACT_SHARE = 0.2  # of free rows that are removed at once: this copies the KV caches too
_CAPACITY_UNIT = 32  # the capacity of hypotheses is a multiple of it: few shapes
_NO_BEAM = -1e9  # log-probability of a beam without a hypothesis
_CHUNK = 2**19  # logits that `topk_log_probs` reads at a time on a CPU: two megabytes stay in the cores' caches
_BLOCK, _LARGE = 64, 2**14  # `topk` searches blocks of so many tokens, in a vocabulary from that size on


@dataclass(frozen=True)
class LengthPenalty:
    """log P / penalty(length) compares hypotheses: "gnmt" is ((5 + length) / 6)^α (Wu et al. 2016, arXiv 1609.08144,
    Eq. 14), "power" is Hugging Face's length^α. The end token counts.
    """

    alpha: float
    formula: str
    counted: int = 0  # tokens of the prefix that count, such as one of a language

    def __call__(self, lengths: Tensor) -> Tensor:
        return ((5 + lengths) / 6 if self.formula == "gnmt" else lengths) ** self.alpha


class BeamState(NamedTuple):
    """The running hypotheses of a batch, the best first, and the best that have ended."""

    tokens: Tensor  # (B, K, T), the prefix included. K may be 1 at first
    next_tokens: Tensor  # (B, K), their last tokens, not yet read by the decoder
    parents: Tensor  # (B, K), the beams of the previous step that they extend
    log_probs: Tensor  # (B, K)
    lengths: Tensor  # (B,), tokens of each running hypothesis
    limits: Tensor  # (B,), tokens that each may have
    enough: Tensor  # (B,), ended hypotheses that no running one may beat at the end of the search
    ended_tokens: Tensor  # (B, K, T)
    ended_lengths: Tensor  # (B, K)
    ended_scores: Tensor  # (B, K), -inf where none has ended
    done: Tensor  # (B,), bool: the ended hypotheses are final
    penalties: Tensor  # (T + 1,), by length: data, so that one compiled step serves every α

    @classmethod
    def start(
        cls, prefix: Tensor, limits: Tensor, enough: Tensor, running: int, ended: int, penalties: Tensor
    ) -> "BeamState":
        """Start `running` beams with the prefix (B, P), one of them a hypothesis, and room for `ended` hypotheses."""
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
            enough=enough,
            ended_tokens=prefix.new_zeros(batch, ended, capacity),
            ended_lengths=prefix.new_zeros(batch, ended),
            ended_scores=log_probs.new_full((batch, ended), -torch.inf),
            done=torch.zeros_like(limits, dtype=torch.bool),
            penalties=penalties,
        )

    @property
    def positions(self) -> Tensor:
        """Positions of `next_tokens`, (B,). They stay as they are for a sentence that is done."""
        return torch.minimum(self.lengths, self.limits - 1) - 1

    def select(self, rows: Tensor) -> "BeamState":
        """Keep these sentences."""
        return BeamState(*(each[rows] for each in self[:-1]), self.penalties)  # type: ignore[call-arg]

    def replace(self, rows: Tensor, other: "BeamState") -> "BeamState":
        """Replace these sentences by the sentences of `other`."""
        both = ((mine, rows, theirs) for mine, theirs in zip(self[:-1], other[:-1], strict=True))
        penalties = max(self.penalties, other.penalties, key=len)
        return BeamState(*(replace_rows(*each, -1) for each in both), penalties)  # type: ignore[call-arg]


@dataclass(frozen=True)
class SearchConfig:
    """The constants of a search, a key for compiled steps. Called, it extends all beams by a token (ibid., §7)."""

    num_beams: int
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    forced_eos_token_id: int | None
    can_grow: bool  # a longer hypothesis can win by its penalty alone

    @classmethod
    def of(cls, generation_config: GenerationConfig, penalty: LengthPenalty) -> "SearchConfig":
        """From a generation config with all defaults filled in.

        The paper's search ends when no beam can win any more. With Hugging Face's penalty `early_stopping` decides: by
        default transformers compares at the present length, and may miss a longer hypothesis.
        """
        ends, forced = generation_config.eos_token_id, generation_config.forced_eos_token_id
        return cls(
            num_beams=generation_config.num_beams,
            early_stopping=generation_config.early_stopping,
            eos_token_ids=() if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
            pad_token_id=generation_config.pad_token_id or 0,
            forced_eos_token_id=forced[0] if isinstance(forced, list) else forced,
            can_grow=penalty.alpha > 0 and (penalty.formula == "gnmt" or generation_config.early_stopping == "never"),
        )

    @property
    def num_candidates(self) -> int:
        """Candidates per step: up to K may end with each end token, and K more must be able to continue."""
        return 1 if self.num_beams == 1 else self.num_beams * max(2, 1 + len(self.eos_token_ids))

    def __call__(self, state: BeamState, logits: Tensor) -> BeamState:
        """The next state, from the logits (B, K, V) of the next tokens."""
        logits = self.force_eos(state, logits)
        count = min(self.num_candidates, logits.shape[2])
        return self.extend(state, *topk_log_probs(logits, count, normalize=self.num_beams > 1))

    def force_eos(self, state: BeamState, logits: Tensor) -> Tensor:
        """`forced_eos_token_id` at the limit of each sentence. The processor of that name knows only the batch's."""
        if self.forced_eos_token_id is None:
            return logits
        forced = torch.full_like(logits, -torch.inf)
        forced[..., self.forced_eos_token_id] = 0
        return torch.where((state.lengths + 1 == state.limits)[:, None, None], forced, logits)

    def extend(self, state: BeamState, log_probs: Tensor, tokens: Tensor) -> BeamState:
        """Continue with the best candidates (B, K, n) that do not end. Of the best K, keep the ones that end."""
        if self.num_beams == 1:
            return self._extend_greedily(state, tokens[:, :, 0])
        beams, (running, each) = self.num_beams, log_probs.shape[1:]
        total, tokens = (log_probs + state.log_probs[..., None]).flatten(1), tokens.flatten(1)  # (B, K · n)
        missing = self.num_candidates - total.shape[1]
        if missing > 0:  # in a vocabulary smaller than the beam
            total, tokens = F.pad(total, (0, missing), value=2 * _NO_BEAM), F.pad(tokens, (0, missing))
        log_probs, index = total.topk(self.num_candidates, dim=1)
        tokens = tokens.gather(1, index)  # (B, 2 K), as are all candidates, the best first
        parents = (index // each).clamp(max=running - 1)
        length = state.lengths + 1
        at_limit = length == state.limits
        ends = at_limit[:, None].expand_as(tokens)
        for eos in self.eos_token_ids:
            ends = ends | (tokens == eos)

        # Only the K best may end. The rest can only continue.
        scores = log_probs[:, :beams] / state.penalties[length][:, None]
        scores = scores.masked_fill(~ends[:, :beams] | state.done[:, None], -torch.inf)
        ended_scores, best = torch.cat([state.ended_scores, scores], dim=1).topk(beams, dim=1)  # (B, K)
        new, new_lengths = _append(state, parents[:, :beams], tokens[:, :beams]), length[:, None].expand(-1, beams)
        ended_tokens = torch.cat([state.ended_tokens, new], dim=1).gather(1, best[..., None].expand_as(new))

        log_probs, going = log_probs.masked_fill(ends, _NO_BEAM).topk(beams, dim=1)  # (B, K)
        parents, tokens = parents.gather(1, going), tokens.gather(1, going)
        bound = log_probs[:, 0] / state.penalties[state.limits if self.can_grow else length]
        last = ended_scores.gather(1, state.enough[:, None] - 1)[:, 0]  # (B,)
        done = state.done | at_limit | (bound <= last)
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
        """Append the most probable tokens (B, 1). Tokens after the end of a hypothesis do not count."""
        lengths = torch.where(state.done, state.lengths, state.lengths + 1)
        ends = [tokens[:, 0] == eos for eos in self.eos_token_ids]
        done = torch.stack([state.done, lengths == state.limits, *ends]).any(dim=0)
        written = state.tokens.scatter(2, state.lengths[:, None, None], tokens[..., None])  # (B, 1, T)
        ended = {"ended_tokens": written, "ended_lengths": lengths[:, None]}
        return state._replace(tokens=written, next_tokens=tokens, lengths=lengths, done=done, **ended)


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
    """`scores.topk(count)` of (N, V). On a CPU only the blocks with the highest maxima are searched."""
    size, device = scores.shape[1], scores.device
    if device.type != "cpu" or size < max(_LARGE, 2 * count * _BLOCK):
        return scores.topk(count)
    whole = size // _BLOCK * _BLOCK  # tokens in blocks. The rest are always read
    blocks = scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=2).topk(count).indices  # (N, n)
    tokens = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)  # (N, n, 64) -> (N, n · 64)
    tokens = torch.cat([tokens, torch.arange(whole, size).expand(len(scores), -1)], dim=1)
    values, index = scores.gather(1, tokens).topk(count)
    return values, tokens.gather(1, index)


Advance: TypeAlias = Callable[[BeamState, Tensor], BeamState]


class Decoder(Protocol):
    """The interface between a search and its decoder: next-token logits and KV caches of a batch."""

    initial_beams: int  # K of the first step

    def prefill(self, tokens: Tensor) -> None:
        """Read the first tokens (B, P - 1) of every beam: the prefix but for its last token."""

    def step(self, state: BeamState, advance: Advance) -> BeamState:
        """Read `state.next_tokens` and pass their logits (B, K, V) to `advance`. Compiled as one."""

    def select(self, rows: Tensor) -> None:
        """Keep these sentences."""

    def replace(self, rows: Tensor, other: Any) -> None:
        """Replace these sentences by the sentences of `other`, after its prefill."""


class SearchBatch(NamedTuple):
    """n sentences that start together."""

    decoder: Decoder
    prefix: Tensor  # (n, P), the first tokens of their translations
    source_lengths: Tensor  # (n,)
    keys: Sequence[Any]  # returned with their translations
    wanted: Sequence[int]  # hypotheses to return, K at most


class Hypotheses(NamedTuple):
    """The translations of a sentence, the best first."""

    tokens: Tensor  # (R, T), the prefix and the end token included
    lengths: Tensor  # (R,)
    scores: Tensor  # (R,)


def is_hypothesis(score: float | None) -> bool:
    """Return whether a beam with this score has a hypothesis. A greedy search has no scores, None."""
    return score is None or score > _NO_BEAM / 10


def steps_at_once(device: torch.device) -> int:
    """Decoding steps between host synchronisations, because each stalls the accelerator."""
    return 1 if device.type == "cpu" else 16


@dataclass(eq=False)
class BeamSearch:
    """A running batch of sentences: they join at any step, and leave when their translations are final.

    Greedy search is the case of one beam.
    """

    config: SearchConfig
    penalty: LengthPenalty
    max_length: int  # tokens of a translation, the prefix included, at most
    over: int | None = None  # tokens that it may have more than its source, without the prefix. None: no such limit
    processors: LogitsProcessorList | None = None  # of `generate`
    fixed_rows: bool = False  # processors identify a sentence by its row: no other may join a running batch

    def __post_init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        """Sentences that are being translated."""
        return sum(key is not None for key in self.keys)

    def clear(self) -> None:
        """Drop all sentences, and free their caches."""
        self.state: BeamState | None = None
        self.decoder: Decoder | None = None
        self.length = 0  # tokens of the sentences that started first
        self.keys: list[Any] = []  # of the sentence in each row, None in a free row
        self.wanted: list[int] = []

    def join(self, batch: SearchBatch) -> None:
        """Start sentences in free rows, and in new ones if these are too few."""
        if not len(self):
            self.clear()
        state = self._start(batch)
        if self.state is None or self.decoder is None:
            self.state, self.decoder, self.length = state, batch.decoder, batch.prefix.shape[1]
            self.keys, self.wanted = list(batch.keys), list(batch.wanted)
            return
        missing = len(batch.keys) - (len(self.keys) - len(self))
        if missing > 0:
            self._select([*range(len(self.keys)), *[0] * missing])  # copies of the first row, to be replaced
            self.keys[-missing:] = [None] * missing
        free = [row for row, key in enumerate(self.keys) if key is None][: len(batch.keys)]
        rows = torch.tensor(free, device=batch.prefix.device)
        self.state = self.state.replace(rows, state)
        self.decoder.replace(rows, batch.decoder)
        for row, key, wanted in zip(free, batch.keys, batch.wanted, strict=True):
            self.keys[row], self.wanted[row] = key, wanted

    def _start(self, batch: SearchBatch) -> BeamState:
        prefix, given, beams = batch.prefix, batch.prefix.shape[1], self.config.num_beams
        limits = torch.full_like(prefix[:, 0], self.max_length)
        if self.over is not None:
            limits = (given + (batch.source_lengths + self.over).clamp(min=1)).clamp(max=self.max_length)
        running, longest = batch.decoder.initial_beams, int(limits.max())
        if self.state is not None:
            running, longest = beams, max(longest, self.state.tokens.shape[2] - 1)
        if given > 1:
            batch.decoder.prefill(prefix[:, :-1])
        capacity = -(-(longest + 1) // _CAPACITY_UNIT) * _CAPACITY_UNIT
        lengths = torch.arange(capacity + 1, device=prefix.device) - given + self.penalty.counted
        penalties = self.penalty(lengths.clamp(min=1).float())
        # The paper's search ends when no beam can beat the wanted hypotheses, Hugging Face's with K of them.
        enough = batch.wanted if self.penalty.formula == "gnmt" else [beams] * len(prefix)
        return BeamState.start(prefix, limits, torch.tensor(enough, device=prefix.device), running, beams, penalties)

    def step(self) -> list[tuple[Any, Hypotheses]]:
        """Decode the next token of every sentence. Return keys and translations of those that are done."""
        self._compact()
        if self.state is None or self.decoder is None:
            return []
        advance = self._process_and_extend if self.processors else self.config
        for _ in range(steps_at_once(self.state.done.device)):
            self.state = self.decoder.step(self.state, advance)
            self.length += 1
        done = self.state.done.tolist()  # synchronises with the host
        finished = [row for row, key in enumerate(self.keys) if done[row] and key is not None]
        if not finished:
            return []
        rows = torch.tensor(finished, device=self.state.done.device)
        ended = self.state.ended_tokens[rows], self.state.ended_lengths[rows], self.state.ended_scores[rows]
        results = []
        for row, *hypotheses in zip(finished, *ended, strict=True):
            best = slice(self.wanted[row])
            results.append((self.keys[row], Hypotheses(*(part[best] for part in hypotheses))))
            self.keys[row] = None
        if not len(self):
            self.clear()
        return results

    def drop(self, keys: set[Any]) -> None:
        """Give up sentences and free their rows."""
        self.keys = [None if key in keys else key for key in self.keys]

    def _process_and_extend(self, state: BeamState, logits: Tensor) -> BeamState:
        """`SearchConfig.__call__` with logits processors. They take hypotheses of one length: one call for each."""
        beams, running = self.config.num_beams, logits.shape[1]
        # transformers shows them logits in a greedy search, log-probabilities in a beam search
        scores = logits.float() if beams == 1 else logits.float().log_softmax(dim=-1)  # (B, K, V)
        groups: dict[int, Any] = {self.length: slice(None)}
        if not self.fixed_rows:
            groups = {length: state.lengths == length for length in set(state.lengths.tolist())}
        processed = torch.empty_like(scores)
        for length, rows in groups.items():
            tokens = state.tokens[rows, :, :length].expand(-1, beams, -1).flatten(0, 1)  # (n · K, length)
            shown = scores[rows].expand(-1, beams, -1).flatten(0, 1)  # (n · K, V)
            shown = self.processors(tokens, shown)  # type: ignore[misc]
            processed[rows] = shown.unflatten(0, (-1, beams))[:, :running]
        scores = self.config.force_eos(state, processed)
        return self.config.extend(state, *scores.topk(min(self.config.num_candidates, scores.shape[2]), dim=2))

    def _compact(self) -> None:
        """Remove the free rows once they are many."""
        kept = [row for row, key in enumerate(self.keys) if key is not None]
        free = len(self.keys) - len(kept)
        if not kept:
            self.clear()
        elif free and not self.fixed_rows and free >= _COMPACT_SHARE * len(self.keys):
            self._select(kept)

    def _select(self, rows: list[int]) -> None:
        if self.state is not None and self.decoder is not None:
            index = torch.tensor(rows, device=self.state.done.device)
            self.state = self.state.select(index)
            self.decoder.select(index)
        self.keys = [self.keys[row] for row in rows]
        self.wanted = [self.wanted[row] for row in rows]


# Replacing the rows of a batch


def resized(states: Tensor, size: int, dim: int) -> Tensor:
    """Resize `dim` to `size`, padding with zeros (or False)."""
    missing = size - states.shape[dim]
    return F.pad(states, (0, 0) * (states.dim() - 1 - dim % states.dim()) + (0, missing)) if missing else states


def replace_rows(mine: Tensor, rows: Tensor, theirs: Tensor, dim: int) -> Tensor:
    """Replace `rows` of `mine` by `theirs`. `dim` is padded to the longer of the two."""
    if mine.dim() > 1:
        size = max(mine.shape[dim], theirs.shape[dim])
        mine, theirs = resized(mine, size, dim), resized(theirs, size, dim)
    return mine.index_copy(0, rows, theirs)
