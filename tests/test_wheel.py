"""The wheel: the files it installs, seen from an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vanilla_transformer_cli.main import SUBCOMMANDS
from vanilla_transformer_cli.parsing import installed_recipes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(folder),
        str(repository),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if built.returncode != 0 and "hatchling" in built.stderr:
        pytest.skip("pip cannot fetch hatchling, which builds the wheel")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> set[str]:
    """Put the files of a wheel into `folder / "site"`. Returns their names."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
        return set(archive.namelist())


def installed(
    folder: Path, *arguments: str, given: str | None = None
) -> subprocess.CompletedProcess:
    """Run Python without a network, in an empty folder, with the package of `folder / "site"` alone."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    unreachable = {
        name: "http://127.0.0.1:9"
        for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY")
    }
    own = {"PYTHONPATH": str(folder / "site"), "HF_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=empty,
        env=os.environ | unreachable | own,
    )


@pytest.mark.slow  # pip makes an environment for the build
def test_wheel_has_the_command_and_its_recipes(wheel: Path, tmp_path: Path) -> None:
    names = unpack(wheel, tmp_path)
    (entry,) = (tmp_path / "site").glob("*/entry_points.txt")
    assert "vanilla-transformer = vanilla_transformer_cli.main:main" in entry.read_text()
    assert {f"vanilla_transformer_cli/{name}.py" for name in SUBCOMMANDS} <= names
    assert {f"vanilla_transformer_cli/recipes/{name}.yaml" for name in installed_recipes()} <= names
    data = {"py.typed", "hub/card_template.md", "text/__init__.pyi"}
    assert {f"hf_vanilla_transformer/{name}" for name in data} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
    for arguments in (["recipes", "numbers_en_de"], ["train", "--help"], ["--version"]):
        run = installed(tmp_path, "-m", "vanilla_transformer_cli", *arguments)
        assert run.returncode == 0, run.stderr
    # a recipe by its name, read from the wheel: the run begins and refuses the size
    run = installed(
        tmp_path, "-m", "vanilla_transformer_cli", "train", "numbers_en_de", "--numbers_size", "0"
    )
    assert run.returncode == 2, run.stderr
    assert "numbers_size" in run.stderr
    assert "at least 1" in run.stderr


@pytest.mark.slow
def test_wheel_has_the_c_functions_for_every_processor(wheel: Path, tmp_path: Path) -> None:
    names = unpack(wheel, tmp_path)
    libraries = [name for name in names if name.endswith(".so")]
    assert "-py3-none-" in wheel.name
    has_compiler = any(map(shutil.which, ("gcc", "clang", "cc")))
    assert len(libraries) == has_compiler
    assert wheel.name.endswith("-any.whl") != has_compiler
    if not has_compiler:
        return
    script = (
        "import os; os.environ['PATH'] = ''; from hf_vanilla_transformer.engine import c_kernels as c; "
        "[c._opened(c.SOURCE.with_name(c.library_name()), name) for name in c.instruction_sets()]; assert c.library()"
    )
    run = installed(tmp_path, "-c", script)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_installed_wheel_predicts_and_translates_offline(wheel: Path, tmp_path: Path) -> None:
    names = unpack(wheel, tmp_path)
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    files |= {"tokenizer.json", "tokenizer_config.json"}
    of_targets = {"target_tokenizer/tokenizer.json", "target_tokenizer/tokenizer_config.json"}
    models = tmp_path / "site" / "hf_vanilla_transformer" / "models"
    for model, expected, size in (
        ("g2p_en", files | of_targets, 3e6),
        ("retrosynthesis", files, 3e6),
        ("en_de", files, 12e6),
    ):
        prefix = f"hf_vanilla_transformer/models/{model}/"
        assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == expected
        weights = [path for path in (models / model).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in weights) < size
    for command, model, given, written in (
        ("predict", "g2p_en", "kitten\nworld\n", "K IH T AH N\nW ER L D\n"),
        ("translate", "en_de", "Good morning!\n", "Guten Morgen!\n"),
    ):
        run = installed(
            tmp_path, "-m", "vanilla_transformer_cli", command, "--model", model, given=given
        )
        assert run.stdout == written, run.stderr
    script = (
        "import hf_vanilla_transformer, sys; from transformers import AutoModelForSeq2SeqLM; "
        "AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])"
    )
    loaded = installed(tmp_path, "-c", script, str(models / "g2p_en"))
    assert loaded.returncode == 0, loaded.stderr
