"""A result states the machine and the software it was measured with."""

import importlib.metadata
import re

import pytest
import torch

from hf_vanilla_transformer.utils.system_info import describe_hardware, versions


@pytest.mark.parametrize("threads", ["1 torch thread", "2 torch threads"])
def test_hardware_names_cpu_cores_threads_and_gpus(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(threads[0]))
    assert re.search(rf"\S+.*, .*\d+ cores?, {threads}(;|$)", describe_hardware())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    assert describe_hardware().endswith("; 2 x NVIDIA H200")


def test_versions_are_those_of_the_installed_packages() -> None:
    found = versions("pytest", "no-such-package")
    assert found["torch"] == importlib.metadata.version("torch") and found["pytest"] == pytest.__version__
    assert {"python", "hf_vanilla_transformer", "transformers", "sacrebleu"} <= set(found)
    assert "no-such-package" not in found
