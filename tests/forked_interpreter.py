"""Python programs in forks of one process that has imported the libraries, which takes longer than most programs.

This file is also that process. It imports nothing of the repository, computes nothing and starts no thread, so that a
fork is as good as a new process.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "transformers.trainer_seq2seq",
    "transformers.models.auto.modeling_auto",
    "accelerate",
    "datasets",
)
FILES = ("input", "output", "errors")

# Libraries and Python read variables with these beginnings when they are imported and when it starts.
BEGINNINGS = "PYTHON LD_ TORCH PYTORCH ATEN_ OMP_ MKL_ KMP_ HF_ TRANSFORMERS_ TOKENIZERS_"
READ_AT_IMPORT = tuple(BEGINNINGS.split())


class Interpreter:
    """Runs programs as `python` does, each in a fork. It starts with the first program.

    Without `os.fork`, or if the libraries would read other variables, a program runs in a new process.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        arguments: Sequence[Any],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",
        seconds: int = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python` with these arguments.

        Args:
            arguments: a script, or `-c` or `-m` and what follows, after `-I` or not.
            cwd: the working directory.
            env: all variables of the environment.
            input: the standard input.
            seconds: after which the program is ended.
        """
        env = dict(os.environ if env is None else env)
        command = [str(argument) for argument in arguments]
        if not (hasattr(os, "fork") and self.has_read(env)):
            return subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                cwd=cwd,
                env=env,
                input=input,
                timeout=seconds,
            )
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in FILES]
            given, *written = paths
            given.write_text(input, encoding="utf-8")
            request = [
                command,
                env,
                str(cwd or Path.cwd()),
                list(map(str, paths)),
                seconds,
            ]
            status = self._answer(request)
            output, errors = (
                file.read_text(encoding="utf-8", errors="replace") for file in written
            )
        return subprocess.CompletedProcess([sys.executable, *command], status, output, errors)

    def has_read(self, env: Mapping[str, str]) -> bool:
        """Whether the libraries have read the values that their variables have here."""
        names = {name for name in {*env, *self._environment} if name.startswith(READ_AT_IMPORT)}
        names -= {
            "PYTHONPATH",
            "KMP_INIT_AT_FORK",
        }  # scikit-learn sets the second one where it is imported
        return all(env.get(name) == self._environment.get(name) for name in names)

    def _answer(self, request: list[Any]) -> int:
        if self._process is None:
            environment = dict(self._environment)
            environment.pop("PYTHONPATH", None)
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


# In the process that forks


def serve() -> list[str]:
    """Answer requests, and exit when there are no more. In a fork, return its arguments."""
    del sys.path[0]  # this folder
    for module in LIBRARIES:
        importlib.import_module(module)
    gc.freeze()  # the forks need not look for garbage among a million objects
    with os.fdopen(os.dup(0)) as requests, os.fdopen(os.dup(1), "w") as answers:
        for line in requests:
            arguments, *others = json.loads(line)
            pid = os.fork()
            if not pid:
                become_new(*others)
                return arguments
            _, status = os.waitpid(pid, 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    sys.exit()


def become_new(environment: dict[str, str], folder: str, files: list[str], seconds: int) -> None:
    """Make a fork as it would be if it had just started."""
    signal.alarm(seconds)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()
    for stream, file in enumerate(files):
        to_write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(file, to_write if stream else os.O_RDONLY)
        os.dup2(opened, stream)
        os.close(opened)


def run_program(arguments: list[str]) -> None:
    """Run what the arguments of `python` name."""
    isolated = arguments[0] == "-I"
    first, *others = arguments[isolated:]
    folders = {"-c": "", "-m": os.getcwd()}
    folder = folders.get(first, str(Path(first).resolve().parent))
    if not isolated:
        more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder, *filter(None, more)]
    if first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *rest = others
        sys.argv = ["-c", *rest]
        names = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(code, "<string>", "exec"), names)
    else:
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    run_program(serve())
