"""Compile `c_kernels.c` for several instruction sets into one shared library.

The build of a wheel does it (`scripts/build_kernels.py`), and `c_kernels.py` in a source tree. The former has no other
library installed, so that this module imports the standard library only.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_name("c_kernels.c")

#: what `c_kernels.c` exports. The library has each name once per instruction set: `attend_AVX2`
FUNCTIONS = (
    "multiply",
    "multiply_floats",
    "finish",
    "write_cache",
    "attend",
    "run_stack",
    "best",
)

FLAGS = "-O3 -fPIC -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math -ffinite-math-only"

#: The instruction set that every processor of a platform has, such as SSE2 on x86-64 and NEON on ARM64.
DEFAULT = "DEFAULT"

# By the names of `torch.backends.cpu.get_cpu_capability`, which has none for VNNI.
_X86 = {
    "AVX512_VNNI": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mprefer-vector-width=512",
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512",
    "AVX2": "-mavx2 -mfma",
}
_SECONDS = 120  # that one call of a compiler may take


class BuildError(Exception):
    """No compiler of this machine builds the library. The message is for the user, and may have several lines."""


def instruction_sets() -> dict[str, str]:
    """The instruction sets of this platform, and the compiler's flags for each."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {DEFAULT: "", **(_X86 if is_x86 else {})}


def library_name() -> str:
    """The file of the library next to the source, named after the platform and a digest of source and flags."""
    content = SOURCE.read_bytes() + repr((FLAGS, instruction_sets())).encode()
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"c_kernels-{sysconfig.get_platform()}-{digest}.so"


def build(folder: Path, names: Iterable[str]) -> Path:
    """Build a library in `folder` with the functions for these instruction sets, with the first compiler that can.

    Raises:
        BuildError: there is no compiler, or all fail.
    """
    reasons = []
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang", "cc"))
    for compiler in dict.fromkeys(filter(None, map(shutil.which, compilers))):
        try:
            return _build_with(compiler, folder, names)
        except subprocess.CalledProcessError as error:
            reason = error.stderr or f"it ends with status {error.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it takes longer than {_SECONDS} s"
        except OSError as error:
            reason = str(error)
        reasons.append(f"{compiler} fails: {reason.strip()}")
    raise BuildError("; ".join(reasons) or "there is no C compiler; install gcc, or name one in CC")


def _build_with(compiler: str, folder: Path, names: Iterable[str]) -> Path:
    known = instruction_sets()
    objects = []
    for name in names:
        renamed = [f"-D{function}={function}_{name}" for function in FUNCTIONS]
        objects.append(str(folder / f"{name}.o"))
        _run(
            compiler,
            *FLAGS.split(),
            *known[name].split(),
            *renamed,
            "-c",
            str(SOURCE),
            "-o",
            objects[-1],
        )
    library = folder / "c_kernels.so"
    _run(compiler, "-shared", *objects, "-o", str(library), "-lm")
    ctypes.CDLL(str(library))  # a cross compiler builds for another processor
    return library


def _run(*command: str) -> None:
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
        timeout=_SECONDS,
    )
