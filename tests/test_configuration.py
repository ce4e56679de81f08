"""The configuration: the paper's Table 3, refused values, and saving."""

import pytest
import torch

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer.configuration_vanilla_transformer import PRESETS
from tests.model_helpers import tiny_config

BASE = {
    "N": 6,
    "d_model": 512,
    "d_ff": 2048,
    "h": 8,
    "d_k": 64,
    "d_v": 64,
    "P_drop": 0.1,
    "ε_ls": 0.1,
    "millions": 65,  # of parameters
}
# An empty cell is the base model's.
TABLE_3 = {
    "base": {},
    "A1": {"h": 1, "d_k": 512, "d_v": 512},
    "A4": {"h": 4, "d_k": 128, "d_v": 128},
    "A16": {"h": 16, "d_k": 32, "d_v": 32},
    "A32": {"h": 32, "d_k": 16, "d_v": 16},
    "B16": {"d_k": 16, "millions": 58},
    "B32": {"d_k": 32, "millions": 60},
    "C2": {"N": 2, "millions": 36},
    "C4": {"N": 4, "millions": 50},
    "C8": {"N": 8, "millions": 80},
    "C256": {"d_model": 256, "d_k": 32, "d_v": 32, "millions": 28},
    "C1024": {"d_model": 1024, "d_k": 128, "d_v": 128, "millions": 168},
    "C1024ff": {"d_ff": 1024, "millions": 53},
    "C4096ff": {"d_ff": 4096, "millions": 90},
    "D0.0": {"P_drop": 0.0},
    "D0.2": {"P_drop": 0.2},
    "Dls0.0": {"ε_ls": 0.0},
    "Dls0.2": {"ε_ls": 0.2},
    "E": {},
    "big": {"d_model": 1024, "d_ff": 4096, "h": 16, "P_drop": 0.3, "millions": 213},
}
# Rows that fit Table 3 only with a larger vocabulary than §5.1 tells, as explained at PRESETS.
NEEDS_VOCABULARY_OF_41000 = {"B16", "C2", "C4", "C256", "C1024ff"}


def test_presets_cover_every_row_of_table_3() -> None:
    assert PRESETS.keys() == TABLE_3.keys()


@pytest.mark.parametrize("name", TABLE_3)
def test_presets_have_the_values_of_table_3(name: str) -> None:
    row = BASE | TABLE_3[name]
    vocab_size = 41000 if name in NEEDS_VOCABULARY_OF_41000 else 37000
    config = VanillaTransformerConfig.from_preset(name, vocab_size=vocab_size)
    with torch.device("meta"):
        translator = VanillaTransformerForConditionalGeneration(config)
    for stack in (translator.get_encoder(), translator.get_decoder()):
        assert len(stack.layers) == row["N"]
        for layer in stack.layers:
            rows = {
                layer.fc1: row["d_ff"],
                layer.self_attn.q_proj: row["h"] * row["d_k"],
                layer.self_attn.v_proj: row["h"] * row["d_v"],
            }
            for linear, count in rows.items():
                assert linear.weight.shape == (count, row["d_model"])
    assert config.encoder_attention_heads == config.decoder_attention_heads == row["h"]
    assert config.dropout == row["P_drop"]
    assert config.label_smoothing == row["ε_ls"]
    assert config.position_encoding_type == ("learned" if name == "E" else "sinusoidal")
    assert translator.num_parameters() / 1e6 == pytest.approx(row["millions"], rel=0.03)


def test_preset_overrides_take_precedence() -> None:
    config = VanillaTransformerConfig.from_preset(
        "big",
        dropout=0.2,
        encoder_layers=3,
        vocab_size=100,
    )
    assert config.dropout == 0.2
    assert config.encoder_layers == 3
    assert config.decoder_layers == 6
    assert config.target_vocab_size == 100


def test_default_configuration_is_the_base_model() -> None:
    default = VanillaTransformerConfig().to_dict()
    base = VanillaTransformerConfig.from_preset("base").to_dict()
    assert {key for key, value in base.items() if default[key] != value} == {"label_smoothing"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 30}, r"d_model=30.*encoder_attention_heads=4"),
        ({"decoder_attention_heads": 5}, r"d_model=32.*decoder_attention_heads=5"),
        ({"encoder_attention_heads": 5, "head_dim": 8}, r"encoder_attention_heads=5"),
        ({"encoder_layers": 0}, "encoder_layers=0"),
        ({"vocab_size": -3}, "vocab_size=-3"),
        ({"value_head_dim": 0}, "value_head_dim=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"position_encoding_type": "rotary"}, "position_encoding_type='rotary'.*sinusoidal"),
        (
            {"position_encoding_type": "sinusoidal_fairseq", "pad_token_id": None},
            "pad_token_id=None",
        ),
        ({"activation_function": "rleu"}, "activation_function='rleu'.*relu"),
        ({"decoder_vocab_size": 50}, "decoder_vocab_size=50.*vocab_size=40"),
        ({"layer_norm_position": "pre", "final_layer_norm": False}, "final_layer_norm=False"),
        ({"layer_norm_position": "middle"}, "layer_norm_position='middle'.*post, pre"),
    ],
)
def test_invalid_configuration_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", "512"),
        ("dropout", "0.1"),
        ("attention_bias", "no"),
        ("encoder_layers", 2.5),
    ],
)
def test_field_of_wrong_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(Exception, match=field):
        tiny_config(**{field: value})


def test_head_dims_allow_an_indivisible_d_model() -> None:
    config = tiny_config(d_model=30, head_dim=5, value_head_dim=7)
    model = VanillaTransformerForConditionalGeneration(config)
    first, *_ = model.get_encoder().layers
    assert first.self_attn.out_proj.weight.shape == (30, 4 * 7)


def test_pre_norm_ends_each_stack_with_a_normalisation() -> None:
    assert tiny_config(layer_norm_position="pre").final_layer_norm is True
    assert tiny_config().final_layer_norm is False
    assert tiny_config(final_layer_norm=True).layer_norm_position == "post"
    assert all(
        VanillaTransformerConfig.from_preset(name).layer_norm_position == "post" for name in PRESETS
    )


def test_model_refuses_fields_that_were_set_one_by_one_and_contradict() -> None:
    config = tiny_config()
    config.layer_norm_position = "pre"
    with pytest.raises(ValueError, match="final_layer_norm=False"):
        VanillaTransformerForConditionalGeneration(config)
