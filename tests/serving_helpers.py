"""A tiny translator for the tests of documents and of the server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.serving import Limits
from hf_vanilla_transformer.serving.service import LanguagePair
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import echo_model

CORPUS = [
    "two hundred and one",
    "seven",
    "one million three hundred thousand",
    "a house. the big red house!",
]


def echo_translator(**fields: Any) -> Translator:
    """A random model whose translations are short, depend on the sentence, and have ASCII letters only."""
    tokenizer = train_tokenizer(CORPUS * 3, 300)
    model = echo_model(tokenizer, **fields)
    model.generation_config.max_new_tokens = 8
    return Translator(model, tokenizer)


def echo_folder(folder: Path) -> Path:
    """The translator as a model folder."""
    translator = echo_translator()
    translator.model.save_pretrained(folder)
    save_tokenizers(folder, translator.source_tokenizer)
    return folder


def language_pair(
    translator: Translator | None = None,
    source: str = "en",
    target: str = "de",
    split: Any = None,
    **engine: Any,
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
