"""Decode with several models: a token's probability is the mean of theirs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..generation_vanilla_transformer import EncodedSource, ModuleDecoder
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration as Model
from ..search_vanilla_transformer import BeamState, Decoder


class EnsembleEngine:
    """An inference engine that averages the probabilities of several models.

    Args:
        model: the first model.
        members: the other models. Every model may be optimized.

    Raises:
        ValueError: vocabularies of different sizes.
    """

    search_only = True  # transformers' loops would call the first model alone

    def __init__(self, model: Model, members: Sequence[Model]):
        self.model = model
        self.members = members
        self.engine = model.inference_engine
        size = model.config.target_vocab_size
        for member in members:
            other = member.config.target_vocab_size
            if other != size:
                raise ValueError(
                    f"ensemble: a model with {other} target tokens beside one with {size}; use one tokenizer"
                )

    def _models(self) -> list[tuple[Model, Any]]:
        """All models with their inference engines."""
        found = []
        for model in (self.model, *self.members):
            # A member may be the first model again, whose engine is now this one.
            engine = self.engine if model is self.model else model.inference_engine
            found.append((model, engine))
        return found

    def encode(self, model: Model, ids: Tensor, mask: Tensor) -> EncodedSource:
        encoded = []
        for each, engine in self._models():
            if engine is None:
                encoded.append(each.get_encoder()(ids, mask).last_hidden_state)
            else:
                encoded.append(engine.encode(each, ids, mask).states)
        return EncodedSource(encoded[0], mask, ids, others=tuple(encoded[1:]))

    def decoder(self, model: Model, source: EncodedSource, beams: int, rows: int) -> Decoder:
        if len(source.others) != len(self.members):
            raise ValueError(
                "ensemble: each model encodes the source itself; give input_ids, not encoder outputs"
            )
        all_states = (source.states, *source.others)
        decoders: list[Decoder] = []
        for (each, engine), states in zip(self._models(), all_states, strict=True):
            own = source._replace(states=states, others=())
            if engine is None:
                decoders.append(ModuleDecoder(each, own))
            else:
                decoders.append(engine.decoder(each, own, beams, rows))
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
