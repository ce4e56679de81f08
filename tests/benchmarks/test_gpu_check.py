"""The command for a GPU, on a CPU with tiny sizes: every section ends in a file, and existing files are kept."""

import json
import time
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.utils.errors import UserError
from scripts.benchmarks import gpu_check
from scripts.benchmarks.gpu_check import Check, report, run


@pytest.mark.slow
def test_gpu_check_measures_every_section_on_a_cpu(tmp_path: Path) -> None:
    check = Check(tmp_path / "out", "cpu", quick=True)
    found = run(check)
    assert list(found) == list(gpu_check.sections(check))
    for name, figures in found.items():
        assert "not measured" not in figures, (name, figures)
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8")) == figures
    assert found["training_tiny"]["ours_bf16, processes 1"]["tokens_per_second"] > 0
    assert 0 < found["memory_tiny"]["ours_bf16, processes 1"]["share_of_peak_arithmetic"] < 1
    table = report(found)
    assert table.count("| decoding_tiny |") == 8  # two engines, two batch sizes, two numbers of beams


def test_gpu_check_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def fails() -> dict:
        done.append("fails")
        raise ImportError("there is no\nctranslate2")

    def works() -> dict:
        done.append("works")
        return {"hardware": "a", "torch": "b"}

    monkeypatch.setattr(gpu_check, "sections", lambda check: {"machine": works, "other": fails})
    check = Check(tmp_path, "cpu")
    first, second = run(check), run(check)
    assert done == ["works", "fails"] and first == second
    assert first["other"]["not measured"] == "there is no ctranslate2"
    assert "not measured: there is no ctranslate2" in report(first)


def test_gpu_check_needs_a_gpu_or_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device.*'cuda'"):
        run(Check(tmp_path, "cuda"))


def test_gpu_check_stops_a_section_that_takes_the_time_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs() -> dict:
        time.sleep(30)
        raise AssertionError

    named = {"machine": hangs, "memory_base": lambda: {"hardware": "a"}}
    monkeypatch.setattr(gpu_check, "sections", lambda check: named)
    monkeypatch.setitem(gpu_check.LIMITS, "machine", 0.2)
    start = time.monotonic()
    figures = run(Check(tmp_path, "cpu"))
    assert time.monotonic() - start < 5
    assert "not done in" in figures["machine"]["not measured"]
    assert figures["memory_base"]["hardware"] == "a"
    monkeypatch.setattr(gpu_check, "MINUTES", 0)
    assert run(Check(tmp_path / "other", "cpu"))["memory_base"]["not measured"] == "no time was left"
