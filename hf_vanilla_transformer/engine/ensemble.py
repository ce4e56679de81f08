"""Decode with several models: a token's probability is the mean of theirs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..decoding_vanilla_transformer import EncodedSource
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration as Model
from ..search_vanilla_transformer import BeamState, Decoder
from .shared_copy import shared_copy


def with_ensemble(models: Sequence[Model]) -> Any:
    """Return a copy of the first model that shares its weights and searches with all of them.

    Raises:
        ValueError: vocabularies of different sizes.
    """
    size, *others = (model.config.target_vocab_size for model in models)
    for other in others:
        if other != size:
            raise ValueError(
                f"ensemble: a model with {other} target tokens beside one with {size}; use one tokenizer"
            )
    copied = shared_copy(models[0])
    copied.inference_engine = EnsembleEngine(models)
    return copied


class EnsembleEngine:
    """An inference engine that averages the probabilities of models, each of which may be optimized."""

    search_only = "ensemble"  # transformers' loops would call the first model alone

    def __init__(self, models: Sequence[Model]):
        self.models = tuple(models)

    def encode(self, model: Model, ids: Tensor, mask: Tensor) -> EncodedSource:
        states, *others = (each.encode(ids, mask).states for each in self.models)
        return EncodedSource(states, mask, ids, others=tuple(others))

    def decoder(self, model: Model, source: EncodedSource, beams: int) -> Decoder:
        all_states = (source.states, *source.others)
        if len(all_states) != len(self.models):
            raise ValueError(
                "ensemble: each model encodes the source itself; give input_ids, not encoder outputs"
            )
        decoders = []
        for each, states in zip(self.models, all_states, strict=True):
            own = source._replace(states=states, others=())
            decoders.append(each.make_decoder(own, beams))
        return EnsembleDecoder(decoders)


class EnsembleDecoder(Decoder):
    """A `Decoder` that asks several."""

    def __init__(self, decoders: Sequence[Decoder]):
        self.decoders = decoders
        self.initial_beams = max(decoder.initial_beams for decoder in decoders)

    def prefill(self, tokens: Tensor) -> None:
        for decoder in self.decoders:
            decoder.prefill(tokens)

    def logits(self, state: BeamState) -> Tensor:
        logits = torch.stack([decoder.logits(state).float() for decoder in self.decoders])
        return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(self.decoders))

    def select(self, rows: Tensor) -> None:
        for decoder in self.decoders:
            decoder.select(rows)

    def replace(self, rows: Tensor, other: "EnsembleDecoder") -> None:
        for mine, theirs in zip(self.decoders, other.decoders, strict=True):
            mine.replace(rows, theirs)
