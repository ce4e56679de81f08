"""What can be converted besides a toolkit's files: a name on the Hub."""

import errno
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.utils.errors import DiskFull, UserError
from tests.interop.foreign import assert_same_logits, converted, write_opus_folder
from tests.model_helpers import error_of


def test_zip_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "opus.zip").write_bytes(b"PK")
    assert "unzip" in error_of(convert, "marian-npz", tmp_path / "opus.zip", tmp_path / "ours")


@pytest.mark.parametrize("place", [".", "second"])
def test_adapter_is_refused_with_the_remedy(place: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "merge_and_unload" in error_of(convert, "marian", tmp_path, tmp_path / "ours")


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name on the Hub is not missing because there is no space for the files."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DiskFull, match="no space left"):
        convert("marian-npz", "Helsinki-NLP/opus-mt-en-de", tmp_path / "ours")


def test_name_on_the_hub_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = write_opus_folder(tmp_path / "opus")
    assert "Helsinki-NLP/opus-mt-en-xx" in error_of(
        convert, "marian", "Helsinki-NLP/opus-mt-en-xx", tmp_path / "ours"
    )
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **_: str(tmp_path / name.split("/")[1]),
    )
    ours, tokenizer, _ = converted("marian", Path("Helsinki-NLP/opus"), tmp_path / "ours")
    assert_same_logits(ours, theirs)
    assert tokenizer is not None


@pytest.mark.parametrize(
    ("source_format", "model_type", "advice"),
    [
        ("marian", "m2m_100", "--from m2m100"),
        ("m2m100", "marian", "--from marian"),
        ("marian", "mbart", "no other"),
    ],
)
def test_folder_of_another_family_says_what_fits(
    source_format: str, model_type: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(UserError, match=f"{model_type}.*{advice}"):
        convert(source_format, tmp_path / "model", tmp_path / "ours")
