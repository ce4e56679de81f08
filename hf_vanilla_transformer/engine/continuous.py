"""Continuous batching for a server: a beam search that sentences join and leave while it runs.

`generate(next_batch=…)` returns when every sentence is done. That suits a file. Here `step` returns each translation
as soon as it is final.

Shapes: n sentences that join, S source length, P first tokens of a translation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel

from ..generation_vanilla_transformer import new_search, plan_search, uncovered_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..search_vanilla_transformer import (
    REFILL_SHARE,
    BeamSearch,
    SearchBatch,
    is_hypothesis,
    require_numbers,
)
from ..utils.errors import UserError

_JOIN_STEPS = 4  # sentences wait at most this many steps for more to join with them


#: A key, the token ids of the source, the number of hypotheses wanted (at most beams), and the first ids of each, as
#: many in all sentences of a search.
NewSentence: TypeAlias = tuple[object, list[int], int, list[int]]


@dataclass(frozen=True)
class FoundHypothesis:
    """A translation: token ids without the start token, and its score (None after greedy search)."""

    tokens: list[int]
    score: float | None


class ContinuousSearch:
    """A running batch of sentences, empty at first. Used by one thread.

    Args:
        model: in evaluation mode, optimized or not. Several searches may share it.
        batch_size: sentences in the batch, at most.
        max_tokens: source tokens in the batch, padding included, at most. A longer sentence goes alone. None is no
            limit.
        prefix_length: first ids of every translation that `join` will give.
        settings: arguments of `generate`, such as `num_beams`. The rest are in the model's generation config.

    Raises:
        UserError: settings, or a generation config, that this package's search does not cover.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        batch_size: int = 64,
        max_tokens: int | None = None,
        prefix_length: int = 0,
        **settings: Any,
    ):
        self.model = model
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.search = _search_of(model, prefix_length, settings)
        self.source_lengths: dict[object, int] = {}  # of the sentences with these keys
        self.steps_since_join = 0

    def __len__(self) -> int:
        """Sentences that are being translated."""
        return len(self.search)

    @property
    def keys(self) -> list[Any]:
        """The keys of the sentences that are being translated."""
        return [key for key in self.search.keys if key is not None]

    def wants(self, waiting: int) -> bool:
        """Return whether it is time for the waiting sentences to join: a larger group is cheaper for each of them."""
        is_large = waiting >= REFILL_SHARE * len(self)
        return not self or is_large or self.steps_since_join >= _JOIN_STEPS

    def fits(self, sources: Sequence[list[int]]) -> bool:
        """Return whether these sentences may join."""
        lengths = [self.source_lengths[key] for key in self.keys]
        lengths += [len(source) for source in sources]
        if len(lengths) == 1:
            return True
        if len(lengths) > self.batch_size:
            return False
        return self.max_tokens is None or len(lengths) * max(lengths) <= self.max_tokens

    @torch.inference_mode()
    def join(self, sentences: Sequence[NewSentence]) -> None:
        """Start sentences."""
        if not sentences:
            return
        batch = self.prepare(sentences)
        self.steps_since_join = 0
        self.source_lengths = {key: self.source_lengths[key] for key in self.keys}
        self.source_lengths |= {key: len(source) for key, source, *_ in sentences}
        self.search.join(batch)

    @torch.inference_mode()
    def prepare(self, sentences: Sequence[NewSentence]) -> SearchBatch:
        """Encode sentences as in `join`. Those that run are not touched."""
        keys, sources, wanted, prefixes = zip(*sentences, strict=True)
        device = self.model.device
        start = self.model.generation_config.decoder_start_token_id
        rows = [torch.tensor(source, dtype=torch.long) for source in sources]  # one may be empty
        pad = self.model.config.pad_token_id or 0
        ids = pad_sequence(rows, batch_first=True, padding_value=pad).to(device)  # (n, S)
        lengths = torch.tensor([len(source) for source in sources], device=device)
        mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()  # (n, S)
        source = self.model.encode(ids, mask)
        return SearchBatch(
            decoder=self.model.make_decoder(source, self.search.config.num_beams),
            prefix=torch.tensor([[start, *prefix] for prefix in prefixes], device=device),  # (n, P)
            source_mask=mask,
            keys=keys,
            wanted=wanted,
        )

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, list[FoundHypothesis]]]:
        """Decode the next token of every sentence. Return keys and translations, best first, of the finished ones."""
        self.steps_since_join += 1
        done = self.search.step()
        if not done:
            return []
        # Those of all sentences together: each copy to the host waits for a GPU.
        parts = zip(*(hypotheses for _, hypotheses in done), strict=True)
        rows = zip(*(torch.cat(part).tolist() for part in parts), strict=True)
        return [(key, self._found(islice(rows, len(each.lengths)))) for key, each in done]

    def _found(self, rows: Iterable[tuple[list[int], int, float]]) -> list[FoundHypothesis]:
        greedy = self.search.config.num_beams == 1
        found: list[FoundHypothesis] = []
        for tokens, length, score in rows:
            require_numbers(math.isnan(score))
            if not found or is_hypothesis(score):
                found.append(FoundHypothesis(tokens[1:length], None if greedy else score))
        return found

    def drop(self, keys: set[object]) -> None:
        """Give up sentences."""
        self.search.drop(keys)

    def clear(self) -> None:
        """Give up all sentences."""
        self.search.clear()


def _search_of(
    model: VanillaTransformerForConditionalGeneration, prefix_length: int, settings: dict[str, Any]
) -> BeamSearch:
    """The search of `generate` with these settings. transformers fills in defaults and makes logits processors."""
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UserError(
            f"model: {type(model).__name__} is none of this package's; convert it first"
        )
    start = model.generation_config.decoder_start_token_id
    ids = torch.tensor([[start]], device=model.device)  # only its batch size counts
    # Only its length counts, also in the limit of a translation.
    prefix = {"decoder_input_ids": ids.expand(1, 1 + prefix_length)}
    search, limits, uncovered = plan_search(model, ids, None, settings | prefix, refill=True)
    if search is None:
        raise UserError(uncovered_line("continuous batching", uncovered))

    def started(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **_: object,
    ) -> BeamSearch:
        return new_search(model, logits_processor, generation_config, **search.keywords)

    generate: Any = GenerationMixin.generate  # not this package's `generate`, which searches
    with torch.inference_mode():
        return generate(model, ids, custom_generate=started, **(limits | settings | prefix))
