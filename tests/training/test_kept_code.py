"""A run keeps the code that it started with, also if the package is replaced while it goes on."""

import shutil
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


def test_checkpoint_has_the_code_of_a_subclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept_own_code"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "own.py").write_text(OWN)
    (folder / "own_part.py").write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    from kept_own_code.own import OwnTranslator  # type: ignore[import-not-found]

    OwnTranslator.register_for_auto_class("AutoModelForSeq2SeqLM")
    model = OwnTranslator(tiny_model().config)
    trainer = make_trainer(tmp_path / "run", model=model, save_strategy="steps", save_steps=1, max_steps=1)
    (folder / "own_part.py").write_text("NUMBER = 2\n")
    trainer.train()
    assert (tmp_path / "run" / "checkpoint-1" / "own_part.py").read_text() == "NUMBER = 1\n"
