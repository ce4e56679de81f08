"""int8 weights on a CPU: transformers quantises with torchao while it loads."""

import importlib.util

import pytest
import torch

from tests.model_helpers import padded, sentences, tiny_model

# A process of its own: transformers takes torchao in when it is imported, and torchao has much to say then.
SCRIPT = """
import sys

import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import AutoModelForSeq2SeqLM, TorchAoConfig

import hf_vanilla_transformer

folder, again, data = sys.argv[1:]
expected = torch.load(data)
batch = {name: expected[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
source = {name: batch[name] for name in ("input_ids", "attention_mask")}
for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=TorchAoConfig(config)).eval()
    projection = model.get_encoder().layers[0].fc1.weight
    assert type(projection) is not torch.nn.Parameter and type(projection.data).__name__ != "Tensor", type(projection)
    assert model.lm_head.weight is model.get_input_embeddings().weight  # the tied matrix stays as it is
    with torch.no_grad():
        logits = model(**batch).logits
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert 0 < error < 0.03, error
    assert model.generate(**source, max_new_tokens=10).equal(expected["written"])
    model.save_pretrained(again)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(again).eval()
    with torch.no_grad():
        assert loaded(**batch).logits.equal(logits)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; it comes with the extra 'int8'",
)
@torch.no_grad()
def test_int8_loads_translates_and_saves(tmp_path, python) -> None:
    model = tiny_model(d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=400)
    folder, again = tmp_path / "model", tmp_path / "again"
    model.save_pretrained(folder)
    source = padded(sentences([6, 9], 400))
    batch = {"input_ids": source, "attention_mask": source.ne(1).long()}
    written = model.generate(**batch, max_new_tokens=10)
    batch["decoder_input_ids"] = torch.tensor(sentences([5, 5], 400, seed=1))
    torch.save({**batch, "logits": model(**batch).logits, "written": written}, tmp_path / "data.pt")
    result = python.run(["-c", SCRIPT, folder, again, tmp_path / "data.pt"])
    assert result.returncode == 0, result.stderr
    weights = [(path / "model.safetensors").stat().st_size for path in (again, folder)]
    assert weights[0] < 0.5 * weights[1]
