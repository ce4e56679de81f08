"""Complete and incomplete checkpoints, which of them is resumed from, and their average."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.training.state.checkpoints import (
    average_weights,
    complete_checkpoints,
    find_checkpoint,
    last_checkpoint,
    one_run_at_a_time,
    remove_staging_folder,
    require_readable,
    require_training_state,
    resume_hint,
    staged,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import TYING_MODES, error_of, tiny_model


def checkpoint(run, name, state='{"global_step": 1}', weights=b"x"):
    folder = run / name
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_incomplete_and_pruned_checkpoints_are_ignored_and_stay(tmp_path):
    second, tenth, ninth = (checkpoint(tmp_path, f"checkpoint-{step}") for step in (2, 10, 9))
    checkpoint(tmp_path, "checkpoint-11", state=None)
    checkpoint(tmp_path, "checkpoint-12", state='{"global_st')
    checkpoint(tmp_path, "checkpoint-13", state="")
    checkpoint(tmp_path, "checkpoint-14", weights=None)
    checkpoint(tmp_path, "checkpoint-best")
    checkpoint(tmp_path, "my-checkpoint-3")
    assert complete_checkpoints(tmp_path) == [second, ninth, tenth]
    assert last_checkpoint(tmp_path) == tenth
    assert resume_hint(tmp_path).startswith(f"{tenth} is complete")
    before = sorted(tmp_path.rglob("*"))
    checkpoint(tmp_path / ".saving", "checkpoint-15")
    remove_staging_folder(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def whole(run, step):
    """A checkpoint that can be resumed from."""
    folder = checkpoint(run, f"checkpoint-{step}")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"a": torch.ones(100)}, folder / name)
    state = {"fixed": {}, "data": {}, "position": {}, "files": ["optimizer.pt"]}
    (folder / "run_state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("resume", ["true", "True", "auto", "run/checkpoint-9"])
def test_last_checkpoint_is_resumed_from(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    whole(run, 2)
    last = whole(run, 9)
    assert find_checkpoint(run, resume).resolve() == last
    (last / "model.safetensors").write_bytes(b"cut")
    remedy = "delete checkpoint-9 to resume from the checkpoint before it"
    assert error_of(find_checkpoint, run, resume).endswith(remedy)


def test_checkpoint_of_another_run_starts_a_new_folder(tmp_path):
    older, last = (whole(tmp_path / "old", step) for step in (2, 9))
    run = tmp_path / "new"
    for resume in (older, last):
        assert find_checkpoint(run, str(resume)) == resume
    for resume in ("false", "auto"):
        assert find_checkpoint(run, resume) is None
    run.mkdir()
    for name in ("b", "a", "c"):
        (run / name).touch()
    for resume in (str(last), "false", "auto"):
        message = error_of(find_checkpoint, run, resume)
        assert message == f"output_dir {run} is not empty (it has a): name a new folder"


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("false", r"is not empty \(it has checkpoint-2\): resume its run .* or name a new folder"),
        ("run/checkpoint-2", "run already has checkpoint-9"),
        ("run/checkpoint-3", "checkpoint-3 is no complete checkpoint"),
    ],
)
def test_other_checkpoints_are_not_resumed_from(tmp_path, monkeypatch, resume, message):
    monkeypatch.chdir(tmp_path)
    for step in (2, 9):
        whole(tmp_path / "run", step)
    with pytest.raises(UserError, match=message):
        find_checkpoint(tmp_path / "run", resume)


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "model.safetensors"])
def test_damaged_copy_of_a_checkpoint_is_refused(tmp_path, name):
    folder = whole(tmp_path, 1)
    require_readable(folder)
    if name == "optimizer.pt":
        (folder / name).unlink()
    else:
        (folder / name).write_text("{")
    assert name in error_of(require_readable, folder)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_training_state_is_whole(tmp_path, name):
    folder = whole(tmp_path, 1)
    content = (folder / name).read_bytes()
    changed = content.replace(torch.ones(9).numpy().tobytes(), torch.zeros(9).numpy().tobytes(), 1)
    for bad, reason in ((content[:-9], "is damaged ("), (changed, "is damaged (checksum of ")):
        (folder / name).write_bytes(bad)
        assert f"{name} {reason}" in error_of(require_training_state, folder, 1)
    (folder / name).unlink()
    assert f"has no {name}, " in error_of(require_training_state, folder, 1)


@pytest.mark.parametrize("optimizer", ["optimizer.pt", "optimizer.bin", "optimizer_0"])
@pytest.mark.parametrize("written", [1, 2, 3])
def test_training_state_of_other_processes_is_said(tmp_path, capsys, optimizer, written):
    folder = whole(tmp_path, 1)
    (folder / "optimizer.pt").rename(folder / optimizer)
    if optimizer == "optimizer_0":  # a folder, of sharded weights
        (folder / optimizer).unlink()
        (folder / optimizer).mkdir()
    for rank in range(written):
        shutil.copy(folder / "scheduler.pt", folder / f"rng_state_{rank}.pth")
    (folder / "rng_state.pth").unlink()
    require_training_state(folder, 2)
    said = f"was written by {written} processes and is resumed by 2: "
    assert (said in capsys.readouterr().out) is (written != 2)


def test_folder_that_cannot_be_written_is_named(tmp_path):
    def lock(folder):
        with one_run_at_a_time(folder):
            pass

    file = tmp_path / "file"
    file.touch()
    assert error_of(lock, file) == f"output_dir {file} is a file: name a folder"
    assert error_of(lock, file / "a").endswith("a cannot be written: Not a directory")


def test_staged_files_keep_their_folders(tmp_path):
    with staged(tmp_path, "nothing was saved") as folder:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "c").touch()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["a", "b", "c"]


def saved(path, **tensors):
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("dtype", "numbers", "expected"),
    [
        # in a float32 sum, the ones would be lost next to 1e8
        (torch.float32, [1e8, 1.0, 1.0, -1e8], 0.5),
        # 1 + 2^-7 is bfloat16's next number after 1
        (torch.bfloat16, [1.0, 1 + 2**-6], 1 + 2**-7),
    ],
)
def test_average_is_computed_in_float64(tmp_path, dtype, numbers, expected):
    files = [
        saved(tmp_path / f"{i}", a=torch.tensor([[x, 3.0]], dtype=dtype))
        for i, x in enumerate(numbers)
    ]
    average_weights(files, tmp_path / "mean.safetensors")
    found = load_file(tmp_path / "mean.safetensors")["a"]
    assert found.dtype == dtype
    assert found.tolist() == [[expected, 3.0]]


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_average_stores_tied_weights_once_and_loads(tmp_path, share, tie):
    models = [
        tiny_model(seed, share_encoder_decoder_embeddings=share, tie_word_embeddings=tie)
        for seed in (1, 2)
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    mean = tmp_path / "mean"
    for model, folder in zip([*models, models[0]], (first, second, mean), strict=True):
        model.save_pretrained(folder)
    average_weights([first, second], mean / "model.safetensors")
    assert (
        load_file(mean / "model.safetensors").keys()
        == load_file(first / "model.safetensors").keys()
    )
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(mean).state_dict()
    weights = [model.state_dict() for model in models]
    expected = {name: (tensor + weights[1][name]) / 2 for name, tensor in weights[0].items()}
    torch.testing.assert_close(dict(loaded), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"a": torch.ones(2)}, "b"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "c"),
        ({"a": torch.ones(2), "b": torch.ones(1, 3)}, "b"),
        ({"a": torch.ones(2, dtype=torch.float16), "b": torch.ones(3)}, "a"),
        ({"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(1)}, "a"),
    ],
)
def test_average_refuses_different_tensors(tmp_path, tensors, name):
    first = saved(tmp_path / "first.safetensors", a=torch.ones(2), b=torch.ones(3))
    other = saved(tmp_path / "other.safetensors", **tensors)
    message = rf"other\.safetensors and .*first\.safetensors cannot .* differ in {name}$"
    with pytest.raises(UserError, match=message):
        average_weights([first, other], tmp_path / "mean.safetensors")
    assert not (tmp_path / "mean.safetensors").exists()


def test_average_of_no_checkpoint_is_refused(tmp_path):
    assert error_of(average_weights, [], tmp_path / "mean").startswith("there is no checkpoint")
