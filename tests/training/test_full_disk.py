"""Full disks, quotas, limits and lost ranks: one line with the cause, and complete files stay complete."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistBackendError
from torch.distributed.checkpoint.api import CheckpointException

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.run import finishing
from hf_vanilla_transformer.training.state import distributed as training_distributed
from hf_vanilla_transformer.training.state.checkpoints import (
    complete_checkpoints,
    report_failed_save,
)
from hf_vanilla_transformer.training.state.distributed import (
    errors_on_main_rank_only,
    require_first_rank,
)
from hf_vanilla_transformer.utils.atomic_write import atomic_file, full_disk_reason, new_folder
from hf_vanilla_transformer.utils.errors import DiskFull, UserError
from tests.model_helpers import error_of, slow
from tests.trainer_helpers import run_tiny, write_pairs

NUMBERS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "quota",
    errno.EFBIG: "allowed size",
}
TORCH_ERROR = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
LOST_PEER = (
    "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:60829"
)


@pytest.mark.parametrize("number", NUMBERS)
def test_system_error_names_the_folder_and_the_reason(tmp_path, number):
    with pytest.raises(DiskFull) as raised, atomic_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise OSError(number, os.strerror(number))
    assert re.match(f"{tmp_path}: .*{NUMBERS[number]}", str(raised.value))
    assert not list(tmp_path.iterdir())
    # Libraries in Rust raise plain exceptions.
    assert NUMBERS[number] in full_disk_reason(
        Exception(f"{os.strerror(number)} (os error {number})")
    )
    error = RuntimeError(TORCH_ERROR)
    error.__context__ = OSError(number, os.strerror(number))
    assert NUMBERS[number] in full_disk_reason(error)


def test_error_of_torch_alone_names_every_possible_reason():
    """`torch.save` says neither which error the system gave it nor that it was one."""
    reason = full_disk_reason(RuntimeError(TORCH_ERROR))
    for part in ("no space left", "quota", "ulimit -f"):
        assert part in reason


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O error"), ValueError("no disk"), UserError("os error 28")]
)
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(type(error)) as raised, new_folder(tmp_path / "new"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            CheckpointException("", {1: (OSError(errno.ENOSPC, "No space left on device"), None)}),
            "no space left",
        ),
        (RuntimeError(LOST_PEER), "10.0.0.1"),
        (DistBackendError("NCCL error"), "NCCL"),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
    ],
    ids=["full", "lost", "NCCL", "memory"],
)
def test_errors_of_other_ranks_are_one_line(tmp_path, error, words):
    with (
        pytest.raises(UserError, match=f"{words}.*training stopped"),
        report_failed_save(tmp_path, "training stopped"),
    ):
        raise error


@pytest.mark.parametrize("rank", [0, 1])
def test_first_rank_removes_the_partial_file(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    partial = tmp_path / ".saving"
    partial.mkdir()
    with pytest.raises(DiskFull, match="denied: stopped"), report_failed_save(tmp_path, "stopped"):
        raise PermissionError("denied")
    assert partial.exists() is bool(rank)


def test_fault_of_a_save_is_no_error_of_the_user(tmp_path):
    with (
        pytest.raises(RuntimeError, match="shape"),
        report_failed_save(tmp_path, "training stopped"),
    ):
        raise RuntimeError("shape")


@pytest.mark.parametrize("main_fails", [False, True])
def test_error_of_one_rank_names_its_host_and_one_of_all_ranks_is_printed_once(
    monkeypatch, main_fails
):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setattr(training_distributed, "_get_default_store", lambda: store)
    monkeypatch.setattr(training_distributed, "_SAME_ERROR_WITHIN", timedelta(milliseconds=10))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    raised = {}
    for rank in range(0 if main_fails else 1, 3):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises((UserError, SystemExit)) as caught, errors_on_main_rank_only():
            raise DiskFull("/scratch: no space left")
        raised[rank] = str(caught.value)
    reported = "/scratch: no space left"
    if main_fails:
        assert raised == {0: reported, 1: "2", 2: "2"}
    else:
        assert raised == {1: f"{socket.gethostname()}: {reported}", 2: "2"}


def test_loss_of_another_rank_is_one_line_before_training(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"another rank.*10\.0\.0\.1"), errors_on_main_rank_only():
        raise RuntimeError(LOST_PEER)


def test_closed_port_of_the_first_rank_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        require_first_rank()
    assert f"MASTER_ADDR: 127.0.0.1:{port}" in error_of(require_first_rank, seconds=0)
    monkeypatch.setenv("RANK", "0")
    require_first_rank()


LIMITED = """
import resource
from vanilla_transformer_cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
main()
"""


@pytest.mark.slow
def test_tokenizer_command_without_space_is_one_line(repository, tmp_path):
    (tmp_path / "text").write_text("abc abc\n" * 9)
    run = subprocess.run(
        [
            *(sys.executable, "-c", LIMITED, "tokenizer", tmp_path / "text"),
            *("--output_dir", tmp_path / "new"),
            *("--vocab_size", "270"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(repository)},
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert str(tmp_path) in line
    assert "allowed size" in line


PHASES = {
    "checkpoint": (VanillaTransformerTrainer, "_save_optimizer_and_scheduler", "checkpoint-1"),
    "model": (finishing, "save_tokenizers", "model .*checkpoint-2"),
    "move": (finishing, "_same_weights", "model .*checkpoint-2"),
    "card": (finishing, "write_model_card", "card .*checkpoint-2"),
}


@pytest.mark.parametrize("phase", ["checkpoint", *slow("model", "move", "card")])
def test_quota_in_each_phase_keeps_what_was_saved(tmp_path, monkeypatch, phase):
    owner, name, message = PHASES[phase]
    original = getattr(owner, name)

    def save(*arguments):
        if phase != "checkpoint" or arguments[0].state.global_step == 2:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return original(*arguments)

    pairs = [(f"{number}", f"{number} und {number}") for number in range(6)]
    settings = {
        **write_pairs(tmp_path / "text", pairs),
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 4,
    }
    run = tmp_path / "run"
    handler = signal.getsignal(signal.SIGINT)
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=f"^{run}: .*quota.*{message}"),
    ):
        patch.setattr(owner, name, save)
        run_tiny(run, **settings)
    assert signal.getsignal(signal.SIGINT) is handler  # Ctrl-C works again
    steps = ["checkpoint-1"] if phase == "checkpoint" else ["checkpoint-1", "checkpoint-2"]
    assert [path.name for path in complete_checkpoints(run)] == steps
    assert (run / "model.safetensors").is_file() is (phase == "card")
    assert not (run / ".saving").exists()
    if phase == "checkpoint":
        assert run_tiny(run, **settings, resume_from_checkpoint=True)["train_updates"] == 2


@pytest.mark.slow
def test_full_disk_trials(repository):
    """Three sizes. `python -m scripts.trials.full_disk` has more."""
    command = [sys.executable, "-m", "scripts.trials.full_disk", "--trials", "3"]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600)
    if run.returncode == 3:
        pytest.skip(run.stdout.strip())
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert run.stdout.endswith("0 faults\n"), run.stdout[-6000:]
