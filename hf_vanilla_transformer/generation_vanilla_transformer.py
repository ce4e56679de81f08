"""How the paper decodes (§6.1): beam 4, length penalty 0.6, at most 50 tokens more than the source has."""

from typing import Any

from torch import Tensor
from transformers.generation import GenerationConfig

from .configuration_vanilla_transformer import VanillaTransformerConfig

MAX_LENGTH_OVER_SOURCE = 50  # tokens

# `Seq2SeqTrainer` writes this default of the library into the generation config of the model that it evaluates.
_LIBRARY_MAX_LENGTH = 20


def paper_generation_config(config: VanillaTransformerConfig) -> GenerationConfig:
    """Beam 4 and α = 0.6, in Hugging Face's terms: a hypothesis is scored by log P / length^0.6.

    The paper's score is log P / ((5 + length) / 6)^0.6 (Wu et al. 2016, Eq. 14); `GenerationMixin` does not have it.

    Args:
        config: gives the special words.
    """
    generation_config = GenerationConfig.from_model_config(config)
    generation_config.update(num_beams=4, length_penalty=0.6, early_stopping=False)
    generation_config._from_model_config = False  # or `generate` would make it anew from the model's configuration
    return generation_config


def paper_max_new_tokens(
    generation_config: GenerationConfig, inputs: Tensor | None, kwargs: dict[str, Any], own: bool
) -> dict[str, int]:
    """The keyword argument that limits a translation to 50 tokens more than its source.

    Args:
        generation_config: what decides where `kwargs` do not.
        inputs, kwargs: the arguments of `generate`; the source is (B, S) ids, (B, S, D) embeddings or what the
            encoder made of them.
        own: whether it is the model's own generation config; a length of 20 is then taken out of it, because only
            the trainer can have written it.

    Returns:
        `{"max_new_tokens": S + 50}`; empty where the caller or the generation config limits the length already, or
        where there is no source.
    """
    lengths = kwargs.get("max_length"), kwargs.get("max_new_tokens"), generation_config.max_new_tokens
    if any(length is not None for length in lengths):
        return {}
    if own and generation_config.max_length == _LIBRARY_MAX_LENGTH:
        generation_config.max_length = None
    if generation_config.max_length is not None:
        return {}
    for source in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if source is not None:
            return {"max_new_tokens": source.shape[1] + MAX_LENGTH_OVER_SOURCE}
    if kwargs.get("encoder_outputs") is not None:
        return {"max_new_tokens": kwargs["encoder_outputs"][0].shape[1] + MAX_LENGTH_OVER_SOURCE}
    return {}
