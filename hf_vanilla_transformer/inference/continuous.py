"""Continuous batching for a server: a beam search that sentences join and leave while it runs.

`generate(next_batch=…)` returns when every sentence is done, which suits a file. Here each translation comes back as
soon as it is final, and new sentences join at any step. The steps are those of `generate`: `SearchConfig` and the
model's decoder.

Shapes: B sentences in the batch, n sentences that join, K beams, S source length, T capacity of a hypothesis in
tokens, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from ..errors import UserError
from ..generation_vanilla_transformer import plan_search, steps_at_once
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..search_vanilla_transformer import BeamState, Decoder, SearchConfig, round_up
from .batching import MAX_TOKENS

#: Joining copies the KV caches and costs an encoder pass: do it for this share of the batch, or after so many steps.
_JOIN_SHARE, _JOIN_STEPS = 0.1, 4

#: Compacting copies the KV caches as well: do it when this share of the rows is free.
_COMPACT_SHARE = 0.2

#: Scores below this belong to beams that hold no hypothesis.
_IMPOSSIBLE = -1e8

_CAPACITY_UNIT = 32  # by which the capacity of hypotheses grows: few shapes

#: Fields of a generation config whose logits processors know a sentence by its row, which changes here.
_BY_ROW = ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "prefix_allowed_tokens_fn")


@dataclass(frozen=True)
class FoundHypothesis:
    """A translation: token ids without the start token, and its score (None after greedy search)."""

    tokens: list[int]
    score: float | None


class ContinuousSearch:
    """A running batch of sentences, which is empty at first. Used by one thread.

    Args:
        model: in evaluation mode, optimized or not. Several searches may share it.
        batch_size: sentences in the batch, at most.
        max_tokens: source tokens in the batch, padding included, at most; a longer sentence goes alone.
        settings: arguments of `generate`, such as `num_beams`; the model's generation config has the others.

    Raises:
        UserError: settings, or a generation config, that this package's search does not cover.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        batch_size: int = 64,
        max_tokens: int = MAX_TOKENS,
        **settings: Any,
    ):
        self.model, self.batch_size, self.max_tokens = model, batch_size, max_tokens
        generation_config, self.processors, planned = _prepared(model, settings)
        self.over: int | None = planned["over"]  # tokens that a translation may have more than its source (§6.1)
        self.max_length: int = generation_config.max_length
        self.penalty = planned["penalty"]
        generation_config.num_return_sequences = generation_config.num_beams
        self.config = SearchConfig.of(generation_config, self.penalty)
        self.per_row = self.penalty.formula == "gnmt" and self.config.num_beams > 1  # whether fewer may be enough
        # the paper's search ends when no beam can beat the hypotheses that are wanted, for one number of them each
        self.configs = {n: replace(self.config, enough=n) for n in range(1, self.config.num_beams + 1)}
        self.keys: list[Any] = []  # of the sentence in each row; None where the row is free
        self.enough: list[int] = []  # hypotheses wanted, for each row
        self.widths: list[int] = []  # source tokens, for each row
        self.steps_since_join = 0
        self.state: BeamState | None = None
        self.decoder: Decoder | None = None

    def __len__(self) -> int:
        """Sentences that are being translated."""
        return sum(key is not None for key in self.keys)

    def wants(self, waiting: int) -> bool:
        """Whether it is time for so many waiting sentences to join: a larger group at once is cheaper for each."""
        return not self or waiting >= _JOIN_SHARE * len(self) or self.steps_since_join >= _JOIN_STEPS

    def fits(self, sources: Sequence[list[int]]) -> bool:
        """Whether these sentences may join."""
        running = [width for key, width in zip(self.keys, self.widths, strict=True) if key is not None]
        widths = running + [len(source) for source in sources]
        return len(widths) == 1 or (len(widths) <= self.batch_size and len(widths) * max(widths) <= self.max_tokens)

    @torch.inference_mode()
    def join(self, sentences: Sequence[tuple[Any, list[int], int]]) -> None:
        """Begin sentences, each a key, its source's token ids, and the number of hypotheses wanted (at most beams)."""
        if not sentences:
            return
        self.steps_since_join = 0
        if not self:
            self.clear()
        keys, sources, enough = map(list, zip(*sentences, strict=True))
        decoder, state = self._begin(sources)
        if self.state is None or self.decoder is None:
            self.decoder, self.state = decoder, state
            self.keys, self.enough, self.widths = keys, enough, [len(source) for source in sources]
            return
        free = [row for row, key in enumerate(self.keys) if key is None][: len(sources)]
        if len(free) < len(sources):
            free += self._grow(len(sources) - len(free))
        rows = torch.tensor(free, device=self.model.device)
        self.state = self.state.replace(rows, state)
        self.decoder.replace(rows, decoder)
        for row, key, wanted, source in zip(free, keys, enough, sources, strict=True):
            self.keys[row], self.enough[row], self.widths[row] = key, wanted, len(source)

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, list[FoundHypothesis]]]:
        """Decode the next token of every sentence; the keys and translations, best first, of those that are done."""
        if self.state is None or self.decoder is None:
            return []
        self.steps_since_join += 1
        if self.per_row:
            self.config = self.configs[max(self.enough)]
        advance = self._process_and_extend if self.processors else self.config
        for _ in range(steps_at_once(self.model.device)):
            self.state = self.decoder.step(self.state, advance)
            if self.per_row and min(self.enough) < self.config.enough:
                self._end_those_with_enough()
        found = []
        for row, done in enumerate(self.state.done.tolist()):
            if done and self.keys[row] is not None:
                found.append((self.keys[row], self._hypotheses(row)))
                self.keys[row] = None
        self._compact()
        return found

    def drop(self, keys: set[Any]) -> None:
        """Give up sentences: their rows are free."""
        self.keys = [None if key in keys else key for key in self.keys]

    def _begin(self, sources: list[list[int]]) -> tuple[Decoder, BeamState]:
        """Encode sentences, and start their hypotheses."""
        device, longest = self.model.device, max(map(len, sources))
        pad = self.model.config.pad_token_id
        ids = torch.tensor([source + [pad] * (longest - len(source)) for source in sources], device=device)  # (n, S)
        lengths = torch.tensor([len(source) for source in sources], device=device)
        mask = (torch.arange(longest, device=device) < lengths[:, None]).long()  # (n, S)
        states = self.model.encode(ids, mask).last_hidden_state
        beams = self.config.num_beams
        decoder = self.model.make_decoder(states, mask, beams)
        limits = torch.full_like(lengths, self.max_length)
        if self.over is not None:
            limits = 1 + lengths + self.over  # the start token counts
        if self.model.config.position_encoding_type == "learned":
            limits = limits.clamp(max=self.model.config.max_position_embeddings + 1)  # the last token needs none
        capacity = round_up(int(limits.max()) + 1, _CAPACITY_UNIT)
        running = decoder.initial_beams
        if self.state is not None:
            capacity, running = max(capacity, self.state.tokens.shape[2]), beams
        start = torch.full((len(sources), 1), self.model.generation_config.decoder_start_token_id, device=device)
        penalties = self.penalty(torch.arange(-1, capacity, device=device).clamp(min=1).float())
        return decoder, BeamState.start(start, limits, running, beams, penalties)

    def _process_and_extend(self, state: BeamState, logits: Tensor) -> BeamState:
        """`SearchConfig.__call__` with logits processors, which take hypotheses of one length: one call for each."""
        greedy = self.config.num_beams == 1
        scores = logits.float() if greedy else logits.float().log_softmax(dim=-1)  # (B, K, V)
        for length in set(state.lengths.tolist()):
            rows = (state.lengths == length).nonzero()[:, 0]
            tokens = state.tokens[rows, : scores.shape[1], :length].flatten(0, 1)  # (n, K, length) -> (n · K, length)
            processed = self.processors(tokens, scores[rows].flatten(0, 1))  # (n · K, V)
            scores = scores.index_copy(0, rows, processed.unflatten(0, (len(rows), -1)))
        scores = self.config.force_eos(state, scores)
        return self.config.extend(state, *scores.topk(min(self.config.num_candidates, scores.shape[2]), dim=2))

    def _end_those_with_enough(self) -> None:
        """End the sentences of which fewer hypotheses are wanted than of others, and no beam can beat these."""
        assert self.state is not None
        state = self.state
        lengths = state.limits if self.config.can_grow else state.lengths
        bound = state.log_probs[:, 0] / state.penalties[lengths]
        last = torch.tensor(self.enough, device=bound.device)[:, None] - 1  # (B, 1)
        enough = bound <= state.ended_scores.gather(1, last)[:, 0]
        self.state = state._replace(done=state.done | enough)

    def _hypotheses(self, row: int) -> list[FoundHypothesis]:
        assert self.state is not None
        lengths, scores = self.state.ended_lengths[row].tolist(), self.state.ended_scores[row].tolist()
        tokens = self.state.ended_tokens[row].tolist()  # (K, T)
        greedy = self.config.num_beams == 1
        return [
            FoundHypothesis(tokens[rank][1 : lengths[rank]], None if greedy else scores[rank])
            for rank in range(self.enough[row])
            if not rank or scores[rank] > _IMPOSSIBLE
        ]

    def _grow(self, count: int) -> list[int]:
        """Add free rows: copies of the first row, to be replaced."""
        rows = [*range(len(self.keys)), *[0] * count]
        self._select(rows)
        added = list(range(len(rows) - count, len(rows)))
        for row in added:
            self.keys[row] = None
        return added

    def _compact(self) -> None:
        """Remove free rows once they are many."""
        kept = [row for row, key in enumerate(self.keys) if key is not None]
        if not kept:
            self.clear()
        elif len(self.keys) - len(kept) > _COMPACT_SHARE * len(self.keys):
            self._select(kept)

    def _select(self, rows: list[int]) -> None:
        assert self.state is not None and self.decoder is not None
        index = torch.tensor(rows, device=self.model.device)
        self.state = self.state.select(index)
        self.decoder.select(index)
        self.keys, self.enough, self.widths = (
            [each[row] for row in rows] for each in (self.keys, self.enough, self.widths)
        )

    def clear(self) -> None:
        """Give up all sentences."""
        self.state, self.decoder = None, None
        self.keys, self.enough, self.widths = [], [], []


def _prepared(
    model: VanillaTransformerForConditionalGeneration, settings: dict[str, Any]
) -> tuple[GenerationConfig, LogitsProcessorList, dict[str, Any]]:
    """What `generate` hands to a search: the config with all defaults, the processors, keywords of `beam_search`."""
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UserError(f"model: {type(model).__name__} is none of this package's; convert it first")
    start = model.generation_config.decoder_start_token_id
    ids = torch.tensor([[start]], device=model.device)  # only its batch size counts
    search, limits, uncovered = plan_search(model, ids, None, settings)
    asked = model.generation_config.to_diff_dict() | settings
    uncovered += [name for name in _BY_ROW if asked.get(name) not in (None, 0, 1.0)]
    if search is None or uncovered:
        raise UserError(f"model: its generation_config.json asks for {', '.join(uncovered)}; a shared search has none")

    def keep(model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **_: Any) -> Any:
        return generation_config, logits_processor

    generate: Any = GenerationMixin.generate  # without the search of this package's own `generate`
    with torch.inference_mode():
        generation_config, processors = generate(model, ids, custom_generate=keep, **(limits | settings))
    return generation_config, processors, search.keywords
