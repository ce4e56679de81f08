"""Sentence pairs as token ids, drawn again in each epoch, padded or packed."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .augmentation import with_augmentation
    from .encoding import EncodingReport, encode_pairs
    from .packing import PackedCollator, packed_forward

__all__ = [
    "EncodingReport",
    "PackedCollator",
    "encode_pairs",
    "packed_forward",
    "with_augmentation",
]

__getattr__ = lazy_names(
    __name__,
    {
        "EncodingReport": ".encoding",
        "PackedCollator": ".packing",
        "encode_pairs": ".encoding",
        "packed_forward": ".packing",
        "with_augmentation": ".augmentation",
    },
)
