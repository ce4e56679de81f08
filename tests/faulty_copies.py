"""Copies of the repository in which a test run sees a fault of the package, and pytest in them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Imports the libraries (this takes longer than most tests), and forks for each run of pytest.
RUNNER = """
import json, os, signal, sys
import accelerate, datasets, hypothesis, pytest, torch
from transformers import MarianMTModel, Seq2SeqTrainer

for line in sys.stdin:
    folder, seconds, arguments = json.loads(line)
    child = os.fork()
    if not child:
        # A fault may never end. On a busy machine the tests take several times as long.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(4 * seconds)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        sys.path.insert(0, folder)
        for stream in (1, 2):
            os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        status = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Outcome = tuple[int, str]  # exit status of pytest, and its output
RunTests = Callable[[Path, list[str]], Outcome]


def copy_repository(repository: Path, folder: Path) -> Path:
    """Copy the package and its tests into a folder, and link all else.

    What passes in the repository passes in such a copy, so that a test that fails in it has noticed the fault.
    """
    for entry in repository.iterdir():
        if entry.name in ("hf_vanilla_transformer", "tests"):
            shutil.copytree(
                entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            (folder / entry.name).symlink_to(entry)
    return folder


@contextmanager
def running_tests(folder: Path, seconds: int = 600) -> Iterator[RunTests]:
    """Yield a function that runs pytest in a copy of the repository, until a test fails or the time is over.

    `seconds` are of the processor.
    """
    command = [sys.executable, "-c", RUNNER]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as runner:
        requests, answers = runner.stdin, runner.stdout
        assert requests is not None and answers is not None

        def run(copy: Path, arguments: list[str]) -> Outcome:
            flags = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
            print(json.dumps([str(copy), seconds, [*flags, *arguments]]), file=requests, flush=True)
            status = int(answers.readline())
            return status, (copy / "output.txt").read_text(encoding="utf-8", errors="replace")

        yield run
        requests.close()
