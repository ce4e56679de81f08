"""Run the check of a file in a separate process, with a time limit and without writing, sockets or programs.

It keeps mistakes of a student's code from doing harm. It is no protection against an attack.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.untrusted import one_line, require_file

SECONDS = 60

# Audit events of Python
_REFUSED = {
    *("socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn"),
    *("os.remove", "os.rmdir", "os.rename", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "os.kill"),
}


class _Refused(BaseException):
    """Not an `Exception`, so that the checked code does not catch it."""


def check_file(path: str | Path, name: str, given: Mapping[str, Any], seconds: int = SECONDS) -> dict[str, Any]:
    """Check the class or function `name` of a Python file, and return the fields of `checker.Report`."""
    path = require_file(Path(path))
    task = json.dumps([str(path.resolve()), name, dict(given)])
    command = [sys.executable, "-m", f"{__package__}.sandbox"]
    try:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, input=task, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: the code did not end in {seconds} seconds") from None
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise UserError(f"{path}: the code ended its process with status {ended.returncode}") from None
    if "error" in answer:
        raise UserError(f"{path}: {answer['error']}")
    return answer


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _REFUSED:
        raise _Refused(f"the code tried to call {event} {one_line(arguments[:2])}")
    if event == "open" and arguments[0] != os.devnull:
        mode, flags = arguments[1] or "", arguments[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR):
            raise _Refused(f"the code tried to write {arguments[0]}")


def _run(path: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """In the separate process: import the file and check the class."""
    import importlib.util

    from .checker import check

    sys.dont_write_bytecode = True
    sys.addaudithook(_audit)
    sys.path.insert(0, str(Path(path).parent))
    specification = importlib.util.spec_from_file_location("checked", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["checked"] = module
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        return {"error": f"{type(error).__name__} when it is imported: {one_line(error)}"}
    if not callable(build := getattr(module, name, None)):
        names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == "checked"]
        return {"error": f"it has no class or function {name}; it has {', '.join(names) or 'none'}"}
    report = check(build, given)
    return {
        "mistakes": [f"{each.place} ({each.section}): {each.explanation}" for each in report.mistakes],
        "difference": report.difference,
        "notes": report.notes,
    }


def main() -> None:
    """Read a task from standard input, and print the answer as a line of JSON."""
    answer_to, sys.stdout = sys.stdout, sys.stderr  # what the code prints is no answer
    path, name, given = json.load(sys.stdin)
    try:
        answer = _run(path, name, given)
    except UserError as error:
        answer = {"error": str(error)}
    except _Refused as refusal:
        answer = {"error": f"{refusal}, which a check refuses"}
    except SystemExit as error:
        answer = {"error": f"the code called sys.exit({error.code!r})"}
    except RecursionError as error:
        answer = {"error": one_line(error)}
    print(json.dumps(answer), file=answer_to, flush=True)
    os._exit(0)  # threads and handlers of the code do not delay the end


if __name__ == "__main__":
    main()
