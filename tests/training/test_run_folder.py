"""The folder of a run: only what a run wrote is ever deleted or replaced, and one run trains in it at a time."""

import errno
import json
import os
import socket
import subprocess
import sys

import pytest

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.training import finishing, run_folder
from hf_vanilla_transformer.training.checkpoints import complete_checkpoints, remove_old_checkpoints
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.run import run_training
from hf_vanilla_transformer.training.run_folder import (
    LOCK,
    RunLock,
    check_new_run,
    move_into_run,
    record_all_files,
    remove_run,
    remove_written_folder,
    written_files,
)
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer
from tests.trainer_helpers import TINY_RUN, as_flags

TINY = TINY_RUN | {"per_device_train_batch_size": 4, "max_steps": 2, "save_steps": 1, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "pairs.tsv"
    numbers = [
        ("one", "eins"),
        ("two", "zwei"),
        ("three", "drei"),
        ("four", "vier"),
        ("five", "fünf"),
        ("six", "sechs"),
    ]
    file.write_text("source\ttarget\n" + "".join(f"{source}\t{target}\n" for source, target in numbers))
    return {"train_file": file, "source_column": "source", "target_column": "target"}


def train(folder, pairs, **values):
    return run_training(*parse_recipe(["--output_dir", str(folder), *as_flags({**TINY, **pairs, **values})]))


def contents(folder):
    """Every path below a folder, without following links, with the bytes of files and the targets of links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def write(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def earlier_run(folder, *names):
    """A folder with files that a run wrote."""
    for name in names:
        write(folder / name, f"run's {name}")
    record_all_files(folder)
    return folder


# 1. What belongs to a run


def test_removed_run_leaves_what_it_did_not_write(tmp_path):
    run = earlier_run(tmp_path / "run", "model.safetensors", "README.md", "config.json", "target_tokenizer/t.json")
    for name in ("checkpoint-1", "checkpoint-2"):
        earlier_run(run / name, "model.safetensors", "trainer_state.json")
    mine = [write(run / name) for name in ("notes.txt", "data/train.en", "checkpoint-2/notes.txt", "checkpoint-9/w")]
    mine.append(write(run / "README.md", "an edited card"))
    elsewhere = write(tmp_path / "elsewhere" / "model.safetensors")
    (run / "checkpoint-7").symlink_to(elsewhere.parent)
    (run / "model.safetensors").unlink()
    (run / "model.safetensors").symlink_to(elsewhere)
    remove_run(run)
    assert all(path.read_text() != "run's" and path.is_file() for path in [*mine, elsewhere])
    assert {path.name for path in run.iterdir()} == {
        *("notes.txt", "data", "checkpoint-2", "checkpoint-9", "README.md", "checkpoint-7", "model.safetensors")
    }
    assert (run / "checkpoint-7").is_symlink() and [path.name for path in (run / "checkpoint-2").iterdir()] == [
        "notes.txt"
    ]


def test_manifest_of_somebody_else_reaches_no_other_folder(tmp_path):
    precious = write(tmp_path / "precious.txt")
    run = earlier_run(tmp_path / "run", "model.safetensors")
    (run / ".files.json").write_text(json.dumps({"../precious.txt": None, str(precious): None}))
    remove_run(run)
    assert precious.read_text() == "mine"
    for damaged in ("[1]", '{"a": ', ""):
        (run / ".files.json").write_text(damaged)
        assert written_files(run) == []


def test_files_in_the_way_are_set_aside(tmp_path, capsys):
    run = earlier_run(tmp_path / "run", "config.json", "README.md")
    write(run / "README.md", "an edited card")
    write(run / "README.md.bak", "an older card")
    elsewhere = write(tmp_path / "elsewhere" / "t.json")
    (run / "target_tokenizer").symlink_to(elsewhere.parent)
    for name in ("config.json", "README.md", "target_tokenizer/t.json"):
        write(run / "staged" / name, "new")
    move_into_run(run / "staged", run)
    assert (run / "README.md.bak").read_text() == "an older card"
    assert (run / "README.md.bak1").read_text() == "an edited card"
    assert not (run / "config.json.bak").exists()  # the run's own
    assert elsewhere.read_text() == "mine" and (run / "target_tokenizer.bak").is_symlink()
    assert {(run / name).read_text() for name in written_files(run)} == {"new"}
    assert "README.md.bak1" in capsys.readouterr().out


def test_mount_point_is_emptied_of_the_runs_files_only(tmp_path, monkeypatch):
    """As a file system refuses to remove a folder on which another one is mounted."""
    checkpoint = earlier_run(tmp_path / "checkpoint-4", "model.safetensors")

    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(run_folder.Path, "rmdir", busy)
    remove_written_folder(checkpoint)
    assert checkpoint.is_dir() and not any(checkpoint.iterdir())


def test_checkpoint_limit_spares_notes_and_pruned_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        earlier_run(tmp_path / f"checkpoint-{step}", "model.safetensors", "optimizer.pt").joinpath(
            "trainer_state.json"
        ).write_text("{}")
        record_all_files(tmp_path / f"checkpoint-{step}")
    note = write(tmp_path / "checkpoint-2" / "notes.txt")
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()  # pruned to its weights
    remove_old_checkpoints(tmp_path, 1, tmp_path / "checkpoint-4")
    assert (tmp_path / "checkpoint-1" / "model.safetensors").is_file()
    assert list(note.parent.iterdir()) == [note]
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-4"]


def test_overwritten_run_is_replaced_and_the_rest_stays(tmp_path, pairs):
    real, run = tmp_path / "real", tmp_path / "run"
    real.mkdir()
    run.symlink_to(real)
    train(run, pairs, max_steps=3)
    first = (run / "model.safetensors").read_bytes()
    mine = [write(run / name) for name in ("notes.txt", "data/train.en", "checkpoint-3/notes.txt")]
    write(run / "README.md", "an edited card")
    train(run, pairs, overwrite_output_dir=True, seed=5)
    assert all(path.read_text() == "mine" for path in mine) and run.is_symlink()
    assert (run / "README.md.bak").read_text() == "an edited card"
    assert [path.name for path in complete_checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    assert (run / "model.safetensors").read_bytes() != first
    # everything else is the new run's
    assert set(contents(real)) - {"notes.txt", "data", "data/train.en", "README.md.bak", ".files.json"} == {
        *written_files(run), "checkpoint-3", "checkpoint-3/notes.txt",
        *(name for name in contents(real) if name.startswith(("checkpoint-1", "checkpoint-2"))),
    }  # fmt: skip


MISTAKES = [
    {"learning_rate": -1},
    {"optim": "adamw_bnb_8bit"},  # bitsandbytes is missing
    {"per_device_train_batch_size": 0, "dataloader_drop_last": True},
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: next(iter(mistake)))
def test_old_run_stays_if_the_new_one_fails(tmp_path, pairs, mistake):
    run = earlier_run(tmp_path / "run", "model.safetensors", "trainer_state.json")
    before = contents(run)
    with pytest.raises(Exception):  # noqa: B017 - each has its own error, before or in the first update
        train(run, pairs, overwrite_output_dir=True, **mistake)
    assert contents(run) == before


def test_old_run_stays_until_the_new_one_saves(tmp_path, pairs, monkeypatch):
    run = earlier_run(tmp_path / "run", "model.safetensors", "trainer_state.json")
    before, seen = contents(run), []
    original = VanillaTransformerTrainer._save_rng_state

    def look(self, folder):
        seen.append({name: each for name, each in contents(run).items() if not name.startswith((".saving", LOCK))})
        original(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_rng_state", look)
    train(run, pairs, overwrite_output_dir=True)
    assert seen[0] == before and "model.safetensors" not in seen[1] and "checkpoint-1" in seen[1]


@pytest.mark.slow
def test_run_resumes_into_another_folder(tmp_path, pairs):
    train(tmp_path / "first", pairs, max_steps=1)
    before = contents(tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoint-1"
    earlier = earlier_run(tmp_path / "second", "model.safetensors", "trainer_state.json")
    with pytest.raises(UserError, match="second already has a run"):
        train(earlier, pairs, resume_from_checkpoint=checkpoint)
    train(earlier, pairs, resume_from_checkpoint=checkpoint, overwrite_output_dir=True)
    assert [path.name for path in complete_checkpoints(earlier)] == ["checkpoint-2"]
    assert contents(tmp_path / "first") == before


def test_auto_starts_a_run_and_resumes_it(tmp_path, pairs, capsys):
    train(tmp_path, pairs, max_steps=1, resume_from_checkpoint="auto")
    assert "resuming" not in capsys.readouterr().out
    results = train(tmp_path, pairs, resume_from_checkpoint="auto")
    assert f"resuming from {tmp_path}/checkpoint-1" in capsys.readouterr().out and results["train_updates"] == 2


def test_new_run_needs_a_folder_without_files_that_it_would_replace(tmp_path):
    check_new_run(tmp_path / "missing", False)
    write(tmp_path / "notes.txt")
    check_new_run(tmp_path, False)
    for name in ("README.md", "config.json", "tokenizer.json"):
        file = write(tmp_path / name)
        with pytest.raises(UserError, match=f"its {name} would be replaced"):
            check_new_run(tmp_path, True)
        file.unlink()


# 2. One run at a time

HOLD = """
import fcntl, json, os, socket, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": "noon"}), file=file, flush=True)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run" / LOCK)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_second_run_in_a_folder_is_refused(holder, tmp_path, pairs):
    refusal = (
        f"output_dir {tmp_path}/run: process {holder.pid} on {socket.gethostname()} has been training in it since noon"
    )
    with pytest.raises(UserError) as raised:
        train(tmp_path / "run", pairs)
    assert str(raised.value).startswith(refusal) and "\n" not in str(raised.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    lock = RunLock(tmp_path / "run")
    assert lock.acquire() is None  # that of a dead process is no obstacle
    lock.release()
    assert not (tmp_path / "run" / LOCK).exists()


def test_lock_file_is_asked_where_the_file_system_has_no_locks(holder, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "lockf", no_locks)
    assert f"process {holder.pid}" in RunLock(tmp_path / "run").acquire()
    holder.kill()
    holder.wait()
    assert RunLock(tmp_path / "run").acquire() is None


def test_refused_run_leaves_no_folder(tmp_path, pairs):
    with pytest.raises(UserError, match="is not there"):
        train(tmp_path / "a" / "b", pairs | {"train_file": tmp_path / "no.tsv"})
    assert not (tmp_path / "a").exists()


def test_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run"))

    monkeypatch.setattr(run_folder.os, "open", refuse)
    assert RunLock(tmp_path / "run").acquire() == f"output_dir {tmp_path}/run cannot be written: Permission denied"
    assert not (tmp_path / "run").exists()


# 3. Save first, score after


def test_model_is_saved_before_the_test_split_is_scored(tmp_path, pairs, monkeypatch):
    def fail(*_):
        raise IndexError("index 200 is out of range")

    test = {"test_file": pairs["train_file"]}
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "score_test_split", fail)
        with pytest.raises(UserError) as raised:
            train(tmp_path, pairs | test, save_strategy="no")
    assert str(raised.value).startswith(
        f"the test split cannot be scored: index 200 is out of range; the model is saved in {tmp_path}, "
        f"and a resumed run scores it: {tmp_path}/checkpoint-2 is complete"
    )
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert not (tmp_path / "all_results.json").exists() and (tmp_path / "tokenizer.json").is_file()
    results = train(tmp_path, pairs | test, save_strategy="no", resume_from_checkpoint=True, max_steps=2)
    assert results["test_bleu"] >= 0 and (tmp_path / "README.md").is_file()
    assert len(weights) == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_end_of_training_is_saved_before_the_weights_are_scored(tmp_path, pairs, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(finishing, "choose_weights", fail)
    with pytest.raises(UserError, match="the validation split cannot be scored: out of memory; the last update is"):
        train(tmp_path, pairs, save_strategy="no")
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


@pytest.mark.slow
def test_checkpoint_for_scoring_is_removed_in_the_end(tmp_path, pairs):
    train(tmp_path, pairs, save_strategy="no")
    assert (tmp_path / "model.safetensors").is_file() and not list(tmp_path.glob("checkpoint-*"))
