"""Every way to load a model refuses weights that are missing, unexpected or of another shape, and foreign classes."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.hub.model_files import choose_files
from hf_vanilla_transformer.hub.publishing import prepared_files
from hf_vanilla_transformer.inference.loading import check_model_folder, load_model
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.training.run.fine_tuning import load_base_model
from hf_vanilla_transformer.training.trainer.objectives.distillation import Teacher
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import save_model, tiny_config, tiny_model, with_paths
from tests.trainer_helpers import random_pairs, trained
from vanilla_transformer_cli.main import main

WEIGHT = "model.decoder.layers.0.fc1.weight"


class GatedTransformer(VanillaTransformerForConditionalGeneration):
    """A subclass with a gate. It keeps the configuration and the model type of its base."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = torch.nn.Linear(config.d_model, config.d_model)


class ScaledTransformer(VanillaTransformerForConditionalGeneration):
    """A subclass without weights of its own."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("models") / "good", ["one two three"] * 3, vocab_size=265
    )


def damaged(good: Path, damage: str) -> Path:
    """A copy of the folder with one of the faults."""
    folder = good.parent / damage
    if folder.exists():
        return folder
    shutil.copytree(good, folder)
    if model_class := {"subclass": GatedTransformer, "class": ScaledTransformer}.get(damage):
        model_class(tiny_config(vocab_size=265)).save_pretrained(folder)
        return folder
    if damage == "adapter":  # as before the weights were merged
        adapter = {"peft_type": "LORA", "target_modules": ["fc1"], "base_model_name_or_path": None}
        (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
        return folder
    weights = load_file(folder / "model.safetensors")
    if damage == "missing":
        del weights[WEIGHT]
    elif damage == "unexpected":
        weights["gate.weight"] = torch.ones(2, 2)
    elif damage == "mismatched":
        weights[WEIGHT] = torch.ones(3, 3)
    elif damage == "integers":
        weights[WEIGHT] = weights[WEIGHT].to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def by_command(line: str) -> Callable[[Path, Path, Path], None]:
    """A subcommand of `vanilla-transformer` in this process. FOLDER, GOOD, TEXT and OUT are replaced by paths."""

    def load(folder: Path, good: Path, scratch: Path) -> None:
        text = scratch / "text"
        text.write_text("one two\n", encoding="utf-8")
        arguments = with_paths(
            line.split(),
            FOLDER=folder,
            GOOD=good,
            TEXT=text,
            OUT=scratch / "out",
        )
        main(arguments)

    return load


LOADERS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "load_model": lambda folder, good, scratch: load_model(folder, "cpu"),
    "Translator": lambda folder, good, scratch: Translator.from_pretrained(folder, "cpu"),
    "ensemble": lambda folder, good, scratch: Translator.from_pretrained(
        good, "cpu", ensemble=[folder]
    ),
    "teacher": lambda folder, good, scratch: Teacher([folder], 0.5, tiny_model(vocab_size=265)),
    "base of a fine-tuning": lambda folder, good, scratch: load_base_model(str(folder)),
    "checkpoint": lambda folder, good, scratch: check_model_folder(folder),
    "export ctranslate2": lambda folder, good, scratch: export(
        "ctranslate2", folder, scratch / "out"
    ),
    "export marian": lambda folder, good, scratch: export("marian", folder, scratch / "out"),
    "translate": by_command("translate --model FOLDER --input TEXT --output OUT"),
    "evaluate": by_command("evaluate --model FOLDER --source TEXT --reference TEXT"),
    "distil": by_command("distil --teacher FOLDER --source_file TEXT --output_dir OUT"),
    "attention": by_command("attention --model FOLDER --sentence one --output OUT"),
    "average": by_command("average FOLDER FOLDER --output OUT"),
    "average with another": by_command("average FOLDER GOOD --output OUT"),
    "serve": by_command("serve --model en-de=FOLDER --port 0"),
}
DAMAGES = {
    "missing": "fc1",
    "unexpected": "gate",
    "mismatched": "fc1",
    "integers": "fc1",
    "subclass": "gate|GatedTransformer",
    "class": "ScaledTransformer",
    "adapter": "merge_and_unload",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("loader", LOADERS)
def test_loading_refuses_other_weights_in_one_line(
    good, loader, damage, tmp_path, capsys, caplog, monkeypatch
):
    folder = damaged(good, damage)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises((UserError, SystemExit)) as caught:
        LOADERS[loader](folder, good, tmp_path)
    assert "LOAD REPORT" not in caplog.text
    message = str(caught.value)
    if isinstance(caught.value, SystemExit):
        message += capsys.readouterr().err
    assert str(folder) in message
    assert re.search(DAMAGES[damage], message)
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "unexpected", "mismatched", "subclass"])
def test_resuming_refuses_other_weights(good: Path, damage: str, tmp_path: Path) -> None:
    """From a checkpoint whose weights are those of the folder."""
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = trained(tmp_path, random_pairs(8), tiny_model(vocab_size=265), **saving)
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copy(damaged(good, damage) / "model.safetensors", checkpoint)
    with pytest.raises(UserError, match="checkpoint-2.*(fc1|gate)"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("loader", ["load_model", "Translator", "ensemble", "checkpoint"])
def test_loading_takes_the_folder_without_damage(good: Path, loader: str, tmp_path: Path) -> None:
    LOADERS[loader](good, good, tmp_path)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "mismatched", "adapter"])
def test_publishing_refuses_other_weights(good, damage):
    with pytest.raises(UserError, match=DAMAGES[damage]):
        prepared_files(damaged(good, damage), "me/x")


def test_publishing_takes_a_subclass_only_with_its_code(good: Path) -> None:
    folder = damaged(good, "class")
    code = "test_loading_paths.py"  # of the class, named by auto_map
    assert code in choose_files(folder).chosen
    (folder / code).unlink()
    with pytest.raises(UserError, match=code):
        choose_files(folder)
    choose_files(good)


def test_encoder_is_checked_as_its_class(tmp_path: Path) -> None:
    tiny_model().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["VanillaTransformerModel"]
    check_model_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["encoder.layers.0.fc1.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="fc1"):
        prepared_files(tmp_path, "me/x")
