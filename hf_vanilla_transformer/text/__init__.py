"""Words, language codes, tokens and tokenizers: what is known of a text, without a corpus."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .tokenizer_files import load_tokenizers, save_tokenizers
    from .tokenizer_training import train_tokenizer

__all__ = [
    "load_tokenizers",
    "save_tokenizers",
    "train_tokenizer",
]

__getattr__ = lazy_names(
    __name__,
    {
        "load_tokenizers": ".tokenizer_files",
        "save_tokenizers": ".tokenizer_files",
        "train_tokenizer": ".tokenizer_training",
    },
)
