"""Beam search (§6.1 of the paper): `BeamSearch` chooses the tokens, a `Decoder` computes their logits.

Who calls whom, from `generate` to a token:

    generate -> plan_search, encode, transformers' generate -> beam_search                 generation_…
    beam_search -> make_decoder, BeamSearch.join -> BeamState.start, Decoder.prefill       once, and at each refill
    beam_search -> BeamSearch.step -> Decoder.step -> Decoder.logits, SearchConfig.advance for each token
    SearchConfig.advance -> topk_log_probs (GPU: likely_tokens), extend                    chooses the tokens
    SearchConfig.extend -> _best, _chosen                                                  hypotheses end or go on
    BeamSearch.step -> Decoder.read_done -> Hypotheses                                     for finished sentences

The state of a search is tensors of fixed shape, which the host reads only every few steps. A step of search and
decoder can therefore be captured as a CUDA graph.

Shapes: B sentences in the batch, K beams, P tokens of the prefix, T capacity of a hypothesis in tokens, V target
vocabulary, R hypotheses returned, n best candidates of a beam, N of a sentence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ForcedEOSTokenLogitsProcessor, GenerationConfig, LogitsProcessorList

# Of the batch that joins at once: each time costs an encoder pass and copies the KV caches.
REFILL_SHARE = 0.1
_COMPACT_SHARE = 0.2  # of free rows that are removed at once: this copies the KV caches too
_CAPACITY_UNIT = 32  # the capacity of hypotheses is a multiple of it: few shapes
# The score that `generate` returns for a row without a hypothesis. It is transformers' too.
_NO_HYPOTHESIS = -1e9
# The searches of OpenNMT-py, before version 3 and from version 3 on, and of JoeyNMT 2. eole has OpenNMT-py 3's.
BEAM_SEARCH_RULES = ("opennmt2", "opennmt3", "joeynmt")
# Logits that `topk_log_probs` reads at a time on a CPU: two megabytes stay in the cores' caches.
_CHUNK = 2**19
_BLOCK = 64  # `likely_tokens` searches blocks of so many tokens,
_LARGE = 2**14  # in a vocabulary from this size on,
_LARGE_ON_GPU = 2**12  # or this one: there torch's own reads all scores five times


@dataclass(frozen=True)
class LengthPenalty:
    """log P / penalty(length) compares hypotheses: "gnmt" is ((5 + length) / 6)^α (Wu et al. 2016, arXiv 1609.08144,
    Eq. 14), "power" is Hugging Face's length^α. The end token counts.
    """

    alpha: float
    formula: str
    counted: int = 0  # tokens of the prefix that count, such as one of a language

    def __call__(self, lengths: Tensor) -> Tensor:
        base = (5 + lengths) / 6 if self.formula == "gnmt" else lengths
        return base**self.alpha

    def table(self, capacity: int, prefix: int, device: torch.device) -> Tensor:
        """The penalties of hypotheses of 0 … `capacity` tokens, of which `prefix` were given: (capacity + 1,)."""
        lengths = torch.arange(capacity + 1, device=device) - prefix + self.counted
        return self(lengths.clamp(min=1).float())

    def log_probability(self, score: float, length: int) -> float:
        """Return log P of a hypothesis with this score, of `length` tokens without those of the prefix."""
        counted = torch.tensor(float(max(length + self.counted, 1)), device="cpu")
        return score * self(counted).item()


class BeamState(NamedTuple):
    """The running hypotheses of a batch, the best first, and the best that have ended."""

    tokens: Tensor  # (B, K, T), the prefix included. K may be 1 at first
    next_tokens: Tensor  # (B, K), their last tokens, not yet read by the decoder
    parents: Tensor  # (B, K), the beams of the previous step that they extend
    log_probs: Tensor  # (B, K)
    lengths: Tensor  # (B,), tokens of each running hypothesis
    limits: Tensor  # (B,), tokens that each may have
    limit_penalties: Tensor  # (B,), of hypotheses with so many
    # (B,), the number of the ended hypothesis that no running one may beat at the end of the search.
    decisive: Tensor
    ended_tokens: Tensor  # (B, K, T)
    ended_lengths: Tensor  # (B, K)
    ended_scores: Tensor  # (B, K), -inf where none has ended
    # (B, K), bool: at some step the candidate of this rank has ended, or there was none.
    end_places: Tensor
    done: Tensor  # (B,), bool: the ended hypotheses are final

    @classmethod
    def start(
        cls,
        prefix: Tensor,
        limits: Tensor,
        penalties: Tensor,
        decisive: Tensor,
        running: int,
        ended: int,
    ) -> "BeamState":
        """Start hypotheses with the prefix (B, P), of up to T tokens if there are T + 1 penalties.

        Of the `running` beams one is a hypothesis. There is room for `ended` hypotheses.
        """
        batch, length = prefix.shape
        capacity = len(penalties) - 1
        log_probs = torch.zeros(batch, running, dtype=torch.float32, device=prefix.device)
        log_probs[:, 1:] = -torch.inf
        return cls(
            tokens=F.pad(prefix, (0, capacity - length))[:, None].repeat(1, running, 1),
            next_tokens=prefix[:, -1:].repeat(1, running),
            parents=prefix.new_zeros(batch, running),
            log_probs=log_probs,
            lengths=torch.full_like(limits, length),
            limits=limits,
            limit_penalties=penalties[limits],
            decisive=decisive,
            ended_tokens=prefix.new_zeros(batch, ended, capacity),
            ended_lengths=prefix.new_zeros(batch, ended),
            ended_scores=log_probs.new_full((batch, ended), -torch.inf),
            end_places=torch.zeros(batch, ended, dtype=torch.bool, device=prefix.device),
            done=torch.zeros_like(limits, dtype=torch.bool),
        )

    @classmethod
    def of_prefix(cls, tokens: Tensor) -> Iterator["BeamState"]:
        """The states of one beam with which a decoder reads first tokens (B, P) one by one."""
        for length in range(1, tokens.shape[1] + 1):
            limits = torch.full_like(tokens[:, 0], length + 1)
            yield cls.start(
                prefix=tokens[:, :length],
                limits=limits,
                penalties=torch.ones(length + 3, device=tokens.device),
                decisive=limits,
                running=1,
                ended=1,
            )

    @property
    def positions(self) -> Tensor:
        """Positions of `next_tokens`, (B,). They stay as they are for a sentence that is done."""
        return torch.minimum(self.lengths, self.limits - 1) - 1

    def select(self, rows: Tensor) -> "BeamState":
        """Keep these sentences."""
        return BeamState(*(part[rows] for part in self))

    def replace(self, rows: Tensor, other: "BeamState") -> "BeamState":
        """Replace these sentences by the sentences of `other`."""
        pairs = zip(self, other, strict=True)
        return BeamState(*(replace_rows(mine, rows, theirs, -1) for mine, theirs in pairs))


@dataclass(frozen=True)
class SearchConfig:
    """The constants of a search. A captured step belongs to one."""

    num_beams: int
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    # One of these is the last token of a hypothesis at its limit.
    forced_eos_token_id: tuple[int, ...] | None
    can_grow: bool  # a longer hypothesis can win by its penalty alone
    rule: str | None = None  # of BEAM_SEARCH_RULES. None: the paper's or Hugging Face's search

    @classmethod
    def of(cls, generation_config: GenerationConfig, penalty: LengthPenalty) -> "SearchConfig":
        """From a generation config with all defaults filled in.

        The paper's search ends when no beam can win any more. With Hugging Face's penalty `early_stopping` decides: by
        default transformers compares at the present length, and may miss a longer hypothesis. The field
        `beam_search_rule` chooses one of `BEAM_SEARCH_RULES` instead.

        Raises:
            ValueError: `beam_search_rule` is none of them.
        """
        rule = getattr(generation_config, "beam_search_rule", None)
        if rule is not None and rule not in BEAM_SEARCH_RULES:
            raise ValueError(
                f"beam_search_rule={rule!r}: it must be one of {', '.join(BEAM_SEARCH_RULES)}"
            )
        until_no_beam_can_win = (
            penalty.formula == "gnmt" or generation_config.early_stopping == "never"
        )
        return cls(
            num_beams=generation_config.num_beams,
            early_stopping=generation_config.early_stopping,
            eos_token_ids=_token_ids(generation_config.eos_token_id),
            forced_eos_token_id=_token_ids(generation_config.forced_eos_token_id) or None,
            can_grow=penalty.alpha > 0 and until_no_beam_can_win,
            rule=rule,
        )

    @property
    def num_candidates(self) -> int:
        """Candidates per step: up to K may end with each end token, and K more must be able to continue."""
        if self.num_beams == 1:
            return 1
        return self.num_beams * max(2, 1 + len(self.eos_token_ids))

    def advance(self, state: BeamState, logits: Tensor, penalties: Tensor) -> BeamState:
        """Extend all hypotheses by a token (Wu et al. 2016, §7).

        Args:
            state: of the hypotheses without the token.
            logits: (B, K, V), of the token.
            penalties: (T + 1,), by length. They are data, so that one captured step serves every α.
        """
        count = min(self.num_candidates, logits.shape[2])
        tokens: Tensor | None
        is_selection_cheap = logits.device.type == "cpu" and count < logits.shape[2]
        if self.num_beams == 1 or is_selection_cheap:
            log_probs, tokens = topk_log_probs(logits, count, normalize=self.num_beams > 1)
        else:
            # `extend` selects the best of all beams at once: a kernel less.
            scores = logits.log_softmax(dim=-1, dtype=torch.float32)
            log_probs, tokens = likely_tokens(scores, count)
        return self.extend(state, log_probs, tokens, penalties)

    def force_eos(self, scores: Tensor, at_limit: Tensor) -> Tensor:
        """Return scores (B, K, V) that leave `forced_eos_token_id` alone to sentences at their limit (B,)."""
        scores = scores.masked_fill(at_limit[:, None, None], -torch.inf)
        for token in self.forced_eos_token_id or ():
            scores[..., token].masked_fill_(at_limit[:, None], 0)
        return scores

    def extend(
        self, state: BeamState, log_probs: Tensor, tokens: Tensor | None, penalties: Tensor
    ) -> BeamState:
        """Continue with the best candidates that do not end. Of the best K, keep the ones that end.

        Args:
            log_probs: (B, K, n), of candidates of each beam. They are overwritten.
            tokens: (B, K, n), the candidates. None if they are all tokens.
        """
        if self.num_beams == 1:
            assert tokens is not None
            return self._extend_greedily(state, log_probs[:, :, 0], tokens[:, :, 0])
        beams = self.num_beams
        length = state.lengths + 1  # (B,)
        log_probs, parents, tokens = self._best(state, log_probs, tokens)  # (B, N) each
        at_limit = length == state.limits  # (B,)
        ends = at_limit[:, None].expand_as(tokens)
        for eos in self.eos_token_ids:
            ends = ends | (tokens == eos)

        # Only the K best may end, of a sentence that is not done. The rest can only continue.
        penalty = penalties[length]  # (B,)
        scores = log_probs[:, :beams] / penalty[:, None]
        scores = scores.masked_fill(ends[:, :beams] <= state.done[:, None], -torch.inf)
        if len(self.eos_token_ids) > 1:
            scores = F.pad(scores, (0, self.num_candidates - 2 * beams), value=-torch.inf)
        continuing = log_probs.masked_fill(ends, -torch.inf)  # all -inf at the limit
        if self.rule == "joeynmt":
            # one that ends stays in the beam with further tokens, and does not end again
            continuing = log_probs.clone()
            again = self._have_ended(state).gather(1, parents[:, :beams])
            scores[:, :beams].masked_fill_(again, -torch.inf)
        if self.rule is not None:
            # one that ends takes the place of a beam, in OpenNMT-py's searches for a step
            continuing[:, beams:] = -torch.inf

        # Choose the best K of those that have ended, and the best K that go on.
        choices = torch.cat([state.ended_scores, scores, continuing], dim=1)  # (B, 2 · N)
        values, index = choices.unflatten(1, (2, -1)).topk(beams, dim=2)  # (B, 2, K)
        ended_scores, log_probs = values.unbind(1)

        worst = ended_scores.gather(1, state.decisive[:, None])[:, 0]  # (B,)
        end_places = state.end_places
        if self.rule is not None:
            end_places = end_places | ends[:, :beams] | log_probs.isneginf()
            done = state.done | at_limit | self._ends_by_rule(ends, end_places, worst)
        else:
            # No hypothesis can win any more, or none is left.
            bound = log_probs[:, 0] / (state.limit_penalties if self.can_grow else penalty)
            done = state.done >= (bound > worst)  # also if they are no numbers
            if self.early_stopping is True:
                done = done | (ended_scores[:, beams - 1] > -torch.inf)
        return _chosen(state, length, parents, tokens, index)._replace(
            log_probs=log_probs,
            lengths=torch.where(state.done, state.lengths, length),
            ended_scores=ended_scores,
            end_places=end_places,
            done=done,
        )

    def _ends_by_rule(self, ends: Tensor, end_places: Tensor, worst: Tensor) -> Tensor:
        """Return for which sentences (B,) the search ends by `rule`.

        Args:
            ends: (B, N), the candidates that end.
            end_places: (B, K), of `BeamState`, after this step.
            worst: (B,), the score of the last hypothesis that has to end. -inf if too few have ended.
        """
        if self.rule == "joeynmt":
            return end_places.all(dim=1)
        # The best candidate ends, or before version 3 once did, and enough have ended.
        best_ended = end_places[:, 0] if self.rule == "opennmt2" else ends[:, 0]
        return best_ended & (worst > -torch.inf)

    def _have_ended(self, state: BeamState) -> Tensor:
        """Return which running hypotheses have an end token, (B, K) Boolean."""
        places = torch.arange(state.tokens.shape[2], device=state.tokens.device)
        written = places < state.lengths[:, None, None]  # (B, 1, T)
        ended = torch.zeros_like(state.tokens, dtype=torch.bool)  # (B, K, T)
        for eos in self.eos_token_ids:
            ended = ended | (state.tokens == eos)
        return (ended & written).any(dim=2)

    def _best(
        self, state: BeamState, log_probs: Tensor, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best N candidates of each sentence, of the n of each beam: log P of the hypothesis, beam and token."""
        running, each = log_probs.shape[1:]
        total = log_probs.add_(state.log_probs[..., None]).flatten(1)  # (B, K, n) -> (B, K · n)
        missing = self.num_candidates - total.shape[1]
        if missing > 0:  # in a vocabulary smaller than the beam
            total = F.pad(total, (0, missing), value=-torch.inf)
        total, index = total.topk(self.num_candidates, dim=1)  # (B, N), the best first
        if missing > 0:
            index = index.clamp(max=running * each - 1)
        tokens = index % each if tokens is None else tokens.flatten(1).gather(1, index)
        return total, index // each, tokens

    def _extend_greedily(self, state: BeamState, scores: Tensor, tokens: Tensor) -> BeamState:
        """Append the most probable tokens (B, 1), of these scores. Tokens after the end of a hypothesis do not count.

        The state keeps the last score of a row alone, which shows whether the model computes numbers.
        """
        lengths = torch.where(state.done, state.lengths, state.lengths + 1)
        ends = [tokens[:, 0] == eos for eos in self.eos_token_ids]
        done = torch.stack([state.done, lengths == state.limits, *ends]).any(dim=0)
        # (B, 1, T)
        written = state.tokens.scatter(2, state.lengths[:, None, None], tokens[..., None])
        return state._replace(
            tokens=written,
            next_tokens=tokens,
            log_probs=scores.to(state.log_probs.dtype),
            lengths=lengths,
            ended_tokens=written,
            ended_lengths=lengths[:, None],
            done=done,
        )


def _token_ids(value: int | Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """The ids of a field of a generation config that has none, one or several."""
    if value is None:
        return ()
    return tuple(torch.as_tensor(value, device="cpu").flatten().tolist())


def _chosen(
    state: BeamState, length: Tensor, parents: Tensor, tokens: Tensor, index: Tensor
) -> BeamState:
    """The state with the chosen hypotheses.

    Args:
        length: (B,), of the candidates.
        parents, tokens: (B, N), the candidates.
        index: (B, 2, K), of the chosen ones. Those that have ended are among the ended ones of `state` and then the
            candidates, N in all. Those that go on are candidates.
    """
    candidates = tokens.shape[1]
    beams = index.shape[2]
    extended = _append(state, parents, tokens)  # (B, N, T)
    new = extended[:, : candidates - beams]
    both = torch.cat([state.ended_tokens, new, extended], dim=1).unflatten(1, (2, -1))
    places = index[..., None].expand(-1, -1, -1, both.shape[3])
    ended_tokens, going_tokens = both.gather(2, places).unbind(1)  # (B, K, T)

    # One table for all numbers: lengths of the ended and tokens of the others, nothing and parents.
    new_lengths = length[:, None].expand_as(new[..., 0])
    numbers = [state.ended_lengths, new_lengths, tokens, parents, parents]
    table = torch.cat(numbers, dim=1).unflatten(1, (2, 2, -1))  # (B, 2, 2, N)
    found = table.gather(3, index[:, None].expand(-1, 2, -1, -1))  # (B, 2, 2, K)
    return state._replace(
        tokens=going_tokens,
        next_tokens=found[:, 0, 1],
        parents=found[:, 1, 1],
        ended_tokens=ended_tokens,
        ended_lengths=found[:, 0, 0],
    )


def _append(state: BeamState, parents: Tensor, tokens: Tensor) -> Tensor:
    """Hypotheses (B, K, T) that extend these beams by these tokens, (B, K) each."""
    past = state.tokens.gather(1, parents[..., None].expand(-1, -1, state.tokens.shape[2]))
    places = state.lengths[:, None, None].expand(-1, parents.shape[1], 1)
    return past.scatter_(2, places, tokens[..., None])


def topk_log_probs(logits: Tensor, count: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """The highest log-probabilities (without `normalize`: logits) and their tokens, (…, count) each, of (…, V)."""
    rows = logits.flatten(0, -2)
    if rows.device.type != "cpu":
        values, tokens = _topk_of_rows(rows, count, normalize)
    else:
        at_once = max(1, _CHUNK // rows.shape[1])
        chunks = [_topk_of_rows(chunk, count, normalize) for chunk in rows.split(at_once)]
        values, tokens = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    shape = logits.shape[:-1]
    return values.unflatten(0, shape), tokens.unflatten(0, shape)


def _topk_of_rows(rows: Tensor, count: int, normalize: bool) -> tuple[Tensor, Tensor]:
    if normalize:
        scores = rows.log_softmax(dim=-1, dtype=torch.float32)
    elif count == 1 and rows.device.type != "cpu":
        scores = rows
    else:
        scores = rows.float()
    if count == 1:
        return scores.max(dim=1, keepdim=True)  # faster than `topk`
    likely, tokens = likely_tokens(scores, count)
    values, index = likely.topk(count)
    return values, index if tokens is None else tokens.gather(1, index)


def likely_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Scores and tokens (…, n) among which are the highest `count` of (…, V).

    In a large vocabulary these are the tokens of the blocks with the highest maxima. Else they are all, None.
    """
    size = scores.shape[-1]
    large = _LARGE if scores.device.type == "cpu" else _LARGE_ON_GPU
    if size < max(large, 2 * count * _BLOCK):
        return scores, None
    tokens = torch.arange(size, device=scores.device)
    whole = size // _BLOCK * _BLOCK  # tokens in blocks. The rest are always read
    maxima = scores[..., :whole].unflatten(-1, (-1, _BLOCK)).amax(dim=-1)  # (…, blocks)
    blocks = maxima.topk(count).indices  # (…, n)
    inside = tokens[:whole].view(-1, _BLOCK)[blocks].flatten(-2)  # (…, n, 64) -> (…, n · 64)
    rest = tokens[whole:].expand(*scores.shape[:-1], -1)
    likely = torch.cat([inside, rest], dim=-1)
    return scores.gather(-1, likely), likely


class Decoder:
    """The interface between a search and its decoder: next-token logits and KV caches of a batch."""

    initial_beams = 1  # K of the first step

    def prefill(self, tokens: Tensor) -> None:
        """Read the first tokens (B, P - 1) of every beam: the prefix but for its last token."""
        raise NotImplementedError

    def logits(self, state: BeamState) -> Tensor:
        """Read `state.next_tokens` and return the logits (B, K, V) of the tokens after them."""
        raise NotImplementedError

    def step(self, state: BeamState, config: SearchConfig, penalties: Tensor) -> BeamState:
        """Extend all hypotheses by a token. A decoder may capture this as a whole."""
        return config.advance(state, self.logits(state), penalties)

    def select(self, rows: Tensor) -> None:
        """Keep these sentences."""
        raise NotImplementedError

    def replace(self, rows: Tensor, other: Any) -> None:
        """Replace these sentences by the sentences of `other`, after its prefill."""
        raise NotImplementedError

    def read_done(self, state: BeamState) -> list[bool]:
        """`state.done` on the host, which waits for the device. A decoder may read its own numbers with it."""
        return state.done.tolist()

    def computed_rows(self, count: int) -> int:
        """The rows that are computed for so many sentences. Compaction has to reduce them."""
        return count


class SearchBatch(NamedTuple):
    """n sentences that start together."""

    decoder: Decoder
    prefix: Tensor  # (n, P), the first tokens of their translations
    source_mask: Tensor  # (n, S), 0 for padding
    keys: Sequence[Any]  # returned with their translations
    wanted: Sequence[int]  # hypotheses to return, K at most


class Hypotheses(NamedTuple):
    """The translations of a sentence, the best first. If too few have ended, the best fills the other rows."""

    tokens: Tensor  # (R, T), the prefix and the end token included
    lengths: Tensor  # (R,)
    scores: Tensor  # (R,), -1e9 in the other rows. NaN if the logits are no numbers


def is_hypothesis(score: float | None) -> bool:
    """Return whether a row of `generate` with this score has a hypothesis. A greedy search has no scores, None.

    transformers divides the score of a row without one by the length penalty.
    """
    return score is None or score > _NO_HYPOTHESIS / 10


def require_numbers(has_nan: bool) -> None:
    """Raise a ValueError if `Hypotheses` with a score of NaN are among the results: their tokens mean nothing."""
    if has_nan:
        raise ValueError(
            "generate: the logits are not finite: the weights are not, or numbers exceed the range of the dtype; "
            "load a checkpoint from before its training diverged, or in float32"
        )


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
    # Tokens that it may have more than its source, without the prefix. None: no such limit.
    over: int | None = None
    processors: LogitsProcessorList | None = None  # of `generate`
    # Processors identify a sentence by its row: no other may join a running batch.
    fixed_rows: bool = False
    # What the host does in each `step` before it waits for the device.
    meanwhile: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        """Sentences that are being translated."""
        return sum(key is not None for key in self.keys)

    def clear(self) -> None:
        """Drop all sentences, and free their caches."""
        self.state: BeamState | None = None
        self.decoder: Decoder | None = None
        self.penalties: Tensor | None = None  # (T + 1,)
        self.length = 0  # tokens of the sentences that started first
        self.keys: list[Any] = []  # of the sentence in each row, None in a free row
        self.wanted: list[int] = []

    # Sentences come

    def join(self, batch: SearchBatch) -> None:
        """Start sentences in free rows, and in new ones if these are too few."""
        if not len(self):
            self.clear()
        state = self._start(batch)
        if self.state is None or self.decoder is None:
            self.state = state
            self.decoder = batch.decoder
            self.length = batch.prefix.shape[1]
            self.keys = list(batch.keys)
            self.wanted = list(batch.wanted)
            return
        self._add_rows(len(batch.keys) - (len(self.keys) - len(self)))
        free = [row for row, key in enumerate(self.keys) if key is None][: len(batch.keys)]
        rows = torch.tensor(free, device=batch.prefix.device)
        self.state = self.state.replace(rows, state)
        self.decoder.replace(rows, batch.decoder)
        for row, key, wanted in zip(free, batch.keys, batch.wanted, strict=True):
            self.keys[row] = key
            self.wanted[row] = wanted

    def _start(self, batch: SearchBatch) -> BeamState:
        """Feed the prefix of new sentences to their decoder, and return their state."""
        prefix = batch.prefix
        given = prefix.shape[1]  # P
        beams = self.config.num_beams
        if given > 1:
            batch.decoder.prefill(prefix[:, :-1])

        limits = torch.full_like(prefix[:, 0], self.max_length)
        longest = self.max_length
        if self.over is not None:
            own = (batch.source_mask.ne(0).sum(dim=1) + self.over).clamp(min=1)
            limits = (given + own).clamp(max=self.max_length)
            # No source has more tokens than S, which the host knows without waiting for the device.
            width = batch.source_mask.shape[1]
            longest = min(given + max(width + self.over, 1), self.max_length)
        running = batch.decoder.initial_beams
        if self.state is not None:
            running = self.state.parents.shape[1]
            longest = max(longest, self.state.tokens.shape[2] - 1)
        capacity = -(-(longest + 1) // _CAPACITY_UNIT) * _CAPACITY_UNIT
        if self.penalties is None or len(self.penalties) <= capacity:
            self.penalties = self.penalty.table(capacity, given, prefix.device)

        # The searches of Hugging Face and of OpenNMT-py 2 compare with K hypotheses, others with the wanted ones.
        enough = list(batch.wanted) if self._counts_wanted() else [beams] * len(prefix)
        if len(set(enough)) == 1:
            decisive = torch.full_like(limits, enough[0] - 1)  # without a copy from the host
        else:
            decisive = torch.tensor(enough, device=prefix.device) - 1
        return BeamState.start(
            prefix=prefix,
            limits=limits,
            penalties=self.penalties,
            decisive=decisive,
            running=running,
            ended=beams,
        )

    def _counts_wanted(self) -> bool:
        """Return whether a search ends with the wanted hypotheses, not with K."""
        if self.config.rule is not None:
            return self.config.rule == "opennmt3"
        return self.penalty.formula == "gnmt"

    def _add_rows(self, count: int) -> None:
        """Add free rows, copies of the first one."""
        if count > 0:
            self._select([*range(len(self.keys)), *[0] * count])
            self.keys[-count:] = [None] * count

    # Sentences run

    def step(self) -> list[tuple[Any, Hypotheses]]:
        """Decode the next token of every sentence. Return keys and translations of those that are done."""
        self._compact()
        if self.state is None or self.decoder is None or self.penalties is None:
            return []
        state = self.state
        for _ in range(steps_at_once(state.done.device)):
            if self.processors:
                state = self._process_and_extend(state, self.decoder.logits(state), self.penalties)
            else:
                state = self.decoder.step(state, self.config, self.penalties)
            self.length += 1
        self.state = state
        if self.meanwhile is not None:
            self.meanwhile()
        done = self.decoder.read_done(state)
        return self._take(
            [row for row, key in enumerate(self.keys) if done[row] and key is not None]
        )

    def _process_and_extend(self, state: BeamState, logits: Tensor, penalties: Tensor) -> BeamState:
        """`SearchConfig.advance` with logits processors. They take hypotheses of one length: one call for each."""
        running = logits.shape[1]  # 1 in the first step, in which transformers shows K copies
        tokens = state.tokens.expand(-1, self.config.num_beams, -1)  # (B, K, T)
        scores = logits.float()
        if self.config.num_beams > 1:
            # transformers shows logits in a greedy search, log-probabilities in a beam search
            scores = scores.log_softmax(dim=-1)
        scores = scores.expand(-1, self.config.num_beams, -1)  # (B, K, V)
        if self.fixed_rows:
            processed = self._process(tokens[..., : self.length], scores, state.limits)
        else:
            processed = torch.empty_like(scores)
            for length in set(state.lengths.tolist()):
                rows = state.lengths == length
                processed[rows] = self._process(
                    tokens[rows, :, :length], scores[rows], state.limits[rows]
                )
        count = min(self.config.num_candidates, processed.shape[2])
        log_probs, candidates = topk_log_probs(processed[:, :running], count, normalize=False)
        return self.config.extend(state, log_probs, candidates, penalties)

    def _process(self, tokens: Tensor, scores: Tensor, limits: Tensor) -> Tensor:
        """Return the scores (n, K, V) of tokens after `tokens` (n, K, length), changed in transformers' order.

        Args:
            limits: (n,), the most tokens of each sentence.
        """
        sentences = len(tokens)
        length = tokens.shape[2]
        tokens = tokens.flatten(0, 1)  # (n · K, length)
        for processor in self.processors or ():
            is_end = isinstance(processor, ForcedEOSTokenLogitsProcessor)
            if is_end and self.config.forced_eos_token_id is not None:
                # The processor knows only the largest limit of the batch.
                scores = self.config.force_eos(scores, at_limit=limits == length + 1)
            else:
                scores = processor(tokens, scores.flatten(0, 1)).unflatten(0, (sentences, -1))
        return scores

    # Sentences go

    def _take(self, rows: list[int]) -> list[tuple[Any, Hypotheses]]:
        """Free these rows, and return their keys and translations."""
        if not rows or self.state is None:
            return []
        state = self.state
        index = torch.tensor(rows, device=state.done.device)
        scores = state.ended_scores[index]  # (n, K)
        places = torch.arange(scores.shape[1], device=scores.device)
        places = places.masked_fill(scores.isneginf(), 0)  # of the best where none has ended
        tokens = state.ended_tokens[index[:, None], places]  # (n, K, T)
        lengths = state.ended_lengths[index].gather(1, places)
        # Without a hypothesis that has ended, the best that runs shows whether the model computes numbers.
        last = torch.where(scores[:, 0].isneginf(), state.log_probs[index, 0], scores[:, 0])
        is_number = last < torch.inf  # (n,), False for NaN
        scores = scores.clamp(min=_NO_HYPOTHESIS)
        scores = scores.masked_fill(~is_number[:, None], torch.nan)
        results = []
        for place, row in enumerate(rows):
            best = slice(self.wanted[row])
            hypotheses = Hypotheses(tokens[place, best], lengths[place, best], scores[place, best])
            results.append((self.keys[row], hypotheses))
            self.keys[row] = None
        if not len(self):
            self.clear()
        return results

    def drop(self, keys: set[Any]) -> None:
        """Give up sentences and free their rows."""
        self.keys = [None if key in keys else key for key in self.keys]

    def _compact(self) -> None:
        """Remove the free rows once they are many."""
        kept = [row for row, key in enumerate(self.keys) if key is not None]
        if not kept or self.decoder is None:
            self.clear()
            return
        if self.fixed_rows:
            return
        now = self.decoder.computed_rows(len(self.keys))
        then = self.decoder.computed_rows(len(kept))
        if then < now and now - then >= _COMPACT_SHARE * now:
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
    if not missing:
        return states
    later = states.dim() - 1 - dim % states.dim()  # dimensions after it
    return F.pad(states, (0, 0) * later + (0, missing))


def replace_rows(mine: Tensor, rows: Tensor, theirs: Tensor, dim: int) -> Tensor:
    """Replace `rows` of `mine` by `theirs`. `dim` is padded to the longer of the two."""
    if mine.dim() > 1:
        size = max(mine.shape[dim], theirs.shape[dim])
        mine = resized(mine, size, dim)
        theirs = resized(theirs, size, dim)
    return mine.index_copy(0, rows, theirs)
