"""Hugging Face's `FSMTForConditionalGeneration`, transformers' port of fairseq's Transformer."""

from pathlib import Path

from transformers import FSMTConfig

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
    return from_peer(
        read_folder(FSMTConfig, folder),
        output=_OUTPUT,
        tokenizer=load_tokenizer("FSMTTokenizer", folder, files),
        other_fields={"position_encoding_type": "sinusoidal_fairseq"},
        locate=lambda name: _OUTPUT if name == "lm_head.weight" else name.replace("cross_attn", "encoder_attn"),
        unused=set(),
    )
