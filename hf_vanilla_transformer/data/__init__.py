"""Sentence pairs and how they become ids: corpora, the built-in numbers, tokenizers, encoding."""

from .corpora import PairReport, load_pairs
from .encoding import EncodingReport, encode_pairs, with_bpe_dropout
from .numbers import number_pairs
from .readers import read_lines
from .tokenizer_training import copy_with_bpe_dropout, load_tokenizers, save_tokenizers, train_tokenizer

__all__ = [
    "EncodingReport",
    "PairReport",
    "copy_with_bpe_dropout",
    "encode_pairs",
    "load_pairs",
    "load_tokenizers",
    "number_pairs",
    "read_lines",
    "save_tokenizers",
    "train_tokenizer",
    "with_bpe_dropout",
]
