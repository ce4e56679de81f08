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


@pytest.fixture
def project(repository: Path) -> str:
    return (repository / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture
def constraints(repository: Path) -> str:
    return (repository / "scripts" / "constraints.txt").read_text(encoding="utf-8")


def test_version_is_the_same_everywhere(project: str) -> None:
    (declared,) = re.findall(r'(?m)^version = "(.+)"$', project)
    assert hf_vanilla_transformer.__version__ == declared
    assert importlib.metadata.version("hf_vanilla_transformer") == declared


def _is_for_here(requirement: Requirement, extras: list[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def test_pinned_versions_are_within_declared_ranges(constraints: str) -> None:
    tested = {}
    for line in constraints.splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if _is_for_here(pin, [""]):
                tested[_normal(pin.name)] = str(pin.specifier).removeprefix("==")
    metadata = importlib.metadata.metadata("hf_vanilla_transformer")
    extras = ["", *(metadata.get_all("Provides-Extra") or [])]
    count = 0
    for wanted in map(Requirement, metadata.get_all("Requires-Dist") or []):
        name = _normal(wanted.name)
        if name != "hf-vanilla-transformer" and _is_for_here(wanted, extras):
            count += 1
            assert tested.get(name, "") in wanted.specifier, wanted
    assert count >= 15


# Versions that were not tested


def test_tested_versions_are_the_declared_ranges(project: str, constraints: str) -> None:
    requirements = map(Requirement, re.findall(r'"([a-z_]+>=[^";\]]+)"', project))
    declared = {wanted.name: wanted.specifier for wanted in requirements}
    assert {"transformers", "torch", "peft"} < TESTED.keys() < declared.keys()
    for name, (oldest, newest) in TESTED.items():
        major, minor = Version(newest).release[:2]
        bounds = {f">={oldest}", f"<{major}.{minor + 1}"}
        if name == "torch":
            bounds = {f">={oldest}"}
        assert {str(bound) for bound in declared[name] if bound.operator != "!="} == bounds
    pinned = re.search(r"^torch==([0-9.]+)$", constraints, re.MULTILINE)
    assert pinned is not None
    oldest, newest = map(Version, TESTED["torch"])
    assert oldest <= Version(".".join(pinned[1].split(".")[:2])) <= newest


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"transformers": "5.24.0", "torch": "2.15.0+cpu", "peft": "0.21.9"}, []),
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
    assert "\n" not in "".join(caplog.messages)
    for each in named:
        assert each in caplog.text
    caplog.clear()
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    warn_of_untested_versions()
    assert caplog.messages == [], "a worker repeats what the main process said"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
