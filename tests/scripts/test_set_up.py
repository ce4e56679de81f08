"""quickstart.sh and the other scripts install what the README says, and harm neither a model nor an installed package.

The Python in the environment is a script that only writes down what it is asked for.
"""

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# Says of the package what `direct_url.json` says, has no torch, and fails to train.
PYTHON = """#!/usr/bin/env bash
echo "$0 $*" >>"{calls}"
case "$*" in
  -) echo "{installed}" ;;
  *'version("torch")'*) exit 1 ;;
  "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
  *vanilla_transformer_cli*) exit 3 ;;
esac
"""


class Clone:
    """A clone with an environment of pretended Python."""

    def __init__(self, folder: Path, installed: str) -> None:
        self.folder, self.calls = folder, folder / "calls.txt"
        (folder / "scripts").mkdir()
        for name in ("README.md", "pyproject.toml", "scripts/constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        for script in (ROOT / "scripts").glob("*.sh"):
            shutil.copy(script, folder / "scripts")
        self.python = folder / ".venv" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(
            PYTHON.format(calls=self.calls, installed=installed), encoding="utf-8"
        )
        self.python.chmod(0o755)

    def run(self, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run a script of the clone. Folders in `path` come before the usual commands."""
        environment = {**os.environ, "PYTHON": str(self.python), "PATH": f"{path}:/usr/bin:/bin"}
        return subprocess.run(
            ["bash", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def called(self, part: str) -> list[str]:
        """The calls of Python with these words."""
        lines = self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []
        return [line for line in lines if part in line]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path, installed="")


def test_quickstart_keeps_the_model_that_the_readme_trained(clone: Clone) -> None:
    weights = clone.folder / "runs" / "quickstart" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"trained")
    refused = clone.run("scripts/quickstart.sh")
    assert refused.returncode == 1 and weights.read_bytes() == b"trained"
    assert re.fullmatch(
        r"error: .*/runs/quickstart is kept.*--output_dir runs/another\n", refused.stderr
    )
    assert clone.called("") == [], "refused before anything is installed"
    clone.run("scripts/quickstart.sh", "--output_dir", "runs/another")
    (trained,) = clone.called("vanilla_transformer_cli train")
    assert trained.endswith("train numbers_en_de --output_dir runs/another") and weights.exists()


def test_quickstart_installs_what_the_readme_does(clone: Clone) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    clone.run("scripts/quickstart.sh")
    of_torch, of_package = clone.called("pip install")
    index = re.search(r"^pip install torch==\S+ (--index-url \S+)", readme, re.MULTILINE)
    extras = re.search(
        r'^pip install -c scripts/constraints.txt "\.(\[.*\])"', readme, re.MULTILINE
    )
    assert (
        index is not None and of_torch.endswith(f"{index[1]} torch") and "--constraint" in of_torch
    )
    assert extras is not None and of_package.endswith(f"--editable {clone.folder}{extras[1]}")
    assert clone.called("cli train")[0].endswith(
        f"train numbers_en_de --output_dir {clone.folder}/runs/quickstart"
    )


def test_torch_is_the_usual_build_beside_a_gpu(clone: Clone, tmp_path: Path) -> None:
    driver = tmp_path / "driver" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\n", encoding="utf-8")
    driver.chmod(0o755)
    clone.run("scripts/test.sh", path=str(driver.parent))
    assert (
        "--editable" in "".join(clone.called("pip install")) and clone.called("--index-url") == []
    )


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "docs.sh"])
def test_installed_package_is_not_replaced(script: str, tmp_path: Path) -> None:
    clone = Clone(tmp_path, installed="installed")
    clone.run(f"scripts/{script}")
    assert clone.called("pip install")
    for call in clone.called("pip install"):
        assert call.startswith(f"{clone.folder}/.venv-dev/bin/python ")


def test_requirements_are_those_of_pyproject(clone: Clone) -> None:
    clone.python.unlink()
    clone.python.symlink_to(
        shutil.which("python3", path="/usr/bin:/bin:" + os.environ["PATH"]) or "python3"
    )
    printed = clone.run("-c", "source scripts/common.sh && requirements").stdout.splitlines()
    bounds = {wanted.name: wanted.specifier for wanted in map(Requirement, printed)}
    assert {"transformers", "torch", "peft", "tqdm"} <= bounds.keys() and len(bounds) > 15
    assert (
        "5.17" in bounds["transformers"]
        and "5.16" not in bounds["transformers"]
        and "6" not in bounds["transformers"]
    )


def test_scripts_name_tests_that_there_are() -> None:
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in scripts)
    named = set(re.findall(r"\btests/[\w/]*test_\w+\.py", text))
    assert len(named) > 9
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_python_in_shell_scripts_imports_what_exists() -> None:
    text = "\n".join(script.read_text(encoding="utf-8") for script in ROOT.glob("scripts/*.sh"))
    imports = re.findall(r"^from (hf_vanilla_transformer[\w.]*) import (.+)$", text, re.MULTILINE)
    assert imports
    for module, names in imports:
        assert set(names.split(", ")) <= set(dir(importlib.import_module(module)))
