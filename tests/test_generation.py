"""Decoding with `generate`: the paper's settings (§6.1), and the caller's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import EOS, PAD, START, assert_near, tiny_model
from tests.search_helpers import AS_DICT, source


def endless_model(**fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A model that never produces the end token by itself, so that only a limit stops it."""
    model = tiny_model(lm_head_bias=True, **fields)
    with torch.no_grad():
        model.lm_head.bias[[EOS, PAD]] = -1e4
    return model


@pytest.mark.parametrize("beams", [1, 4])
def test_attention_mask_defaults_to_the_pad_token(beams: int) -> None:
    # `GenerationMixin` makes none for models with an encoder.
    model = tiny_model()
    inputs = source([7, 2, 5])
    settings = {
        "num_beams": beams,
        "max_new_tokens": 10,
        "output_scores": True,
        **AS_DICT,
    }
    expected = model.generate(**inputs, **settings)
    for name in ("inputs", "input_ids"):
        actual = model.generate(**{name: inputs["input_ids"]}, **settings)
        assert actual.sequences.tolist() == expected.sequences.tolist()
        assert_near(actual.scores[0], expected.scores[0])


@pytest.mark.usefixtures("limit_of_the_package")
def test_default_limit_is_source_plus_50() -> None:
    model = endless_model()
    for length in (3, 11):
        inputs = source([length, 2])
        assert model.generate(**inputs).shape[1] == 1 + length + 50
        assert model.generate(inputs["input_ids"], num_beams=1).shape[1] == 1 + length + 50


def test_default_limit_counts_encoder_outputs_and_embeddings() -> None:
    model = endless_model()
    inputs = source([5, 3])
    expected = model.generate(**inputs, num_beams=1)
    forms = {
        "encoder_outputs": model.get_encoder()(**inputs),
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
    }
    for name, value in forms.items():
        settings = {name: value, "attention_mask": inputs["attention_mask"]}
        found = model.generate(**settings, num_beams=1)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("beams", [1, 4])
def test_decoder_input_ids_of_32_bits_are_continued(beams: int) -> None:
    model = tiny_model(tie_word_embeddings=False)
    prefix = torch.tensor([[START, 7, 11], [START, 9, 8]])
    settings = source([6, 3]) | {"num_beams": beams, "max_new_tokens": 5}
    wide = model.generate(**settings, decoder_input_ids=prefix)
    narrow = model.generate(**settings, decoder_input_ids=prefix.int())
    assert narrow.tolist() == wide.tolist()


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_new_tokens": 7}, 8),
        ({"max_length": 9}, 9),
        ({"max_length": 20}, 20),
        ({"max_new_tokens": 70}, 71),
    ],
)
@pytest.mark.parametrize("in_config", [False, True])
def test_limit_of_the_caller_wins(settings: dict, length: int, in_config: bool) -> None:
    if in_config:
        config = GenerationConfig(**settings, decoder_start_token_id=START)
        settings = {"generation_config": config}
    tokens = endless_model().generate(**source([4, 3]), **settings)
    assert tokens.shape[1] == length


def test_limit_of_the_models_own_generation_config_wins() -> None:
    model = endless_model()
    model.generation_config.max_new_tokens = 5
    assert model.generate(**source([4])).shape[1] == 6
    assert model.generate(**source([4]), max_new_tokens=8).shape[1] == 9


def test_beam_of_four_is_the_default() -> None:
    model = tiny_model()
    inputs = source([6, 3]) | {"max_new_tokens": 5}
    output = model.generate(**inputs, output_scores=True, **AS_DICT)
    assert len(output.scores[0]) == 2 * 4
    expected = model.generate(**inputs, num_beams=4)
    assert model.generate(**inputs).tolist() == expected.tolist()
    assert len(model.generate(**inputs, num_return_sequences=4)) == 8


@pytest.mark.usefixtures("limit_of_the_package")
def test_generation_config_is_saved(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    expected = {
        "num_beams": 4,
        "paper_length_penalty": 0.6,
        "max_length_over_source": 50,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
    }
    assert expected.items() <= saved.items()
    assert "length_penalty" not in saved, "it would have Hugging Face's meaning"
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.generation_config.num_beams == 4
    found, expected = (each.generate(**source([6, 3])) for each in (loaded, model))
    assert found.tolist() == expected.tolist()


def test_special_tokens_come_from_the_configuration() -> None:
    model = tiny_model(decoder_start_token_id=7, eos_token_id=[2, 3])
    written = model.generate(**source([4, 6]), max_new_tokens=4)
    assert written[:, 0].tolist() == [7, 7]
    assert model.generation_config.eos_token_id == [2, 3]
