"""`scripts/train_tokenizer.py`: a tokenizer from text files."""

import runpy
import sys

import pytest
from transformers import AutoTokenizer


@pytest.fixture
def command(repository, monkeypatch, capsys, tmp_path):
    """Run the script in this process in an empty folder; return exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("one two three\n" * 5)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *arguments])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(repository / "scripts" / "train_tokenizer.py"), run_name="__main__")
        return leaving.value.code, *capsys.readouterr()

    return command


def test_tokenizer_is_saved(command, tmp_path):
    status, printed, errors = command("text", "--vocab_size", "270", "--output_dir", "made")
    assert status == 0, errors
    assert len(AutoTokenizer.from_pretrained(tmp_path / "made")) == 270 and "saved in made" in printed


def test_output_dir_that_is_a_file_is_refused(command, tmp_path):
    (tmp_path / "made").write_text("mine")
    status, printed, errors = command("text", "--vocab_size", "270", "--output_dir", "made")
    assert status == 2 and "made " in errors and "saved" not in printed
    assert (tmp_path / "made").read_text() == "mine"
