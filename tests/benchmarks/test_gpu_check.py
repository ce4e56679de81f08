"""The command for a GPU, on a CPU with tiny sizes: every section ends in a file, and existing files are kept."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.utils.errors import UserError
from scripts.benchmarks import gpu_check
from scripts.benchmarks.gpu_check import Check, report, run
from scripts.benchmarks.report import Measurement

Sections = dict[str, Callable[[], Iterator[dict]]]


@pytest.mark.slow
def test_gpu_check_measures_every_section_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "MINUTES", 60)  # of a busy machine
    monkeypatch.setattr(gpu_check, "LIMITS", dict.fromkeys(gpu_check.LIMITS, 3600))
    check = Check(tmp_path / "out", "cpu", quick=True)
    found = run(check)
    assert list(found) == list(gpu_check.sections(check))
    for name, figures in found.items():
        assert "not measured" not in figures, (name, figures)
        assert (
            json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8")) == figures
        )
    ours = "ours_bf16, preset tiny, processes 1"
    assert found["training"][ours]["tokens_per_second"] > 0
    assert 0 < found["fixed"][ours]["share_of_peak_arithmetic"] < 1
    table = report(found)
    for section in ("decoding", "ctranslate2"):
        assert (
            table.count(f"| {section} |") == 8
        )  # two engines, two batch sizes, two numbers of beams
    assert table.count("| kernels |") == len(gpu_check.OTHER_TRAINERS)
    assert table.count("| graphs |") == len(gpu_check.GRAPH_TRAINERS)
    assert found["loader"]["loader"]["tokens_per_second"] > 100_000


def test_loader_is_measured_by_itself_without_a_gpu(tmp_path: Path) -> None:
    found = run(Check(tmp_path, "cpu", quick=True, chosen=["loader"]))
    assert list(found) == ["machine", "loader"]
    figures = found["loader"]
    first, later = (figures[name] for name in ("loader, first epoch with its plan", "loader"))
    (tokens,) = first["target_tokens"]
    assert later["target_tokens"] == [tokens] * gpu_check.LOADER_EPOCHS
    assert 0 < first["tokens_per_second"] < later["tokens_per_second"]
    assert "| loader " in report(found)


def test_unknown_sections_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sections: lader is none of machine, fixed, "):
        run(Check(tmp_path, "cpu", chosen=["lader"]))


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> Sections:
    """The sections of every check: an empty table to fill in."""
    named: Sections = {}
    monkeypatch.setattr(gpu_check, "sections", lambda check: named)
    return named


def test_gpu_check_goes_on_with_what_is_missing(tmp_path: Path, sections: Sections) -> None:
    done = []

    def fails() -> Iterator[dict]:
        done.append("fails")
        yield {"ours": {"tokens_per_second": 5.0, "peak_mib": None}}
        raise ImportError("there is no\nctranslate2")

    def works() -> Iterator[dict]:
        done.append("works")
        yield {"hardware": "a", "torch": "b"}

    sections |= {"machine": works, "fixed": fails}
    check = Check(tmp_path, "cpu")
    first, second = run(check), run(check)
    assert done == ["works", "fails"] and first == second
    assert first["fixed"]["not measured"] == "there is no ctranslate2"
    table = report(first)
    assert "not measured: there is no ctranslate2" in table
    assert "| fixed | ours | 5 |" in " ".join(table.split())  # what there was before


def test_figures_of_a_killed_check_are_there_and_it_goes_on(
    tmp_path: Path, sections: Sections
) -> None:
    figures = {"ours": {"tokens_per_second": 5.0}}
    machine = {"hardware": "a", "torch": "b"}
    killed = [True]

    def interrupted() -> Iterator[dict]:
        yield figures
        if killed.pop():
            raise KeyboardInterrupt
        yield figures | {"marian": {}}

    sections |= {"machine": lambda: iter([machine]), "training": interrupted}
    with pytest.raises(KeyboardInterrupt):
        run(Check(tmp_path, "cpu"))
    left = {
        path.name: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")
    }
    assert left["training.json"] == figures | {"unfinished": True}
    assert left["machine.json"].items() >= machine.items()
    killed.append(False)
    assert "marian" in run(Check(tmp_path, "cpu"))["training"]


def test_measurements_are_given_one_by_one_and_with_their_last_round() -> None:
    def measured() -> Iterator[Measurement]:
        ones = [Measurement("ours", {"beams": 1}), Measurement("marian", {"beams": 1})]
        for one in ones:
            one.add(2.0, 10, None)
            yield one
        ones[0].add(1.0, 10, None)

    rates = [
        {name: one["rates"] for name, one in figures.items()}
        for figures in gpu_check._figures(measured())
    ]
    first = {"ours, beams 1": [5.0]}
    assert rates == [
        first,
        first | {"marian, beams 1": [5.0]},
        {"ours, beams 1": [5.0, 10.0], "marian, beams 1": [5.0]},
    ]


def test_gpu_check_needs_a_gpu_or_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device.*'cuda'"):
        run(Check(tmp_path, "cuda"))


def test_gpu_check_stops_a_section_that_takes_the_time_of_others(
    tmp_path: Path, sections: Sections, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []

    def hangs() -> Iterator[dict]:
        times.append("once")
        with suppress(Exception):  # as a library does
            time.sleep(30)
        yield {}

    sections |= {"machine": hangs, "fixed": lambda: iter([{"hardware": "a"}])}
    monkeypatch.setitem(gpu_check.LIMITS, "machine", 0.2)
    start = time.monotonic()
    figures = run(Check(tmp_path, "cpu"))
    assert time.monotonic() - start < 5
    assert "not done in" in figures["machine"]["not measured"]
    assert figures["fixed"]["hardware"] == "a"
    assert "not measured: not done in" in report(figures)
    run(Check(tmp_path, "cpu"))
    assert len(times) == 2, "the same command measures it again"
    monkeypatch.setattr(gpu_check, "MINUTES", 0)
    assert run(Check(tmp_path / "other", "cpu"))["fixed"]["not measured"] == "no time was left"
