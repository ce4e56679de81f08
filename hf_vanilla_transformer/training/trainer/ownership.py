"""What of a run is code of the package and of transformers, unchanged, and what is the caller's.

Each function returns what is the caller's own, as a noun for a line of the run, or None.
"""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from transformers import DataCollatorForSeq2Seq
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_pt_utils import LabelSmoother

from ...batches.packing import TABLE_COLUMNS, is_fixed
from ...batches.redrawing import RedrawnDataset
from ...layers_vanilla_transformer import HOOKS, eager_attention_forward
from ...loss_vanilla_transformer import IGNORED

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
_HOMES_BY_PLACE = "transformers.activations", "torch.nn.modules.activation"
_ADAPTERS = "peft.peft_model", "peft.tuners.lora."  # prompts add places


def is_own(function: Any) -> bool:
    """True for a function or method that a library defines, not for one that was put in its place."""
    function = getattr(function, "__func__", function)
    # `functools.wraps` copies `__module__`, but not the namespace of the code
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return home.partition(".")[0] in _LIBRARIES


def methods(*names: str) -> Callable[[Any], str | None]:
    """A function that returns the first of these methods of a trainer that is overridden."""

    def overridden(trainer: Any) -> str | None:
        for name in names:
            if not is_own(getattr(trainer, name)):
                return f"{name} of {type(trainer).__name__}"
        return None

    return overridden


def foreign_loss(trainer: Any) -> str | None:
    """A loss that the caller computes from a batch and its outputs."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    if type(trainer.label_smoother) not in (type(None), LabelSmoother):
        return "an own label_smoother"
    return methods("compute_loss", "training_step")(trainer)


# Data


def foreign_data(trainer: Any) -> str | None:
    """A part that makes the batches of training from the rows, unless the ids of a table are read once."""
    return (
        _foreign_collator(trainer)
        or methods("_remove_unused_columns", "_get_collator_with_removed_columns")(trainer)
        or _foreign_rows(trainer)
    )


def _foreign_collator(trainer: Any) -> str | None:
    collator = trainer.data_collator
    if type(collator) is not DataCollatorForSeq2Seq or not is_own(type(collator).__call__):
        return f"data_collator={_name(collator)}"
    if not is_own(getattr(collator.tokenizer, "pad", None)):
        return f"the padding of {_name(collator.tokenizer)}"
    shift = getattr(collator.model, "prepare_decoder_input_ids_from_labels", None)
    shifts = shift is None or (shift.__self__ is trainer._base_model() and is_own(shift))
    if not shifts or collator.label_pad_token_id != IGNORED:
        return "the decoder inputs or labels of data_collator"
    return None


def _foreign_rows(trainer: Any) -> str | None:
    data = trainer.train_dataset
    if data is None or type(data) is RedrawnDataset:
        return None
    name = f"train_dataset={_name(data)}"
    if not is_fixed(data):
        return f"{name} with rows of its own"
    if not is_own(trainer._set_signature_columns_if_needed):
        return f"_set_signature_columns_if_needed of {type(trainer).__name__}"
    columns = _columns(data)
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns &= set(trainer._signature_columns)
    if unknown := sorted(columns.difference(TABLE_COLUMNS)):
        return f"the columns {', '.join(unknown)}"
    return None if {"input_ids", "labels"} <= columns else f"the columns of {name}"


def _columns(data: Any) -> set[str]:
    """The columns of a dataset whose rows `is_fixed`."""
    if isinstance(data, Subset):
        return _columns(data.dataset)
    if isinstance(data, ConcatDataset):
        return set().union(*map(_columns, data.datasets))
    return set(data.format["columns"]) if isinstance(data, Dataset) else set().union(*data)


# The model


def foreign_part(model: nn.Module) -> str | None:
    """A module, hook or attention that may mix the places of a row, or does what is not written in this package."""
    for name, module in model.named_modules():
        kind = type(module)
        if not _is_known(kind):
            return f"{kind.__name__} {name}".rstrip()
        hooks = [hook for kind_of_hook in HOOKS for hook in vars(module)[kind_of_hook].values()]
        if not all(map(is_own, hooks)):
            return f"hooks of {name or kind.__name__}"
        own = vars(module).get("_original_forward", vars(module).get("forward"))
        if own is not None and not (is_own(own) and getattr(own, "__self__", module) is module):
            return f"the forward of {name or kind.__name__}"
        if changed := _changed_method(module):
            return f"{changed} of {name or kind.__name__}"
    config: Any = model.config
    backend = config._attn_implementation
    if not is_own(ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)):
        return f"attn_implementation={backend!r}"
    return None


def _is_known(kind: type) -> bool:
    """True for a class of the bundle, of an adapter, or one of torch that computes each place by itself."""
    home = kind.__module__
    if kind in _BY_PLACE or (home in _HOMES_BY_PLACE and kind is not nn.MultiheadAttention):
        return True
    of_bundle = home.startswith(f"{_PACKAGE}.") and home.endswith("_vanilla_transformer")
    return of_bundle or home.startswith(_ADAPTERS)


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


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
