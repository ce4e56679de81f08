"""The numbers of the page's view of the inside."""

import math

import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerModel
from hf_vanilla_transformer.inference.inside_view import norms_and_positions


def test_positions_and_norms_of_a_bfloat16_model_are_in_float32() -> None:
    config = VanillaTransformerConfig(
        vocab_size=20,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
    )
    config.encoder_attention_heads = config.decoder_attention_heads = 2
    model = VanillaTransformerModel(config).eval().bfloat16()
    states = torch.randn(1, 4, 16, dtype=torch.bfloat16)
    norms, positions = norms_and_positions(model.encoder, (states,))
    assert abs(positions[2, 0].item() - math.sin(2)) < 1e-6
    assert abs(positions[2, 1].item() - math.cos(2)) < 1e-6
    assert torch.allclose(norms[0, 0], states[0].double().norm(dim=-1).float(), rtol=1e-6)
