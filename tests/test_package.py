"""The package as a user installs it: types, version, a light import."""

import importlib.metadata
import importlib.resources
import multiprocessing
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import hf_vanilla_transformer
from hf_vanilla_transformer.utils.version import TESTED, warn_of_untested_versions


def test_py_typed_is_in_the_package() -> None:
    assert (importlib.resources.files(hf_vanilla_transformer) / "py.typed").is_file()


def test_version_is_the_same_everywhere(repository: Path) -> None:
    declared = re.search(r'^version = "(.+)"$', (repository / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert declared is not None
    assert hf_vanilla_transformer.__version__ == declared[1]
    assert importlib.metadata.version("hf_vanilla_transformer") == declared[1]


def test_pinned_versions_are_within_declared_ranges(repository: Path) -> None:
    tested = {}
    for line in (repository / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                tested[_normal(pin.name)] = str(pin.specifier).removeprefix("==")
    extras = ["", *(importlib.metadata.metadata("hf_vanilla_transformer").get_all("Provides-Extra") or [])]
    declared = map(Requirement, importlib.metadata.requires("hf_vanilla_transformer") or [])
    here = [each for each in declared if not each.marker or any(each.marker.evaluate({"extra": x}) for x in extras)]
    ours = [wanted for wanted in here if _normal(wanted.name) != "hf-vanilla-transformer"]
    assert len(ours) >= 15
    outside = [str(wanted) for wanted in ours if tested.get(_normal(wanted.name), "") not in wanted.specifier]
    assert outside == []


# Versions that were not tested


def test_tested_versions_are_the_declared_ranges(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    declared = {wanted.name: wanted for wanted in map(Requirement, re.findall(r'"([a-z_]+>=[^";\]]+)"', text))}
    assert {"transformers", "torch", "peft"} < TESTED.keys() < declared.keys()
    for name, (oldest, newest) in TESTED.items():
        major, minor = Version(newest).release[:2]
        bounds = {f">={oldest}"} if name == "torch" else {f">={oldest}", f"<{major}.{minor + 1}"}
        assert {str(bound) for bound in declared[name].specifier if bound.operator != "!="} == bounds
    constraints = (repository / "scripts" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntorch=={TESTED['torch'][1]}." in constraints


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"transformers": "5.24.0", "torch": "2.13.0+cpu", "peft": "0.21.9"}, []),
        ({"transformers": "5.17.0", "torch": "2.9.1", "tokenizers": "0.23.3"}, []),
        ({"transformers": "6.0.0.dev0"}, ["transformers 6.0.0.dev0"]),
        ({"tokenizers": "0.23.2", "torch": "2.100.0"}, ["tokenizers 0.23.2", "torch 2.100.0"]),
    ],
)
def test_untested_versions_are_named_in_one_line(installed, named, monkeypatch, caplog):
    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    warn_of_untested_versions()
    assert len(caplog.messages) == bool(named)
    assert all(each in caplog.text for each in named) and "\n" not in "".join(caplog.messages)
    caplog.clear()
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    warn_of_untested_versions()
    assert caplog.messages == [], "a worker repeats what the main process said"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
