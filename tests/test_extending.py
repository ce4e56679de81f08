"""A model with another feed-forward network and another attention, and a loss of one's own: the whole life."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from hf_vanilla_transformer.data import load_tokenizers
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.inference.translator import Translator
from tests.trainer_helpers import QUIET, TINY_RUN, as_flags

FEED_FORWARD = """
import torch
from torch import nn
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.layers_vanilla_transformer import (
    VanillaTransformerAttention, VanillaTransformerDecoderLayer, VanillaTransformerEncoderLayer,
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


def square_loss(outputs: Any, labels: torch.Tensor, tokens: Any) -> torch.Tensor:
    log_p = outputs.logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]  # (B, T)
    return (log_p**2)[labels != -100].sum() / (tokens if tokens is not None else (labels != -100).sum())


@pytest.mark.parametrize("source", [FEED_FORWARD, ATTENTION], ids=["feed_forward", "attention"])
def test_subclass_trains_saves_loads_and_publishes(source, tmp_path, monkeypatch, command):
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 30
    (tmp_path / "own_model.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
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
    script = [sys.executable, "-c", LOAD, "run", "logits"]
    loaded = subprocess.run(script, capture_output=True, text=True, env={"PATH": "", "HF_HOME": str(tmp_path / "hf")})
    assert loaded.returncode == 0, loaded.stderr
    with pytest.raises(ValueError, match="decoded through their modules"):
        optimize_for_inference(model)
    assert len(list(Translator(model, tokenizer).translate(["one", "two"]))) == 2
    status, printed, errors = command("publish", "run", "--repo-id", "me/own", "--dry-run")
    assert status == 0 and "own_model.py" in printed, errors
    rows = [{"input_ids": [5, 6, 2], "labels": [7, 8, 9, 2]}, {"input_ids": [7, 2], "labels": [5, 2]}]
    for trainer_class, arguments in (
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
        (VanillaTransformerTrainer, VanillaTransformerTrainingArguments),
    ):

        class OwnLoss(trainer_class):  # type: ignore[misc, valid-type]
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = square_loss(outputs, inputs["labels"], num_items_in_batch)
                return (loss, outputs) if return_outputs else loss

        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        collator = DataCollatorForSeq2Seq(tokenizer, model)
        args = arguments("own", max_steps=1, learning_rate=1e-2, lr_scheduler_type="constant", **QUIET)
        OwnLoss(model=model, args=args, train_dataset=rows, data_collator=collator).train()
        new = [name for name in before if "gate" in name or "temperature" in name]
        assert new and all(not torch.equal(before[name], model.state_dict()[name]) for name in new)


@pytest.mark.parametrize("name", ["no_such:X", "own_model", "torch.nn:Linear", "own_model:Missing", ""])
def test_wrong_model_class_is_refused_in_one_line(name: str, tmp_path: Path, command: Any) -> None:
    (tmp_path / "text").write_text("one\n" * 4, encoding="utf-8")
    text = [tmp_path / "text", tmp_path / "text"]
    flags = as_flags(TINY_RUN | {"train": text, "output_dir": tmp_path / "run"})
    status, _, errors = command("train", f"--model_class={name}", *flags)
    assert status == 2 and errors.startswith("error: model_class: ") and errors.count("\n") == 1
