"""The commands and the package on Windows and macOS: what the source calls, and runs in a pretended one."""

import ast
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.training.state.checkpoints import LOCK, STAGING_FOLDER
from tests.interop.foreign import write_fsmt_folder, write_opus_folder
from tests.model_helpers import save_model
from tests.pretended_system import FORBIDDEN, pretend, run
from tests.system_names import STUBS, SYSTEMS, lacking, names, stub
from tests.test_extras import COMMANDS
from tests.trainer_helpers import TINY_RUN, as_flags

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla_transformer"
SOURCES = [
    *sorted(PACKAGE.rglob("*.py")),
    *sorted((ROOT / "scripts" / "vanilla_transformer_cli").rglob("*.py")),
]
OWNER = PACKAGE / "utils" / "system_calls.py"

# What every system has, and one of them does differently or refuses.
DIFFERENT = {
    "ctypes": {"CDLL", "PyDLL"},  # a loaded library cannot be deleted on Windows
    "multiprocessing": {
        "Pool",
        "Process",
        "get_all_start_methods",
        "get_context",
        "set_start_method",
    },
    "os": {"fsync", "kill", "link", "open", "rename", "replace", "symlink"},
    "tempfile": {"NamedTemporaryFile"},  # cannot be opened a second time on Windows
}
DIFFERENT_METHODS = {"add_signal_handler", "hardlink_to", "rename", "symlink_to"}
# Owners of a call that needs more than one function here.
ALLOWED = {"engine/c_kernels.py": {"ctypes.CDLL"}, "engine/c_compiler.py": {"ctypes.CDLL"}}

# Calls with text: the position of the mode, and whether it is text without one.
MODES = {
    "open": (1, True),
    "io.open": (1, True),
    "gzip.open": (1, False),
    ".open": (0, True),
    "os.fdopen": (1, True),
}
BYTES = {"os.open"}
TEXTS = {".read_text", ".write_text", "io.TextIOWrapper", "TextIOWrapper"}
SUBPROCESSES = {
    "subprocess.run",
    "subprocess.Popen",
    "subprocess.check_output",
    "subprocess.check_call",
}


def bound_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that imports bind, and the dotted names that they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, *_ = alias.name.split(".")
                yield alias.asname or root, alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield alias.asname or alias.name, f"{module}.{alias.name}"


class Source:
    """A module's imports of the standard library, and what it takes from them."""

    def __init__(self, text: str):
        self.tree = ast.parse(text)
        bound = sorted(set(bound_names(self.tree)))
        self.imported = {name for name, _ in bound}
        self.modules: dict[str, str] = {}  # name in the source -> module
        self.taken: list[tuple[str, str]] = []  # from modules: module, name
        for name, dotted in bound:
            module, _, last = dotted.rpartition(".")
            if dotted.startswith("."):
                continue
            if stub(dotted) is not None:
                self.modules[name] = dotted
                self.taken.append((dotted, ""))
            elif stub(module) is not None:
                self.taken.append((module, last))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                self.take(node.value, node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                owner, name, *_ = node.args
                if isinstance(name, ast.Constant):
                    self.take(owner, str(name.value))

    def take(self, owner: ast.expr, name: str) -> None:
        module = self.module(owner)
        if module is not None and stub(f"{module}.{name}") is None:
            self.taken.append((module, name))

    def module(self, node: ast.expr) -> str | None:
        """The module that an expression is, or None."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := self.module(node.value)) is not None:
            name = f"{parent}.{node.attr}"
            return name if stub(name) is not None else None
        return None

    def unguarded(self) -> Iterator[str]:
        """What a system lacks or does differently."""
        for module, name in self.taken:
            for system in SYSTEMS:
                known = names(module, system)
                if not known:
                    yield f"{module} is not on {system}"
                elif name and name not in known and not name.startswith("__"):
                    yield f"{module}.{name} is not on {system}"
            if name in DIFFERENT.get(module, ()):
                yield f"{module}.{name} is different"
        for node in ast.walk(self.tree):
            is_method = isinstance(node, ast.Attribute) and node.attr in DIFFERENT_METHODS
            if is_method and ast.unparse(node.value) not in self.imported:
                yield f".{node.attr} is different"

    def unencoded(self) -> Iterator[str]:
        """Calls that read or write text in the encoding of the system."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _is_text(node) and not _has_encoding(node):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_text(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name not in MODES.keys() | TEXTS | SUBPROCESSES | BYTES and isinstance(
        call.func, ast.Attribute
    ):
        name = f".{call.func.attr}"
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in SUBPROCESSES:
        return bool({"text", "universal_newlines", "errors"} & keywords.keys())
    if name in TEXTS:
        return True
    if name not in MODES:
        return False
    position, is_text = MODES[name]
    modes = [keywords["mode"]] if "mode" in keywords else call.args[position : position + 1]
    for mode in modes:
        if isinstance(mode, ast.Constant):
            letters = str(mode.value)
            return "t" in letters or (is_text and "b" not in letters)
    return is_text


def _has_encoding(call: ast.Call) -> bool:
    return any(keyword.arg == "encoding" for keyword in call.keywords)


@pytest.fixture(scope="module")
def sources() -> dict[Path, Source]:
    """The package and the command."""
    return {path: Source(path.read_text(encoding="utf-8")) for path in SOURCES}


needs_stubs = pytest.mark.skipif(STUBS is None, reason="needs mypy's stubs")


@needs_stubs
@pytest.mark.slow
def test_one_module_calls_what_another_system_lacks(sources: dict[Path, Source]) -> None:
    found = []
    for path, source in sources.items():
        name = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).as_posix()
        allowed = {f"{call} is different" for call in ALLOWED.get(name, ())}
        if path == OWNER:
            assert len(set(source.unguarded())) > 5
        else:
            found += [f"{name}: {each}" for each in source.unguarded() if each not in allowed]
    assert not found, "\n".join(found)


@needs_stubs
def test_every_file_names_its_encoding(sources: dict[Path, Source]) -> None:
    found = [
        f"{path}: {each}"
        for path, source in sources.items()
        for each in source.unencoded()
        if "CleaningInput.open" not in each  # opens several formats
    ]
    assert not found, "\n".join(found)


@needs_stubs
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nos.sysconf('SC_PAGE_SIZE')", "os.sysconf is not on win32"),
        ("from os import sched_getaffinity", "os.sched_getaffinity is not on darwin"),
        ("import os as system\nsystem.fork()", "os.fork is not on win32"),
        ("import os\ngetattr(os, 'getuid')()", "os.getuid is not on win32"),
        ("import os\nos.O_DIRECTORY", "os.O_DIRECTORY is not on win32"),
        (
            "import os\nos.process_cpu_count()",
            "os.process_cpu_count is not on linux",
        ),  # Python 3.13
        ("def f():\n    import resource", "resource is not on win32"),
        ("import fcntl", "fcntl is not on win32"),
        ("from pwd import getpwuid", "pwd is not on win32"),
        ("import signal\nsignal.alarm(3)", "signal.alarm is not on win32"),
        ("from signal import SIGKILL", "signal.SIGKILL is not on win32"),
        ("import socket\nsocket.AF_UNIX", "socket.AF_UNIX is not on win32"),
        ("import os\nos.fsync(3)", "os.fsync is different"),
        (
            "import multiprocessing as mp\nmp.get_context('fork')",
            "multiprocessing.get_context is different",
        ),
        ("from pathlib import Path\nPath('a').symlink_to('b')", ".symlink_to is different"),
    ],
)
def test_planted_call_is_found(text: str, reason: str) -> None:
    assert reason in set(Source(text).unguarded())


@needs_stubs
@pytest.mark.parametrize(
    "text",
    [
        "open('a')",
        "open('a', 'w')",
        "path.open()",
        "path.open('w')",
        "path.read_text()",
        "path.write_text('b')",
        "gzip.open('a', 'rt')",
        "io.TextIOWrapper(b)",
        "subprocess.run(c, text=True)",
        "open(a, mode)",
    ],
)
def test_planted_text_without_encoding_is_found(text: str) -> None:
    assert list(Source(text).unencoded())
    separator = "" if text.endswith("()") else ", "
    assert not list(Source(f"{text[:-1]}{separator}encoding='utf-8')").unencoded())
    assert not list(
        Source("open('a', 'rb'), path.open('wb'), gzip.open('a'), subprocess.run(c)").unencoded()
    )


@needs_stubs
def test_names_that_a_system_lacks_are_known() -> None:
    assert {"sysconf", "fork", "getuid", "nice", "killpg", "O_DIRECTORY"} <= lacking("os", "win32")
    assert {"SIGKILL", "SIGALRM", "SIGHUP", "alarm"} <= lacking("signal", "win32")
    assert "sched_getaffinity" in lacking("os", "darwin")
    assert "fork" not in lacking("os", "darwin")


# The commands in pretended systems


def write_folder(folder: Path) -> Path:
    """Text that no code page has whole, a model, and a foreign one."""
    for side, text in (("en", "two hundred\none 中\n"), ("de", "zweihundert für ─\nein 中国\n")):
        (folder / f"a.{side}").write_text(text * 8, encoding="utf-8")
    save_model(
        folder / "model",
        ["two hundred and one", "zweihundert für 中"] * 3,
        vocab_size=300,
    )
    write_opus_folder(folder / "opus")
    return folder


def commands(folder: Path) -> list[list[str]]:
    """What must work in every system, with the output in `folder`."""
    pairs = f"--train {folder}/a.en {folder}/a.de --validation {folder}/a.en {folder}/a.de"
    flags = " ".join(as_flags(TINY_RUN | {"logging_steps": 1, "eval_steps": 1, "save_steps": 1}))
    steps = "--eval_strategy steps --save_strategy steps"
    train = f"train {pairs} {flags} {steps} --predict_with_generate true --output_dir {folder}/run"
    lines = [
        f"{train} --max_steps 2",
        f"{train} --max_steps 3 --resume_from_checkpoint true",
        f"translate --model {folder}/run --input {folder}/a.en --output {folder}/lines --max_new_tokens 4",
        f"translate --model {folder}/model --input {folder}/a.en --max_new_tokens 4",
        f"predict --model {folder}/model --input {folder}/a.en --max_new_tokens 4",
        f"convert --from marian {folder}/opus {folder}/converted",
        f"convert --from marian {folder}/opus {folder}/converted --overwrite",
        f"clean {folder}/a.en {folder}/a.de --output {folder}/c.en {folder}/c.de",
        f"publish {folder}/run --repo-id me/x --dry-run",
        f"serve --model en-de={folder}/model --device cpu --port {free_port()}",
    ]
    return [line.split() for line in lines]


def assert_end_well(results: list[Any]) -> None:
    """All but the server, which is interrupted."""
    *others, server = [status for status, *_ in results]
    assert server == 130, results
    assert not any(others), results


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def check_files(folder: Path) -> None:
    """Text is in UTF-8, no name is refused by Windows, and nothing temporary is left."""
    results = folder / "run"
    assert {"checkpoint-3", "model.safetensors", "README.md"} <= {
        path.name for path in results.iterdir()
    }
    for path in folder.rglob("*"):
        assert not FORBIDDEN & set(path.name) and path.name not in (LOCK, STAGING_FOLDER)
        if path.suffix in {".json", ".md", ".py", ".txt"}:
            path.read_text(encoding="utf-8")
    assert "zweihundert für ─" in (folder / "c.de").read_text(encoding="utf-8")
    assert len((folder / "lines").read_text(encoding="utf-8").splitlines()) == 16


@pytest.mark.slow
@needs_stubs
@pytest.mark.skipif(sys.platform != "linux", reason="pretends another system than Linux")
def test_commands_end_well_as_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with an output that has few characters. Other systems: `…_with_every_code_page`."""
    write_folder(tmp_path)
    output = io.TextIOWrapper(io.BytesIO(), "cp1252", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        pretend(patch, "win32")
        results = [run(command) for command in commands(tmp_path)]
        # No file there has such a name.
        assert run(
            f"clean {tmp_path}/a.en {tmp_path}/a.de --output {tmp_path}/a:b {tmp_path}/NUL".split()
        ) == [2]
    assert_end_well(results)
    assert "translatedText" in results[-1][1]
    printed = output.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"zweihundert f\xfcr \\u2500" in printed, "a sample translation"
    check_files(tmp_path)


def statuses(
    system: str,
    lines: list[list[str]],
    folder: Path,
    **environment: str,
) -> tuple[list[Any], bytes]:
    """What `run` returns for each command in a program of its own, and the standard output of all."""
    results = folder / "results.json"
    program = [
        sys.executable,
        str(ROOT / "tests" / "pretended_system.py"),
        system,
        str(results),
        json.dumps(lines),
    ]
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
        "PYTHONUTF8": "0",
        "PYTHONWARNDEFAULTENCODING": "1",
        **environment,
    }
    done = subprocess.run(program, env=variables, capture_output=True, timeout=1200)
    assert results.is_file(), done.stderr.decode(errors="replace")[-3000:]
    return json.loads(results.read_text(encoding="utf-8")), done.stdout


@needs_stubs
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pretends another system than Linux")
@pytest.mark.parametrize(
    ("system", "encoding"),
    [
        *(("linux", each) for each in ("cp1252", "cp437", "ascii", "latin-1")),
        ("win32", "cp1252"),
        ("darwin", "ascii"),
    ],
)
def test_commands_end_well_with_every_code_page(
    system: str,
    encoding: str,
    tmp_path: Path,
) -> None:
    """Standard output is strict, and files without a named encoding would be in ASCII."""
    write_folder(tmp_path)
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    lines = commands(tmp_path)
    for line in lines:
        if line[0] == "train":
            line += ["--dataloader_num_workers", "1"]
    results, printed = statuses(system, lines, tmp_path, **locale)
    assert_end_well(results)
    assert "zweihundert für ─".encode(encoding, "backslashreplace") in printed, (
        "a sample translation"
    )
    check_files(tmp_path)


@needs_stubs
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pretends another system than Linux")
def test_every_subcommand_ends_alike_in_all_systems(tmp_path: Path) -> None:
    """With the commands that `test_extras` tries."""
    found = {}
    for system in ("linux", "win32", "darwin"):
        folder = tmp_path / system
        folder.mkdir()
        write_folder(folder)
        write_fsmt_folder(folder / "fsmt")
        (folder / "a.md").write_text("one two\n", encoding="utf-8")
        lines = [line.format(folder).split() for line in COMMANDS]
        results, _ = statuses(
            system,
            lines,
            folder,
            PYTHONIOENCODING="cp437",
            LC_ALL="C",
            PYTHONCOERCECLOCALE="0",
        )
        found[system] = dict(zip(COMMANDS, results, strict=True))
    assert found["win32"] == found["linux"]
    assert found["darwin"] == found["linux"]
    assert {status for status, *_ in found["linux"].values()} <= {0, 2}, found["linux"]
