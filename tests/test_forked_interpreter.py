"""A program that runs in a fork sees what it would see in a new process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked_interpreter import Interpreter

SEEN = """
import json, os, sys, threading
print(json.dumps({
    "arguments": sys.argv,
    "path": [os.path.abspath(folder) for folder in sys.path],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "input": sys.stdin.read(),
    "name": __name__,
    "threads": threading.active_count(),
}))
print("error", file=sys.stderr)
"""
PARENT = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.mark.parametrize("form", ["script", "-c", "-m", "-I -c"])
def test_program_sees_what_a_new_process_sees(
    form: str, python: Interpreter, tmp_path: Path
) -> None:
    (tmp_path / "seen.py").write_text(SEEN, encoding="utf-8")
    forms = {
        "script": ["seen.py"],
        "-c": ["-c", SEEN],
        "-m": ["-m", "seen"],
        "-I -c": ["-I", "-c", SEEN],
    }
    command: list[Any] = [*forms[form], "a", 2]
    folders = os.pathsep.join([str(tmp_path / "here"), "/there"])
    settings: dict[str, Any] = {
        "cwd": tmp_path,
        "env": os.environ | {"PYTHONPATH": folders, "OWN": "1"},
        "input": "in",
    }
    new = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, **settings
    )
    run = python.run(command, **settings)
    assert json.loads(run.stdout) == json.loads(new.stdout)
    assert (run.returncode, run.stderr) == (new.returncode, new.stderr) == (0, "error\n")


@forks
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_status_is_that_of_the_program(code: str, status: int, python: Interpreter) -> None:
    run = python.run(["-c", code])
    assert run.returncode == status
    assert ("ZeroDivisionError" in run.stderr) == (status == 1)


@forks
@pytest.mark.slow
def test_program_is_ended_after_its_time(python: Interpreter) -> None:
    assert python.run(["-c", "import time; time.sleep(60)"], seconds=1).returncode == -14


@forks
def test_programs_are_forks_of_one_process_unless_libraries_read_other_variables(
    python: Interpreter,
) -> None:
    forked = {python.run(["-c", PARENT], env=os.environ | {"OWN": value}).stdout for value in "01"}
    (interpreter,) = forked
    new = python.run(["-c", PARENT], env=os.environ | {"OMP_NUM_THREADS": "2"}).stdout
    assert new == f"{os.getpid()} False\n"
    assert interpreter.endswith(" True\n")
    assert interpreter.split()[0] != str(os.getpid())


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TORCH_LOGS", "PYTHONUTF8"]
)
def test_variables_that_libraries_read_are_known(name: str, python: Interpreter) -> None:
    without = {key: value for key, value in os.environ.items() if key != name}
    assert python.has_read(
        os.environ | {"PYTHONPATH": "elsewhere", "KMP_INIT_AT_FORK": "FALSE", "OWN": "1"}
    )
    assert not python.has_read(without | {name: "other"})
    assert python.has_read(without) == (name not in os.environ)
