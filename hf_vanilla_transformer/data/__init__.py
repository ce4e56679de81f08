"""Sentence pairs, tokenizers, and pairs as token ids."""

from .corpora import PairReport, load_pairs
from .encoding import EncodingReport, encode_pairs, with_bpe_dropout
from .mixtures import MixtureReport, load_mixture
from .numbers import number_pairs
from .readers import read_lines
from .tokenizer_training import load_tokenizers, save_tokenizers, train_tokenizer

__all__ = [
    "EncodingReport",
    "MixtureReport",
    "PairReport",
    "encode_pairs",
    "load_mixture",
    "load_pairs",
    "load_tokenizers",
    "number_pairs",
    "read_lines",
    "save_tokenizers",
    "train_tokenizer",
    "with_bpe_dropout",
]
