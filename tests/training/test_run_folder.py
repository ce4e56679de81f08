"""The folder of a run: a new run needs an empty one, and one run trains in it at a time."""

import subprocess
import sys

import pytest

from hf_vanilla_transformer.training.run import finishing
from hf_vanilla_transformer.training.state.checkpoints import (
    LOCK,
    complete_checkpoints,
    find_checkpoint,
    one_run_at_a_time,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of
from tests.trainer_helpers import run_tiny, write_pairs

TINY = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "save_steps": 1,
    "learning_rate": 0.01,
}
NUMBERS = {
    "one": "eins",
    "two": "zwei",
    "three": "drei",
    "four": "vier",
    "five": "fünf",
    "six": "sechs",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"), list(NUMBERS.items()))


def train(folder, pairs, **values):
    return run_tiny(folder, **{**TINY, **pairs, **values})


# 1. A new or empty folder


@pytest.mark.parametrize("name", ["notes.txt", "README.md", ".git", "checkpoint-1"])
def test_new_run_needs_an_empty_folder(tmp_path, pairs, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"output_dir {tmp_path} .*{name}"):
        train(tmp_path, pairs)
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert (tmp_path / name).read_text() == "mine"


def test_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, pairs):
    for name in (".saving", "runs"):
        (tmp_path / name).mkdir()
    for name in (LOCK, "scores_before.json"):
        (tmp_path / name).write_text("{}")
    assert find_checkpoint(tmp_path, "auto") is None
    assert train(tmp_path, pairs, resume_from_checkpoint="auto")["train_updates"] == 2


def test_finished_run_is_named_with_its_remedy(tmp_path, pairs):
    train(tmp_path, pairs, max_steps=1)
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert "--resume_from_checkpoint true" in error_of(train, tmp_path, pairs, seed=5)
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_run_resumes_into_another_folder(tmp_path, pairs):
    train(tmp_path / "first", pairs, max_steps=1)
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    checkpoint = tmp_path / "first" / "checkpoint-1"
    second = tmp_path / "second"
    second.mkdir()
    (second / "model.safetensors").touch()
    with pytest.raises(UserError, match="output_dir .*second"):
        train(second, pairs, resume_from_checkpoint=checkpoint)
    (second / "model.safetensors").unlink()
    train(second, pairs, resume_from_checkpoint=checkpoint)
    assert [path.name for path in complete_checkpoints(second)] == ["checkpoint-2"]
    assert before == {path: path.read_bytes() for path in before}


def test_auto_starts_a_run_and_resumes_it(tmp_path, pairs, capsys):
    train(tmp_path, pairs, max_steps=1, resume_from_checkpoint="auto")
    assert "resuming" not in capsys.readouterr().out
    results = train(tmp_path, pairs, resume_from_checkpoint="auto")
    assert f"resuming from {tmp_path}/checkpoint-1" in capsys.readouterr().out
    assert results["train_updates"] == 2


# 2. One run at a time

HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run" / LOCK)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_second_run_in_a_folder_is_refused(holder, tmp_path, pairs):
    assert f"output_dir {tmp_path}/run: " in error_of(train, tmp_path / "run", pairs)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()  # a dead process holds no lock
    with (
        one_run_at_a_time(tmp_path / "run"),
        pytest.raises(UserError),
        one_run_at_a_time(tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run" / LOCK).exists()


def test_refused_run_leaves_no_folder(tmp_path, pairs):
    with pytest.raises(UserError, match="^train: .*no.tsv"):
        train(tmp_path / "a" / "b", pairs | {"train": tmp_path / "no.tsv"})
    assert not (tmp_path / "a").exists()


# 3. Save first, score after


def test_model_is_saved_before_the_test_split_is_scored(tmp_path, pairs, monkeypatch):
    def fail(*_):
        raise IndexError("index 200 is out of range")

    settings = {**pairs, "test": pairs["train"], "save_strategy": "no"}
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "score_test_split", fail)
        message = error_of(train, tmp_path, settings)
    for part in ("index 200 is out of range", str(tmp_path), f"{tmp_path}/checkpoint-2"):
        assert part in message
    size = (tmp_path / "model.safetensors").stat().st_size
    assert not (tmp_path / "all_results.json").exists()
    assert (tmp_path / "tokenizer.json").is_file()
    results = train(tmp_path, settings, resume_from_checkpoint=True)
    assert results["test_bleu"] >= 0
    assert (tmp_path / "README.md").is_file()
    assert (tmp_path / "model.safetensors").stat().st_size == size


@pytest.mark.slow
def test_end_of_training_is_saved_before_the_weights_are_scored(tmp_path, pairs, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(finishing, "choose_weights", fail)
    with pytest.raises(UserError, match="validation.*out of memory"):
        train(tmp_path, pairs, save_strategy="no")
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


@pytest.mark.slow
def test_checkpoint_for_scoring_is_removed_in_the_end(tmp_path, pairs):
    train(tmp_path, pairs, save_strategy="no")
    assert (tmp_path / "model.safetensors").is_file()
    assert not list(tmp_path.glob("checkpoint-*"))
