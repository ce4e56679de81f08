"""The structure that CONTRIBUTING describes: import arrows, and the code allowed in the bundle."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.bundle_rules import violations
from tests.forked_interpreter import Interpreter
from vanilla_transformer_cli.main import SUBCOMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla_transformer"
COMMAND = ROOT / "scripts" / "vanilla_transformer_cli"
BUNDLE = sorted(PACKAGE.glob("*_vanilla_transformer.py"))
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "huggingface-hub": "huggingface_hub",
}  # where they differ from the distribution's

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """dotted name -> file, of the package and of the command."""
    found = {}
    for path in [*sorted(PACKAGE.rglob("*.py")), *sorted(COMMAND.rglob("*.py"))]:
        parts = (
            path.relative_to(PACKAGE.parent if PACKAGE in path.parents else COMMAND.parent)
            .with_suffix("")
            .parts
        )
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports, inside functions too. `from a import b` is a.b if that is a module."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                longer = f"{module}.{alias.name}"
                yield longer if longer in MODULES else module


def module_graph() -> Graph:
    graph: Graph = {}
    for name, path in MODULES.items():
        found = set(imports(name, ast.parse(path.read_text(encoding="utf-8"))))
        graph[name] = {module for module in found if module in MODULES} - {name}
    return graph


def entry(module: str) -> str:
    """Where a module stands in the list of CONTRIBUTING: a subpackage, the bundle, or a module at the top."""
    parts = module.split(".")
    if parts[0] == COMMAND.name:
        return parts[0]
    if len(parts) == 1:
        return "__init__"
    return "bundle" if parts[1].endswith("_vanilla_transformer") else parts[1]


GRAPH = module_graph()
ENTRIES: Graph = {entry(module): set() for module in GRAPH}
for _module, _imported in GRAPH.items():
    ENTRIES[entry(_module)] |= {entry(other) for other in _imported} - {entry(_module)}


def cycle(graph: Graph) -> list[str]:
    """A cycle of imports, or an empty list."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        for following in sorted(graph[node]):
            if found := visit(following, [*path, node]):
                return found
        finished.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


@pytest.fixture(scope="module")
def levels() -> dict[str, int]:
    """entry -> line of the list in CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"Imports go down this list.*?```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return {
        name: line for line, names in enumerate(block[1].splitlines()) for name in names.split(", ")
    }


def test_list_of_contributing_is_complete(levels: dict[str, int]) -> None:
    assert sorted(levels) == sorted(ENTRIES)


def going_up(levels: dict[str, int]) -> list[str]:
    """Imports of modules that are on a lower line. What is on none is above all."""
    return [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        for other in sorted(others)
        if levels.get(entry(module), -1) > levels.get(entry(other), -1)
    ]


def test_imports_never_go_up(levels: dict[str, int]) -> None:
    up = going_up(levels)
    assert not up, "\n".join(up)


def test_modules_have_no_cycle() -> None:
    assert cycle(GRAPH) == []


def test_subpackages_have_no_cycle() -> None:
    assert cycle(ENTRIES) == []


def test_rooms_import_what_their_first_lines_say() -> None:
    said = {}
    for room in ENTRIES.keys() & {path.name for path in PACKAGE.iterdir()}:
        first = (
            ast.get_docstring(
                ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
            )
            or ""
        )
        if found := re.search(r"imports? the ([\w ,]+) only", first):
            said[room] = set(re.split(r", | and ", found[1]))
    assert "engine" in said
    for room, names in said.items():
        assert ENTRIES[room] - {"__init__"} == names, room


def test_levels_of_the_first_page_import_nothing_above() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([123]) \| (.*?) \|", text, re.MULTILINE)
    levels = {
        name: -int(number) for number, names in rows for name in re.findall(r"`(\w+)`", names)
    }
    levels |= {"bundle": -1, "utils": -1, "__init__": -1}
    assert levels.keys() | {COMMAND.name} == ENTRIES.keys()
    up = going_up({COMMAND.name: -4} | levels)
    assert not up, "\n".join(up)


def test_subcommands_do_not_import_each_other() -> None:
    # `main` imports the module of the chosen subcommand by its name
    subcommands = {f"{COMMAND.name}.{name}" for name in SUBCOMMANDS}
    assert subcommands <= GRAPH.keys()
    found = [
        f"{name} imports {other}" for name in subcommands for other in GRAPH[name] & subcommands
    ]
    assert not found, "\n".join(found)


def imported_at_once(name: str) -> list[str]:
    """What a module imports outside its functions: the first parts of the names, without the standard library."""
    body = ast.parse(MODULES[name].read_text(encoding="utf-8")).body
    statements: list[ast.stmt] = [
        each for each in body if isinstance(each, ast.Import | ast.ImportFrom)
    ]
    roots = {module.split(".")[0] for module in imports(name, ast.Module(statements, []))}
    return sorted(roots - sys.stdlib_module_names)


def test_command_imports_the_package_inside_functions_only() -> None:
    found = {name: imported_at_once(name) for name in MODULES if name.startswith(COMMAND.name)}
    assert all(set(roots) <= {COMMAND.name} for roots in found.values()), found


#: Modules that `serving.serve` imports inside a function, and the libraries of the extra `serve`.
SERVING = {
    f"hf_vanilla_transformer.serving.{name}"
    for name in ("app", "http_rules", "interface", "metrics", "request_body", "schemas", "server")
}
OF_SERVING = {
    *(
        "fastapi",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "python_multipart",
        "starlette",
        "uvicorn",
    )
}


def test_optional_libraries_are_imported_inside_functions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    names = [Requirement(line).name.lower() for line in re.findall(r'"(.*?)"', block[1])]
    allowed = {IMPORT_NAMES.get(name, name) for name in names}
    allowed |= {PACKAGE.name, COMMAND.name, "pyarrow"}  # which comes with datasets
    found = []
    for name in MODULES:
        more = OF_SERVING if name in SERVING else set()
        found += [
            f"{name} imports {root}"
            for root in imported_at_once(name)
            if root not in allowed | more
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", BUNDLE, ids=lambda path: path.stem)
def test_bundle_has_no_violation(path: Path) -> None:
    found = violations(path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


# A violation of each kind -> how its message begins.
PLANTED = {
    "import torch\ny = torch._weight_int8pack_mm": "private name of torch",
    "import torch as t\nt._dynamo.mark_dynamic(1, 0)": "private name of torch",
    "def f():\n    from torch._inductor import config\n    return config": "private name of torch",
    "from torch import _C\n_C": "private name of torch",
    "from transformers import PreTrainedModel\nPreTrainedModel._from_config": "private name of transformers",
    "import torch\ngetattr(torch, '_dynamo')": "private name of torch",
    "import torch\ntorch.ops.mkldnn": "private operators",
    "from torch.ops import mkldnn\nmkldnn": "private operators",
    "def f(module):\n    return module._inductor": "internals",
    "NAME = 'torch._dynamo.config'": "internals in a string",
    "def f(module):\n    return module._forward_hooks": "private attribute: _forward_hooks",
    "def f(config):\n    config._from_config = False": "private attribute: _from_config",
    "def f(module):\n    return getattr(module, '_backward_hooks')": "private attribute: _backward_hooks",
    "def f(forward):\n    return getattr(forward, '__globals__', {})": "code object: __globals__",
    "import types\ntypes.CodeType": "code object",
    "exec('x = 1')": "code object",
    "from weakref import WeakKeyDictionary\n_MEMO = WeakKeyDictionary()": "module-level state",
    "import itertools\n_A, _B = 1, itertools.count()": "module-level state",
    "memo = {}": "module-level state",
    "if True:\n    seen = []": "module-level state",
    "X = make()": "module-level state",
    "import collections\nclass A:\n    made = collections.defaultdict(list)": "module-level state",
    "_STATE = {}\ndef f(x):\n    _STATE.update(x)": "changes _STATE",
    "from .a_vanilla_transformer import NAMES\nNAMES.append(1)": "changes NAMES",
    "from transformers import modeling_utils\ndef f():\n    modeling_utils.flag = 1": "changes modeling_utils",
    "import torch\nsetattr(torch, 'x', 1)": "changes torch",
    "class A:\n    pass\ndef f(x):\n    A.last = x": "changes A",
    "X = 1\ndef f():\n    global X\n    X = 2": "global X",
    "from functools import lru_cache\n@lru_cache\ndef f():\n    pass": "process-wide cache",
    "import functools\n@functools.cache\ndef f():\n    pass": "process-wide cache",
    "def f():\n    import accelerate\n    accelerate": "import of accelerate",
    "from hf_vanilla_transformer.utils.errors import UserError\nUserError": "absolute import of the package",
    "from .errors import UserError\nUserError": "relative import of .errors",
    "from ..x_vanilla_transformer import A\nA": "relative import of ..x_vanilla_transformer",
    "from . import layers_vanilla_transformer\nlayers_vanilla_transformer": "relative import of .",
    "from __future__ import annotations": "from __future__",
    "import importlib\nimportlib.import_module('x')": "dynamic import",
}


@pytest.mark.parametrize(("source", "message"), PLANTED.items(), ids=PLANTED)
def test_violation_is_refused(source: str, message: str) -> None:
    assert any(found.split(": ", 1)[1].startswith(message) for found in violations(source)), (
        violations(source)
    )


#: files of the package that importing a module loads, at most
LOADED = {
    "text.words": 15,
    "text.language_tokens": 17,
    "inference.languages": 25,
    "evaluation.metrics": 28,
    "inference.translator": 45,
    "training.trainer.trainer": 62,
}


# What an import may change, before and after the import of the trainer. torch, transformers and their libraries change
# some of it themselves, and come first.
STATE = """
import json, locale, os, signal, sys, threading, warnings
import torch, transformers

def state():
    modules, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    names = [(module, name) for module in (modules, optimizer) for name in vars(module)]
    hooks = {name: len(getattr(module, name) or ()) for module, name in names if name.startswith("_global_")}
    return {
        "hooks": hooks,
        "threads": [thread.name for thread in threading.enumerate()],
        "torch threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "benchmark": torch.backends.cudnn.benchmark,
        "verbosity": transformers.utils.logging.get_verbosity(),
        "environment": dict(os.environ),
        "warnings": [str(each) for each in warnings.filters],
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "working directory": os.getcwd(),
    }

before = state()
from hf_vanilla_transformer import Translator, VanillaTransformerTrainer
print(json.dumps([before, state()]))
"""

# What the package imports in addition to transformers, and in addition with a subpackage.
FACE = """
import json
before = set(sys.modules)
for _ in range(2):  # imported twice is as good as once
    sys.modules.pop("hf_vanilla_transformer", None)
    import hf_vanilla_transformer
face = sorted(sys.modules.keys() - before)
import hf_vanilla_transformer.evaluation
print(json.dumps([face, sorted(sys.modules.keys() - before)]))
"""

# Text is read line by line, without the libraries that read tables.
LINES = """
import json
from hf_vanilla_transformer.inference.sentences import read_sentences
lines = [*read_sentences("tests/planted_faults.txt")]
print(json.dumps([lines, list(sys.modules)]))
"""

# One process forks for each program.
FORKS = """
import os, sys
for program in sys.argv[1:]:
    if not os.fork():
        exec(program, {"sys": sys})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, program
"""
# Without the libraries that the package might import.
FEW_LIBRARIES = """
import torch, transformers
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast
"""
ALONE = {"face": FACE, "lines": LINES}
PROGRAMS = {"state": STATE}
PROGRAMS |= {
    name: f"import json, {PACKAGE.name}.{name}\nprint(json.dumps(list(sys.modules)))"
    for name in LOADED
}


@pytest.fixture(scope="module")
def printed_alone() -> dict[str, Any]:
    """What programs print in a process with few libraries."""
    command = [sys.executable, "-c", FEW_LIBRARIES + FORKS, *ALONE.values()]
    lines = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    return {name: json.loads(line) for name, line in zip(ALONE, lines, strict=True)}


@pytest.fixture(scope="module")
def printed(python: Interpreter) -> dict[str, Any]:
    """What each program prints."""
    run = python.run(["-c", FORKS, *PROGRAMS.values()], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return {
        name: json.loads(line) for name, line in zip(PROGRAMS, run.stdout.splitlines(), strict=True)
    }


@pytest.mark.parametrize("name", LOADED)
def test_import_loads_few_files(name: str, printed: dict[str, Any]) -> None:
    assert sum(module.split(".")[0] == PACKAGE.name for module in printed[name]) <= LOADED[name]


@pytest.mark.slow
def test_import_needs_only_torch_and_transformers(printed_alone: dict[str, Any]) -> None:
    face, evaluation = printed_alone["face"]
    libraries = {"matplotlib", "num2words", "tensorboard", "datasets", "sacrebleu", "accelerate"}
    assert libraries.isdisjoint(face) and "matplotlib" not in evaluation


def test_lines_of_text_are_read_without_datasets(printed_alone: dict[str, Any]) -> None:
    lines, modules = printed_alone["lines"]
    assert lines == (ROOT / "tests" / "planted_faults.txt").read_text(encoding="utf-8").splitlines()
    assert {"datasets", "pandas"}.isdisjoint(modules)


def test_names_of_metrics_are_known_without_evaluate(printed: dict[str, Any]) -> None:
    assert "evaluate" not in printed["evaluation.metrics"]


def test_import_of_the_trainer_changes_nothing_in_the_process(printed: dict[str, Any]) -> None:
    before, after = printed["state"]
    assert before == after
    assert before["hooks"]["_global_module_registration_hooks"] == 0
