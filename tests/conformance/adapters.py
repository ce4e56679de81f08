"""Where Hugging Face's mixins take every model for a causal language model, what makes them fit a translator.

What runs in other processes must be found there by its module's name, so it is a module apart from the tests.
"""

from collections.abc import Callable
from typing import Any

import hf_tests.test_fsdp_mixin as fsdp_mixin
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, MarianMTModel, PreTrainedConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration


class ReadsItsSource:
    """The tensor-parallel tests call `model(input_ids)`. Here the decoder then gets the same tokens."""

    _auto_class = None  # this file does not belong into a checkpoint

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if decoder_input_ids is None and labels is None:
            decoder_input_ids = input_ids
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            labels=labels,
            **kwargs,
        )


class MarianReadsItsSource(ReadsItsSource, MarianMTModel):
    pass


class VanillaTransformerReadsItsSource(ReadsItsSource, VanillaTransformerForConditionalGeneration):
    pass


def on_a_translator(
    rank: int,
    config_class: type[PreTrainedConfig],
    config: dict,
    test: Callable,
    *args: Any,
    **kwargs: Any,
) -> None:
    """One process of an FSDP test, with a translator where the mixin makes a causal language model."""
    fsdp_mixin.AutoModelForCausalLM = AutoModelForSeq2SeqLM
    test(rank, config_class, config, *args, **kwargs)
