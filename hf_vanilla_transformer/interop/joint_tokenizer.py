"""One tokenizer.json for a model, as transformers.js needs it, even if source and target have a tokenizer each.

In that case target tokens keep their ids, so that the decoder's graph and `decode` need no change. Source token i has
the id V + i, V being the size of the target vocabulary. Special tokens of both have the target's id. Target tokens get
a prefix from a private-use area, so that none of them matches the text of a source. A `MarianTokenizer` becomes one of
the same tokens, and pieces that its vocabulary lacks get ids after all others.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import MarianTokenizer, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..text.language_tokens import tokens_by_language
from ..text.side_tokens import Side, side_tokens, target_vocabulary
from ..text.source_text import normalizing
from ..utils.errors import UserError
from .converted import Fields
from .vocabularies import sentencepiece_backend

_TARGET_PREFIX = "\ue000"


@dataclass(frozen=True)
class SourceIds:
    """The mapping from ids of a joint tokenizer to the encoder's ids."""

    vocab_size: int  #: the number of ids of the joint tokenizer
    offset: int = 0  #: the offset of source tokens, or 0 if both languages share one tokenizer
    unknown: int = 0  #: the encoder's id of tokens that its vocabulary lacks
    missing: int = 0  #: the number of these tokens, the last ones

    def to_model(self, ids: Tensor) -> Tensor:
        """Ids (B, S) of the joint tokenizer to the encoder's."""
        if self.missing:
            ids = torch.where(
                ids >= self.vocab_size - self.missing, self.offset + self.unknown, ids
            )
        return torch.where(ids >= self.offset, ids - self.offset, ids) if self.offset else ids


def joint_tokenizer(
    source: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
    config: VanillaTransformerConfig,
) -> tuple[Fields, Fields, SourceIds]:
    """Return tokenizer.json, tokenizer_config.json, and the mapping of ids for the encoder's graph.

    Args:
        source, target: a model's tokenizers, the same object if the languages share one.
    """
    size = max(config.vocab_size, len(source))
    content, missing = _content(normalizing(source, target)[0], "source", size)
    ids = SourceIds(size + missing, 0, source.unk_token_id or 0, missing)
    if target is not source or target_vocabulary(source) is not None:
        offset = max(config.target_vocab_size, len(target))
        languages = {*tokens_by_language(source).values()}
        content = _join(content, _content(target, "target", offset)[0], offset, languages)
        ids = replace(ids, vocab_size=offset + config.vocab_size + missing, offset=offset)
    settings: Fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "clean_up_tokenization_spaces": bool(target.clean_up_tokenization_spaces),
        "split_special_tokens": bool(source.split_special_tokens),
    }
    if config.position_encoding_type == "learned":
        settings["model_max_length"] = config.max_position_embeddings
    for name, token in target.special_tokens_map.items():
        if name.endswith("_token"):
            settings[name] = str(token)
    return content, settings, ids


def _content(tokenizer: PreTrainedTokenizerBase, side: Side, size: int) -> tuple[Fields, int]:
    """The content of tokenizer.json, without BPE-dropout, truncation and padding, and the number of missing pieces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    missing = 0
    if isinstance(tokenizer, MarianTokenizer):
        backend, missing = _marian_backend(tokenizer, side, size)
    if backend is None:
        name = type(tokenizer).__name__
        raise UserError(
            f"tokenizer: {name} has no tokenizer.json, the one format that a browser's library reads"
        )
    content: Fields = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    if content["model"].get("dropout") is not None:
        content["model"]["dropout"] = None
    return content, missing


def _marian_backend(
    tokenizer: PreTrainedTokenizerBase, side: Side, size: int
) -> tuple[Tokenizer, int]:
    """A tokenizer with the tokens of a `MarianTokenizer`, and the number of pieces without an id."""
    tokens = side_tokens(tokenizer, size, side)
    languages = {*tokens_by_language(tokenizer).values()}
    codes = [token for token in tokens if token in languages]
    special = tokenizer.special_tokens_map | dict(zip(codes, codes, strict=True))
    model = getattr(tokenizer, f"spm_{side}").serialized_model_proto()
    try:
        backend, missing = sentencepiece_backend(model, tokens, special, of_marian=True)
    except RuntimeError as error:
        raise UserError(
            f"tokenizer: its SentencePiece model has no tokenizer.json ({error})"
        ) from None
    backend.add_special_tokens(tokenizer.all_special_tokens)
    backend.add_tokens([AddedToken(code, normalized=False) for code in codes])
    end = tokenizer.eos_token
    backend.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    return backend, len(missing)


def _join(source: Fields, target: Fields, offset: int, languages: Collection[str]) -> Fields:
    """The source's tokenizer with the target's tokens and decoder, as the head of this file describes.

    `languages` are the tokens of the source that are those of languages.
    """
    kinds = [content["model"]["type"] for content in (source, target)]
    if kinds != ["Unigram"] * 2 and not {"BPE", "WordLevel", "WordPiece"}.issuperset(kinds):
        raise UserError(
            f"tokenizers: two vocabularies of type {' and '.join(kinds)} cannot be joined for the web"
        )
    codes, special = _added_tokens(source, languages)
    _, special_of_target = _added_tokens(target, languages)
    for name, token in sorted(special.items()):
        if name not in special_of_target or special_of_target[name]["id"] != token["id"]:
            raise UserError(f"tokenizers: {name!r} has different ids; the ONNX export needs one id")
    vocabulary = source["model"]["vocab"]
    of_target = target["model"]["vocab"]
    if kinds[0] == "Unigram":  # a list of tokens and scores
        names = [
            name if name in special_of_target else _TARGET_PREFIX + name for name, _ in of_target
        ]
        names += [f"{_TARGET_PREFIX}{number}" for number in range(len(names), offset)]
        lowest = min(score for _, score in vocabulary)
        joint: Any = [[name, lowest] for name in names[:offset]]
        for name, score in vocabulary:
            joint.append([_TARGET_PREFIX * 2 + name if name in special else name, score])
    else:
        joint = {
            name if name in special_of_target else _TARGET_PREFIX + name: number
            for name, number in of_target.items()
        }
        for name, number in vocabulary.items():
            joint[name] = special[name]["id"] if name in special else offset + number
    without_prefix = {"type": "Replace", "pattern": {"String": _TARGET_PREFIX}, "content": ""}
    decoders = [without_prefix, *([target["decoder"]] if target["decoder"] else [])]
    return {
        **source,
        "added_tokens": [
            *special_of_target.values(),
            *(token | {"id": offset + token["id"]} for token in codes.values()),
        ],
        "model": {**source["model"], "vocab": joint},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _added_tokens(
    content: Fields, languages: Collection[str]
) -> tuple[dict[str, Fields], dict[str, Fields]]:
    """The tokens of languages and the others that tokenizer.json lists apart, by name."""
    added = {token["content"]: token for token in content["added_tokens"]}
    codes = {name: token for name, token in added.items() if name in languages}
    return codes, {name: token for name, token in added.items() if name not in codes}
