"""Copies of a model's modules that share its weights, for computations that other threads must not notice."""

import copy
from typing import TypeVar

from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)


def shared_copy(model: Model, attention: str | None = None) -> Model:
    """Copy the modules and the configuration of a model in evaluation mode, but not its weights.

    A mode, a hook or an attention implementation set on the copy does not reach the model, so that several threads may
    use both. The copy takes milliseconds and sees later writes to the weights. With `attention="eager"` it returns
    attention weights. None keeps the model's implementation.
    """
    weights = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, weights).eval()
    if attention is not None:
        copied.set_attn_implementation(attention)
    return copied


def in_evaluation_mode(model: Model) -> Model:
    """Return the model if all its modules are in evaluation mode, otherwise a `shared_copy`."""
    return shared_copy(model) if any(module.training for module in model.modules()) else model
