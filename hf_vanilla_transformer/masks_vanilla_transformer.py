"""Masks of the three attentions (§3.2.3), and the positions of tokens under them.

A mask says which keys each query sees. Its form depends on the attention function: eager attention adds it to the
scores, and torch's kernels take a Boolean one.

Shapes: B batch, S source length, T target length, P positions already in the cache, K = P + T keys, D d_model.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    create_causal_mask,
)

from .arguments_vanilla_transformer import BACKENDS
from .configuration_vanilla_transformer import VanillaTransformerConfig


def mask_backend(config: VanillaTransformerConfig) -> str:
    """Return the attention function for which masks are made.

    For a function that the user registered transformers makes no mask, unless a mask function has been registered
    under the same name. Such a function gets the masks of eager attention.
    """
    backend = config._attn_implementation
    # torch.compile cannot look into the registry on Python 3.10
    known = backend in BACKENDS or backend in ALL_MASK_ATTENTION_FUNCTIONS
    return backend if known else "eager"


def _with_mask_backend(config: VanillaTransformerConfig) -> VanillaTransformerConfig:
    """Return `config`, or a copy of it for which transformers makes masks."""
    backend = mask_backend(config)
    if backend == config._attn_implementation:
        return config
    config = copy.copy(config)
    config._attn_implementation = backend
    return config


def causal_mask(
    config: VanillaTransformerConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> Any:
    """Return the mask (B, 1, T, K) of masked self-attention: keys after the query are hidden, and padding."""
    return create_causal_mask(_with_mask_backend(config), inputs_embeds, attention_mask, cache)


def bidirectional_mask(
    config: VanillaTransformerConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    encoder_hidden_states: Tensor | None = None,
) -> Any:
    """Return the mask (B, 1, T, S) of attention to a whole source, or to all of the inputs. None masks nothing."""
    # On a CPU a mask without padding is left out. On a GPU the host would wait to learn that.
    left_out = attention_mask is None or attention_mask.device.type == "cpu"
    return create_bidirectional_mask(
        _with_mask_backend(config),
        inputs_embeds,
        attention_mask,
        encoder_hidden_states,
        allow_is_bidirectional_skip=left_out,
    )


def padding_mask(config: VanillaTransformerConfig, input_ids: Tensor) -> Tensor | None:
    """Return 1 for every id (B, S) that is not the pad token. None if there is no such token.

    Raises:
        ValueError: the pad token also ends sentences.
    """
    pad = config.pad_token_id
    if pad is None:
        return None
    # transformers would warn in `generate`, and read everything. Then a sentence depends on those next to it.
    eos = config.eos_token_id
    if pad in (eos if isinstance(eos, list) else [eos]):
        raise ValueError(
            f"attention_mask is missing: pad_token_id={pad} also ends sentences, so that ids do not show padding"
        )
    return input_ids.ne(pad).long()


def token_positions(
    inputs: Tensor, attention_mask: Any, past: int = 0, prepared: bool = False
) -> Tensor:
    """Positions (B or 1, T) that count tokens only. Padding gets the position of the token before it, or 0.

    Args:
        inputs: ids (B, T) or embeddings (B, T, D).
        attention_mask: (B, P + T), 1 for a token, 0 for padding on any side. Without it positions are P, P + 1 …
        past: P.
        prepared: for a static cache `generate` makes a mask (B, 1, T, K), where True or 0.0 marks a visible key.
    """
    length = inputs.shape[1]
    dimensions = attention_mask.ndim if isinstance(attention_mask, Tensor) else 0
    if dimensions == 4 and prepared:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (visible[:, 0].sum(dim=-1) - 1).clamp(min=0)[:, -length:]
    if dimensions == 2:
        return (attention_mask.ne(0).cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=inputs.device) + past)[None]


# Packed rows: several sentences in a row, each a segment with a number. 0 is a free place.


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Return True at the first place of each segment: (B, T) to (B, T)."""
    starts = segment_ids != segment_ids.roll(1, dims=-1)
    starts[:, 0] = True
    return starts


def segment_positions(segment_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return positions (B, T) that count the tokens of each segment, as `token_positions` those of a sentence."""
    visible = (
        torch.ones_like(segment_ids) if attention_mask is None else attention_mask.ne(0).long()
    )
    count = visible.cumsum(dim=-1)
    before = (count - visible).masked_fill(~segment_starts(segment_ids), 0).cummax(dim=-1).values
    return (count - before - 1).clamp(min=0)


def without_hidden(segment_ids: Tensor, attention_mask: Tensor | None, name: str) -> Tensor:
    """Return `segment_ids` (B, T) with the places that a mask (B, T) hides as free places."""
    if attention_mask is None:
        return segment_ids
    if attention_mask.shape != segment_ids.shape:
        raise ValueError(
            f"{name} has shape {tuple(attention_mask.shape)}: next to segment ids it must have their shape, "
            f"{tuple(segment_ids.shape)}"
        )
    return segment_ids.masked_fill(attention_mask == 0, 0)


def segment_mask(
    config: VanillaTransformerConfig,
    queries: Tensor,
    keys: Tensor,
    dtype: torch.dtype,
    causal: bool = False,
) -> Tensor:
    """Return the mask (B, 1, T, K) of attention within segments. No key after the query is visible if `causal`.

    A free place without a free key sees every key. Nothing depends on it, and no row of a mask is empty.

    Args:
        config: names the attention function.
        queries: segment of each query, (B, T).
        keys: segment of each key, (B, K).
        dtype: of the hidden states.

    Raises:
        ValueError: the attention function takes no such mask.
    """
    backend = mask_backend(config)
    if backend not in ("eager", "sdpa"):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} takes no packed rows: choose eager or sdpa"
        )
    visible = queries[:, None, :, None] == keys[:, None, None, :]  # (B, 1, T, K)
    if causal:
        place = torch.arange(keys.shape[1], device=keys.device)
        visible = visible & (place[:, None] >= place)
    if queries is not keys:  # otherwise each place sees itself
        visible = visible | ~visible.any(dim=-1, keepdim=True)
    if backend == "sdpa":
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
