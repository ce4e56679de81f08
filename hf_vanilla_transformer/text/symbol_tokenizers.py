"""Tokenizers for `tokens`: characters, bytes, white-space tokens, the matches of a regular expression, SentencePiece.

Each is a `PreTrainedTokenizerFast`, so that loading it needs no code of this package, and restores its text exactly,
unless it lower-cases it (`lowercase`).
`chars`, `words` and regular expressions have the symbols of the training text. Another symbol is an error in training
and `<unk>` afterwards. `bytes` and `sentencepiece` have a token for every byte, and no unknown symbol.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..utils.errors import UserError
from .token_kinds import PATTERNS, check_tokens, describe_tokenizer
from .tokenizer_training import (
    NAMED_TOKENS,
    SPECIAL_TOKENS,
    fast_tokenizer,
    train_tokenizer,
    trained_sentencepiece,
)

# A special token in a text is text: its first character becomes a piece of its own. "^" would also match after a line
# break.
_SPECIAL_TEXT = r"(?<![\s\S])<(?=(?:s|pad|/s|unk)>(?![\s\S]))"
_BYTE_OR_SPECIAL_TEXT = r"<(?=(?:s|pad|/s|unk|0x[0-9A-F]{2})>)"
_SHOWN = 40  # characters of a symbol in an error


@dataclass(frozen=True)
class _Kind:
    """The parts of a tokenizer with a closed vocabulary."""

    pattern: str  #: of a token, or of what separates two tokens
    separated: bool = False

    def backend(self, vocabulary: dict[str, int]) -> Tokenizer:
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        behavior = "removed" if self.separated else "isolated"
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(self.pattern), behavior),
                pre_tokenizers.Split(Regex(_SPECIAL_TEXT), "isolated"),
            ]
        )
        # WordPiece's decoder puts a space between two tokens. None starts with its prefix, because none has a space.
        backend.decoder = (
            decoders.WordPiece(prefix=" ", cleanup=False) if self.separated else decoders.Fuse()
        )
        return backend

    def pieces(self) -> Callable[[str], list[tuple[str, tuple[int, int]]]]:
        """A function from a text to its tokens and their places. Text that is no token is left out."""
        if self.separated:
            split = pre_tokenizers.Split(Regex(self.pattern), "removed")
        else:
            split = pre_tokenizers.Split(Regex(self.pattern), "removed", invert=True)
        return split.pre_tokenize_str


# `words`: one space that is next to no other white space separates two tokens.
_WORDS = _Kind(r"(?<=\S) (?=\S)", separated=True)
_CHARS = _Kind(r"[\s\S]")


def _kind(tokens: str) -> _Kind:
    if tokens == "words":
        return _WORDS
    return _CHARS if tokens == "chars" else _Kind(PATTERNS.get(tokens, tokens))


def train_any_tokenizer(
    rows: Iterable[tuple[str, int]],
    tokens: str,
    *,
    vocab_size: int,
    min_frequency: int = 2,
    lowercase: bool = False,
    content: str | None = None,
    side: str = "text",
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of any `tokens`.

    Args:
        rows: texts and their line numbers.
        tokens: one of `KINDS_OF_TOKENS`, or a regular expression.
        vocab_size: the number of tokens. For tokens that the text determines, the largest number.
        min_frequency, content: of `bpe`, as in `train_tokenizer`.
        lowercase: lower-case all text.
        side: names the texts in errors.

    Raises:
        UserError: what `train_tokenizer`, `train_unigram_tokenizer` and `train_symbol_tokenizer` raise.
    """
    if tokens == "bpe":
        texts = (text for text, _ in rows)
        return train_tokenizer(texts, vocab_size, min_frequency, lowercase, content)
    if tokens == "sentencepiece":
        if lowercase:
            raise UserError(
                "lowercase: True: sentencepiece keeps the case: leave lowercase out, or take bpe"
            )
        return train_unigram_tokenizer((text for text, _ in rows), vocab_size)
    return train_symbol_tokenizer(rows, tokens, vocab_size, lowercase, side)


def train_symbol_tokenizer(
    rows: Iterable[tuple[str, int]],
    tokens: str,
    vocab_size: int | None = None,
    lowercase: bool = False,
    side: str = "text",
) -> PreTrainedTokenizerFast:
    """Make a tokenizer of all symbols of a text, the most frequent first.

    Args:
        rows: the sequences of one side or of both, and their line numbers for errors.
        tokens: "chars", "bytes", "words", a name of `PATTERNS`, or a regular expression whose matches are the tokens.
        vocab_size: the largest number of tokens, with 4 special tokens. None is no limit. `bytes` always have 260.
        lowercase: lower-case all text.
        side: names the texts in errors, such as "source".

    Returns:
        The tokenizer, with `<s>` = 0, `<pad>` = 1, `</s>` = 2, `<unk>` = 3.

    Raises:
        UserError: a text with characters that are no token, a token that is one of the special tokens, or more symbols
            than `vocab_size`.

    Source: the pattern `smiles`, Schwaller et al. 2019.
    """
    check_tokens(tokens)
    if tokens == "bytes":
        backend = _bytes_backend()
    else:
        kind = _kind(tokens)
        counts = _count_symbols(rows, kind, tokens, lowercase, side)
        symbols = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
        size = len(SPECIAL_TOKENS) + len(symbols)
        if vocab_size is not None and size > vocab_size:
            raise UserError(
                f"vocab_size: {vocab_size:,} is less than the {size:,} tokens of the {side} with tokens={tokens}: "
                f"set it to {size} or more, or take bpe"
            )
        backend = kind.backend(
            {symbol: number for number, symbol in enumerate([*SPECIAL_TOKENS, *symbols])}
        )
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = fast_tokenizer(backend, **NAMED_TOKENS)
    describe_tokenizer(tokenizer, tokens, "sequence")
    return tokenizer


def _count_symbols(
    rows: Iterable[tuple[str, int]], kind: _Kind, tokens: str, lowercase: bool, side: str
) -> Counter[str]:
    """How often each symbol occurs. Text that is no symbol is an error with its line."""
    counts: Counter[str] = Counter()
    pieces = kind.pieces()
    for text, line in rows:
        text = normalizers.Lowercase().normalize_str(text) if lowercase else text
        if kind is _CHARS:
            counts.update(text)
            continue
        found = pieces(text)
        _check_pieces(text, found, kind, f"line {line}: the {side}", tokens)
        counts.update(piece for piece, _ in found)
    return counts


def _check_pieces(
    text: str, found: list[tuple[str, tuple[int, int]]], kind: _Kind, where: str, tokens: str
) -> None:
    for piece, _ in found:
        if piece in SPECIAL_TOKENS:
            raise UserError(
                f"{where} has the token {piece}, a special token of the model: rename it in the text"
            )
        if kind.separated and (piece.split() != [piece]):
            shown = repr(piece[:_SHOWN])
            raise UserError(
                f"{where} has {shown}: one space separates two tokens of `words`, and no other white space"
            )
    if kind.separated:
        return
    end = 0
    for _, (start, following) in [*found, ("", (len(text), len(text)))]:
        if start > end:
            shown = repr(text[end : min(start, end + _SHOWN)])
            raise UserError(
                f"{where} has {shown} at character {end + 1}, which is no token of tokens={tokens}"
            )
        end = following


def _bytes_backend() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def train_unigram_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train SentencePiece (Kudo and Richardson 2018, a unigram model), as a fast tokenizer that restores any text.

    Args:
        texts: the sequences of one side or of both.
        vocab_size: the number of tokens, at most, with 4 special tokens and 256 bytes for unknown characters.

    Returns:
        The tokenizer, with `<s>` = 0, `<pad>` = 1, `</s>` = 2, `<unk>` = 3.

    Raises:
        UserError: sentencepiece is not installed, or cannot train `vocab_size` tokens.
    """
    content = trained_sentencepiece(
        # its mark of a space is ordinary text here, which bytes represent
        (text.replace("\u2581", "") for text in texts),
        vocab_size,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    from sentencepiece import SentencePieceProcessor

    trained = SentencePieceProcessor(model_proto=content)
    pieces = [
        (trained.id_to_piece(number).replace("\u2581", " "), trained.get_score(number))
        for number in range(trained.get_piece_size())
    ]
    backend = Tokenizer(
        models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index("<unk>"), byte_fallback=True)
    )
    backend.normalizer = normalizers.Prepend(" ")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_BYTE_OR_SPECIAL_TEXT), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = fast_tokenizer(backend, **NAMED_TOKENS)
    describe_tokenizer(tokenizer, "sentencepiece", "language")
    return tokenizer
