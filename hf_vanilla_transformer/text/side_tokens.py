"""The tokens of source and target by id, for tokenizers of any class.

`get_vocab()` and `decode` do not suffice. `MarianTokenizer` with separate vocabularies and `FSMTTokenizer` have two
vocabularies: `get_vocab()` is the source's, and `decode` uses the target's. `M2M100Tokenizer.get_vocab()` lacks the
languages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig

Side = Literal["source", "target"]
DecodeIds = Callable[[Sequence[int]], str]

#: Arguments of `decode` for the text of a translation. Cleaning up would change its spaces.
AS_TEXT: dict[str, object] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


def side_tokens(tokenizer: PreTrainedTokenizerBase, size: int, side: Side) -> list[str]:
    """The token of each id of one side.

    Args:
        tokenizer: of this side, or of both.
        size: rows of the embedding. A row without a token gets the name `<unused_N>`.
        side: the side of a tokenizer with two vocabularies.
    """
    tokens = _vocabulary(tokenizer, side)
    for number in range(size):
        if number not in tokens and (token := _converted(tokenizer, number)) is not None:
            tokens[number] = token
    names = set(tokens.values())
    for number in range(size):
        if number not in tokens:
            name = f"<unused_{number}>"
            tokens[number] = name if name not in names else f"<unused_row_{number}>"
    return [tokens[number] for number in range(size)]


def tokens_of_sides(
    config: VanillaTransformerConfig,
    source: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
) -> tuple[list[str], list[str]]:
    """The `side_tokens` of a model's source and target."""
    target_size = getattr(config, "target_vocab_size", config.vocab_size)
    return side_tokens(source, config.vocab_size, "source"), side_tokens(
        target, target_size, "target"
    )


def side_decoder(tokenizer: PreTrainedTokenizerBase, side: Side) -> DecodeIds:
    """A function from the ids of one side to text, special tokens included. `decode` takes ids of the target only."""
    if side == "source" and target_vocabulary(tokenizer) is not None:
        tokens = _vocabulary(tokenizer, side)
        return lambda ids: tokenizer.convert_tokens_to_string(
            [tokens.get(i, str(tokenizer.unk_token)) for i in ids]
        )
    return lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the letters of the tokens are bytes. Letters such as Ġ may be those of a language, too."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in repr(getattr(backend, "decoder", None))


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The target's tokens, with the letters of a byte-level BPE instead of its bytes: "ĠfÃ¼r" becomes "Ġfür".

    Tokens with incomplete or unprintable characters stay as they are.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    if not is_byte_level(tokenizer):
        return tokens
    texts = [
        token if token.isascii() else decoders.ByteLevel().decode([token]).replace(" ", "Ġ")
        for token in tokens
    ]
    return [
        text if text.isprintable() and "\ufffd" not in text else token
        for token, text in zip(tokens, texts, strict=True)
    ]


def target_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[int, str] | None:
    """The target's tokens of a tokenizer with two vocabularies, otherwise None."""
    target = getattr(tokenizer, "decoder", None)
    source = tokenizer.get_vocab()
    if not isinstance(target, Mapping) or all(
        source.get(token) == number for number, token in target.items()
    ):
        return None
    return dict(target)


def _vocabulary(tokenizer: PreTrainedTokenizerBase, side: Side) -> dict[int, str]:
    tokens = target_vocabulary(tokenizer) if side == "target" else None
    tokens = tokens or {number: token for token, number in tokenizer.get_vocab().items()}
    known = set(tokens.values())
    added = {
        number: str(token)
        for number, token in tokenizer.added_tokens_decoder.items()
        if str(token) not in known
    }
    return added | tokens  # added tokens have the ids of the source


def _converted(tokenizer: PreTrainedTokenizerBase, number: int) -> str | None:
    """The token of an id that the vocabulary lacks. None if the tokenizer does not map it back to this id."""
    try:
        token = tokenizer.convert_ids_to_tokens(number)
    except (IndexError, KeyError, OverflowError):
        return None
    return token if token and tokenizer.convert_tokens_to_ids(token) == number else None
