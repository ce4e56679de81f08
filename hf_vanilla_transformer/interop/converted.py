"""The result of reading a toolkit's files, and the types of its parts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

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
