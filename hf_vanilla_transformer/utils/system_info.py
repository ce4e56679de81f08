"""The machine and the versions that a measured figure depends on."""

import functools
import os
import platform
import re
from collections import Counter
from importlib import metadata
from pathlib import Path

import torch

from .system_calls import usable_cores

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")


def describe_hardware() -> str:
    """CPU, cores, threads and GPUs in one line: `AMD EPYC 7B13, 2 of 64 cores, 2 torch threads; 1 x NVIDIA H200`."""
    total = os.cpu_count() or 1
    usable = len(usable_cores())
    cores = counted(usable, "core") if usable == total else f"{usable} of {total} cores"
    parts = [f"{cpu_name()}, {cores}, {counted(torch.get_num_threads(), 'torch thread')}"]
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    parts += [f"{count} x {name}" for name, count in names.items()]
    return "; ".join(parts)


def counted(number: int, noun: str) -> str:
    """The number with its noun, such as `1 update` and `2,000 updates`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def cpu_name() -> str:
    """The model of the CPU, such as `AMD EPYC 7B13`, or as much as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name[ \t]*:[ \t]*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def versions(*more: str) -> dict[str, str]:
    """The versions of Python, this package, `PACKAGES` and the packages in `more`, if they are installed."""
    from .version import __version__

    installed = {"python": platform.python_version(), "hf_vanilla_transformer": __version__}
    for name in (*PACKAGES, *more):
        if version := _installed_version(name):
            installed[name] = version
    return installed


@functools.cache
def _installed_version(name: str) -> str | None:
    """The version of a package, or None if it is not installed. Its metadata take milliseconds to read."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
