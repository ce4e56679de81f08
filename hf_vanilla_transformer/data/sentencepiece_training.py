"""A joint SentencePiece vocabulary, for models that Argos Translate, LibreTranslate or Marian will use."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import MarianTokenizer, PreTrainedTokenizerBase

from ..errors import UserError, naming_extras
from .tokenizer_training import SPECIAL_TOKENS


def train_sentencepiece_tokenizer(
    texts: Iterable[str], vocab_size: int, model_type: str = "unigram"
) -> PreTrainedTokenizerBase:
    """Train SentencePiece (Kudo and Richardson 2018) on sentences of both languages.

    Args:
        texts: sentences. model_type: "unigram" or "bpe".
        vocab_size: number of tokens, at most, including 4 special tokens and 256 bytes for unknown characters.

    Returns:
        A `MarianTokenizer` with `<s>` = 0, `<pad>` = 1, `</s>` = 2, `<unk>` = 3, as `train_tokenizer` gives them.

    Raises:
        UserError: sentencepiece is not installed, or cannot train `vocab_size` tokens.
    """
    with naming_extras():
        import sentencepiece
    bos, pad, eos, unk = SPECIAL_TOKENS
    ids: dict[str, Any] = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3}
    pieces: dict[str, Any] = {"bos_piece": bos, "pad_piece": pad, "eos_piece": eos, "unk_piece": unk}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=1.0,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
            **ids,
            **pieces,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"vocab_size={vocab_size}: {' '.join(str(error).split())}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocabulary = {processor.id_to_piece(number): number for number in range(processor.get_piece_size())}
    with TemporaryDirectory() as folder:
        spm, vocab = Path(folder) / "joint.spm", Path(folder) / "vocab.json"
        spm.write_bytes(model.getvalue())
        vocab.write_text(json.dumps(vocabulary), encoding="utf-8")
        special = {"bos_token": bos, "pad_token": pad, "eos_token": eos, "unk_token": unk}
        settings = {"model_max_length": int(1e9), "split_special_tokens": True}  # "</s>" in a text is text
        return MarianTokenizer(str(spm), str(spm), str(vocab), **settings, **special)
