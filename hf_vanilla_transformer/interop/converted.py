"""The result of reading a toolkit's files, and the types of its parts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError

#: A file that the user may name.
File = str | Path | None
#: Tensors by name.
Tensors = dict[str, Tensor]
#: Fields of a configuration, or settings of a search, by name.
Fields = dict[str, Any]


@dataclass
class Converted:
    """A translation model read from a toolkit's files."""

    model: VanillaTransformerForConditionalGeneration  #: with the toolkit's generation settings, if the files have any
    #: for source and target. None if the files have no tokenizer, or if one serves both.
    tokenizer: PreTrainedTokenizerBase | None = None
    target_tokenizer: PreTrainedTokenizerBase | None = None
    #: for the user: how the model translates differently from the toolkit, or what its tokenizer needs
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_tokenizer_size(self.tokenizer, self.model.config.vocab_size)
        check_tokenizer_size(self.target_tokenizer, self.model.config.target_vocab_size)


def check_tokenizer_size(tokenizer: PreTrainedTokenizerBase | None, rows: int) -> None:
    """Raise a UserError if a tokenizer has more tokens than the model has rows in its embedding."""
    if tokenizer is not None and len(tokenizer) > rows:
        raise UserError(
            f"tokenizer: it has {len(tokenizer)} tokens, and the model's vocab_size is {rows}; take the model's own, "
            "or call model.resize_token_embeddings(len(tokenizer)), and train the new tokens"
        )
