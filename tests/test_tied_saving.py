"""The weights that `save_pretrained` leaves out follow the configuration that it writes, in every tying mode."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from tests.model_helpers import WITHOUT_THE_PACKAGE, assert_near, tiny_model, translation_batch

TYING: dict[str, dict[str, Any]] = {
    "all tied": {},
    "one embedding": {"tie_word_embeddings": False},
    "target tied": {"share_encoder_decoder_embeddings": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 44},
    "nothing tied": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}
BATCH = translation_batch([5, 3], [6, 4])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def reloaded(model: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    model.save_pretrained(folder)
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, output_loading_info=True)


@pytest.mark.parametrize("fields", TYING.values(), ids=TYING)
@pytest.mark.parametrize(
    "changed",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
        {},
    ],
    ids=["tie", "untie", "apart", "unchanged"],
)
def test_changed_tying_is_saved_whole(fields: dict[str, Any], changed: dict[str, bool], tmp_path: Path) -> None:
    model = tiny_model(**fields)
    expected = logits(model)
    for name, value in changed.items():
        setattr(model.config, name, value)
    again, info = reloaded(model, tmp_path)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_near(logits(again), expected, 1e-6)
    third, _ = reloaded(again, tmp_path / "third")
    assert_near(logits(third), expected, 1e-6)


def tie_by_configuration(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()


def tie_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.decoder.embed_tokens.weight


def share_embeddings(model: Any) -> None:
    model.config.share_encoder_decoder_embeddings, model.config.decoder_vocab_size = True, None
    model.tie_weights()


@pytest.mark.parametrize(
    ("name", "tie"),
    [
        ("one embedding", tie_by_configuration),
        ("nothing tied", tie_by_configuration),
        ("one embedding", tie_by_hand),
        ("nothing tied", tie_by_hand),
        ("target tied", share_embeddings),
    ],
)
def test_model_that_is_tied_later_is_saved_whole(name: str, tie: Any, tmp_path: Path) -> None:
    model = tiny_model(**TYING[name])
    tie(model)
    again, info = reloaded(model, tmp_path)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_near(logits(again), logits(model), 1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("fields", TYING.values(), ids=TYING)
@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["fc1", "fc2"]], ids=["attention", "feed-forward"])
@pytest.mark.parametrize("way", ["merged", "unloaded", "modules_to_save", "state_dict"])
def test_model_of_an_adapter_loads_as_it_was(fields, modules, way, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    saved = ["fc1"] if way == "modules_to_save" and "fc1" not in modules else None
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, modules_to_save=saved)
    adapted = peft.get_peft_model(tiny_model(**fields), config)
    expected = logits(adapted)
    model = adapted.unload() if way == "unloaded" else adapted.merge_and_unload()
    if way == "unloaded":
        expected = logits(model)
    if way == "state_dict":  # as `Trainer` saves
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
        again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    else:
        again, info = reloaded(model, tmp_path)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_near(logits(again), expected, 2e-6)


REMOTE = """
import torch
from pathlib import Path
from transformers import AutoModelForSeq2SeqLM

for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
    batch, expected = torch.load(folder / "logits")
    with torch.no_grad():
        assert (model(**batch).logits - expected).abs().max() <= 2e-6 * expected.abs().max(), folder
"""


@pytest.mark.slow
def test_merged_adapters_are_published_and_load_as_remote_code(tmp_path: Path, command: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    for name, fields in TYING.items():
        adapted = peft.get_peft_model(tiny_model(vocab_size=270, **fields), config)
        expected, folder = logits(adapted), tmp_path / "models" / name
        adapted.merge_and_unload().save_pretrained(folder)
        save_tokenizers(folder, train_tokenizer(["one two three"] * 5, 270, min_frequency=1))
        status, printed, errors = command("publish", folder, "--repo-id", "me/merged", "--dry-run")
        assert status == 0 and "modeling_vanilla_transformer.py" in printed, errors
        torch.save((BATCH, expected), folder / "logits")
    script = [sys.executable, "-c", WITHOUT_THE_PACKAGE + REMOTE, str(tmp_path / "models")]
    run = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"HF_HOME": str(tmp_path / "hf")})
    assert run.returncode == 0, run.stderr
