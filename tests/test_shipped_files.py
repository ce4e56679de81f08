"""The bundle: saved with every checkpoint, and all that a process without this package has (`trust_remote_code`)."""

import copy
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

import hf_vanilla_transformer
from hf_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
)
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import PAD, WITHOUT_THE_PACKAGE, padded, randomise, sentences, tiny_config
from tests.search_helpers import varied_model

PACKAGE = Path(hf_vanilla_transformer.__file__).parent
ROLES = (
    "arguments",
    "attention",
    "configuration",
    "decoding",
    "generation",
    "layers",
    "loss",
    "masks",
    "modeling",
    "pipeline",
    "search",
)
BUNDLE = {f"{role}_vanilla_transformer.py" for role in ROLES}

AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_vanilla_transformer.VanillaTransformerForCausalLM",
    "AutoModelForTextEncoding": "modeling_vanilla_transformer.VanillaTransformerEncoderModel",
    "AutoModelForSequenceClassification": "modeling_vanilla_transformer.VanillaTransformerForSequenceClassification",
}


def test_bundle_has_a_file_for_each_role() -> None:
    assert {path.name for path in PACKAGE.glob("*_vanilla_transformer.py")} == BUNDLE


@pytest.mark.parametrize(
    "model_class",
    [
        VanillaTransformerModel,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerForCausalLM,
        VanillaTransformerEncoderModel,
        VanillaTransformerForSequenceClassification,
    ],
)
def test_save_pretrained_writes_the_bundle(
    model_class: type[PreTrainedModel], tmp_path: Path
) -> None:
    model_class(tiny_config()).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == BUNDLE
    for name in BUNDLE:
        assert (tmp_path / name).read_bytes() == (PACKAGE / name).read_bytes()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["auto_map"] == AUTO_MAP
    # `pipeline()` takes the only entry of the task, so that an encoder or a classifier must not have it.
    assert ("custom_pipelines" in config) == (
        model_class is VanillaTransformerForConditionalGeneration
    )
    assert config["model_type"] == "vanilla_transformer"


REMOTE = """
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification,
    AutoModelForTextEncoding, AutoTokenizer,
)


def use(name, saved_again, tensors):
    batch = load_file(tensors)
    ids, mask, target = batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"]
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True).eval()
    assert AutoConfig.from_pretrained(name, trust_remote_code=True).d_model == 32
    assert not type(model).__module__.startswith("hf_vanilla_transformer")
    results = {}
    for beams in (1, 4):
        found = model.generate(ids, attention_mask=mask, num_beams=beams, return_dict_in_generate=True)
        results[f"translations_{beams}"] = found.sequences
    results["scores"] = found.sequences_scores
    results["logits"] = model(ids, mask, target).logits.detach()
    base = AutoModel.from_pretrained(name, trust_remote_code=True).eval()
    results["base"] = base(ids, mask, target).last_hidden_state.detach()
    encoder = AutoModelForTextEncoding.from_pretrained(name, trust_remote_code=True).eval()
    results["encoder"] = encoder(ids, mask).last_hidden_state.detach()
    decoder = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    results["decoder"] = decoder(target, None, results["encoder"], mask).logits.detach()
    encoder.save_pretrained(saved_again + "_encoder")
    alone = AutoModel.from_pretrained(saved_again + "_encoder", trust_remote_code=True).eval()
    assert not hasattr(alone, "decoder") and torch.equal(alone(ids, mask).last_hidden_state, results["encoder"])
    classifier = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True, num_labels=3)
    assert classifier(ids).logits.shape == (len(ids), 3)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    tokens = tokenizer(["two hundred and thirty-four"], return_tensors="pt")
    assert tokenizer.decode(tokens["input_ids"][0], skip_special_tokens=True) == "two hundred and thirty-four"
    results["tokens"] = tokens["input_ids"]
    model.train()(input_ids=ids, attention_mask=mask, labels=target).loss.backward()
    model.save_pretrained(saved_again)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, tensors)


for first in range(1, len(sys.argv), 3):
    use(*sys.argv[first : first + 3])
"""


def put_into_hub_cache(folder: Path, home: Path, name: str) -> None:
    """Lay a model folder out as `huggingface_hub` leaves it: blobs, and a snapshot that links them."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    revision = "1" * 40
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = repository / "snapshots" / revision / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")


@pytest.mark.slow
@torch.no_grad()
def test_checkpoint_works_without_the_package(tmp_path: Path) -> None:
    model = varied_model(end=3.0, vocab_size=320, label_smoothing=0.1)
    tokenizer = train_tokenizer(
        ["two hundred and thirty-four", "zweihundertvierunddreißig"] * 9, vocab_size=320
    )
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    repository = "somebody/translator-1.0"  # a dot, which the name of a Python module cannot have
    put_into_hub_cache(folder, tmp_path / "home", repository)
    ids = padded(sentences([6, 3, 9, 2, 12], 320))
    inputs = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
    batch = inputs | {"decoder_input_ids": torch.tensor(sentences([5] * 5, 320, seed=1))}
    (tmp_path / "remote.py").write_text(WITHOUT_THE_PACKAGE + REMOTE, encoding="utf-8")
    # -I: neither the working directory nor PYTHONPATH
    command = [sys.executable, "-I", "remote.py"]
    paths = [
        (name, tmp_path / f"again-{i}", tmp_path / f"tensors-{i}")
        for i, name in enumerate((folder, repository))
    ]
    for name, again, tensors in paths:
        save_file(batch, tensors)
        command += [str(name), str(again), str(tensors)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr

    outputs, logits = model.model(**batch), model(**batch).logits
    optimize_for_inference(model)
    greedy = model.generate(**inputs, num_beams=1)
    translated = model.generate(**inputs, num_beams=4, return_dict_in_generate=True)
    lengths = translated.sequences.ne(PAD).sum(dim=1)
    assert len(lengths.unique()) > 2
    for _, again, tensors in paths:
        found = load_file(tensors)
        # The package's engine and the bundle alone, in float32, give the same tokens.
        assert found["translations_1"].tolist() == greedy.tolist()
        assert found["translations_4"].tolist() == translated.sequences.tolist()
        assert found["scores"].tolist() == pytest.approx(
            translated.sequences_scores.tolist(), abs=1e-5
        )
        assert found["logits"].equal(logits)
        torch.testing.assert_close(found["decoder"], logits)
        assert found["base"].equal(outputs.last_hidden_state)
        assert found["encoder"].equal(outputs.encoder_last_hidden_state)
        assert found["tokens"].equal(
            tokenizer(["two hundred and thirty-four"], return_tensors="pt")["input_ids"]
        )
        # A checkpoint saved by remote code equals one saved by the package.
        assert {path.name for path in again.glob("*.py")} == BUNDLE
        before, after = (json.loads((each / "config.json").read_text()) for each in (folder, again))
        assert after["custom_pipelines"] == before["custom_pipelines"]
        assert AutoModelForSeq2SeqLM.from_pretrained(again).eval()(**batch).logits.equal(logits)


def test_save_pretrained_does_not_modify_the_model(tmp_path: Path) -> None:
    model = randomise(VanillaTransformerForConditionalGeneration(tiny_config()))
    config = model.config.to_dict()
    weights = copy.deepcopy(model.state_dict())
    model.save_pretrained(tmp_path)
    saved = model.config.to_dict()
    changed = {name for name in config | saved if config.get(name) != saved.get(name)}
    assert changed <= {"architectures", "dtype"}
    for name, tensor in model.state_dict().items():
        assert tensor.equal(weights[name])
