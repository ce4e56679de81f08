"""The joint byte-pair encoding of §5.1: train it, save it beside a checkpoint, load it again.

The tokenizer is the stock `PreTrainedTokenizerFast`, so a saved folder needs no code of this package.
"""

import copy
import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..atomic_write import atomic_file
from ..errors import UserError
from .corpora import cache_file

# in the order of their ids: 0, 1, 2, 3
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
TARGET_FOLDER = "target_tokenizer"

_SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256  # every byte has a token, so every text can be written


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    min_frequency: int = 2,
    lowercase: bool = False,
    content: str | None = None,
) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE (Sennrich et al. 2016, on bytes as Radford et al. 2019).

    Any text comes back exactly from `decode(ids, skip_special_tokens=True)`: spaces, line ends, composed and
    decomposed accents, every script; with `lowercase`, its lower-cased form does. "</s>" written in a text is
    text, not the end of the sentence. `</s>` follows each text, source and target alike; the decoder starts
    with `<s>`.

    Args:
        texts: sentences of both languages for a joint vocabulary (§3.4 shares one embedding matrix).
        vocab_size: tokens in all, the 4 special ones and the 256 bytes included. Fewer come out where the
            texts have too few pairs that occur `min_frequency` times.
        min_frequency: how often a pair must occur to be merged.
        lowercase: lower-case every text; the case is lost.
        content: what no other texts have, such as a hash of these: what is learned from them is then kept in the
            cache of `datasets`, and `texts` are read only once. None keeps nothing.

    Returns:
        The tokenizer, with `<s>` = 0, `<pad>` = 1, `</s>` = 2, `<unk>` = 3.

    Raises:
        UserError: `vocab_size` leaves no room for the bytes, or `min_frequency` is below 1.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size is {vocab_size}; {_SMALLEST_VOCABULARY} is the least: 4 special tokens, 256 bytes"
        )
    if min_frequency < 1:
        raise UserError(f"min_frequency is {min_frequency}; 1 is the least")
    backend = _trained_backend(texts, vocab_size, min_frequency, lowercase, content)
    bos, pad, eos, unk = SPECIAL_TOKENS
    eos_id = backend.token_to_id(eos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B:0 {eos}:0", special_tokens=[(eos, eos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        # a special token that a user writes into a sentence stays ordinary text
        split_special_tokens=True,
    )


def _trained_backend(
    texts: Iterable[str], vocab_size: int, min_frequency: int, lowercase: bool, content: str | None
) -> Tokenizer:
    backend = _untrained_backend(lowercase)
    settings = tokenizers.__version__, backend.to_str(), SPECIAL_TOKENS, vocab_size, min_frequency, content
    file = cache_file(f"{hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()}.tokenizer.json")
    if content is not None and file.is_file():
        return Tokenizer.from_file(str(file))
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if content is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as temporary:
            backend.save(str(temporary))
    return backend


def _untrained_backend(lowercase: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    # One space before every text, taken off again by the decoder: a word is the same token at the start of a
    # sentence as within it. (`add_prefix_space` would add none before a text that starts with a space, and the
    # way back could not tell.)
    space = normalizers.Prepend(" ")
    backend.normalizer = normalizers.Sequence([space, normalizers.Lowercase()]) if lowercase else space
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return backend


def copy_with_bpe_dropout(tokenizer: PreTrainedTokenizerBase, dropout: float | None) -> PreTrainedTokenizerBase:
    """Make a copy that leaves out each merge with some probability (Provilkov et al. 2020, arXiv 1910.13267).

    For training only. It is a copy, so that the tokenizer that is saved, and the one that evaluates, never
    carries dropout. The random numbers are drawn inside `tokenizers` and no seed reaches them.

    Args:
        tokenizer: one whose model is a BPE; left as it is.
        dropout: probability in [0, 1); None or 0 for a copy without dropout.

    Returns:
        The copy.

    Raises:
        UserError: the probability is out of range, or the tokenizer has no merges to drop.
    """
    if dropout is not None and not 0 <= dropout < 1:
        raise UserError(f"bpe_dropout is {dropout}; it must be at least 0 and below 1")
    duplicate = copy.deepcopy(tokenizer)
    model = _model(duplicate)
    if not isinstance(model, models.BPE):
        raise UserError(f"BPE-dropout needs a byte-pair encoding; the tokenizer is a {type(tokenizer).__name__}")
    model.dropout = dropout or None
    return duplicate


def _model(tokenizer: PreTrainedTokenizerBase) -> Any:
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)


def save_tokenizers(
    directory: str | Path, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase | None = None
) -> None:
    """Save the tokenizer of a checkpoint, and the target's in the sub-folder `target_tokenizer` if it differs.

    Args:
        directory: the checkpoint's folder; made if there is none.
        source: tokenizer of the source language, or of both.
        target: tokenizer of the target language; None or `source` itself for a joint one.
    """
    target_folder = Path(directory) / TARGET_FOLDER
    _without_dropout(source).save_pretrained(str(directory))
    if target is not None and target is not source:
        _without_dropout(target).save_pretrained(str(target_folder))
    elif target_folder.is_dir():
        shutil.rmtree(target_folder)  # of an earlier save: it would be taken for this target's


def _without_dropout(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    model = _model(tokenizer)
    if isinstance(model, models.BPE) and model.dropout is not None:
        return copy_with_bpe_dropout(tokenizer, None)
    return tokenizer


def load_tokenizers(directory: str | Path) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load what `save_tokenizers` saved, or any tokenizer that `AutoTokenizer` knows.

    Args:
        directory: the folder, or a model's name on the Hub.

    Returns:
        (source tokenizer, target tokenizer): one and the same object where the folder has no `target_tokenizer`.

    Raises:
        UserError: there is no tokenizer.
    """
    source = _load(directory)
    target = Path(directory) / TARGET_FOLDER
    return source, _load(target) if target.is_dir() else source


def _load(directory: str | Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"no tokenizer in {str(directory)!r}: {reason}") from error
