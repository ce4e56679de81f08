"""Decode with several models: a token's probability is the mean of theirs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..generation_vanilla_transformer import ModuleDecoder
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration as Model
from ..search_vanilla_transformer import Advance, BeamState, Decoder


class EnsembleEngine:
    """An inference engine that averages the probabilities of several models.

    Args:
        model: the first model.
        members: the other models. The states of all encoders are concatenated, (B, S, D + …). Every model may be
            optimized.

    Raises:
        ValueError: vocabularies of different sizes.
    """

    search_only = True  # transformers' loops would call the first model alone

    def __init__(self, model: Model, members: Sequence[Model]):
        self.model, self.members, self.engine = model, members, model.inference_engine
        size = model.config.target_vocab_size
        for other in (member.config.target_vocab_size for member in members):
            if other != size:
                raise ValueError(
                    f"ensemble: a model with {other} target tokens beside one with {size}; use one tokenizer"
                )

    def _models(self) -> list[tuple[Model, Any]]:
        """All models with their inference engines."""
        models = (self.model, *self.members)
        return [(model, self.engine if model is self.model else model.inference_engine) for model in models]

    def encode(self, model: Model, ids: Tensor, mask: Tensor) -> BaseModelOutput:
        encoded = [
            each.get_encoder()(ids, mask) if engine is None else engine.encode(each, ids, mask)
            for each, engine in self._models()
        ]
        return BaseModelOutput(last_hidden_state=torch.cat([each.last_hidden_state for each in encoded], dim=-1))

    def decoder(self, model: Model, states: Tensor, mask: Tensor, beams: int, rows: int) -> Decoder:
        models = self._models()
        widths = [each.config.d_model for each, _ in models]
        if states.shape[-1] != sum(widths):
            raise ValueError("ensemble: each model encodes the source itself; give input_ids, not encoder outputs")
        parts = zip(models, states.split(widths, dim=-1), strict=True)
        return EnsembleDecoder(
            [
                ModuleDecoder(each, part, mask) if engine is None else engine.decoder(each, part, mask, beams, rows)
                for (each, engine), part in parts
            ]
        )


class EnsembleDecoder:
    """A `Decoder` that asks several."""

    def __init__(self, decoders: Sequence[Decoder]):
        self.decoders, self.initial_beams = decoders, max(decoder.initial_beams for decoder in decoders)

    def _call(self, name: str, *args: Any) -> list[Any]:
        return [getattr(decoder, name)(*args) for decoder in self.decoders]

    def prefill(self, tokens: Tensor) -> None:
        self._call("prefill", tokens)

    def step(self, state: BeamState, advance: Advance) -> BeamState:
        logits = torch.stack(self._call("step", state, lambda _, logits: logits.float())).log_softmax(dim=-1)
        return advance(state, logits.logsumexp(dim=0) - math.log(len(self.decoders)))

    def select(self, rows: Tensor) -> None:
        self._call("select", rows)

    def replace(self, rows: Tensor, other: "EnsembleDecoder") -> None:
        for mine, theirs in zip(self.decoders, other.decoders, strict=True):
            mine.replace(rows, theirs)
