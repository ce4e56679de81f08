"""What of a run is code of the package and of transformers, unchanged, and what is the caller's.

Each function returns what is the caller's own, as a noun for a line of the run, or None.
"""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from torch.utils.data import ConcatDataset, Subset
from transformers import DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import LabelSmoother

from ...batches.packing import TABLE_COLUMNS, is_fixed
from ...batches.redrawing import RedrawnDataset
from ...engine.ownership import is_own
from ...loss_vanilla_transformer import IGNORED


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


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
