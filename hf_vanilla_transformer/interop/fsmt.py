"""Hugging Face's `FSMTForConditionalGeneration`, transformers' port of fairseq's Transformer."""

from pathlib import Path

from transformers import FSMTForConditionalGeneration

from .converting import Converted
from .state_dicts import build_model, require_tensors, word_matrices
from .transformers_folders import decode_as, load_peer, load_tokenizer

_SAME_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("encoder_attention_heads", "decoder_attention_heads", "activation_function", "scale_embedding"),
    *("dropout", "attention_dropout", "activation_dropout", "max_position_embeddings"),
    *("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"),
)
_OUTPUT = "model.decoder.output_projection.weight"


def from_fsmt(folder: str | Path) -> Converted:
    """A folder of an `FSMTForConditionalGeneration`, such as facebook/wmt19-en-de.

    Its tokenizer stays the `FSMTTokenizer`, so that ids and text are the same; that needs sacremoses.

    Args:
        folder: config.json, the weights, and vocab-src.json, vocab-tgt.json, merges.txt where it has a tokenizer.

    Raises:
        UserError: another kind of model, damaged or missing files.
    """
    fsmt = load_peer(FSMTForConditionalGeneration, folder)
    tensors = require_tensors(fsmt.state_dict(), str(folder))
    words = word_matrices(tensors, "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", _OUTPUT)
    files = ("vocab-src.json", "vocab-tgt.json", "merges.txt")
    tokenizer = load_tokenizer("FSMTTokenizer", folder, files, "sacremoses")
    fields = {name: getattr(fsmt.config, name) for name in _SAME_FIELDS} | words.fields
    model = build_model(
        fields
        | {
            "position_encoding_type": "sinusoidal_fairseq",
            "unk_token_id": None if tokenizer is None else tokenizer.unk_token_id,
        },
        tensors,
        _place,
        unused=words.copies | {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")},
    )
    decode_as(model, fsmt.generation_config)
    return Converted(model, tokenizer)


def _place(name: str) -> str:
    return _OUTPUT if name == "lm_head.weight" else name.replace("cross_attn", "encoder_attn")
