"""Beam search: which hypotheses run, which have ended, when a sentence is done (Wu et al. 2016, arXiv 1609.08144, §7).

Sentences need not begin together. Those that are done leave, and others may take their room, so that the processor
always has as many rows to work on as it likes.

Shapes: B sentences open, K beams, T words of the longest hypothesis, P words that every hypothesis begins with, V
target vocabulary, R hypotheses wanted of each sentence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import GenerationConfig, LogitsProcessorList

from .decoding_vanilla_transformer import BeamPlaces, Reader, StepReader

# When this share of the rows is done they leave the batch, for which the caches are copied; or others take their room,
# for which these have to pass through the encoder.
_LEAVING_SHARE, _REPLACED_SHARE = 0.2, 0.1

_NOTHING = -1  # where a hypothesis has no word
_BLOCK = 64  # numbers, in `_largest`
_NUMBERS_AT_ONCE = 2**18  # a megabyte, in `likeliest`


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

    def penalty(self, length: Any) -> Any:
        """What the log-probability of `length` words (a number or a tensor), the end counted, is divided by."""
        return ((5 + length) / 6) ** self.alpha if self.of_paper else length**self.alpha

    def best_penalty(self, length: Any, longest: Any, early_stopping: bool | str) -> Any:
        """The penalty with which a hypothesis that has `length` words now may come out best in the end.

        Log-probabilities only fall, so a longer end can win by its penalty alone. With `early_stopping=False`
        transformers looks at the present length instead, and may miss it.
        """
        may_grow = self.of_paper or early_stopping == "never"
        return self.penalty(longest if may_grow and self.alpha > 0 else length)


@dataclass
class Group:
    """Sentences that begin a search together: who reads them, and how many words each may have in the end (B)."""

    readers: Sequence[Reader]
    limits: Tensor


class Open:
    """The sentences that are open, a row each, with the hypotheses that run (the best first) and those that ended.

    Args:
        rows: (B,), which sentence each row is.
        prefix: (B, P). limits: (B,), see `Group`.
    """

    def __init__(self, rows: Tensor, prefix: Tensor, limits: Tensor, beams: int):
        self.rows, self.limits = rows, limits
        self.lengths = torch.full_like(rows, prefix.shape[1])  # (B,), words so far
        self.words = prefix[:, None].expand(-1, beams, -1)  # (B, K, T)
        self.log_p = torch.zeros(len(rows), beams, device=rows.device)  # (B, K)
        self.log_p[:, 1:] = -1e9  # only one has begun
        self.ended_words = self.words[:, :, :0]  # (B, K, T)
        self.ended_scores = torch.full_like(self.log_p, -torch.inf)
        self.done = torch.zeros_like(rows, dtype=torch.bool)

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        for name, value in vars(self).items():
            setattr(self, name, value[rows])

    def put(self, rows: Tensor, other: "Open") -> None:
        """Other sentences, which may be at another word, take the room of these."""
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            if mine.dim() == 3:
                width = max(mine.shape[2], theirs.shape[2])
                mine, theirs = (F.pad(words, (0, width - words.shape[2]), value=_NOTHING) for words in (mine, theirs))
            setattr(self, name, mine.index_copy(0, rows, theirs))

    def continued(self, parents: Tensor, words: Tensor) -> Tensor:
        """Running hypotheses (B, K, T), with one word more."""
        past = self.words.gather(1, parents[..., None].expand(-1, -1, self.words.shape[2]))
        if int(self.lengths.max()) == past.shape[2]:
            past = F.pad(past, (0, 1), value=_NOTHING)
        at = self.lengths[:, None, None].expand(-1, past.shape[1], 1)  # (B, K, 1)
        return past.scatter(2, at, words[..., None])

    def collect(self, scores: Tensor, parents: Tensor, words: Tensor, ends: Tensor) -> None:
        """Put the hypotheses (B, K) that end here among the K best of their sentence."""
        new = self.continued(parents, words)
        old = F.pad(self.ended_words, (0, new.shape[2] - self.ended_words.shape[2]), value=_NOTHING)
        scores = torch.cat([self.ended_scores, scores.masked_fill(~ends, -torch.inf)], dim=1)  # (B, 2 K)
        self.ended_scores, best = scores.topk(self.log_p.shape[1], dim=1)
        self.ended_words = torch.cat([old, new], dim=1).gather(1, best[..., None].expand(-1, -1, new.shape[2]))


class Rules:
    """What a search keeps to.

    Args:
        processors: change the log-probabilities of the next word.
        settings: with all defaults filled in.
        score: how hypotheses are compared.
    """

    def __init__(self, processors: LogitsProcessorList, settings: GenerationConfig, score: Score):
        self.processors, self.score = processors, score
        self.beams, self.wanted = settings.num_beams, settings.num_return_sequences or 1
        self.early_stopping = self.beams == 1 or settings.early_stopping
        ends = settings.eos_token_id
        self.ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self.pad = settings.pad_token_id if settings.pad_token_id is not None else 0
        # Of the best 2 K continuations at most K end a sentence (with one end word), so K are left to go on.
        self.candidates = 1 if self.beams == 1 else self.beams * max(2, 1 + len(self.ends))
        # How many have to have ended, so that no other counts.
        self.enough = self.wanted if score.of_paper else self.beams

    def likeliest(self, logits: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest words after each beam and their log-probabilities, (B, K, 2 K) or fewer.

        Args:
            logits: (B, K, V). so_far: (B, K, T), which the processors are shown.
        """
        each = min(self.candidates, logits.shape[2])
        if not self.processors:
            return likeliest(logits, each, normalised=self.beams > 1)
        # transformers shows them logits in a greedy search, log-probabilities in a beam search
        scores = logits.float() if self.beams == 1 else logits.float().log_softmax(dim=-1)
        scores = self.processors(so_far.flatten(0, 1), scores.flatten(0, 1)).unflatten(0, logits.shape[:2])
        return scores.topk(each, dim=2)


class Search(Rules):
    """Find the best translations; greedy search is the case of one beam.

    Args:
        group: the sentences to begin with.
        prefix: (B, P), what their translations begin with.
        processors, settings, score: see `Rules`.
        refill: given a number, brings at most so many sentences that take the room of those that are done, or None.
            They begin with the first sentence's prefix. Only `StepReader`s can do it, and only without `processors`,
            which count on rows of one length.
    """

    def __init__(
        self,
        group: Group,
        prefix: Tensor,
        processors: LogitsProcessorList,
        settings: GenerationConfig,
        score: Score,
        refill: Callable[[int], Group | None] | None = None,
    ):
        super().__init__(processors, settings, score)
        self.refill, self.end_words = refill, prefix.new_tensor(self.ends)
        self.prefix_length = prefix.shape[1]  # P
        self.prefix = prefix[:1]  # (1, P)
        self.seen = 0  # sentences
        self.best: dict[int, tuple[Tensor, Tensor]] = {}  # of a sentence that is done: words (R, T), scores (R)
        self.readers, self.open = group.readers, self.opened(group, prefix)
        self.pasts = BeamPlaces(len(prefix), self.prefix_length, self.beams, prefix.device)
        logits = self.mean([reader.read_prefix(prefix, self.beams) for reader in self.readers])  # (B, 1, V)
        self.logits = logits.expand(-1, self.beams, -1)

    def opened(self, group: Group, prefix: Tensor) -> Open:
        """These sentences, with what their translations (B, P) begin with."""
        rows = torch.arange(self.seen, self.seen + len(prefix), device=prefix.device)
        self.seen += len(prefix)
        return Open(rows, prefix, group.limits, self.beams)

    def run(self) -> tuple[Tensor, Tensor]:
        """The best words (B, R, T), padded behind their ends, and their scores (B, R), of all sentences."""
        while True:
            parents, words = self.advance(self.logits)  # (B, K) each
            self.close()
            parents, words = self.renew(parents, words)
            if not len(self.open.rows):
                return self.result()
            # one that is done but is still there stays where it is
            places, positions = self.pasts.append(parents), torch.minimum(self.open.lengths, self.open.limits) - 1
            read = [reader.read(words, places, self.pasts.seen, positions) for reader in self.readers]
            self.logits = self.mean(read)

    def result(self) -> tuple[Tensor, Tensor]:
        """What is in `best`, in the order of the sentences."""
        best = [self.best[i] for i in range(self.seen)]
        width = max(words.shape[1] for words, _ in best)
        words = torch.stack([F.pad(words, (0, width - words.shape[1]), value=_NOTHING) for words, _ in best])
        words = words[:, :, : int(words.ne(_NOTHING).sum(dim=2).max())]  # (B, R, T)
        return words.masked_fill(words == _NOTHING, self.pad), torch.stack([scores for _, scores in best])

    def mean(self, logits: list[Tensor]) -> Tensor:
        """Of an ensemble (B, K, V), the logarithm of the mean of their probabilities."""
        if len(logits) == 1:
            return logits[0]
        log_p = torch.stack([each.float() for each in logits]).log_softmax(dim=-1)
        return log_p.logsumexp(dim=0) - math.log(len(logits))

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the next words; the parents and the new words (B, K) of the beams that go on."""
        log_p, parents, words = self.best_continuations(logits)  # (B, 2 K) each, the best first
        last = self.open.lengths + 1 == self.open.limits  # (B,)
        ends = torch.isin(words, self.end_words) | last[:, None]
        top = slice(None, self.beams)  # only the K best may end: the others are there to go on
        if bool(ends[:, top].any()):
            penalty = self.score.penalty(self.open.lengths + 1 - self.prefix_length)[:, None]
            self.open.collect(log_p[:, top] / penalty, parents[:, top], words[:, top], ends[:, top])

        self.open.log_p, going = log_p.masked_fill(ends, -1e9).topk(self.beams, dim=1)  # (B, K)
        parents, words = parents.gather(1, going), words.gather(1, going)
        self.open.words = self.open.continued(parents, words)
        self.open.lengths = self.open.lengths + 1
        return parents, words

    def best_continuations(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of all words after all beams the likeliest: log P, the beam and the word, (B, 2 K) each."""
        values, words = self.likeliest(logits, self.open.words)  # (B, K, 2 K)
        each = values.shape[2]
        total, words = (values + self.open.log_p[..., None]).flatten(1), words.flatten(1)  # (B, K · 2 K)
        missing = max(0, self.candidates - total.shape[1])  # in a vocabulary of one word
        total, words = F.pad(total, (0, missing), value=-2e9), F.pad(words, (0, missing))
        log_p, places = total.topk(self.candidates, dim=1)
        parents = (places // each).clamp(max=logits.shape[1] - 1)
        return log_p, parents, words.gather(1, places)

    def close(self) -> None:
        """Write down the sentences that are done."""
        now = self.open
        length, longest = now.lengths - self.prefix_length, now.limits - self.prefix_length
        penalty = self.score.best_penalty(length, longest, self.early_stopping)
        done = now.log_p[:, 0] / penalty <= now.ended_scores[:, self.enough - 1]
        if self.early_stopping is True:
            done |= now.ended_scores[:, self.beams - 1] > -torch.inf
        done = (done | (now.lengths == now.limits)) & ~now.done
        for row in done.nonzero().flatten().tolist():
            best = now.ended_words[row, : self.wanted].clone(), now.ended_scores[row, : self.wanted].clone()
            self.best[int(now.rows[row])] = best
        now.done = now.done | done

    def renew(self, parents: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Let others take the room of sentences that are done, or give it up, when there are enough of them.

        Args:
            parents, words: (B, K), with which the open sentences go on. Those of the rows that stay come back.
        """
        done = self.open.done.nonzero().squeeze(1)
        enough = _LEAVING_SHARE if self.refill is None else _REPLACED_SHARE
        if len(done) < enough * len(self.open.rows):
            return parents, words
        while len(done) and self.refill is not None:
            group = self.refill(len(done))
            if group is None:
                self.refill = None
                break
            rows, done = done.tensor_split([len(group.limits)])
            self.put(rows, group)
            parents, words = parents.index_fill(0, rows, 0), words.index_fill(0, rows, int(self.prefix[0, -1]))
        if not len(done):
            return parents, words
        kept = (~self.open.done).nonzero().squeeze(1)
        for holder in (self.open, self.pasts, *self.readers):
            holder.select(kept)
        return parents[kept], words[kept]

    def put(self, rows: Tensor, group: Group) -> None:
        """These sentences take the room of others; all that they begin with is read but the last word."""
        prefix = self.prefix.expand(len(rows), -1)  # (B, P)
        begun = prefix[:, :-1]
        self.open.put(rows, self.opened(group, prefix))
        self.pasts.put(rows, begun.shape[1])
        for mine, theirs in zip(self.readers, group.readers, strict=True):
            if begun.shape[1]:
                theirs.read_prefix(begun, self.beams)
            cast(StepReader, mine).put(rows, cast(StepReader, theirs))


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
