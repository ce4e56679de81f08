"""The rest of the Hugging Face stack: device maps, number formats, pickling and PEFT."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
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


Model = VanillaTransformerForConditionalGeneration
BATCH = translation_batch([7, 2, 5], [3, 8, 1])


def mode(share: bool, tie: bool) -> dict[str, Any]:
    return {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}


def logits_of(model: Model, **changes: Any) -> Tensor:
    with torch.no_grad():
        return model(**BATCH | changes, skip_logits=False).logits


def written(model: Model) -> list[list[int]]:
    inputs = padded(sentences([7, 4]))
    return model.generate(input_ids=inputs, num_beams=2, max_new_tokens=6).tolist()


# Device maps

# `accelerate` loads a layer's weights from disk for its forward pass and frees them. Tied matrices must be on one
# device.
DISK_MAPS = [
    {"": "disk"},
    {
        "model.encoder.layers": "disk",
        "model.decoder.layers": "disk",
        "model.encoder.embed_tokens": "cpu",
        "model.decoder.embed_tokens": "cpu",
        "lm_head": "cpu",
    },
]


def check_loaded(loaded: Model, share: bool, tie: bool) -> None:
    model = tiny_model(**mode(share, tie))
    assert_near(logits_of(loaded), logits_of(model), 1e-6)
    assert written(loaded) == written(model)


@pytest.mark.parametrize(
    ("share", "tie", "device_map"),
    [
        *((share, tie, "auto") for share, tie in TYING_MODES),
        *((True, True, parts) for parts in DISK_MAPS),
    ],
)
def test_disk_offload_gives_the_same_results(
    share: bool,
    tie: bool,
    device_map: Any,
    tmp_path: Path,
) -> None:
    # Marian's own cannot: its tables of positions are not saved.
    model = tiny_model(**mode(share, tie))
    model.save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"device_map": device_map, "offload_folder": tmp_path / "offloaded"}
    if device_map == "auto":
        half = model.num_parameters() * 4 // 2
        settings["max_memory"] = {"cpu": half}
    loaded = Model.from_pretrained(tmp_path / "model", **settings)
    assert "disk" in loaded.hf_device_map.values()
    check_loaded(loaded, share, tie)


# Number formats


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "settings", [{}, {"low_cpu_mem_usage": True}, {"device_map": {"": "cpu"}}], ids=str
)
def test_from_pretrained_in_half_precision(
    settings: dict[str, Any],
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
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
def test_half_precision_is_close_to_float32(
    positions: str,
    backend: str,
    dtype: torch.dtype,
) -> None:
    model = tiny_model(
        attn_implementation=backend,
        position_encoding_type=positions,
        encoder_layers=3,
    )
    expected = logits_of(model)
    actual = logits_of(model.to(dtype))
    assert actual.dtype == dtype
    largest = max(1.0, expected.std().item())
    assert (actual.float() - expected).abs().max().item() < ROUNDING[dtype] * largest


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_survives_masked_rows_and_large_scores(
    backend: str, dtype: torch.dtype
) -> None:
    # The lowest float16 is -65504: a mask of that size and a score of -16 together are minus infinity.
    model = tiny_model(attn_implementation=backend)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # makes every score about -50² · 8 / √8
            if name.endswith("q_proj.bias"):
                parameter.fill_(50)
            elif name.endswith("k_proj.bias"):
                parameter.fill_(-50)
    masks = {
        "attention_mask": BATCH["attention_mask"].clone(),
        "decoder_attention_mask": torch.ones(3, 8, dtype=torch.long),
    }
    masks["attention_mask"][1] = 0
    masks["decoder_attention_mask"][2] = 0
    model.to(dtype)
    assert logits_of(model, **masks).isfinite().all()
    loss, found = gradients(model.train(), **BATCH | masks, skip_logits=False)
    assert math.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_scores_as_in_transformers_own_loop(dtype: torch.dtype) -> None:
    model = tiny_model(seed=2, tie_word_embeddings=False).to(dtype)
    settings: dict[str, Any] = {
        "inputs": padded(sentences([7, 2, 5])),
        "num_beams": 4,
        "max_new_tokens": 10,
        "length_penalty": 1.0,
        "return_dict_in_generate": True,
    }
    ours = model.generate(**settings)
    theirs = model.generate(
        **settings,
        cache_implementation="static",
        output_scores=True,
    )
    assert_near(
        ours.sequences_scores.float(),
        theirs.sequences_scores.float(),
        ROUNDING[dtype],
    )


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_translation_models_survive_copy_and_pickle(
    share: bool,
    tie: bool,
    copied: Any,
) -> None:
    model = tiny_model(**mode(share, tie))
    other = copied(model)
    source = other.get_input_embeddings().weight
    target = other.model.decoder.embed_tokens.weight
    assert (source is target) == share
    assert (target is other.lm_head.weight) == tie
    assert source is not model.get_input_embeddings().weight
    assert logits_of(other).equal(logits_of(model))
    assert other.generation_config.to_dict() == model.generation_config.to_dict()
    assert written(other) == written(model)


# PEFT


def peft_library() -> Any:
    return pytest.importorskip(
        "peft", reason="PEFT is not installed; it comes with the extra 'dev'"
    )


def adapted(model: Model, **settings: Any) -> Any:
    """The model with LoRA adapters (Hu et al. 2021)."""
    peft = peft_library()
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, **settings)
    return peft.get_peft_model(model, config)


def train_a_little(model: Any, steps: int = 8) -> list[float]:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


UNTIED = {"tie_word_embeddings": False}
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "lm_head"]
# Fields of the model, and settings of the adapter.
ADAPTED = {
    "query and value": ({}, {"target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_2_SEQ_LM"}),
    "all-linear": ({"label_smoothing": 0.1}, {"target_modules": "all-linear"}),
    "all and lm_head": (UNTIED, {"target_modules": ALL_LINEAR, "task_type": "SEQ_2_SEQ_LM"}),
    "lm_head trained whole": (
        UNTIED,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "embeddings": (mode(False, False), {"target_modules": ["q_proj", "embed_tokens"]}),
    "some tokens": ({}, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]}),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_lora_trains_saves_and_merges(case: str, tmp_path: Path) -> None:
    # Of matrices that are one, PEFT can adapt single tokens only: merged, its LoRA would change them all (it warns).
    peft = peft_library()
    fields, settings = ADAPTED[case]
    base = tiny_model(**fields)
    before = logits_of(base)
    model = adapted(tiny_model(**fields), **settings)
    assert_near(logits_of(model), before, 1e-6, "an adapter starts as nothing")

    losses = train_a_little(model)
    assert losses[-1] < losses[0] - 0.1
    trained = logits_of(model)
    assert (trained - before).abs().max() > 0.1
    query = model.base_model.model.model.encoder.layers[0].self_attn.q_proj
    assert not query.base_layer.weight.requires_grad

    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny_model(**fields), tmp_path / "adapter").eval()
    assert_near(logits_of(loaded), trained, 1e-6, "loaded")
    assert written(loaded) == written(model)

    merged = loaded.merge_and_unload()
    assert type(merged) is Model
    assert_near(logits_of(merged), trained, 1e-5, "merged")
    assert merged.state_dict().keys() == base.state_dict().keys()
    merged.save_pretrained(tmp_path / "merged")
    again = Model.from_pretrained(tmp_path / "merged").eval()
    assert logits_of(again).equal(logits_of(merged))


def test_lora_loads_through_transformers(tmp_path: Path) -> None:
    # transformers' own door: `add_adapter`, and a base model that is found through the adapter's folder
    peft = peft_library()
    tiny_model().save_pretrained(tmp_path / "base")
    model = Model.from_pretrained(tmp_path / "base")
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(
            f"transformers itself refuses this PEFT: {error}"
        )  # 5.24 wants 0.22, which is not released
    train_a_little(model)
    trained = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = Model.from_pretrained(tmp_path / "base").eval()
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert_near(logits_of(loaded), trained, 1e-6)
    loaded.disable_adapters()
    assert logits_of(loaded).equal(logits_of(tiny_model()))
