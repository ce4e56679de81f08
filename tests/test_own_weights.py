"""A loaded model is independent of its folder: files that are replaced, cut off or removed change and end nothing."""

import shutil
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.engine.linear import int8_error
from tests.forked_interpreter import Interpreter
from tests.model_helpers import randomise
from tests.serving_helpers import CORPUS, echo_folder, echo_translator
from tests.trainer_helpers import as_flags, write_pairs

SETTINGS = {
    "max_steps": 8,
    "save_steps": 4,
    "generation_max_length": 5,
    "disable_tqdm": True,
    "use_cpu": True,
}

# A process of its own, which SIGBUS may end.
FIRST_LINES = """
import os
import shutil
import sys
from functools import partial
from pathlib import Path

folder, other = map(Path, sys.argv[1:3])


def copy_over(file, content):
    with open(file, "r+b") as opened:  # the same inode, as `cp` writes
        opened.write(content)


def harm(folder):
    for name in ("model.safetensors", "ema.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            content = (other / name).read_bytes()
            assert len(content) == (folder / name).stat().st_size, name
            yield name, partial(copy_over, folder / name, content)
            yield name + " cut off", partial(os.truncate, folder / name, 0)
    yield "folder", partial(shutil.rmtree, folder)
"""

LOADED = """
from hf_vanilla_transformer.interop.state_dicts import read_torch_file
from hf_vanilla_transformer.training.state.callbacks import WeightAverage
from hf_vanilla_transformer import (
    Translator, VanillaTransformerForConditionalGeneration, VanillaTransformerTrainer
)
from hf_vanilla_transformer.inference import optimize_for_inference
from transformers import Seq2SeqTrainingArguments
from tests.serving_helpers import CORPUS

as_bin = folder.with_name("bin")
average = WeightAverage(0.5)
average.load(folder)
averages = {"ema": average.average, "converted": read_torch_file(folder / "ema.safetensors")}
translators = {
    "modules": Translator.from_pretrained(folder, "cpu", "float32"),
    "packed": Translator.from_pretrained(folder, "cpu", "float32"),
    "ensemble": Translator.from_pretrained(folder, "cpu", "float32", ensemble=[folder]),
    "torch.save": Translator.from_pretrained(as_bin, "cpu", "float32"),
}
optimize_for_inference(translators["packed"].model)
if "int8" in sys.argv:
    translators["int8"] = Translator.from_pretrained(folder, "cpu", "int8")
plain = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
arguments = Seq2SeqTrainingArguments(str(folder.with_name("run")), use_cpu=True, report_to="none")
trainer = VanillaTransformerTrainer(model=plain, args=arguments)


def results():
    scores = {
        name: [(each.text, each.score) for (each,) in translator.translate_nbest(CORPUS, n_best=1)]
        for name, translator in translators.items()
    }
    states = averages | {"trainer": trainer.model.state_dict()}
    return scores, {name: {key: each.clone() for key, each in state.items()} for name, state in states.items()}


scores, weights = results()
for harmed in (folder, as_bin):
    for what, act in harm(harmed):
        act()
        new_scores, new_weights = results()
        assert new_scores == scores, what
        for name, state in weights.items():
            assert all(each.equal(new_weights[name][key]) for key, each in state.items()), (what, name)
"""

SERVED = """
from fastapi.testclient import TestClient
from hf_vanilla_transformer.serving import ServeOptions
from hf_vanilla_transformer.serving.app import create_app
from hf_vanilla_transformer.serving.server import load_server
from tests.serving_helpers import CORPUS

server = load_server(ServeOptions([f"en-de={folder}"], device="cpu", dtype="float32", workers=2))
with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
    body = {"q": CORPUS, "source": "en", "target": "de", "alternatives": 1}
    expected = client.post("/translate", json=body).json()
    assert len(set(expected["translatedText"])) > 1, expected
    for what, act in harm(folder):
        act()
        assert client.post("/translate", json=body).json() == expected, what
"""

TRAINED = """
from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training

step = VanillaTransformerTrainer.training_step
harms = []


def harming_step(self, *args, **kwargs):
    if harms:
        harms.pop(0)[1]()
    return step(self, *args, **kwargs)


VanillaTransformerTrainer.training_step = harming_step
for output in ("left", "harmed"):
    harms = list(harm(folder)) if output == "harmed" else []
    count = len(harms)
    run_training(*parse_recipe(["--output_dir", str(folder.with_name(output)), *sys.argv[3:]]))
    assert not harms
assert count == 7
left, harmed = (folder.with_name(name) / "model.safetensors" for name in ("left", "harmed"))
assert left.read_bytes() == harmed.read_bytes()
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two model folders with the same tensors, in which the numbers are others. `bin` is the first, by torch.save."""
    names = ["model", "other"]
    for seed, name in enumerate(names):
        model = randomise(echo_translator().model, seed) if seed else echo_translator().model
        folder = echo_folder(tmp_path / name)
        model.save_pretrained(folder)
        shutil.copy(folder / "model.safetensors", folder / "ema.safetensors")
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    is_other = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tmp_path / "model", tmp_path / "bin", ignore=is_other)
    return [str(tmp_path / name) for name in names]


def succeed(python: Interpreter, script: str, *arguments: str) -> None:
    result = python.run(["-c", FIRST_LINES + script, *arguments], seconds=300)
    assert result.returncode == 0, f"status {result.returncode}: {result.stderr[-3000:]}"


@pytest.mark.slow
def test_loaded_weights_do_not_follow_their_files(python: Interpreter, folders: list[str]) -> None:
    has_int8 = int8_error(torch.device("cpu"), torch.float32) is None
    succeed(python, LOADED, *folders, *(["int8"] if has_int8 else []))


@pytest.mark.slow
def test_server_answers_the_same_without_its_folder(
    python: Interpreter, folders: list[str]
) -> None:
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    succeed(python, SERVED, *folders)


@pytest.mark.slow
def test_fine_tuning_ends_the_same_without_its_base(
    python: Interpreter, folders: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(
        "peft", reason="needs the extra `lora`, with which weights of the base stay as they are"
    )
    text = write_pairs(tmp_path / "text", list(zip(CORPUS, reversed(CORPUS), strict=True)))
    flags = as_flags({**text, "model_name_or_path": folders[0], "lora_r": 2, **SETTINGS})
    succeed(python, TRAINED, *folders, *flags)
