"""`vanilla-transformer tokenizer`: a tokenizer from text files."""

from functools import partial

import pytest
from transformers import AutoTokenizer


@pytest.fixture
def train(command, in_tmp_path, tmp_path):
    """Run the subcommand in an empty folder. Return exit status, standard output and standard error."""
    (tmp_path / "text").write_text("one two three\n" * 5)
    return partial(command, "tokenizer")


def test_tokenizer_is_saved(train, tmp_path):
    status, printed, errors = train("text", "--vocab_size", "270", "--output_dir", "made")
    assert status == 0, errors
    assert len(AutoTokenizer.from_pretrained(tmp_path / "made")) == 270 and "saved in made" in printed


def test_output_dir_that_is_a_file_is_refused(train, tmp_path):
    (tmp_path / "made").write_text("mine")
    status, printed, errors = train("text", "--vocab_size", "270", "--output_dir", "made")
    assert status == 2 and "made " in errors and "saved" not in printed
    assert (tmp_path / "made").read_text() == "mine"
