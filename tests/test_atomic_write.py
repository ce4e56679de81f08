"""Files and folders appear when they are complete. An error leaves the old ones."""

import os
from pathlib import Path

import pytest

from hf_vanilla_transformer.utils import atomic_write
from hf_vanilla_transformer.utils.atomic_write import (
    atomic_file,
    new_folder,
    replace_folder,
    write_first,
)
from hf_vanilla_transformer.utils.errors import UserError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_atomic_file_keeps_the_old_file_until_the_end(tmp_path, error):
    target = tmp_path / "results.json"
    target.write_text("old")
    with pytest.raises(error), atomic_file(target) as temporary:
        temporary.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert names(tmp_path) == ["results.json"]
    with atomic_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(tmp_path) == ["results.json"]


def test_atomic_file_does_not_replace_a_device(tmp_path):
    with atomic_file("/dev/null") as temporary:
        assert temporary == Path("/dev/null")
    assert not Path("/dev/null").is_file()


def test_file_in_a_missing_folder_is_refused_by_its_name(tmp_path):
    expected = f"^{tmp_path}/no/out.txt: there is no folder {tmp_path}/no: make it"
    with pytest.raises(UserError, match=expected), atomic_file(tmp_path / "no" / "out.txt"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_new_folder_appears_at_the_end_or_never(tmp_path, overwrite):
    output = tmp_path / "sub" / "out"
    if overwrite:
        output.mkdir(parents=True)
        (output / "old").touch()
    with pytest.raises(RuntimeError), new_folder(output, overwrite) as folder:
        folder.mkdir()
        raise RuntimeError
    assert names(output.parent) == (["out"] if overwrite else [])
    with new_folder(output, overwrite) as folder:
        folder.mkdir()
        (folder / "new").touch()
        assert not (output / "new").exists()
    assert names(output) == ["new"]
    assert names(output.parent) == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_private_files_of_a_new_folder_get_the_mode_of_the_umask(tmp_path):
    """Others that a process has made readable or executable keep their modes."""
    modes = {
        "weights": 0o600,
        "secret/weights": 0o400,
        "program": 0o755,
        "of a group": 0o640,
    }
    previous = os.umask(0o027)
    try:
        with new_folder(tmp_path / "out") as folder:
            for name, mode in modes.items():
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
                file.chmod(mode)
    finally:
        os.umask(previous)
    found = {name: (tmp_path / "out" / name).stat().st_mode & 0o777 for name in modes}
    assert found == modes | {"weights": 0o640, "secret/weights": 0o640}
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == len(modes)


def test_new_folder_refuses_files_and_full_folders(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"), new_folder(tmp_path / "file", overwrite=True):
        pass
    with pytest.raises(UserError, match="--overwrite"), new_folder(tmp_path):
        pass


def test_replace_folder_restores_the_old_one_if_renaming_fails(tmp_path, monkeypatch):
    for name in ("new", "out"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
    replace = os.replace

    def full_disk(source, target):
        if Path(source).name == "new":
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        replace_folder(tmp_path / "new", tmp_path / "out")
    assert names(tmp_path / "out") == ["out"]
    monkeypatch.undo()
    replace_folder(tmp_path / "new", tmp_path / "out")
    assert names(tmp_path / "out") == ["new"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("has_links", [True, False])
def test_first_text_of_a_file_is_that_of_all(tmp_path, monkeypatch, has_links):
    """A process writes while another, which saw no file, is about to."""
    note = tmp_path / "new" / "note"
    rename = atomic_write.rename_to_new

    def rename_later(source, target):
        monkeypatch.setattr(atomic_write, "rename_to_new", rename)
        assert write_first(target, "first") == "first"
        rename(source, target)

    def link(*_):
        raise PermissionError

    monkeypatch.setattr(atomic_write, "rename_to_new", rename_later)
    if not has_links:
        monkeypatch.setattr(os, "link", link)
    assert write_first(note, "second") == ("first" if has_links else "second")
    assert write_first(note, "third") == note.read_text()
    assert names(note.parent) == ["note"]


KILLED = """
import os, signal, sys
from pathlib import Path
from hf_vanilla_transformer.utils.atomic_write import atomic_file, new_folder
with {writer}(Path(sys.argv[1])) as temporary:
    temporary.mkdir() if {is_folder} else temporary.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="no signal asks for a process")
@pytest.mark.parametrize("writer", [atomic_file, new_folder])
def test_what_a_killed_process_has_left_is_removed_by_the_next(python, tmp_path, writer):
    target = tmp_path / "out"
    is_folder = writer is new_folder
    code = KILLED.format(writer=writer.__name__, is_folder=is_folder)
    assert python.run(["-c", code, target]).returncode == -9
    (tmp_path / ".mine.out").touch()
    assert len(names(tmp_path)) == 2
    with writer(target) as first, writer(target) as second:  # of a process that runs
        for temporary in (first, second):
            temporary.mkdir() if is_folder else temporary.touch()
        assert first.exists()
        if is_folder:  # `first` has something to replace
            (second / "x").touch()
    assert names(tmp_path) == [".mine.out", "out"]
