"""What of a model is code of the package and of transformers, unchanged, and what is the caller's.

A fast path of training or of the engine computes what the package's modules compute. Where a caller has put something
else there, the modules run.
"""

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention_vanilla_transformer import eager_attention_forward, hooks_of

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = (_PACKAGE, "transformers", "accelerate", "torch")
# Modules of torch that compute each place of a row by itself
_BY_PLACE = (
    nn.Linear,
    nn.LayerNorm,
    nn.Embedding,
    nn.Dropout,
    nn.Identity,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterDict,
)
# Of embeddings, layers and attentions
_SETTINGS = "max_norm", "pre_norm", "head_dim", "value_head_dim", "is_causal"
_HOMES_BY_PLACE = "transformers.activations", "torch.nn.modules.activation"
_ADAPTERS = "peft.peft_model", "peft.tuners.lora."  # prompts add places


def is_own(function: Any) -> bool:
    """True for a function or method that a library defines, not for one that was put in its place or that a library
    decorates."""
    function = getattr(function, "__func__", function)
    # `functools.wraps` copies `__module__`, but not the namespace of the code
    home = getattr(function, "__globals__", {}).get("__name__", "")
    if home.partition(".")[0] not in _LIBRARIES:
        return False
    inner = getattr(function, "__wrapped__", None)
    if not hasattr(inner, "__globals__"):  # the object in accelerate's `convert_outputs_to_fp32`
        inner = getattr(inner, "__wrapped__", None)
    return inner is None or is_own(inner)


def foreign_part(model: nn.Module) -> str | None:
    """A module, hook, method or attention of the caller's, as a noun, or None. Adapters are none.

    It may mix the places of a row, or does what is not written in this package.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if not (is_known(kind) or kind.__module__.startswith(_ADAPTERS)):
            return f"{kind.__name__} {name}".rstrip()
        if not all(map(is_own, hooks_of(module))):
            return f"hooks of {name or kind.__name__}"
        for own in (vars(module).get("_original_forward"), vars(module).get("forward")):
            if own is not None and not (is_own(own) and getattr(own, "__self__", module) is module):
                return f"the forward of {name or kind.__name__}"
        if changed := _changed_method(module):
            return f"{changed} of {name or kind.__name__}"
        # A layer may have a config of its own.
        backend = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if backend is not None and not is_own(
            ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        ):
            return f"attn_implementation={backend!r}"
    return None


def altered_part(model: nn.Module) -> str | None:
    """A module whose class, shapes or settings are not those that `config` builds, as a noun, or None.

    The modules compute with it. Packed weights would not. Each stack may have any number of layers.
    """
    config: Any = copy.deepcopy(model.config)
    config.encoder_layers = config.decoder_layers = 1
    with torch.device("meta"):
        usual = {name: _built(module) for name, module in type(model)(config).named_modules()}
    names = set()
    for name, module in model.named_modules():
        place = re.sub(r"\blayers\.\d+", "layers.0", name)
        names.add(place)
        if usual.get(place) != _built(module) and not place.endswith(".activation"):
            return f"another {name}"
    missing = sorted(usual.keys() - names)
    return f"no {missing[0]}" if missing else None


def _built(module: nn.Module) -> tuple[Any, ...]:
    """What an engine takes for granted of a module at its place."""
    shapes = {name: weight.shape for name, weight in module.named_parameters(recurse=False)}
    return type(module), shapes, [getattr(module, name, None) for name in _SETTINGS]


def is_known(kind: type) -> bool:
    """True for a class of the bundle, or one of torch that computes each place by itself."""
    home = kind.__module__
    if kind in _BY_PLACE or (home in _HOMES_BY_PLACE and kind is not nn.MultiheadAttention):
        return True
    package, _, name = home.rpartition(".")
    # Not the code of a checkpoint, whose files have these names too: somebody may have changed it.
    return package == _PACKAGE and name.endswith("_vanilla_transformer")


def _changed_method(module: nn.Module) -> str | None:
    """A method of a module of the bundle that was replaced, in the instance or in its class."""
    kind = type(module)
    if not kind.__module__.endswith("_vanilla_transformer"):
        return None
    for name, value in vars(module).items():
        if callable(value) and callable(getattr(kind, name, None)) and not is_own(value):
            return name
    for base in kind.__mro__:
        if base.__module__.endswith("_vanilla_transformer"):
            for name, value in vars(base).items():
                if hasattr(value, "__globals__") and not is_own(value):
                    return name
    return None
