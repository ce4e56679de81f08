"""A model with another feed-forward network and another attention, and a loss of one's own: the whole life."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, Seq2SeqTrainer

from hf_vanilla_transformer import (
    Translator,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
)
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.text import load_tokenizers
from tests.model_helpers import save_model, tiny_config, tiny_model, with_paths
from tests.test_custom_losses import focal
from tests.trainer_helpers import DESCENT, TINY_RUN, as_flags, random_pairs, trained
from vanilla_transformer_cli import serve
from vanilla_transformer_cli.main import parse_arguments
from vanilla_transformer_cli.models import use_model_code

FEED_FORWARD = """
import torch
from torch import nn
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.attention_vanilla_transformer import VanillaTransformerAttention
from hf_vanilla_transformer.layers_vanilla_transformer import (
    VanillaTransformerDecoderLayer,
    VanillaTransformerEncoderLayer,
)
class Gated:
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.d_model, self.fc1.out_features)
    def feed_forward(self, x):
        return self.fc2(self.activation(self.fc1(x)) * self.gate(x))
class GatedEncoderLayer(Gated, VanillaTransformerEncoderLayer): pass
class GatedDecoderLayer(Gated, VanillaTransformerDecoderLayer): pass
class OwnConfig(VanillaTransformerConfig):
    model_type = "own_transformer"
class OwnTranslator(VanillaTransformerForConditionalGeneration):
    config_class = OwnConfig
    layer_classes = GatedEncoderLayer, GatedDecoderLayer
"""
ATTENTION = (
    FEED_FORWARD.split("class Gated:")[0]
    + """
class Scaled(VanillaTransformerAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.tensor(1.5))
    def forward(self, x, *args, **kwargs):
        return super().forward(x * self.temperature, *args, **kwargs)
class ScaledEncoderLayer(VanillaTransformerEncoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Scaled(config, config.encoder_attention_heads, is_causal=False, layer_idx=layer_idx)
class OwnConfig(VanillaTransformerConfig):
    model_type = "own_transformer"
class OwnTranslator(VanillaTransformerForConditionalGeneration):
    config_class = OwnConfig
    layer_classes = ScaledEncoderLayer, VanillaTransformerDecoderLayer
"""
)
LOAD = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
expected = torch.load(sys.argv[2])
ids = torch.tensor([[5, 6, 7, 2]])
assert torch.equal(model(input_ids=ids, labels=ids).logits, expected)
assert "transformers_modules" in type(model).__module__
"""


SOURCES = [FEED_FORWARD, pytest.param(ATTENTION, marks=pytest.mark.slow)]


@pytest.mark.parametrize("source", SOURCES, ids=["feed_forward", "attention"])
def test_subclass_trains_saves_loads_and_publishes(source, tmp_path, own_modules, command, python):
    (tmp_path / "own_model.py").write_text(source, encoding="utf-8")
    (tmp_path / "text").write_text("one two\nthree\n" * 5, encoding="utf-8")
    flags = as_flags(TINY_RUN | {"train": ["text", "text"], "max_steps": 2, "output_dir": "run"})
    status, _, errors = command("train", "--model_class", "own_model:OwnTranslator", *flags)
    assert status == 0, errors
    own: ModuleType = sys.modules["own_model"]
    assert (tmp_path / "run" / "own_model.py").is_file()
    tokenizer, _ = load_tokenizers("run")
    model = own.OwnTranslator.from_pretrained("run").eval()
    ids = torch.tensor([[5, 6, 7, 2]])
    torch.save(model(input_ids=ids, labels=ids).logits.detach(), tmp_path / "logits")
    environment = dict(os.environ)
    for name in ("PATH", "PYTHONPATH"):
        environment.pop(name, None)
    loaded = python.run(["-c", LOAD, "run", "logits"], env=environment)
    assert loaded.returncode == 0, loaded.stderr
    with pytest.raises(ValueError, match="decoded through their modules"):
        optimize_for_inference(model)
    assert len(list(Translator(model, tokenizer).translate(["one", "two"]))) == 2
    status, printed, errors = command("publish", "run", "--repo-id", "me/own", "--dry-run")
    assert status == 0, errors
    assert "own_model.py" in printed
    for trainer_class in (Seq2SeqTrainer, VanillaTransformerTrainer):

        class OwnLoss(trainer_class):  # type: ignore[misc, valid-type]
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss, outputs = focal(self, model, inputs)
                return (loss, outputs) if return_outputs else loss

        own_weights = {
            name: weight
            for name, weight in model.named_parameters()
            if re.search("gate|temperature", name)
        }
        before = {name: weight.detach().clone() for name, weight in own_weights.items()}
        trained(tmp_path / "own", random_pairs(2), model, OwnLoss, max_steps=1, **DESCENT)
        assert before
        for name, weight in own_weights.items():
            assert not torch.equal(before[name], weight)


BROKEN = """
from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
class Two(VanillaTransformerForConditionalGeneration):
    def __init__(self, config, gates): ...
"""
WRONG = [
    "no_such:X",
    "broken",
    "torch.nn:Linear",
    "broken:Missing",
    "",
    "broken:Two",
    "unfinished:X",
]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_model_class_is_refused_in_one_line(name, tmp_path, command, own_modules):
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    (tmp_path / "unfinished.py").write_text("class", encoding="utf-8")
    (tmp_path / "text").write_text("one\n" * 4, encoding="utf-8")
    text = [tmp_path / "text", tmp_path / "text"]
    flags = as_flags(TINY_RUN | {"train": text, "output_dir": tmp_path / "run"})
    status, _, errors = command("train", f"--model_class={name}", *flags)
    assert status == 2
    assert errors.startswith("error: model_class: ")
    assert errors.count("\n") == 1


QUICK = "--train TEXT TEXT --max_steps 1 --use_cpu true --disable_tqdm true --save_steps 1"
# Commands that load a folder: the arguments, and the file or folder that they write.
COMMANDS = {
    "translate": "translate --model FOLDER --input TEXT --output OUT --max_new_tokens 5",
    "evaluate": "evaluate --model FOLDER --source TEXT --reference TEXT --output OUT",
    "distil": "distil --teacher FOLDER --source_file TEXT --output_dir OUT",
    "attention": "attention --model FOLDER --sentence one --translation two --output OUT.png",
    "average": "average FOLDER FOLDER --output OUT",
    "export": "export FOLDER OUT --to onnx",
    "fine-tuning": f"train {QUICK} --model_name_or_path FOLDER --output_dir OUT",
}


@pytest.fixture
def own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], tuple[Path, str]]:
    """Makes a folder of a gated model whose module is not imported. Returns it and its class.

    With `named=True` it has a model type of its own. The classes that the test registers are forgotten after it.
    """
    module = "own_code"
    for mapping in (CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, module, raising=False)

    def make(named: bool) -> tuple[Path, str]:
        source = (
            FEED_FORWARD if named else FEED_FORWARD.replace("    config_class = OwnConfig\n", "")
        )
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        folder = save_model(tmp_path / "model", ["one two three"] * 3, vocab_size=265)
        own = importlib.import_module(module).OwnTranslator
        torch.manual_seed(0)
        fields = tiny_config(vocab_size=265).to_diff_dict() | {
            "model_type": own.config_class.model_type
        }
        own(own.config_class(**fields)).save_pretrained(folder)
        del sys.modules[module]
        sys.path.pop(0)
        return folder, f"{module}:OwnTranslator"

    return make


CODE, CLASS = "--trust_remote_code", "--model_class"
WAYS = [(CODE, True), (CLASS, True), (CODE, False), (CLASS, False)]
# The tensors of a model type of its own are averaged without its code.
TRIED = {"translate": WAYS, "fine-tuning": WAYS, "average": WAYS[2:]}
LOADING = []
for _name in COMMANDS:
    for _way in TRIED.get(_name, WAYS[:1]):
        _is_slow = _way in WAYS[1:3] or _name == "export"
        LOADING.append(pytest.param(_name, *_way, marks=[pytest.mark.slow] if _is_slow else []))


@pytest.mark.parametrize(("name", "flag", "named"), LOADING)
def test_commands_load_a_subclass_with_its_code_or_its_class(
    name: str,
    flag: str,
    named: bool,
    tmp_path: Path,
    own_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
) -> None:
    """Without the flag one line names it, and no code of the folder is run."""
    folder, model_class = own_folder(named)
    text = tmp_path / "text"
    text.write_text("one two\nthree\n" * 5, encoding="utf-8")
    paths = {"FOLDER": folder, "TEXT": text, "OUT": tmp_path / "out"}
    arguments = with_paths(COMMANDS[name].split(), **paths)
    status, _, errors = command(*arguments)
    assert status == 2, errors
    assert errors.count("\n") == 1
    assert "--model_class" in errors
    assert not named or "--trust_remote_code" in errors
    assert not list(tmp_path.glob("out*"))
    monkeypatch.chdir(tmp_path)  # where the module is
    values = {CLASS: [model_class], CODE: ["true"] if name == "fine-tuning" else []}
    status, _, errors = command(*arguments, flag, *values[flag])
    assert status == 0, errors
    assert list(tmp_path.glob("out*"))
    if name == "fine-tuning":
        more = ["--max_steps", "2", "--resume_from_checkpoint", "true"]
        status, _, errors = command(*arguments, flag, *values[flag], *more)
        assert status == 0, errors
        assert any("gate" in key for key in load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize("target", ["ctranslate2", "marian", "argos", "web"])
def test_formats_of_other_libraries_refuse_a_subclass(
    target: str, tmp_path: Path, own_folder: Any, command: Any
) -> None:
    folder, _ = own_folder(named=True)
    output = tmp_path / ("out.argosmodel" if target == "argos" else "out")
    status, _, errors = command("export", folder, output, "--to", target, "--trust_remote_code")
    assert status == 2
    assert "OwnTranslator" in errors
    assert not output.exists()


def test_server_takes_the_code_of_a_folder_with_languages(own_folder: Any) -> None:
    folder, _ = own_folder(named=True)
    use_model_code(parse_arguments(serve, ["--model", f"en-de={folder}", CODE], "serve"))
    assert type(load_model(folder, "cpu")).__name__ == "OwnTranslator"


class Rolled(VanillaTransformerForConditionalGeneration):
    """An override of the usual form: it names none of the arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs


@pytest.mark.parametrize("beams", [1, 3])
def test_override_of_forward_with_any_arguments_decides_the_translation(beams: int) -> None:
    model = tiny_model(lm_head_bias=True, tie_word_embeddings=False)
    ids = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 1]])
    shifted = Rolled(model.config).eval()
    shifted.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in (model.lm_head.weight, model.lm_head.bias):
            parameter.copy_(parameter.roll(1, 0))
    found, expected = (
        each.generate(ids, num_beams=beams, max_new_tokens=8) for each in (shifted, model)
    )
    assert found.equal(expected)
