"""Fingerprints of translators and text: whether a part of a translation may be reused."""

import json
from collections.abc import Iterable
from hashlib import blake2b

import torch

from ..text.tokenizer_files import tokenizer_digest
from .translator import Translator

#: Fields of a configuration that do not change the outputs of a model.
_INCIDENTAL = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "architectures",
    "auto_map",
    "custom_pipelines",
}


def translator_fingerprint(translator: Translator) -> str:
    """Digest of the weights, configurations, dtypes, tokenizers and search defaults of a translator.

    The folder's name is not part of it, so that a moved model keeps its digest and a retrained one does not.
    """
    digest = blake2b(digest_size=16)
    for model in translator.models:
        quantization = getattr(getattr(model, "inference_engine", None), "quantization", None)
        fields = [
            settings.to_dict().items() for settings in (model.config, model.generation_config)
        ]
        kept = [
            {name: value for name, value in items if name not in _INCIDENTAL} for items in fields
        ]
        digest.update(json.dumps([str(quantization), *kept], sort_keys=True, default=str).encode())
        for name, weight in model.state_dict().items():
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    special_ids = [tokenizer.all_special_ids for tokenizer in tokenizers]
    digest.update(json.dumps([tokenizer_digest(tokenizers), special_ids]).encode())
    if translator.source_form is not None and translator.source_form.function is not None:
        digest.update(translator.source_form.name.encode())
    if any(translator.directions.default):
        digest.update(json.dumps(translator.directions.default).encode())
    if translator.shortlist is not None:
        digest.update(
            translator.shortlist.table.numpy().tobytes()
            + translator.shortlist.always.numpy().tobytes()
        )
    return digest.hexdigest()


def text_fingerprint(lines: Iterable[object]) -> str:
    """Digest of lines, or of tuples of them."""
    digest = blake2b(digest_size=8)
    for line in lines:
        digest.update(json.dumps(line).encode() + b"\n")
    return digest.hexdigest()
