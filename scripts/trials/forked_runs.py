"""Training runs in forked processes, so that a trial need not import the libraries. The trials share this module."""

import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.batches import corpus_tokenizers
from hf_vanilla_transformer.evaluation import score_translations
from hf_vanilla_transformer.training.run import finishing, run, run_data
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.utils.errors import UserError, run_command
from tests.trainer_helpers import TINY_RUN, as_flags

# Each phase, and the function at whose beginning it is reported. It is slowed down there, so that signals hit it.
PHASES: dict[str, tuple[Any, str, float]] = {
    "reading": (run_data, "load_corpus", 0.1),
    "tokenizer training": (corpus_tokenizers, "train_any_tokenizer", 0.1),
    "training": (VanillaTransformerTrainer, "training_step", 0.02),
    "saving": (VanillaTransformerTrainer, "_save_rng_state", 0.1),
    "evaluating": (VanillaTransformerTrainer, "prediction_step", 0.05),
    "testing": (finishing, "score_test_split", 0.2),
}
SETTINGS: dict[str, Any] = TINY_RUN | {
    "max_steps": 12,
    "dropout": 0.3,
    "learning_rate": 0.01,
    "warmup_steps": 1,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 2,
    "source_column": "source",
    "target_column": "target",
}


def import_libraries() -> None:
    """Import the modules that a run imports only when it scores, before the first fork."""
    importlib.import_module("transformers.pipelines")
    score_translations(["a"], ["a"])


def write_pairs(folder: Path) -> dict[str, Path]:
    """Three files of pairs, as arguments of a run."""
    files = {}
    for name, count in (("train", 96), ("validation", 8), ("test", 8)):
        rows = [
            f"{number} and {number + 1}\t{number} und {number + 1}\n" for number in range(count)
        ]
        files[name] = folder / f"{name}.tsv"
        files[name].write_text("source\ttarget\n" + "".join(rows))
    return files


class ForkedRun:
    """A training run in one or two forked processes, which are a process group.

    Args:
        settings: arguments of the run, with `output_dir`.
        cache: the cache of `datasets`.
        log: where all processes write their output.
        processes: their number. Several train in parallel over gloo.
        slow: whether phases are slowed down.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        cache: Path,
        log: Path,
        processes: int = 1,
        slow: bool = False,
    ):
        self.log = log
        reader, writer = os.pipe()
        self._phases = os.fdopen(reader, "rb", buffering=0)
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
        environment = address | {"WORLD_SIZE": str(processes)} if processes > 1 else {}
        sys.stdout.flush()
        self.pids: list[int] = []
        for rank in range(processes):
            pid = os.fork()
            if not pid:
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
                os.setpgid(0, self.pids[0] if self.pids else 0)
                _train(
                    settings,
                    cache,
                    log,
                    environment | ranks,
                    writer if slow and rank == 0 else None,
                )
            os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)
        os.close(writer)
        self.statuses: list[int] = []

    def wait_for(self, phase: str, times: int) -> bool:
        """Wait until a phase has begun so many times. Returns False if the run ends before."""
        buffer = b""
        while select.select([self._phases], [], [], 300)[0]:
            read = self._phases.read(1)
            if not read:
                return False
            buffer += read
            if buffer.split(b"\n").count(phase.encode()) >= times and read == b"\n":
                return True
        return False

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to all processes, or to that of one rank."""
        for pid in self.pids if rank is None else [self.pids[rank]]:
            os.kill(pid, number)

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit statuses. Negative numbers are signals. When one process is killed, the others are, as by torchrun.

        Raises:
            TimeoutError: the run hangs. It is killed.
        """
        end, found = time.monotonic() + seconds, dict.fromkeys(self.pids)
        killed = False
        while None in found.values():
            for pid in [pid for pid, status in found.items() if status is None]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    found[pid] = os.waitstatus_to_exitcode(status)
                    if found[pid] and not killed:
                        killed, end = True, min(end, time.monotonic() + 20)
            if time.monotonic() > end:
                left = [pid for pid, status in found.items() if status is None]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    found[pid] = -signal.SIGKILL
                if not killed:
                    raise TimeoutError(f"the run hangs: {self.output()[-2000:]}")
            time.sleep(0.01)
        self._phases.close()
        return [status or 0 for status in found.values()]

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def _train(
    settings: dict[str, Any],
    cache: Path,
    log: Path,
    environment: dict[str, str],
    writer: int | None,
) -> None:
    """In the forked process: train as `vanilla-transformer train` does, then exit."""
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        datasets.config.HF_DATASETS_CACHE = cache
        # Drawing takes longer than all the rest.
        finishing.draw_attention = lambda *_: None
        finishing.plot_curve = _no_curve
        if writer is not None:
            for phase, (owner, name, seconds) in PHASES.items():
                setattr(owner, name, _reported(getattr(owner, name), phase, seconds, writer))
        run_command(lambda: _run(settings))
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _no_curve(*_: Any) -> None:
    raise UserError("not drawn")


def _run(settings: dict[str, Any]) -> None:
    run.run_training(*parse_recipe(as_flags(settings)))


def _reported(
    function: Callable[..., Any], phase: str, seconds: float, writer: int
) -> Callable[..., Any]:
    def reported(*arguments: Any, **settings: Any) -> Any:
        os.write(writer, f"{phase}\n".encode())
        time.sleep(seconds)
        return function(*arguments, **settings)

    return reported


@contextmanager
def empty_folder(path: Path) -> Iterator[Path]:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
