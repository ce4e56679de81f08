"""Numbers on a model's way to its output, which it does not return: attention scores, residual streams, positions.

Shapes: B batch, T tokens, K keys, D d_model, H heads, L layers, d_k and d_v the widths of a head.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from ..engine.shared_copy import shared_copy

Model = TypeVar("Model", bound=PreTrainedModel)

#: Arguments that let a copy return its scores and hidden states.
INSIDE: dict[str, object] = {"output_attentions": True, "output_hidden_states": True}

_NAME = "vanilla_transformer_scores"


def copy_with_scores(model: Model) -> Model:
    """Return a `shared_copy` whose attentions (B, H, T, K) are the scores Q K^T / sqrt(d_k) before mask and softmax.

    The last of its hidden states is the last layer's output, before a final normalisation.
    """
    AttentionInterface.register(_NAME, _attention_with_scores)
    AttentionMaskInterface.register(_NAME, eager_mask)
    copied = shared_copy(model, attention=_NAME)
    copied.config.tie_last_hidden_states = False
    return copied


def _attention_with_scores(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Eq. 1 as in `eager_attention_forward`, without dropout."""
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, K)
    masked = scores if mask is None else scores.float() + mask
    output = masked.softmax(dim=-1).to(value.dtype) @ value  # (B, H, T, d_v)
    return output.transpose(1, 2).contiguous(), scores


def norms_and_positions(
    stack: Any, hidden_states: tuple[Tensor, ...], past: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the lengths (B, L + 1, T) of embeddings and layers' outputs, and the position vectors (T, D) of a stack.

    Args:
        stack: the encoder or the decoder.
        hidden_states: of its output.
        past: the position of the first token.
    """
    states = hidden_states[0][:1]  # (1, T, D)
    positions = past + torch.arange(states.shape[1], device=states.device)
    # in float32, because bfloat16 has three digits
    norms = torch.stack([state.float().norm(dim=-1) for state in hidden_states], dim=1)
    return norms, stack.embed(torch.zeros_like(states, dtype=torch.float32), positions[None])[0]
