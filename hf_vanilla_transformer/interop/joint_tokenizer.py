"""One tokenizer.json for a model, as transformers.js needs it, even if source and target have a tokenizer each.

In that case target tokens keep their ids, so that the decoder's graph and `decode` need no change. Source token i has
the id V + i, V being the size of the target vocabulary. Special tokens of both have the target's id. Target tokens get
a prefix from a private-use area, so that none of them matches the text of a source.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError

_TARGET_PREFIX = "\ue000"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")


@dataclass(frozen=True)
class SourceIds:
    """The mapping from ids of a joint tokenizer to the encoder's ids."""

    vocab_size: int  #: the number of ids of the joint tokenizer
    offset: int = 0  #: the offset of source tokens, or 0 if both languages share one tokenizer

    def to_model(self, ids: Tensor) -> Tensor:
        """Ids (B, S) of the joint tokenizer to the encoder's."""
        return torch.where(ids >= self.offset, ids - self.offset, ids) if self.offset else ids


def joint_tokenizer(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, config: VanillaTransformerConfig
) -> tuple[dict[str, Any], dict[str, Any], SourceIds]:
    """Return tokenizer.json, tokenizer_config.json, and the mapping of ids for the encoder's graph.

    Args:
        source, target: a model's tokenizers, the same object if the languages share one.
    """
    for tokenizer in (source, target):
        if not hasattr(tokenizer, "backend_tokenizer"):
            name = type(tokenizer).__name__
            raise UserError(f"tokenizer: {name} has no tokenizer.json, the one format that a browser's library reads")
    mine, ids = _content(source), SourceIds(max(config.vocab_size, len(source)))
    if target is not source:
        offset = max(config.target_vocab_size, len(target))
        mine, ids = _join(mine, _content(target), offset), SourceIds(offset + config.vocab_size, offset)
    limit = config.max_position_embeddings if config.position_encoding_type == "learned" else None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "clean_up_tokenization_spaces": bool(getattr(target, "clean_up_tokenization_spaces", False)),
        "split_special_tokens": bool(getattr(source, "split_special_tokens", False)),
        **({} if limit is None else {"model_max_length": limit}),
        **{name: str(getattr(target, name)) for name in _SPECIAL if getattr(target, name, None)},
    }
    return mine, settings, ids


def _content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The content of tokenizer.json, without BPE-dropout, truncation and padding."""
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    if content["model"].get("dropout") is not None:
        content["model"]["dropout"] = None
    return content


def _join(source: dict[str, Any], target: dict[str, Any], offset: int) -> dict[str, Any]:
    """The source's tokenizer with the target's tokens and decoder, as the head of this file describes."""
    kinds = [content["model"]["type"] for content in (source, target)]
    if not all(kind in ("BPE", "WordLevel", "WordPiece") for kind in kinds):
        raise UserError(f"tokenizers: two vocabularies of type {' and '.join(kinds)} cannot be joined for the web")
    sides = (source, target)
    special = [{token["content"]: token["id"] for token in content["added_tokens"]} for content in sides]
    different = sorted(token for token in special[0] if special[1].get(token) != special[0][token])
    if different:
        raise UserError(f"tokenizers: {different[0]!r} has different ids; the web export needs one id")
    vocabulary = {
        token if token in special[1] else _TARGET_PREFIX + token: i for token, i in target["model"]["vocab"].items()
    }
    for token, i in source["model"]["vocab"].items():
        vocabulary[token] = special[0][token] if token in special[0] else offset + i
    without_prefix = {"type": "Replace", "pattern": {"String": _TARGET_PREFIX}, "content": ""}
    decoders = [without_prefix, *([target["decoder"]] if target["decoder"] else [])]
    return {
        **source,
        "added_tokens": target["added_tokens"],
        "model": {**source["model"], "vocab": vocabulary},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
