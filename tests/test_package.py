"""The package as a user installs it: types, version, a light import."""

import importlib.metadata
import importlib.resources
import re
from pathlib import Path

from packaging.requirements import Requirement

import hf_vanilla_transformer


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
    declared = map(Requirement, importlib.metadata.requires("hf_vanilla_transformer") or [])
    ours = [wanted for wanted in declared if _normal(wanted.name) != "hf-vanilla-transformer"]
    assert len(ours) >= 15
    outside = [str(wanted) for wanted in ours if tested.get(_normal(wanted.name), "") not in wanted.specifier]
    assert outside == []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
