"""The configuration: the paper's Table 3, refused values, and saving."""

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.configuration_vanilla_transformer import PRESETS
from tests.model_helpers import tiny_config

# N, d_model, d_ff, h, d_k, d_v, P_drop, ε_ls, and millions of parameters, of which an empty cell is the base model's
TABLE_3 = {
    "base": (6, 512, 2048, 8, 64, 64, 0.1, 0.1, 65),
    "A1": (6, 512, 2048, 1, 512, 512, 0.1, 0.1, 65),
    "A4": (6, 512, 2048, 4, 128, 128, 0.1, 0.1, 65),
    "A16": (6, 512, 2048, 16, 32, 32, 0.1, 0.1, 65),
    "A32": (6, 512, 2048, 32, 16, 16, 0.1, 0.1, 65),
    "B16": (6, 512, 2048, 8, 16, 64, 0.1, 0.1, 58),
    "B32": (6, 512, 2048, 8, 32, 64, 0.1, 0.1, 60),
    "C2": (2, 512, 2048, 8, 64, 64, 0.1, 0.1, 36),
    "C4": (4, 512, 2048, 8, 64, 64, 0.1, 0.1, 50),
    "C8": (8, 512, 2048, 8, 64, 64, 0.1, 0.1, 80),
    "C256": (6, 256, 2048, 8, 32, 32, 0.1, 0.1, 28),
    "C1024": (6, 1024, 2048, 8, 128, 128, 0.1, 0.1, 168),
    "C1024ff": (6, 512, 1024, 8, 64, 64, 0.1, 0.1, 53),
    "C4096ff": (6, 512, 4096, 8, 64, 64, 0.1, 0.1, 90),
    "D0.0": (6, 512, 2048, 8, 64, 64, 0.0, 0.1, 65),
    "D0.2": (6, 512, 2048, 8, 64, 64, 0.2, 0.1, 65),
    "Dls0.0": (6, 512, 2048, 8, 64, 64, 0.1, 0.0, 65),
    "Dls0.2": (6, 512, 2048, 8, 64, 64, 0.1, 0.2, 65),
    "E": (6, 512, 2048, 8, 64, 64, 0.1, 0.1, 65),
    "big": (6, 1024, 4096, 16, 64, 64, 0.3, 0.1, 213),
}
# Rows that fit Table 3 only with a larger vocabulary than §5.1 tells, as explained at PRESETS.
NEEDS_VOCABULARY_OF_41000 = {"B16", "C2", "C4", "C256", "C1024ff"}


def test_presets_cover_every_row_of_table_3() -> None:
    assert PRESETS.keys() == TABLE_3.keys()


@pytest.mark.parametrize("name", TABLE_3)
def test_presets_have_the_values_of_table_3(name: str) -> None:
    layers, d_model, ffn, heads, d_k, d_v, dropout, smoothing, millions = TABLE_3[name]
    vocab_size = 41000 if name in NEEDS_VOCABULARY_OF_41000 else 37000
    config = VanillaTransformerConfig.from_preset(name, vocab_size=vocab_size)
    with torch.device("meta"):
        translator = VanillaTransformerForConditionalGeneration(config)
    model = translator.model
    assert len(model.encoder.layers) == len(model.decoder.layers) == layers
    assert config.encoder_attention_heads == config.decoder_attention_heads == heads
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert layer.fc1.weight.shape == (ffn, d_model)
        assert layer.self_attn.q_proj.weight.shape == (heads * d_k, d_model)
        assert layer.self_attn.v_proj.weight.shape == (heads * d_v, d_model)
    assert (config.dropout, config.label_smoothing) == (dropout, smoothing)
    assert config.position_encoding_type == ("learned" if name == "E" else "sinusoidal")
    parameters = sum(parameter.numel() for parameter in translator.parameters())
    assert parameters / 1e6 == pytest.approx(millions, rel=0.03)


def test_preset_overrides_take_precedence() -> None:
    config = VanillaTransformerConfig.from_preset("big", dropout=0.2, encoder_layers=3, vocab_size=100)
    assert (config.dropout, config.encoder_layers, config.decoder_layers) == (0.2, 3, 6)
    assert config.target_vocab_size == 100


def test_default_configuration_is_the_base_model() -> None:
    default, base = VanillaTransformerConfig(), VanillaTransformerConfig.from_preset("base")
    different = {key for key, value in base.to_dict().items() if default.to_dict()[key] != value}
    assert different == {"label_smoothing"}


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
        ({"position_encoding_type": "sinusoidal_fairseq", "pad_token_id": None}, "pad_token_id=None"),
        ({"activation_function": "rleu"}, "activation_function='rleu'.*relu"),
        ({"decoder_vocab_size": 50}, "decoder_vocab_size=50.*vocab_size=40"),
    ],
)
def test_invalid_configuration_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize(
    ("field", "value"), [("d_model", "512"), ("dropout", "0.1"), ("attention_bias", "no"), ("encoder_layers", 2.5)]
)
def test_field_of_wrong_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(Exception, match=field):
        tiny_config(**{field: value})


def test_head_dims_allow_an_indivisible_d_model() -> None:
    config = tiny_config(d_model=30, head_dim=5, value_head_dim=7)
    model = VanillaTransformerForConditionalGeneration(config)
    assert model.model.encoder.layers[0].self_attn.out_proj.weight.shape == (30, 4 * 7)


def test_pre_norm_ends_each_stack_with_a_normalisation() -> None:
    assert tiny_config(layer_norm_position="pre").final_layer_norm is True
    assert tiny_config().final_layer_norm is False
    assert tiny_config(final_layer_norm=True).layer_norm_position == "post"
    assert all(VanillaTransformerConfig.from_preset(name).layer_norm_position == "post" for name in PRESETS)
    with pytest.raises(ValueError, match="final_layer_norm=False"):
        tiny_config(layer_norm_position="pre", final_layer_norm=False)
    with pytest.raises(ValueError, match="layer_norm_position='middle'.*post, pre"):
        tiny_config(layer_norm_position="middle")


def test_model_refuses_fields_that_were_set_one_by_one_and_contradict() -> None:
    config = tiny_config()
    config.layer_norm_position = "pre"
    with pytest.raises(ValueError, match="final_layer_norm=False"):
        VanillaTransformerForConditionalGeneration(config)
