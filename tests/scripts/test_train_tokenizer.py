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
    assert (
        len(AutoTokenizer.from_pretrained(tmp_path / "made")) == 270 and "saved in made" in printed
    )


def test_tokenizer_learns_from_a_sample(train, tmp_path):
    words = [chr(97 + number) * 9 for number in range(20)]
    (tmp_path / "words").write_text("".join(f"{word} {word}\n" for word in words))
    status, printed, errors = train(
        "words", "--sentences", "5", "--vocab_size", "1000", "--output_dir", "made"
    )
    assert status == 0, errors
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "made").get_vocab()
    learned = [f"Ġ{word}" in vocabulary for word in words]
    assert [sum(learned[start : start + 4]) for start in range(0, 20, 4)] == [
        1
    ] * 5  # one of each fifth
    assert "learns from 5 of 20 sentences" in printed
    status, _, errors = train("words", "--sentences", "0", "--output_dir", "none")
    assert status == 2 and "sentences: must be at least 1, not 0" in errors


def test_tokenizer_of_a_model_is_not_replaced(train, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("mine")
    status, _, errors = train("text", "--vocab_size", "270", "--output_dir", "model")
    assert (status, errors) == (2, "error: output_dir model exists already: name a new folder\n")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "mine"


def test_output_dir_that_is_a_file_is_refused(train, tmp_path):
    (tmp_path / "made").write_text("mine")
    status, printed, errors = train("text", "--vocab_size", "270", "--output_dir", "made")
    assert status == 2 and "made " in errors and "saved" not in printed
    assert (tmp_path / "made").read_text() == "mine"
