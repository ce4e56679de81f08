"""A result states the machine and the software it was measured with."""

import importlib.metadata
import platform
import re
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.utils.system_info import cpu_name, describe_hardware, versions


@pytest.mark.parametrize("threads", ["1 torch thread", "2 torch threads"])
def test_hardware_names_cpu_cores_threads_and_gpus(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(threads[0]))
    assert re.search(rf"\S+.*, .*\d+ cores?, {threads}(;|$)", describe_hardware())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    assert describe_hardware().endswith("; 2 x NVIDIA H200")


@pytest.mark.parametrize(
    "text", [None, "processor : 0\n", "model name :\nflags : fpu\n"], ids=["none", "arm", "blank"]
)
def test_cpu_without_a_model_name_is_that_of_the_platform(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_versions_are_those_of_the_installed_packages() -> None:
    found = versions("pytest", "no-such-package")
    assert found["torch"] == importlib.metadata.version("torch") and found["pytest"] == pytest.__version__
    assert {"python", "hf_vanilla_transformer", "transformers", "sacrebleu"} <= set(found)
    assert "no-such-package" not in found
