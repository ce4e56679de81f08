"""Run the check of a file in a separate process, with a time limit and without writing, sockets or programs.

It keeps mistakes of a student's code from doing harm. It is no protection against an attack.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.untrusted import one_line, require_file

SECONDS = 60

# Audit events of Python
_REFUSED = {
    "os.chmod",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.system",
    "os.truncate",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
}
_MAX_PARENTS = 5  # folders above the file in which its imports are searched


class _Refused(BaseException):
    """Not an `Exception`, so that the checked code does not catch it."""


def check_file(
    path: str | Path,
    name: str,
    given: Mapping[str, Any],
    seconds: int = SECONDS,
    roles: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Check the class or function `name` of a Python file, and return the fields of `checker.Report`.

    Args:
        path: the file.
        name: the class or function.
        given: arguments of the constructor.
        seconds: the time limit.
        roles: names of modules by role, as of `checker.check`.

    Raises:
        UserError: the file cannot be imported, or what it contains cannot be checked.
    """
    path = require_file(Path(path))
    task = json.dumps([str(path.resolve()), name, dict(given), dict(roles or {})])
    command = [sys.executable, "-m", f"{__package__}.sandbox"]
    try:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, input=task, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: the code did not end in {seconds} seconds") from None
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise UserError(
            f"{path}: the code ended its process with status {ended.returncode}"
        ) from None
    if "error" in answer:
        raise UserError(f"{path}: {answer['error']}")
    return answer


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _REFUSED:
        raise _Refused(f"the code tried to call {event} {one_line(arguments[:2])}")
    if event == "open" and arguments[0] != os.devnull:
        mode = arguments[1] or ""
        flags = arguments[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR):
            raise _Refused(f"the code tried to write {arguments[0]}")


def _skip_folder(path: Any, *_: Any, **__: Any) -> None:
    """Takes the place of os.mkdir and os.makedirs, which many files call when they are imported."""
    print(f"{path}: the folder was not made", file=sys.stderr)


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder to import a file from, and its name there: dotted if the file belongs to a package."""
    root = path.parent
    names = [path.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    is_relative = any(
        line.startswith(("from .", "import .")) for line in path.read_text("utf-8").splitlines()
    )
    if len(names) == 1 and is_relative:
        names.insert(0, root.name)
        root = root.parent
    if not is_relative or not all(name.isidentifier() for name in names):
        return path.parent, ""
    return root, ".".join(names)


def _imported(path: Path) -> ModuleType:
    """Import a file. A module that is missing is searched in the folders above, which then join `sys.path`."""
    root, dotted = _package_of(path)
    sys.path.insert(0, str(path.parent))
    sys.path.insert(0, str(root))
    searched: set[str] = set()
    while True:
        try:
            return importlib.import_module(dotted) if dotted else _loaded(path)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            folders = [
                each for each in list(path.parents)[:_MAX_PARENTS] if _contains(each, missing)
            ]
            if not missing or missing in searched or not folders:
                raise
            searched.add(missing)
            sys.path.insert(0, str(folders[0]))
            importlib.invalidate_caches()
            for name in [each for each in sys.modules if each.partition(".")[0] == missing]:
                del sys.modules[name]


def _contains(folder: Path, module: str) -> bool:
    return (folder / module).is_dir() or (folder / f"{module}.py").is_file()


def _loaded(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("checked", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["checked"] = module
    specification.loader.exec_module(module)
    return module


def _run(path: str, name: str, given: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
    """In the separate process: import the file and check the class."""
    from .checker import check

    sys.dont_write_bytecode = True
    sys.addaudithook(_audit)
    for function in ("mkdir", "makedirs"):
        setattr(os, function, _skip_folder)
    try:
        module = _imported(Path(path))
    except Exception as error:
        return {"error": f"{type(error).__name__} when it is imported: {one_line(error)}"}
    if not callable(build := getattr(module, name, None)):
        names = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
        return {"error": f"it has no class or function {name}; it has {', '.join(names) or 'none'}"}
    report = check(build, given, roles)
    return {
        "mistakes": [
            f"{each.place} ({each.section}): {each.explanation}" for each in report.mistakes
        ],
        "difference": report.difference,
        "notes": report.notes,
    }


def answer_of(path: str, name: str, given: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
    """In the separate process: the fields of the report, or "error" with the reason why there is none."""
    try:
        return _run(path, name, given, roles)
    except UserError as error:
        return {"error": str(error)}
    except _Refused as refusal:
        return {"error": f"{refusal}, which a check refuses"}
    except SystemExit as error:
        return {"error": f"the code called sys.exit({error.code!r})"}
    except RecursionError as error:
        return {"error": one_line(error)}


def main() -> None:
    """Read a task from standard input, and print the answer as a line of JSON."""
    answer_to = sys.stdout
    sys.stdout = sys.stderr  # what the code prints is no answer
    answer = answer_of(*json.load(sys.stdin))
    print(json.dumps(answer), file=answer_to, flush=True)
    os._exit(0)  # threads and handlers of the code do not delay the end


if __name__ == "__main__":
    main()
