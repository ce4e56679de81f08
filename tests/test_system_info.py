"""A result states the machine and the software it was measured with."""

import importlib.metadata
import os
import platform
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.utils import system_info
from hf_vanilla_transformer.utils.system_info import cpu_name, describe_hardware, versions


def test_hardware_names_cpu_cores_threads_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_info, "cpu_name", lambda: "Apple M4")
    for cores, total, threads, text in (
        (1, 1, 1, "1 core, 1 torch thread"),
        (2, 2, 2, "2 cores, 2 torch threads"),
        (1, 4, 3, "1 of 4 cores, 3 torch threads"),
        (1, None, 1_000, "1 core, 1,000 torch threads"),
    ):
        monkeypatch.setattr(system_info, "usable_cores", lambda cores=cores: set(range(cores)))
        monkeypatch.setattr(os, "cpu_count", lambda total=total: total)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert describe_hardware() == f"Apple M4, {text}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", ["NVIDIA H200", "NVIDIA T4", "NVIDIA H200"].__getitem__
    )
    assert describe_hardware().endswith("; 2 x NVIDIA H200; 1 x NVIDIA T4")


@pytest.mark.parametrize(
    "text",
    [None, "processor : 0\n", "model name :\nflags : fpu\n"],
    ids=["none", "arm", "blank"],
)
def test_cpu_without_a_model_name_is_that_of_the_platform(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, **settings: str) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "Apple M4")
    assert cpu_name() == "Apple M4"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert cpu_name() == "arm64"
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: "x\nmodel name\t:  AMD EPYC \nmodel name : other\n"
    )
    assert cpu_name() == "AMD EPYC"


def test_versions_are_those_of_the_installed_packages() -> None:
    found = versions("pytest", "no-such-package")
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["pytest"] == pytest.__version__
    assert {"python", "hf_vanilla_transformer", "transformers", "sacrebleu"} <= set(found)
    assert "no-such-package" not in found
