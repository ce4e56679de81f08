"""Training of tokenizers: the joint byte-pair encoding of §5.1, and SentencePiece.

The tokenizer is a `PreTrainedTokenizerFast`, so that loading it needs no code of this package.
"""

import hashlib
import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..utils.atomic_write import atomic_file
from ..utils.dataset_cache import cache_file, read_cached, remove_leftovers
from ..utils.errors import UserError, check_at_least_one, naming_extras
from ..utils.untrusted import one_line
from .token_kinds import describe_tokenizer

#: The special tokens, with the ids 0, 1, 2, 3, as arguments of a tokenizer.
NAMED_TOKENS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
SPECIAL_TOKENS = tuple(NAMED_TOKENS.values())

# Every byte is a token, so there are no unknown tokens.
_SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
# `tokenizers` allocates for it, and aborts the process if it cannot.
_LARGEST_VOCABULARY = 1_000_000

#: Sentences that BPE and SentencePiece learn from, at most. More of them change few tokens.
SENTENCES = 10_000_000

#: A merge takes time proportional to the length of each word that contains it, so one word of 1 MB (base64, a DNA
#: sequence, a line of dashes) would take hours. Longer runs of one kind of character are left out of the training.
_LONGEST_WORD = 1000
_LONG_WORD = re.compile(
    "|".join(rf"{kind}{{{_LONGEST_WORD + 1},}}" for kind in (r"\w", r"[^\w\s]", r"\s"))
)
_SECONDS_BETWEEN_SIGNALS = 0.2

_LOGGER = logging.getLogger(__name__)


def sample_numbers(size: int, limit: int, seed: int = 0) -> np.ndarray:
    """At most `limit` of the numbers below `size`, ascending: one from each of `limit` equal parts, drawn by seed."""
    if size <= limit:
        return np.arange(size)
    borders = np.arange(limit + 1) * size // limit
    return np.random.default_rng(seed).integers(borders[:-1], borders[1:])


def describe_sample(sentences: int, of: int) -> str:
    """One line on a sample of sentences."""
    return f"tokenizer: learns from {sentences:,} of {of:,} sentences, drawn by seed"


def sampled_texts(texts: Callable[[], Iterable[str]], limit: int) -> Iterator[str]:
    """At most `limit` of the texts that a function reads, which is called twice. Print a line about fewer."""
    size = sum(1 for _ in texts())
    if size > limit:
        print(describe_sample(limit, size))
    chosen = iter(sample_numbers(size, limit))
    following = next(chosen, None)
    for number, text in enumerate(texts()):
        if number == following:
            yield text
            following = next(chosen, None)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    min_frequency: int = 2,
    lowercase: bool = False,
    content: str | None = None,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (Sennrich et al. 2016, on bytes as Radford et al. 2019).

    `decode(ids, skip_special_tokens=True)` restores any text exactly (with `lowercase`: its lower-cased form):
    spaces, line breaks, composed and decomposed accents, every script. Special tokens in a text, such as "</s>", are
    ordinary text. `</s>` is appended to source and target. The decoder starts with `<s>`. Source text is normalised
    before it is encoded (`text.source_text`).

    Args:
        texts: sentences of both languages for a joint vocabulary (§3.4 shares one embedding matrix).
        vocab_size: number of tokens, including 4 special tokens and 256 bytes, at most a million. The result is
            smaller if too few pairs of tokens occur `min_frequency` times.
        min_frequency: how often a pair must occur to be merged.
        lowercase: lower-case all text.
        content: a hash of the texts, by which the tokenizer is cached in the cache of `datasets`, so that `texts` are
            read only once. None for no caching.

    Returns:
        The tokenizer, with `<s>` = 0, `<pad>` = 1, `</s>` = 2, `<unk>` = 3.

    Raises:
        UserError: `vocab_size` is smaller than the special tokens and bytes or above a million, or `min_frequency` is
            below 1.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size is {vocab_size}; {_SMALLEST_VOCABULARY} is the least: 4 special tokens, 256 bytes"
        )
    if vocab_size > _LARGEST_VOCABULARY:
        raise UserError(f"vocab_size is {vocab_size}; {_LARGEST_VOCABULARY} is the most")
    check_at_least_one(min_frequency=min_frequency)
    backend = _trained_backend(texts, vocab_size, min_frequency, lowercase, content)
    tokenizer = fast_tokenizer(backend, **NAMED_TOKENS)
    describe_tokenizer(tokenizer, "bpe", "language")
    return tokenizer


def fast_tokenizer(
    backend: Tokenizer, ends: bool = True, starts: bool = False, /, **special: str
) -> PreTrainedTokenizerFast:
    """A tokenizer that takes special tokens in a text for ordinary text.

    It appends `eos_token` to a text if `ends`, and puts `bos_token` before it if `starts`.
    """
    bos = special["bos_token"] if starts else ""
    eos = special["eos_token"] if ends else ""
    text = f"{bos} $A {eos}".strip()
    backend.post_processor = processors.TemplateProcessing(
        single=text,
        pair=f"{text} $B:0 {eos}:0" if ends else f"{text} $B:0",
        special_tokens=[(token, backend.token_to_id(token)) for token in (bos, eos) if token],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **special,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _trained_backend(
    texts: Iterable[str], vocab_size: int, min_frequency: int, lowercase: bool, content: str | None
) -> Tokenizer:
    backend = untrained_backend(lowercase)
    settings = (
        tokenizers.__version__,
        backend.to_str(),
        SPECIAL_TOKENS,
        vocab_size,
        min_frequency,
        content,
    )
    file = cache_file(
        f"{hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()}.tokenizer.json"
    )
    if content is not None:
        known = read_cached(file, lambda: Tokenizer.from_str(file.read_text(encoding="utf-8")))
        if known is not None:
            return known
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train_interruptibly(backend, without_long_words(texts), trainer)
    if content is not None:
        remove_leftovers()
        with atomic_file(file) as temporary:
            backend.save(str(temporary))
    return backend


def without_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Leave out runs of more than 1,000 letters and digits, other signs or spaces. Log a warning with their number."""
    left_out = 0
    for text in texts:
        if len(text) > _LONGEST_WORD:
            text, count = _LONG_WORD.subn(" ", text)
            left_out += count
        yield text
    if left_out:
        _LOGGER.warning(
            "tokenizer training left out %d words of more than %d characters, which no language has",
            left_out,
            _LONGEST_WORD,
        )


def _train_interruptibly(backend: Tokenizer, texts: Iterator[str], trainer: Any) -> None:
    """Train in a second thread: in the main thread, Python would see a Ctrl-C only after Rust has returned."""
    errors: list[BaseException] = []
    stopped = threading.Event()

    def run() -> None:
        try:
            backend.train_from_iterator(takewhile(lambda _: not stopped.is_set(), texts), trainer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # daemon: exiting does not wait for it
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_SECONDS_BETWEEN_SIGNALS)
    finally:
        stopped.set()
    if errors:
        raise errors[0]


def untrained_backend(lowercase: bool) -> Tokenizer:
    """A byte-level BPE without tokens."""
    backend = Tokenizer(models.BPE())
    # A space before every text, stripped by the decoder, gives a word the same token at the start of a sentence as
    # within it. `add_prefix_space` adds none before a text that starts with a space, and decoding cannot detect that.
    space = normalizers.Prepend(" ")
    backend.normalizer = (
        normalizers.Sequence([space, normalizers.Lowercase()]) if lowercase else space
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return backend


# SentencePiece


def trained_sentencepiece(texts: Iterable[str], vocab_size: int, **settings: Any) -> bytes:
    """Train SentencePiece with the special tokens of this package. Returns the file of the model.

    Args:
        texts: sentences.
        vocab_size: number of tokens, at most, including 4 special tokens and 256 bytes for unknown characters.
        settings: further options of `SentencePieceTrainer.train`.

    Raises:
        UserError: sentencepiece is not installed, cannot train `vocab_size` tokens, or has too little memory.
    """
    with naming_extras():
        import sentencepiece
    for number, (name, token) in enumerate(NAMED_TOKENS.items()):
        kind = name.removesuffix("_token")
        settings |= {f"{kind}_id": number, f"{kind}_piece": token}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            character_coverage=1.0,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=1,  # warnings, such as of sentences that are left out
            **settings,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"vocab_size={vocab_size}: {one_line(error)}") from None
    except MemoryError:
        raise UserError(
            "tokenizer_sentences: SentencePiece has too little memory for these sentences, of which a million needs "
            "about 2.3 GB: let it learn from fewer"
        ) from None
    return model.getvalue()


def train_sentencepiece_tokenizer(
    texts: Iterable[str], vocab_size: int, normalization: str = "nmt_nfkc"
) -> PreTrainedTokenizerBase:
    """Train SentencePiece (Kudo and Richardson 2018, a unigram model) on sentences of both languages.

    Args:
        texts: sentences.
        vocab_size: number of tokens, at most, including 4 special tokens and 256 bytes for unknown characters.
        normalization: of source and target. "nmt_nfkc" and "nfkc" write full-width punctuation as ASCII, also in
            translations. "identity" keeps it, for translations into Chinese or Japanese.

    Returns:
        A `MarianTokenizer` with `<s>` = 0, `<pad>` = 1, `</s>` = 2, `<unk>` = 3, as `train_tokenizer` gives them.

    Raises:
        UserError: sentencepiece is not installed, or cannot train `vocab_size` tokens.
    """
    content = trained_sentencepiece(texts, vocab_size, normalization_rule_name=normalization)
    from sentencepiece import SentencePieceProcessor
    from transformers import MarianTokenizer

    processor = SentencePieceProcessor(model_proto=content)
    vocabulary = {
        processor.id_to_piece(number): number for number in range(processor.get_piece_size())
    }
    with TemporaryDirectory() as folder:
        spm = Path(folder) / "joint.spm"
        vocab = Path(folder) / "vocab.json"
        spm.write_bytes(content)
        vocab.write_text(json.dumps(vocabulary), encoding="utf-8")
        return MarianTokenizer(
            str(spm),
            str(spm),
            str(vocab),
            model_max_length=int(1e9),
            split_special_tokens=True,  # "</s>" in a text is text
            **NAMED_TOKENS,
        )
