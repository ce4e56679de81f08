"""A run keeps the code that it started with, also if the package is replaced while it goes on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_helpers import tiny_model
from tests.trainer_helpers import make_trainer

OWN = """from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .own_part import NUMBER

class OwnTranslator(VanillaTransformerForConditionalGeneration):
    number = NUMBER
"""


def test_checkpoint_has_the_code_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    module = sys.modules[type(model).__module__]
    package = tmp_path / "package"
    package.mkdir()
    for path in Path(str(module.__file__)).parent.glob("*_vanilla_transformer.py"):
        shutil.copyfile(path, package / path.name)
    first = {path.name: path.read_bytes() for path in package.glob("*_vanilla_transformer.py")}
    for name, each in list(sys.modules.items()):
        file = Path(getattr(each, "__file__", None) or ".")
        if name.startswith("hf_vanilla_transformer.") and file.name in first:
            monkeypatch.setattr(each, "__file__", str(package / file.name))
    trainer = make_trainer(tmp_path / "run", model=model, save_strategy="steps", save_steps=1, max_steps=1)
    for path in package.glob("*.py"):
        path.unlink()  # as pip does before it writes new ones
    trainer.train()
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run" / "checkpoint-1").glob("*.py")}
    assert "modeling_vanilla_transformer.py" in saved and saved.items() <= first.items()
    assert module.__file__ == str(package / "modeling_vanilla_transformer.py")


def test_checkpoint_has_the_code_of_a_subclass(tmp_path: Path, own_modules: Path) -> None:
    folder = tmp_path / "kept_own_code"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "own.py").write_text(OWN)
    (folder / "own_part.py").write_text("NUMBER = 1\n")
    from kept_own_code.own import OwnTranslator  # type: ignore[import-not-found]

    OwnTranslator.register_for_auto_class("AutoModelForSeq2SeqLM")
    model = OwnTranslator(tiny_model().config)
    trainer = make_trainer(tmp_path / "run", model=model, save_strategy="steps", save_steps=1, max_steps=1)
    (folder / "own_part.py").write_text("NUMBER = 2\n")
    trainer.train()
    assert (tmp_path / "run" / "checkpoint-1" / "own_part.py").read_text() == "NUMBER = 1\n"


TRAIN = """
import sys
from hf_vanilla_transformer.training.resumable_trainer import ResumableTrainer
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.run import run_training

at_start = set()
run_epoch = ResumableTrainer._run_epoch


def note_modules(*arguments, **keywords):
    at_start.update(sys.modules)
    return run_epoch(*arguments, **keywords)


ResumableTrainer._run_epoch = note_modules
run_training(*parse_recipe(sys.argv[1:]))
late = [name for name in set(sys.modules) - at_start if name.startswith("hf_vanilla_transformer.")]
print("imported late:", *sorted(late))
"""


@pytest.mark.slow
def test_run_imports_no_module_after_its_start(tmp_path: Path, repository: Path) -> None:
    recipe = [repository / "scripts" / "recipes" / "numbers_en_de.yaml", "--output_dir", tmp_path / "run"]
    flags = ["--max_steps", "4", "--eval_steps", "2", "--numbers_size", "2000", "--report_to", "none"]
    command = [sys.executable, "-c", TRAIN, *map(str, recipe), *flags]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "imported late:"
