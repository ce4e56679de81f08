"""eole's model folders. The reference is the NumPy restatement."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from hf_vanilla_transformer.interop.eole import from_eole
from tests.interop.checkpoints import LAYERS
from tests.interop.checkpoints.eole import PEER, restated, save, weights
from tests.interop.conftest import Compare
from tests.interop.foreign import Record, assert_fields, converted
from tests.model_helpers import error_of


@pytest.mark.parametrize("bias", [False, True])
def test_eole_folder_gives_its_logits(bias: bool, tmp_path: Path, compared: Compare) -> None:
    tensors = weights(bias)
    save(tmp_path / "eole", tensors)
    ours, _, _ = compared(PEER, "eole", tmp_path / "eole", restated(tensors))
    assert_fields(ours.config, attention_bias=bias, dropout=0.2)
    assert_fields(
        ours.generation_config,
        num_beams=5,
        length_penalty=1.0,
        max_new_tokens=250,
    )


@pytest.mark.parametrize(
    ("fields", "options", "formula"),
    [
        # Learned positions are added to unscaled embeddings.
        (
            {"bias": True, "learned": True},
            {"embeddings.position_encoding_type": "Learned", "embeddings.n_positions": 30},
            {"learned": True},
        ),
        # Options of the model hold for its stacks.
        (
            {},
            {"mlp_activation_fn": "gelu", "norm_eps": 1e-3},
            {"activation": "gelu", "eps": 1e-3},
        ),
        # Keys have no bias, as add_key_bias chooses it. Attention has all biases here, or none.
        ({"bias": True, "key_bias": False}, {}, {}),
    ],
    ids=["learned positions", "options of the model", "no key bias"],
)
def test_eole_options_give_their_logits(fields, options, formula, tmp_path, compared):
    tensors = weights(fields.get("bias", False), fields.get("learned", False))
    if not fields.get("key_bias", True):
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.endswith("linear_keys.bias")
        }
    save(tmp_path / "eole", tensors, options)
    compared(PEER, "eole", tmp_path / "eole", restated(tensors, **formula))


def test_eole_output_tied_to_the_target_embedding(tmp_path: Path, compared: Compare) -> None:
    """eole leaves out the output matrix then, and a shared target embedding too."""
    tensors = weights()
    del tensors["generator.weight"]
    save(tmp_path / "eole", tensors, {"share_decoder_embeddings": True})
    tied = {**tensors, "generator.weight": tensors["tgt_emb.embeddings.weight"]}
    ours, _, _ = compared(PEER, "eole", tmp_path / "eole", restated(tied))
    assert_fields(ours.config, tie_word_embeddings=True)


def test_eole_weights_in_several_files(tmp_path: Path) -> None:
    tensors = weights()
    save(tmp_path, tensors)
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith("encoder")}
    save_file(encoder, tmp_path / "model.01.safetensors")
    assert "model.0" in error_of(from_eole, tmp_path)
    rest = {name: tensor for name, tensor in tensors.items() if name not in encoder}
    save_file(rest, tmp_path / "model.00.safetensors")
    assert_fields(from_eole(tmp_path).model.config, encoder_layers=LAYERS[0])


def test_eole_factor_of_a_layer_is_not_dropped(tmp_path: Path) -> None:
    tensors = weights()
    factor = next(name for name in tensors if name.endswith("layer_scalar"))
    save(tmp_path, tensors | {factor: 2 * tensors[factor]})
    assert factor in error_of(from_eole, tmp_path)


def test_eole_tokenizers_have_its_ids(tmp_path: Path) -> None:
    save(tmp_path / "eole", weights())
    ours, tokenizer, target = converted("eole", tmp_path / "eole", tmp_path / "ours")
    # its sources do not end with </s>
    assert tokenizer("s1 s0 sleeps")["input_ids"] == [5, 4, 0]
    assert target("t3 t0")["input_ids"] == [7, 4, 3]
    assert_fields(ours.config, decoder_start_token_id=2, pad_token_id=1)


def test_eole_vocabulary_has_to_fit(tmp_path: Path) -> None:
    save(tmp_path, weights())
    whole = json.loads((tmp_path / "vocab.json").read_text())
    for change, message in [
        ({"tgt": whole["tgt"][:-1]}, " 7 .* 8"),
        ({"src": [*"abcdefghi"]}, "<unk>"),
        ({"specials": {"pad_token": "<pad>"}}, "<pad>"),
        ({"decoder_start_token": "<de>"}, "decoder_start_token=<de>"),
    ]:
        (tmp_path / "vocab.json").write_text(json.dumps(whole | change))
        assert re.search(message, error_of(from_eole, tmp_path))


def test_eole_penalty_that_it_does_not_have_is_refused(tmp_path: Path) -> None:
    save(tmp_path, weights(), inference={"length_penalty": "sum"})
    assert "inference.length_penalty=sum" in error_of(from_eole, tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("architecture", "transformer_lm"),
        ("generator_function", "sparsemax"),
        ("add_estimator", True),
        ("embeddings.embedding_type", "roberta"),
        ("embeddings.position_encoding_type", "Rotary"),
        ("embeddings.position_encoding_type", "SinusoidalConcat"),
        ("embeddings.position_encoding_type", None),
        ("embeddings.position_shift", 2),
        ("embeddings.normalize", True),
        ("encoder.encoder_layer_style", "postnorm"),
        ("encoder.final_encoder_layer_norm", False),
        ("encoder.layer_norm", "rms"),
        ("encoder.norm_eps", 1e-6),
        ("decoder.mlp_activation_fn", "gated-silu"),
        ("decoder.heads_kv", 1),
        ("decoder.head_dim", 8),
        ("decoder.query_norm", True),
        ("decoder.q_gating", True),
        ("decoder.attn_scaling", 64.0),
        ("decoder.num_experts", 4),
        ("decoder.sliding_window", 4096),
        ("decoder.layer_types", ["linear_attention"]),
        ("decoder.num_mtp_heads", 1),
        ("decoder.heads", "four"),
    ],
)
def test_eole_refuses_other_architectures(
    option: str, value: Any, tmp_path: Path, record_property: Record
) -> None:
    save(tmp_path, weights(), {option: value})
    shown = "[linear_attention]" if isinstance(value, list) else value
    assert f"{option.rpartition('.')[2]}={shown}" in error_of(from_eole, tmp_path)
    record_property("refused", f"{option}: {shown}")
