"""One tokenizer.json for a model, as transformers.js needs it, also where source and target have a tokenizer each.

Then the ids of the target stay what they are, so that the decoder's graph and `decode` need no change. Source token i
gets the id V + i, where V is the size of the target vocabulary; special tokens, which both have, keep the target's id.
A prefix from a private-use area keeps tokens of the target from being found in a source.
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
    """How the ids of a joint tokenizer become those of the encoder.

    Attributes:
        vocab_size: ids below which the joint tokenizer stays.
        offset: of the source's tokens; 0 if both languages share one tokenizer.
    """

    vocab_size: int
    offset: int = 0

    def to_model(self, ids: Tensor) -> Tensor:
        """Ids (B, S) of the joint tokenizer to the encoder's."""
        return torch.where(ids >= self.offset, ids - self.offset, ids) if self.offset else ids


def joint_tokenizer(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, config: VanillaTransformerConfig
) -> tuple[dict[str, Any], dict[str, Any], SourceIds]:
    """tokenizer.json, tokenizer_config.json, and what the encoder's graph has to do with the ids.

    Args:
        source, target: of a model's folder; the same object if the languages share one.

    Raises:
        UserError: a tokenizer without tokenizer.json, or two that cannot be joined.
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
    """tokenizer.json, without BPE-dropout and without lengths, which are no part of a model."""
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    if content["model"].get("dropout") is not None:
        content["model"]["dropout"] = None
    return content


def _join(source: dict[str, Any], target: dict[str, Any], offset: int) -> dict[str, Any]:
    """The source's tokenizer, with the target's tokens and decoder; see the head of this file."""
    kinds = [each["model"]["type"] for each in (source, target)]
    if not all(kind in ("BPE", "WordLevel", "WordPiece") for kind in kinds):
        raise UserError(f"tokenizers: two vocabularies of type {' and '.join(kinds)} cannot be joined for the web")
    special = [{token["content"]: token["id"] for token in each["added_tokens"]} for each in (source, target)]
    other = sorted(token for token in special[0] if special[1].get(token) != special[0][token])
    if other:
        raise UserError(f"tokenizers: {other[0]!r} has another id in the target's; the web export needs one id")
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
