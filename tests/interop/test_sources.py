"""What can be converted besides a toolkit's files: a zip archive or a name on the Hub."""

import errno
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.utils.errors import DiskFull, UserError
from tests.interop.checkpoints import marian_npz
from tests.interop.foreign import SOURCES, assert_same_logits, converted, train_sentencepiece, write_opus_folder
from tests.model_helpers import error_of


def write_opus_zip(path: Path, top: str = "") -> list[str]:
    """As the releases of OPUS-MT are downloaded: Marian's files, next to a license."""
    settings = {"eos_id": 0, "unk_id": 1, "bos_id": -1}
    folder = path.with_suffix("")
    folder.mkdir()
    pieces = train_sentencepiece(folder / "source.spm", SOURCES, 70, **settings)
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    (folder / "opus.spm32k.vocab.yml").write_text(yaml.safe_dump({piece: i for i, piece in enumerate(pieces)}))
    marian_npz.save(folder / "opus.npz", marian_npz.weights((len(pieces),) * 2))
    decoder = {"models": ["opus.npz"], "vocabs": ["opus.spm32k.vocab.yml"] * 2, "beam-size": 6, "normalize": 1}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder))
    (folder / "LICENSE").write_text("CC-BY")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.iterdir():
            archive.write(file, f"{top}{file.name}")
    return pieces


@pytest.mark.parametrize("top", ["", "opus-2020/"])
def test_zip_archive_of_opus_is_converted(top: str, tmp_path: Path) -> None:
    pieces = write_opus_zip(tmp_path / "opus.zip", top)
    ours, tokenizer, _ = converted("marian-npz", tmp_path / "opus.zip", tmp_path / "ours")
    plain, _, _ = converted("marian-npz", tmp_path / "opus", tmp_path / "plain")
    assert all(a.equal(b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert ours.generation_config.num_beams == 6 and len(tokenizer(SOURCES[0])["input_ids"]) > 5
    assert tokenizer.convert_ids_to_tokens([5]) == [pieces[5]]


def link(archive: zipfile.ZipFile) -> None:
    member = zipfile.ZipInfo("opus.npz")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(member, "/etc/passwd")


def named(name: str) -> Callable[[zipfile.ZipFile], None]:
    return lambda archive: archive.writestr(name, "x")


def encrypted(archive: zipfile.ZipFile) -> None:
    archive.writestr("opus.npz", "x")
    archive.filelist[0].flag_bits |= 1


HOSTILE: dict[str, Callable[[zipfile.ZipFile], None]] = {
    **{name: named(name) for name in ("../out.npz", "a/../../out.npz", "/out.npz", "..\\out.npz", "c:out.npz")},
    "link": link,
    "encrypted": encrypted,
    "bomb": lambda archive: archive.writestr("opus.npz", bytes(50_000_000)),
    "many": lambda archive: [archive.writestr(f"{number}", "") for number in range(1500)] and None,
    "twice": lambda archive: [archive.writestr("opus.npz", "x") for _ in range(2)] and None,
    "file as folder": lambda archive: [archive.writestr(name, "x") for name in ("a", "a/b")] and None,
    "no model": named("readme.txt"),
    "damaged": lambda archive: archive.fp.write(b"x" * 100) and None,  # type: ignore[union-attr]
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_zip_archives_give_one_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in" / "opus.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        HOSTILE[kind](archive)
    with pytest.raises(UserError, match="opus.zip") as raised:
        convert("marian-npz", tmp_path / "in" / "opus.zip", tmp_path / "ours")
    message = str(raised.value)
    assert "\n" not in message and len(message) < 400
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in", "opus.zip"]


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is not damaged, and a name on the Hub not missing, because there is no space for the files."""
    with zipfile.ZipFile(tmp_path / "opus.zip", "w") as archive:
        archive.writestr("opus.npz", "x")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for source in (tmp_path / "opus.zip", "Helsinki-NLP/opus-mt-en-de"):
        with pytest.raises(DiskFull, match="no space left"):
            convert("marian-npz", source, tmp_path / "ours")


def test_name_on_the_hub_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = write_opus_folder(tmp_path / "opus")
    assert "Helsinki-NLP/opus-mt-en-xx" in error_of(convert, "marian", "Helsinki-NLP/opus-mt-en-xx", tmp_path / "ours")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name.split("/")[1]))
    ours, tokenizer, _ = converted("marian", Path("Helsinki-NLP/opus"), tmp_path / "ours")
    assert_same_logits(ours, theirs)
    assert tokenizer is not None


@pytest.mark.parametrize(
    ("source_format", "model_type", "advice"),
    [("marian", "m2m_100", "--from m2m100"), ("m2m100", "marian", "--from marian"), ("marian", "mbart", "no other")],
)
def test_folder_of_another_family_says_what_fits(
    source_format: str, model_type: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(UserError, match=f"{model_type}.*{advice}"):
        convert(source_format, tmp_path / "model", tmp_path / "ours")
