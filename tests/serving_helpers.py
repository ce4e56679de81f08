"""A tiny translator for the tests of documents and of the server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_vanilla_transformer.data.tokenizer_files import save_tokenizers
from hf_vanilla_transformer.data.tokenizer_training import train_tokenizer
from hf_vanilla_transformer.inference.translator import Translator
from hf_vanilla_transformer.serving import Limits
from hf_vanilla_transformer.serving.service import LanguagePair
from tests.model_helpers import tiny_model

CORPUS = ["two hundred and one", "seven", "one million three hundred thousand", "a house. the big red house!"]


def echo_translator(**fields: Any) -> Translator:
    """A random model whose translations are short, depend on the sentence, and have ASCII letters only."""
    tokenizer = train_tokenizer(CORPUS * 3, 300)
    fields = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, "lm_head_bias": True} | fields
    model = tiny_model(1, encoder_layers=1, decoder_layers=1, **fields)
    with torch.no_grad():
        # large weights in cross-attention and output layer, so that sentences get different translations
        model.model.decoder.layers[0].cross_attn.out_proj.weight *= 4
        model.lm_head.weight *= 4
        for index in range(len(tokenizer)):
            text = tokenizer.decode([index])
            model.lm_head.bias[index] = 0 if text.isascii() and text.strip().isalpha() else -1e4
        model.lm_head.bias[tokenizer.eos_token_id] = 0
    model.generation_config.max_new_tokens = 8
    return Translator(model, tokenizer)


def echo_folder(folder: Path) -> Path:
    """The translator as a model folder."""
    translator = echo_translator()
    translator.model.save_pretrained(folder)
    save_tokenizers(folder, translator.source_tokenizer)
    return folder


def language_pair(
    translator: Translator | None = None, source: str = "en", target: str = "de", split: Any = None, **engine: Any
) -> LanguagePair:
    site = {"engine": "server", "title": "test"}
    return LanguagePair(source, target, translator or echo_translator(), split, site, **engine)


@contextmanager
def client_of(*pairs: LanguagePair, **limits: Any) -> Iterator[Any]:
    """FastAPI's client of a server with these pairs. It is closed at the end."""
    from fastapi.testclient import TestClient

    from hf_vanilla_transformer.serving.app import create_app
    from hf_vanilla_transformer.serving.interface import Server

    server = Server(pairs, Limits(**limits))
    with TestClient(create_app(server), raise_server_exceptions=False) as client:
        client.server = server
        yield client
