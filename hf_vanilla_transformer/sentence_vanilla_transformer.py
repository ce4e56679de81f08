"""One sentence at a time, on a CPU: the search of search_vanilla_transformer.py, where a word is little work.

Half of the time would go into calling one operation after the other. So a `Program` does all that there is to do from
the words to the likeliest next ones, and the search is made of numbers and lists: for a few numbers all of it takes
Python less time than one operation takes torch.

Shapes: K beams, C the likeliest words after each, P words that every hypothesis begins with, T words of the longest,
R hypotheses wanted, S source length, M places in the cache, D d_model, H heads, d_k and d_v the widths of a head, V
target vocabulary.
"""

from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation import GenerationConfig, LogitsProcessorList
from transformers.modeling_utils import PreTrainedModel

from .compiled_vanilla_transformer import Program, of_any_size
from .decoding_vanilla_transformer import StepDecoder, StepLayer, is_ours, laid_out, rounded_up
from .search_vanilla_transformer import Rules, Score, likeliest
from .stacks_vanilla_transformer import check_ids

_ROOM = 16  # places, by which the cache grows
_NOTHING = -1e9  # the log-probability of a beam that has no hypothesis


class SentenceLayer(StepLayer):
    compiled = True

    def attend(self, query: Tensor, entries: Tensor, mask: Tensor | None) -> Tensor:
        """Eq. 1 for the beams (K, H · d_k), over the entries (1, N, H · (d_k + d_v)) of their sentence.

        In sums, which the compiler makes one loop of: less work for few rows than to call a product for each head.
        """
        keys, values = entries[0, :, : self.key_width], entries[0, :, self.key_width :]
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query.unflatten(1, (self.heads, 1, -1)).to(wide)  # (K, H · d_k) -> (K, H, 1, d_k)
        k = keys.unflatten(1, (self.heads, -1)).transpose(0, 1).to(wide)  # (N, H · d_k) -> (H, N, d_k)
        v = values.unflatten(1, (self.heads, -1)).transpose(0, 1).to(wide)  # (H, N, d_v)
        scores = (q * k).sum(dim=-1) * self.scaling  # (K, H, N)
        if mask is not None:
            scores = scores + mask[:, None]
        weights = scores.softmax(dim=-1)[..., None]  # (K, H, N, 1)
        return (weights * v).sum(dim=2).flatten(1).to(query.dtype)  # (K, H, d_v) -> (K, H · d_v)


class SentenceEncoder(nn.Module):
    """All that is computed of a source, for a `Program`."""

    def __init__(self, encoder: nn.Module, step: StepDecoder):
        super().__init__()
        self.encoder, self.step = encoder, step

    def forward(self, ids: Tensor) -> list[Tensor]:
        """For each layer of the decoder the keys and values (1, S, H · (d_k + d_v)) of a source (1, S)."""
        states = self.encoder(ids, torch.ones_like(ids)).last_hidden_state[0].to(self.step.dtype)  # (S, D)
        return [layer.cross_entries(states)[None] for layer in self.step.layers]


class SentenceDecoder(nn.Module):
    """All that is computed when the beams of a sentence have one word more, for a `Program`."""

    def __init__(self, step: StepDecoder):
        super().__init__()
        self.step = step

    def forward(
        self,
        words: Tensor,
        encoding: Tensor,
        own: list[Tensor],
        mask: Tensor,
        source: list[Tensor],
        count: int | None,
        normalised: bool,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """The `count` likeliest words after each beam and their log-probabilities, (K, C) each; see `likeliest`.

        Args:
            words: (3, K), the next words, the beams that they go on from, and the places of their keys and values.
            encoding: (1, D), of their position.
            own: for each layer keys and values (1, M, H · (d_k + d_v)), which those of the words come into.
            mask: (K, M), 0 at the places that belong to a beam; that of the parents becomes that of these beams.
            source: for each layer keys and values, (1, S, ·).
            count: None: all logits, (K, V).
        """
        words, parents, places = words.unbind()  # (K,) each
        mask.copy_(mask[parents].scatter(1, places[:, None], 0.0))
        x = self.step.embed(words, encoding)  # (K, D)
        logits = self.step(x, places, own, None, mask, source, None)  # (K, V)
        return logits if count is None else likeliest(logits, count, normalised)


class SentencePrograms:
    """A model for one sentence at a time.

    Args:
        model: whose weights. dtype: what it computes in. weights: see `Product`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, weights: str | None):
        self.step = StepDecoder(model, dtype, weights, SentenceLayer)
        self.encoder = SentenceEncoder(model.get_encoder(), self.step)
        self.encode, self.decode = Program(self.encoder), Program(SentenceDecoder(self.step))
        self.source_size, self.target_size = model.config.vocab_size, model.config.target_vocab_size  # words

    def source(self, ids: Tensor) -> list[Tensor]:
        """For each layer of the decoder the keys and values (1, S, H · (d_k + d_v)) of a source (1, S).

        Raises:
            ValueError: an id outside the vocabulary.
        """
        check_ids(ids, self.source_size, "input_ids")
        # To the compiler 1 is not a size like others. Clones, as the caller's own must not be marked.
        return self.encode(of_any_size(ids.clone(), 1)) if ids.shape[1] > 1 else self.encoder(ids)


def programs_for(model: PreTrainedModel, weights: str | None) -> SentencePrograms | None:
    """Those of the model as it is now, or None where it is more than our modules.

    Args:
        weights: see `Product`.
    """
    modules = list(model.modules())
    return laid_out(model, SentencePrograms, weights, modules, compiled=True) if is_ours(model, modules) else None


class SentenceReader:
    """What is kept of a sentence while its beams are read: keys and values.

    A place of the cache that no beam sees any more is written again, as by `BeamPlaces`.

    Args:
        source: for each layer keys and values, (1, S, H · (d_k + d_v)).
    """

    def __init__(self, programs: SentencePrograms, source: list[Tensor], beams: int):
        self.programs = programs
        if source[0].shape[1] == 1:  # A word that is there twice is attended to as if it were there once.
            source = [each.repeat(1, 2, 1) for each in source]
        self.source = [of_any_size(each, 1) for each in source]
        room = rounded_up(beams, _ROOM)
        if room == source[0].shape[1]:
            room += _ROOM  # or the compiler would take the one size for the other
        self.own = [of_any_size(each.new_zeros(1, room, each.shape[2]), 1) for each in self.source]
        self.mask = of_any_size(torch.full((beams, room), torch.finfo(torch.float32).min), 1)
        self.seen = [0] * beams  # bit m: whether this beam sees place m
        self.position = 0

    def read(self, words: list[int], parents: list[int], count: int | None, normalised: bool) -> Any:
        """What `SentenceDecoder` makes of the next words (K) of beams that go on from these parents (K)."""
        places = self._places(parents)
        encodings = self.programs.step.encodings(self.position + 1)
        encoding = encodings[self.position : self.position + 1]
        self.position += 1
        step = torch.tensor([words, parents, places])
        kind = len(words), count, normalised
        return self.programs.decode(step, encoding, self.own, self.mask, self.source, count, normalised, kind=kind)

    def _places(self, parents: list[int]) -> list[int]:
        """Of the next words: the first that nobody sees."""
        self.seen = [self.seen[parent] for parent in parents]
        taken = reduce(or_, self.seen)
        places = []
        for beam in range(len(parents)):
            free = ~taken & (taken + 1)  # the lowest bit that is 0
            self.seen[beam] |= free
            taken |= free
            places.append(free.bit_length() - 1)
        missing = rounded_up(max(places) + 1, _ROOM) - self.mask.shape[1]
        if missing > 0:
            lowest = torch.finfo(torch.float32).min
            self.own = [of_any_size(F.pad(each, (0, 0, 0, missing)), 1) for each in self.own]
            self.mask = of_any_size(F.pad(self.mask, (0, missing), value=lowest), 1)
        return places


class SentenceSearch(Rules):
    """`Search` for one sentence.

    Args:
        reader: of the sentence.
        prefix: (P,), what its translations begin with. limit: how many words they may have, those included.
        processors, settings, score: see `Rules`.
    """

    def __init__(
        self,
        reader: SentenceReader,
        prefix: list[int],
        limit: int,
        processors: LogitsProcessorList,
        settings: GenerationConfig,
        score: Score,
    ):
        super().__init__(processors, settings, score)
        self.reader, self.prefix_length, self.limit = reader, len(prefix), limit
        self.words = [prefix] * self.beams  # of those that run, the best first
        self.log_p = [0.0] + [_NOTHING] * (self.beams - 1)  # only one has begun
        self.parents = list(range(self.beams))
        self.ended: list[tuple[float, list[int]]] = []  # scores and words of the K best
        # What is asked of the reader: the processors have to see all logits.
        self.asked = None if processors else min(self.candidates, reader.programs.target_size), self.beams > 1
        for word in prefix[:-1]:
            reader.read([word] * self.beams, self.parents, *self.asked)

    def run(self) -> tuple[Tensor, Tensor]:
        """The best words (1, R, T), padded behind their ends, and their scores (1, R)."""
        while True:
            self.advance()
            if self.done():
                return self.result()

    def result(self) -> tuple[Tensor, Tensor]:
        """The best that have ended."""
        missing = self.wanted - len(self.ended)  # in a vocabulary of one word
        best = self.ended[: self.wanted] + [(float("-inf"), [])] * missing
        width = max(len(words) for _, words in best)
        rows = [words + [self.pad] * (width - len(words)) for _, words in best]
        return torch.tensor([rows]), torch.tensor([[score for score, _ in best]])

    def advance(self) -> None:
        """Choose the next words of the beams that go on, and put the hypotheses that end here among the K best."""
        length = len(self.words[0]) + 1
        going = []
        for rank, (log_p, parent, word) in enumerate(self.best_continuations()):
            if word not in self.ends and length < self.limit:
                going.append((log_p, parent, word))
            elif rank < self.beams:  # only the K best may end: the others are there to go on
                score = log_p / self.score.penalty(length - self.prefix_length)
                self.ended.append((score, self.words[parent] + [word]))
        self.ended = sorted(self.ended, key=itemgetter(0), reverse=True)[: self.beams]
        going = (going + [(_NOTHING, 0, self.pad)] * self.beams)[: self.beams]
        self.log_p, self.parents, words = (list(each) for each in zip(*going, strict=True))
        self.words = [self.words[parent] + [word] for parent, word in zip(self.parents, words, strict=True)]

    def best_continuations(self) -> list[tuple[float, int, int]]:
        """Of all words after all beams the likeliest, the best first: log P, the beam and the word."""
        found = self.reader.read([words[-1] for words in self.words], self.parents, *self.asked)
        if self.processors:
            found = (each[0] for each in self.likeliest(found[None], torch.tensor([self.words])))
        values, words = (each.tolist() for each in found)  # (K, C) each
        continued = [
            (so_far + value, beam, word)
            for beam, so_far in enumerate(self.log_p)
            for value, word in zip(values[beam], words[beam], strict=True)
        ]
        return sorted(continued, key=itemgetter(0), reverse=True)[: self.candidates]

    def done(self) -> bool:
        """Whether no hypothesis that runs can still change what is found."""
        length = len(self.words[0])
        if length >= self.limit or (self.early_stopping is True and len(self.ended) == self.beams):
            return True
        longest = self.limit - self.prefix_length
        penalty = self.score.best_penalty(length - self.prefix_length, longest, self.early_stopping)
        return len(self.ended) >= self.enough and self.log_p[0] / penalty <= self.ended[self.enough - 1][0]
