"""The library of the C functions: built by any compiler, for any processor, once, and equal to float64."""

import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.engine import c_compiler, c_kernels
from hf_vanilla_transformer.engine.c_compiler import (
    BuildError,
    build,
    instruction_sets,
    library_name,
)
from hf_vanilla_transformer.engine.c_kernels import instruction_set

HARNESS = Path(__file__).with_name("c_harness.c")
COMPILER = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs gcc or clang")

# A compiler, options, and what runs a program for another processor.
NATIVE = [
    pytest.param(
        compiler,
        name,
        [],
        id=f"{compiler}-{name}",
        marks=[] if (compiler, name) == ("gcc", "AVX2") else pytest.mark.slow,
    )
    for compiler in ("gcc", "clang")
    for name in instruction_sets()
]
ARM = pytest.param(
    "aarch64-linux-gnu-gcc",
    "",
    ["qemu-aarch64-static"],
    id="aarch64",
    marks=pytest.mark.slow,
)


@pytest.mark.parametrize(("compiler", "name", "emulator"), [*NATIVE, ARM])
def test_c_functions_equal_float64(
    compiler: str,
    name: str,
    emulator: list[str],
    tmp_path: Path,
) -> None:
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    supported = ["DEFAULT", "AVX2", "AVX512", "AVX512_VNNI"]
    if name and supported.index(name) > supported.index(instruction_set()):
        pytest.skip(f"this processor has no {name}")
    flags = instruction_sets()[name] if name else "-static"
    objects = []
    for source, options in ((c_compiler.SOURCE, f"{c_compiler.FLAGS} {flags}"), (HARNESS, "-O1")):
        objects.append(tmp_path / f"{source.stem}.o")
        subprocess.run([compiler, *options.split(), "-c", source, "-o", objects[-1]], check=True)
    program = tmp_path / "harness"
    static = ["-static"] if emulator else []
    subprocess.run([compiler, *static, *objects, "-o", program, "-lm"], check=True)
    run = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole path."""
    folder = tmp_path / "compilers"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return folder


def write_script(file: Path, lines: str) -> None:
    file.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    file.chmod(0o755)


def test_compiler_that_hangs_or_fails_is_named(
    compilers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_script(compilers / "gcc", "exec /bin/sleep 60")
    write_script(compilers / "clang", "echo no such flag >&2; exit 1")
    write_script(compilers / "cc", "exit 3")
    monkeypatch.setattr(c_compiler, "_SECONDS", 0.3)
    with pytest.raises(
        BuildError, match=r"gcc fails: .*longer.*clang fails: no such flag.*cc fails: .*status 3"
    ):
        build(tmp_path, ["DEFAULT"])


@needs_compiler
def test_library_of_another_processor_is_not_taken(compilers: Path, tmp_path: Path) -> None:
    for name in ("gcc", "clang"):
        write_script(
            compilers / name, 'while [ "$1" != -o ]; do shift; done; echo "no library" >"$2"'
        )
    with pytest.raises(BuildError, match="gcc fails: .*clang fails: "):
        build(tmp_path, ["DEFAULT"])


def test_another_source_has_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library_name()
    changed = tmp_path / "c_kernels.c"
    changed.write_bytes(c_compiler.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(c_compiler, "SOURCE", changed)
    assert library_name() != before


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a source tree that has not asked for the library."""
    monkeypatch.setattr(c_kernels, "library_name", lambda: "none.so")
    for function in (c_kernels.library, c_kernels._functions):
        monkeypatch.setattr(c_kernels, function.__name__, c_kernels.cache(function.__wrapped__))


@pytest.mark.usefixtures("fresh")
def test_library_is_none_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/gone")
    assert c_kernels.library() is None


@pytest.mark.usefixtures("fresh", "compilers")
def test_library_is_none_without_a_compiler() -> None:
    assert c_kernels.library() is None


@pytest.mark.usefixtures("fresh")
def test_threads_build_the_library_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    together = threading.Barrier(4)

    def slow_build(folder: Path, names: list[str]) -> Path:
        builds.append(names)
        threading.Event().wait(0.2)
        raise BuildError("none")

    def ask(_: int) -> object:
        together.wait()
        return c_kernels.library()

    monkeypatch.setattr(c_kernels, "build", slow_build)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == [None] * 4
    assert builds == [[instruction_set()]]


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_built_library_computes_the_numbers_of_a_source_tree(
    compilers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_script(compilers / "broken", "exit 1")
    write_script(compilers / "cc", f'PATH="{os.defpath}" exec {COMPILER} "$@"')
    monkeypatch.setenv("CC", "broken")
    own = c_kernels.library()
    built = build(tmp_path, instruction_sets())
    for name in instruction_sets():
        assert all(
            hasattr(c_kernels._opened(built, name), function) for function in c_compiler.FUNCTIONS
        )
    logits = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0))
    found = []
    for library in (own, c_kernels._opened(built, instruction_set())):
        monkeypatch.setattr(c_kernels, "library", lambda library=library: library)
        x = logits.clone()
        rows = c_kernels.finish(
            x,
            bias=logits[0],
            relu=True,
            residual=logits,
            norm=torch.nn.LayerNorm(1001),
        )
        found.append([x, *rows, *c_kernels.best(logits.clone(), 5, True)])
    assert all(first.equal(second) for first, second in zip(*found, strict=True))
