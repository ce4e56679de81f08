"""The rest of the Hugging Face stack: device maps, number formats, pickling and PEFT."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from tests.model_helpers import (
    TYING_MODES,
    assert_near,
    gradients,
    padded,
    sentences,
    tiny_model,
    translation_batch,
)

# PEFT asks for the name that every transformers 5 knows, and warns that it saves a trained output layer.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]

BACKENDS = ["eager", "sdpa"]
HALVES = [torch.bfloat16, torch.float16]
# Of a logit of size 1: each of a dozen layers rounds once or twice, to 8 or 11 bits.
ROUNDING = {torch.bfloat16: 0.1, torch.float16: 0.015}


def mode(share: bool, tie: bool, **fields: Any) -> dict[str, Any]:
    return {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie, **fields}


def logits_of(model: VanillaTransformerForConditionalGeneration, **changes: Any) -> Tensor:
    batch = {**translation_batch([7, 2, 5], [3, 8, 1]), **changes}
    with torch.no_grad():
        return model(**batch, skip_logits=False).logits


# Device maps

DEVICE_MAPS = ["auto", "cpu", {"": "cpu"}, {"model.encoder": "cpu", "model.decoder": "cpu", "lm_head": "cpu"}]

# `accelerate` loads a layer's weights from disk for its forward pass and frees them. Tied matrices must be on one
# device.
DISK_MAPS = [
    {"": "disk"},
    {
        **dict.fromkeys(["model.encoder.layers", "model.decoder.layers"], "disk"),
        **dict.fromkeys(["model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"], "cpu"),
    },
]


def check_loaded(loaded: VanillaTransformerForConditionalGeneration, share: bool, tie: bool) -> None:
    model = tiny_model(**mode(share, tie))
    assert_near(logits_of(loaded), logits_of(model), 1e-6)
    inputs = padded(sentences([7, 4]))
    written = loaded.generate(inputs, num_beams=2, max_new_tokens=6)
    assert written.tolist() == model.generate(inputs, num_beams=2, max_new_tokens=6).tolist()


@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=["auto", "cpu", "whole", "parts"])
@pytest.mark.parametrize(("share", "tie"), [(True, True), (False, False)])
def test_device_maps_give_the_same_results(share: bool, tie: bool, device_map: Any, tmp_path: Path) -> None:
    tiny_model(**mode(share, tie)).save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, device_map=device_map)
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    check_loaded(loaded, share, tie)


@pytest.mark.parametrize(
    ("share", "tie", "device_map"),
    [*((share, tie, "auto") for share, tie in TYING_MODES), *((True, True, parts) for parts in DISK_MAPS)],
)
def test_disk_offload_gives_the_same_results(share: bool, tie: bool, device_map: Any, tmp_path: Path) -> None:
    # Marian's own cannot: its tables of positions are not saved.
    model = tiny_model(**mode(share, tie))
    model.save_pretrained(tmp_path / "model")
    half = {"max_memory": {"cpu": sum(p.numel() * 4 for p in model.parameters()) // 2}} if device_map == "auto" else {}
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offloaded", **half
    )
    assert "disk" in loaded.hf_device_map.values()
    check_loaded(loaded, share, tie)


# Number formats


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("settings", [{}, {"low_cpu_mem_usage": True}, {"device_map": "cpu"}], ids=str)
def test_from_pretrained_in_half_precision(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(lm_head_bias=True, position_encoding_type="learned")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype, **settings).eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert loaded.config.dtype == dtype
    assert loaded.lm_head.weight is loaded.model.encoder.embed_tokens.weight
    assert logits_of(loaded).equal(logits_of(model.to(dtype)))
    # dtype="auto" keeps the saved dtype
    loaded.save_pretrained(tmp_path / "half")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half", dtype="auto").eval()
    assert again.dtype == dtype
    assert logits_of(again).equal(logits_of(loaded))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_half_precision_is_close_to_float32(positions: str, backend: str, dtype: torch.dtype) -> None:
    fields = {"attn_implementation": backend, "position_encoding_type": positions, "encoder_layers": 3}
    model, half = tiny_model(**fields), tiny_model(**fields).to(dtype)
    expected, actual = logits_of(model), logits_of(half)
    assert actual.dtype == dtype
    scale = expected.std().item()
    assert (actual.float() - expected).abs().max().item() < ROUNDING[dtype] * max(1.0, scale)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_survives_masked_rows_and_large_scores(backend: str, dtype: torch.dtype) -> None:
    # The lowest float16 is -65504: a mask of that size and a score of -16 together are minus infinity.
    model = tiny_model(attn_implementation=backend)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # makes every score about -50² · 8 / √8
            if name.endswith("q_proj.bias"):
                parameter.fill_(50)
            elif name.endswith("k_proj.bias"):
                parameter.fill_(-50)
    batch = translation_batch([7, 2, 5], [3, 8, 1])
    batch["attention_mask"][1] = 0
    decoder_mask = torch.ones(3, 8, dtype=torch.long)
    decoder_mask[2] = 0
    changes = {"attention_mask": batch["attention_mask"], "decoder_attention_mask": decoder_mask}
    model.to(dtype)
    assert torch.isfinite(logits_of(model, **changes)).all()
    loss, found = gradients(model.train(), **{**batch, **changes}, skip_logits=False)
    assert torch.isfinite(torch.tensor(loss))
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_scores_as_in_transformers_own_loop(dtype: torch.dtype) -> None:
    model = tiny_model(seed=2, tie_word_embeddings=False).to(dtype)
    settings: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 10, "length_penalty": 1.0}
    settings["return_dict_in_generate"] = True
    inputs = padded(sentences([7, 2, 5]))
    ours = model.generate(inputs, **settings)
    theirs = model.generate(inputs, cache_implementation="static", output_scores=True, **settings)
    assert_near(ours.sequences_scores.float(), theirs.sequences_scores.float(), ROUNDING[dtype])


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_translation_models_survive_copy_and_pickle(share: bool, tie: bool, copied: Any) -> None:
    model = tiny_model(**mode(share, tie))
    other = copied(model)
    source, target, output = other.model.encoder.embed_tokens, other.model.decoder.embed_tokens, other.lm_head
    assert (source.weight is target.weight) == share
    assert (target.weight is output.weight) == tie
    assert source.weight is not model.model.encoder.embed_tokens.weight
    assert logits_of(other).equal(logits_of(model))
    assert other.generation_config.to_dict() == model.generation_config.to_dict()
    inputs = padded(sentences([7, 4]))
    assert other.generate(inputs, max_new_tokens=5).tolist() == model.generate(inputs, max_new_tokens=5).tolist()


# PEFT

LINEAR = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


def peft_library() -> Any:
    return pytest.importorskip("peft", reason="PEFT is not installed; it comes with the extra 'dev'")


def adapted(model: VanillaTransformerForConditionalGeneration, **settings: Any) -> Any:
    """The model with LoRA adapters (Hu et al. 2021)."""
    peft = peft_library()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, **settings))


def train_a_little(model: Any, steps: int = 8) -> list[float]:
    batch = translation_batch([7, 2, 5, 4], [3, 8, 1, 6])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {"target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_2_SEQ_LM"}),
        ({"label_smoothing": 0.1}, {"target_modules": "all-linear"}),
        ({"tie_word_embeddings": False}, {"target_modules": [*LINEAR, "lm_head"], "task_type": "SEQ_2_SEQ_LM"}),
        ({"tie_word_embeddings": False}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        (mode(False, False), {"target_modules": ["q_proj", "embed_tokens"]}),
        ({}, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]}),
    ],
    ids=["query and value", "all-linear", "all and lm_head", "lm_head trained whole", "embeddings", "some tokens"],
)
def test_lora_trains_saves_and_merges(fields: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    # Of matrices that are one, PEFT can adapt single tokens only: merged, its LoRA would change them all (it warns).
    peft = peft_library()
    base = tiny_model(**fields)
    before = logits_of(base)
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = adapted(tiny_model(**fields), **settings)
    assert_near(logits_of(model), before, 1e-6, "an adapter starts as nothing")

    losses = train_a_little(model)
    assert losses[-1] < losses[0] - 0.1
    trained = logits_of(model)
    assert (trained - before).abs().max() > 0.1
    frozen = {name.replace(".base_layer", "") for name, p in model.named_parameters() if not p.requires_grad}
    assert {"base_model.model.model.encoder.layers.0.self_attn.q_proj.weight"} <= frozen

    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny_model(**fields), tmp_path / "adapter").eval()
    assert_near(logits_of(loaded), trained, 1e-6, "loaded")
    inputs = padded(sentences([7, 4]))
    written = model.generate(input_ids=inputs, num_beams=2, max_new_tokens=8)
    assert loaded.generate(input_ids=inputs, num_beams=2, max_new_tokens=8).tolist() == written.tolist()

    merged = loaded.merge_and_unload()
    assert type(merged) is VanillaTransformerForConditionalGeneration
    assert_near(logits_of(merged), trained, 1e-5, "merged")
    assert merged.state_dict().keys() == weights.keys()
    merged.save_pretrained(tmp_path / "merged")
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    assert logits_of(again).equal(logits_of(merged))


def test_lora_loads_through_transformers(tmp_path: Path) -> None:
    # transformers' own door: `add_adapter`, and a base model that is found through the adapter's folder
    peft = peft_library()
    tiny_model().save_pretrained(tmp_path / "base")
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "base")
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers itself refuses this PEFT: {error}")  # 5.24 wants 0.22, which is not released
    train_a_little(model)
    trained = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "base").eval()
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert_near(logits_of(loaded), trained, 1e-6)
    loaded.disable_adapters()
    assert logits_of(loaded).equal(logits_of(tiny_model()))
