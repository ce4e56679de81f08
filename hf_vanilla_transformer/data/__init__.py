"""Sentence pairs, tokenizers, and pairs as token ids."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .augmentation import with_augmentation
    from .corpora import PairReport
    from .encoding import EncodingReport, encode_pairs
    from .inputs import Input, parse_inputs
    from .mixtures import MixtureReport, load_pairs
    from .numbers import number_pairs
    from .packing import PackedCollator, packed_forward
    from .readers import read_lines
    from .tokenizer_files import load_tokenizers, save_tokenizers
    from .tokenizer_training import train_tokenizer

__all__ = [
    "EncodingReport",
    "Input",
    "MixtureReport",
    "PackedCollator",
    "PairReport",
    "encode_pairs",
    "load_pairs",
    "load_tokenizers",
    "number_pairs",
    "packed_forward",
    "parse_inputs",
    "read_lines",
    "save_tokenizers",
    "train_tokenizer",
    "with_augmentation",
]

__getattr__ = lazy_names(
    __name__,
    {
        "EncodingReport": ".encoding",
        "Input": ".inputs",
        "MixtureReport": ".mixtures",
        "PackedCollator": ".packing",
        "PairReport": ".corpora",
        "encode_pairs": ".encoding",
        "load_pairs": ".mixtures",
        "load_tokenizers": ".tokenizer_files",
        "number_pairs": ".numbers",
        "packed_forward": ".packing",
        "parse_inputs": ".inputs",
        "read_lines": ".readers",
        "save_tokenizers": ".tokenizer_files",
        "train_tokenizer": ".tokenizer_training",
        "with_augmentation": ".augmentation",
    },
)
