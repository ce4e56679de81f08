"""A model for the tests of the commands."""

from pathlib import Path

import pytest

from tests.model_helpers import save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a joint tokenizer."""
    return save_model(
        tmp_path_factory.mktemp("model"),
        ["two hundred and one", "zweihunderteins"] * 3,
        vocab_size=280,
    )
