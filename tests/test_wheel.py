"""The wheel: the files it installs, seen from an empty folder."""

import os
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
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(repository)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if built.returncode != 0 and "hatchling" in built.stderr:
        pytest.skip("pip cannot fetch hatchling, which builds the wheel")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow  # pip makes an environment for the build
def test_wheel_has_the_command_and_its_recipes(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert b"vanilla-transformer = vanilla_transformer_cli.main:main" in archive.read(entry)
        archive.extractall(tmp_path / "site")
    assert {f"vanilla_transformer_cli/{name}.py" for name in SUBCOMMANDS} <= names
    assert {f"vanilla_transformer_cli/recipes/{name}.yaml" for name in installed_recipes()} <= names
    assert {"hf_vanilla_transformer/py.typed", "hf_vanilla_transformer/hub/card_template.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
    (tmp_path / "empty").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in (["recipes", "numbers_en_de"], ["train", "--help"], ["--version"]):
        run = subprocess.run(
            [sys.executable, "-m", "vanilla_transformer_cli", *arguments], capture_output=True, text=True, timeout=300,
            cwd=tmp_path / "empty", env=environment | {"PYTHONPATH": str(tmp_path / "site")},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
    # a recipe by its name, read from the wheel: the run begins and refuses the size
    flags = ["train", "numbers_en_de", "--numbers_size", "0"]
    run = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer_cli", *flags], capture_output=True, text=True, timeout=300,
        cwd=tmp_path / "empty", env=environment | {"PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert "numbers_size" in run.stderr and "at least 1" in run.stderr


@pytest.mark.slow
def test_installed_wheel_predicts_phonemes_offline(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    files |= {"tokenizer.json", "tokenizer_config.json"}
    of_targets = {"target_tokenizer/tokenizer.json", "target_tokenizer/tokenizer_config.json"}
    for model, expected in (("g2p_en", files | of_targets), ("retrosynthesis", files)):
        prefix = f"hf_vanilla_transformer/models/{model}/"
        assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == expected
        folder = tmp_path / "site" / prefix
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 3e6
    folder = tmp_path / "site" / "hf_vanilla_transformer" / "models" / "g2p_en"
    (tmp_path / "empty").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HOME")}
    unreachable = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY")}
    environment = kept | unreachable | {"PYTHONPATH": str(tmp_path / "site"), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "vanilla_transformer_cli", "predict", "--model", "g2p_en"]
    run = subprocess.run(
        command,
        input="kitten\nworld\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path / "empty",
        env=environment,
    )
    assert run.stdout == "K IH T AH N\nW ER L D\n", run.stderr
    script = (
        "import hf_vanilla_transformer, sys; from transformers import AutoModelForSeq2SeqLM; "
        "AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert loaded.returncode == 0, loaded.stderr
