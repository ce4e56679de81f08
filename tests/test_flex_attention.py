"""torch's flex attention, compiled by transformers: the third backend, the same numbers."""

import pytest
import torch

from tests.model_helpers import assert_near, tiny_model, translation_batch

pytestmark = pytest.mark.slow  # compiling takes a minute

# torch's kernel takes heads of 16 and more, and has no backward pass on a CPU.
FIELDS = {"d_model": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@torch.no_grad()
def test_flex_attention_gives_the_same_logits() -> None:
    batch = translation_batch([7, 2, 5, 1], [3, 8, 1, 6])
    eager, flex = (tiny_model(attn_implementation=backend, **FIELDS) for backend in ("eager", "flex_attention"))
    expected, actual = eager(**batch), flex(**batch)
    tokens, real = batch["attention_mask"].bool(), batch["labels"].ne(-100)
    assert_near(actual.encoder_last_hidden_state[tokens], expected.encoder_last_hidden_state[tokens])
    assert_near(actual.logits[real], expected.logits[real])
    assert_near(actual.loss, expected.loss)

    # a fully masked source does not affect the other sentences
    batch["attention_mask"][1] = 0
    output = flex(**batch)
    assert torch.isfinite(output.logits).all()
    others = [0, 2, 3]
    assert_near(output.logits[others][real[others]], expected.logits[others][real[others]])


def test_flex_attention_generates() -> None:
    eager, flex = (
        tiny_model(attn_implementation=backend, tie_word_embeddings=False, **FIELDS)
        for backend in ("eager", "flex_attention")
    )
    ids = translation_batch([5, 3], [2, 2])["input_ids"]
    settings = {"num_beams": 2, "length_penalty": 1.0, "max_new_tokens": 4}
    assert flex.generate(ids, **settings).tolist() == eager.generate(ids, **settings).tolist()
