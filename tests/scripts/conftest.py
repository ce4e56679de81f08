"""A model for the tests of the commands."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from tests.model_helpers import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a joint tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["two hundred and one", "zweihunderteins"] * 3, 280)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    return folder
