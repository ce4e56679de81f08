"""Arguments that transformers passes to the forward pass of every model, under the names of its versions.

A forward pass takes `**kwargs` and hands them to its attention. An argument that nothing reads is an error.
transformers 5.24, for example, renamed the cache, and decoding without it gives other tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.utils import TransformersKwargs

#: The cache's name in outputs of the installed transformers.
CACHE = "cache" if "cache" in Seq2SeqModelOutput.__match_args__ else "past_key_values"

# Names that a model may ignore: those that transformers declares for all models, and those that its decorators of
# `forward` read and pass on.
STANDARD = (TransformersKwargs.__optional_keys__ | TransformersKwargs.__required_keys__) | {
    *("return_dict", "use_cache"),
    *("debug_io", "debug_io_dir", "prune_layers"),
}
# Attention functions of transformers, which read names in `STANDARD` only.
BACKENDS = frozenset(
    {"eager", "sdpa", "flex_attention"} | {f"flash_attention_{version}" for version in (2, 3, 4)}
)


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """Return the cache, whichever of its two names the caller uses. `cache` is its name from transformers 5.24 on."""
    if past_key_values is None:
        return cache
    if cache is not None and cache is not past_key_values:
        raise ValueError(
            "past_key_values and cache are two names of one argument: give one of them"
        )
    return past_key_values


def check_unread(arguments: Mapping[str, Any], backend: str | None) -> None:
    """Raise a ValueError for arguments that no attention function reads.

    Args:
        arguments: what is left of those of a forward pass.
        backend: name of the attention function. A function of the user may read names of its own, but no cache.
    """
    for name, value in arguments.items():
        if isinstance(value, Cache):
            raise ValueError(
                f"{name} is a cache under an unknown name: this code and transformers {transformers.__version__} do "
                "not fit together; give it as past_key_values, or install a version that the package was tested with"
            )
        if value is None or (backend is not None and backend not in BACKENDS):
            continue
        known = name in STANDARD
        if not known or (isinstance(value, Tensor) and name != "num_items_in_batch"):
            raise ValueError(
                f"forward has no argument {name} ({type(value).__name__}): check the name, or leave it out"
            )


def check_ids(ids: Tensor, size: int, name: str, remedy: str = "use the model's tokenizer") -> None:
    """Raise a ValueError for ids outside 0 … size - 1, on a CPU and outside compiled graphs."""
    # Elsewhere reading the values would synchronise the GPU or break the graph. There torch's check must do.
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(extreme) for extreme in ids.aminmax())
        if low < 0 or high >= size:
            raise ValueError(
                f"{name} contains {low if low < 0 else high}, but must be below {size}; {remedy}"
            )
