"""The weights that `save_pretrained` leaves out follow the configuration that it writes, in every tying mode."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import assert_near, tiny_model, translation_batch

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


def reloaded(model: Any, folder: Path, **state: Any) -> Any:
    model.save_pretrained(folder, **state)
    again, info = VanillaTransformerForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return again


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
def test_changed_tying_is_saved_whole(
    fields: dict[str, Any], changed: dict[str, bool], tmp_path: Path
) -> None:
    model = tiny_model(**fields)
    expected = logits(model)
    for name, value in changed.items():
        setattr(model.config, name, value)
    again = reloaded(model, tmp_path)
    assert_near(logits(again), expected, 1e-6)
    third = reloaded(again, tmp_path / "third")
    assert_near(logits(third), expected, 1e-6)


def tie_by_configuration(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()


def tie_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.decoder.embed_tokens.weight


def share_embeddings(model: Any) -> None:
    model.config.share_encoder_decoder_embeddings = True
    model.config.decoder_vocab_size = None
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
    again = reloaded(model, tmp_path)
    assert_near(logits(again), logits(model), 1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("fields", TYING.values(), ids=TYING)
@pytest.mark.parametrize(
    "modules", [["q_proj", "v_proj"], ["fc1", "fc2"]], ids=["attention", "feed-forward"]
)
@pytest.mark.parametrize("way", ["merged", "unloaded", "modules_to_save", "state_dict"])
def test_model_of_an_adapter_loads_as_it_was(fields, modules, way, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    saved = ["fc1"] if way == "modules_to_save" and "fc1" not in modules else None
    config = peft.LoraConfig(
        r=4,
        target_modules=modules,
        init_lora_weights=False,
        modules_to_save=saved,
    )
    adapted = peft.get_peft_model(tiny_model(**fields), config)
    expected = logits(adapted)
    model = adapted.unload() if way == "unloaded" else adapted.merge_and_unload()
    if way == "unloaded":
        expected = logits(model)
    state = {"state_dict": model.state_dict()} if way == "state_dict" else {}  # as `Trainer` saves
    again = reloaded(model, tmp_path, **state)
    assert_near(logits(again), expected, 2e-6)
