"""The model that gives the base size the translations of a small one."""

import pytest
import torch

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from tests.speed.widen import FFN, LAYERS, WIDTH, widen


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.slow
def test_wide_model_has_the_logits_of_the_small_one(layers: int) -> None:
    torch.manual_seed(0)
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", layers), ("ffn_dim", 128))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = VanillaTransformerConfig(
        vocab_size=50, d_model=64, attention_bias=True, **sizes, **heads
    )
    small = VanillaTransformerForConditionalGeneration(config).eval()
    for parameter in small.parameters():  # gains and biases too
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    wide = widen(small)
    ids = torch.tensor([[5, 17, 41, 23, 2], [8, 9, 2, 1, 1]])
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 1).long(),
        "decoder_input_ids": ids[:, :3],
    }
    with torch.no_grad():
        expected, logits = (model(**inputs).logits for model in (small, wide))
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)
    assert wide.config.d_model == WIDTH
    assert (wide.config.encoder_layers, wide.config.decoder_ffn_dim) == (LAYERS, FFN)
