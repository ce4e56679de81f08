"""A `MarianMTModel` made from ours gives our numbers."""

import pytest
import torch

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.marian import to_marian
from tests.model_helpers import TYING_MODES, assert_near, tiny_model, translation_batch


@pytest.mark.parametrize("positions", ["sinusoidal", "sinusoidal_split"])
@pytest.mark.parametrize("fields", [{}, {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 11}])
@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
@torch.no_grad()
def test_marian_gives_our_logits(share: bool, tie: bool, fields: dict, positions: str) -> None:
    own = {} if share else {"decoder_vocab_size": 31}
    ours = tiny_model(
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
        position_encoding_type=positions,
        lm_head_bias=True,
        activation_function="swish",
        **own,
        **fields,
    )
    marian = to_marian(ours)
    batch = translation_batch([7, 3, 5], [4, 6, 2], vocab_size=31)
    target = ours.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    expected, actual = (model(**batch, decoder_input_ids=target).logits for model in (ours, marian))
    assert_near(actual, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"position_encoding_type": "learned"},
        {"attention_bias": False},
        {"final_layer_norm": True},
        {"head_dim": 3, "value_head_dim": 8},
        {"layer_norm_eps": 1e-6},
    ],
)
def test_what_marian_has_not_is_named(fields: dict) -> None:
    with pytest.raises(UserError, match=next(iter(fields))):
        to_marian(tiny_model(**fields))
