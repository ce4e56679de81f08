"""Hugging Face's `FSMTForConditionalGeneration`, transformers' port of fairseq's Transformer."""

from pathlib import Path

from transformers import FSMTConfig

from ..errors import UserError
from .converting import Converted
from .transformers_folders import from_peer, load_tokenizer, read_folder

_OUTPUT = "model.decoder.output_projection.weight"


def from_fsmt(folder: str | Path) -> Converted:
    """A folder of an `FSMTForConditionalGeneration`, such as facebook/wmt19-en-de.

    The tokenizer stays an `FSMTTokenizer`, so that ids and text are the same. It needs sacremoses.

    Args:
        folder: config.json, the weights and, if it has a tokenizer, vocab-src.json, vocab-tgt.json and merges.txt.
    """
    files = ("vocab-src.json", "vocab-tgt.json", "merges.txt")
    peer, tokenizer = read_folder(FSMTConfig, folder), load_tokenizer("FSMTTokenizer", folder, files)
    if tokenizer is not None:
        for token in tokenizer.all_special_tokens:
            if tokenizer.decoder.get(tokenizer.encoder.get(token)) != token:
                raise UserError(f"{folder}: {token} has different ids in vocab-src.json and vocab-tgt.json")
    return from_peer(
        peer,
        output=_OUTPUT,
        tokenizer=tokenizer,
        other_fields={"position_encoding_type": "sinusoidal_fairseq"},
        locate=lambda name: _OUTPUT if name == "lm_head.weight" else name.replace("cross_attn", "encoder_attn"),
        unused=set(),
    )
