"""torch's flex attention, compiled by transformers: the third backend, the same numbers."""

from typing import Any

import pytest
import torch

from tests.model_helpers import assert_near, tiny_model, translation_batch

pytestmark = pytest.mark.slow  # compiling takes a minute

# torch's kernel takes heads of 16 and more, and has no backward pass on a CPU.
FIELDS = {"d_model": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def models(**fields: bool) -> list[Any]:
    return [
        tiny_model(attn_implementation=name, **FIELDS, **fields)
        for name in ("eager", "flex_attention")
    ]


@torch.no_grad()
def test_flex_attention_gives_the_same_logits() -> None:
    batch = translation_batch([7, 2, 5, 1], [3, 8, 1, 6])
    eager, flex = models()
    expected = eager(**batch)
    actual = flex(**batch)
    source = batch["attention_mask"].bool()
    target = batch["labels"].ne(-100)
    assert_near(
        actual.encoder_last_hidden_state[source], expected.encoder_last_hidden_state[source]
    )
    assert_near(actual.logits[target], expected.logits[target])
    assert_near(actual.loss, expected.loss)

    # a fully masked source does not affect the other sentences
    batch["attention_mask"][1] = 0
    output = flex(**batch)
    assert torch.isfinite(output.logits).all()
    target[1] = False
    assert_near(output.logits[target], expected.logits[target])


def test_flex_attention_generates() -> None:
    settings = {
        "inputs": translation_batch([5, 3], [2, 2])["input_ids"],
        "num_beams": 2,
        "length_penalty": 1.0,
        "max_new_tokens": 4,
    }
    eager, flex = (model.generate(**settings) for model in models(tie_word_embeddings=False))
    assert flex.tolist() == eager.tolist()
