"""The model that the tests of benchmarks measure."""

from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import tiny_model

SENTENCES = ["two hundred", "a dog sleeps .", "thirty-four cats and a dog run , two hundred sleep"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(vocab_size=300, tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[2] += 2
    model.save_pretrained(folder)
    save_tokenizers(folder, train_tokenizer(SENTENCES * 3, 300))
    return folder
