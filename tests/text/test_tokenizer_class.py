"""A class that reads texts otherwise than the `tokenizer.json` beside it is named, and no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer

from hf_vanilla_transformer.text.tokenizer_files import load_tokenizer
from tests.model_helpers import error_of

LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", *"0123456789.?,€"]
SPECIAL = ["<pad>", "<unk>", "</s>"]


def word_pieces(lowercase: bool = True) -> Tokenizer:
    """The steps of BERT, which its class has with `lowercase`."""
    tokens = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def molecules() -> Tokenizer:
    """Words of one letter, or two for an element: no word of the English probe is in this vocabulary."""
    tokens = [*SPECIAL, "(", ")", "=", "Br", "Cl"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def folder_of(tmp_path: Path, tokenizer: Tokenizer, class_name: str) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": class_name,
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def warnings_of(caplog: pytest.LogCaptureFixture, folder: Path) -> list[str]:
    caplog.clear()
    load_tokenizer(folder)
    return [
        record.getMessage() for record in caplog.records if "tokenizer_class" in record.getMessage()
    ]


def test_a_class_of_other_steps_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, molecules(), "BertTokenizer")
    assert warnings_of(caplog, folder) == [
        f"{folder}: tokenizer_class=BertTokenizer reads texts otherwise than tokenizer.json: if the model learned "
        "with that file, name PreTrainedTokenizerFast in tokenizer_config.json"
    ]


@pytest.mark.parametrize("lowercase", [True, False])
def test_case_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, lowercase: bool) -> None:
    folder = folder_of(
        tmp_path, word_pieces(lowercase), "BertTokenizer"
    )  # the class's default is lower case
    assert len(warnings_of(caplog, folder)) == int(not lowercase)


@pytest.mark.parametrize("make", [molecules, word_pieces])
def test_the_class_that_reads_the_file_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Tokenizer]
) -> None:
    assert warnings_of(caplog, folder_of(tmp_path, make(), "PreTrainedTokenizerFast")) == []


def test_what_a_class_saves_it_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = ["<pad>", "</s>", "<unk>", "Ġ", *LETTERS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    GPT2Tokenizer(vocab=vocabulary, merges=[], unk_token="<unk>").save_pretrained(tmp_path)
    assert warnings_of(caplog, tmp_path) == []


def test_truncation_and_padding_are_no_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = word_pieces()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=400)
    assert warnings_of(caplog, folder_of(tmp_path, tokenizer, "BertTokenizer")) == []


def test_dropout_is_no_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    letters = [*SPECIAL, "Ġ", *LETTERS, "th", "he"]
    vocabulary = {token: number for number, token in enumerate(letters)}
    tokenizer = GPT2Tokenizer(vocab=vocabulary, merges=[("t", "h"), ("h", "e")], unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert warnings_of(caplog, tmp_path) == []


def test_file_that_makes_texts_long_is_refused_under_any_class(tmp_path: Path) -> None:
    tokenizer = word_pieces()
    steps = [normalizers.Replace("a", "aaaa") for _ in range(9)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    refusal = error_of(load_tokenizer, folder_of(tmp_path, tokenizer, "BertTokenizer"))
    assert refusal.endswith("its normalizer makes texts 262,144 times as long, more than 1000")


def test_file_that_cannot_be_read_is_refused_under_any_class(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, word_pieces(), "BertTokenizer")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["decoder"] = {"type": "Nothing"}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert str(folder) in error_of(load_tokenizer, folder)
