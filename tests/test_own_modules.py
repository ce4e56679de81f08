"""Models that a user has taken apart: layers moved or shared, and modules of their own in place of the model's."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.modeling_outputs import BaseModelOutput

from hf_vanilla_transformer import VanillaTransformerForSequenceClassification
from hf_vanilla_transformer.attention_vanilla_transformer import eager_attention_forward
from tests.model_helpers import assert_near, tiny_config, translation_batch
from tests.search_helpers import Model, by_transformers, source, varied_model

GREEDY = {"num_beams": 1, "max_new_tokens": 8}


# Layers


def keep_every_other(layers: nn.ModuleList) -> None:
    del layers[0]
    del layers[1]


def share_the_first(layers: nn.ModuleList) -> None:
    layers[1] = layers[2] = layers[0]


@pytest.mark.parametrize("change", [keep_every_other, share_the_first])
def test_layers_may_be_removed_and_shared(change: Callable[[nn.ModuleList], None]) -> None:
    model = varied_model(decoder_layers=4)
    layers = model.model.decoder.layers
    change(layers)
    model.config.decoder_layers = len(layers)
    inputs = source([6, 1, 8]) | GREEDY
    expected = by_transformers(model, **inputs, use_cache=False)
    assert len(expected.unique(dim=0)) > 1
    assert torch.equal(model.generate(**inputs), expected)
    assert torch.equal(by_transformers(model, **inputs), expected)


class MeanOfThePast(nn.Module):
    """Attention with equal weights, which knows no cache."""

    def forward(
        self, x: Tensor, source: Any = None, mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return x.cumsum(dim=1) / counts, None


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_without_a_cache_is_refused_where_it_would_need_one(layer: int) -> None:
    model = varied_model()
    model.model.decoder.layers[layer].self_attn = MeanOfThePast()
    inputs = source([6, 3]) | GREEDY
    message = rf"decoder.layers\[{layer}\] adds no keys to past_key_values.* give use_cache=False"
    for generate in (Model.generate, by_transformers):
        with pytest.raises(ValueError, match=message):
            generate(model, **inputs)
    expected = by_transformers(model, **inputs, use_cache=False)
    assert torch.equal(model.generate(**inputs, use_cache=False), expected)
    target = torch.tensor([[0, 5, 6]] * 2)
    logits = model(**source([6, 3]), decoder_input_ids=target).logits
    assert logits.shape == (2, 3, 24)


# Embeddings and encoders


def test_embedding_may_have_no_matrix() -> None:
    model = varied_model(share_encoder_decoder_embeddings=False)
    batch = translation_batch([5, 3], [4, 2], 24)
    expected = model(**batch).logits
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_tokens = nn.Sequential(stack.embed_tokens)
    assert torch.equal(model(**batch).logits, expected)


def bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    return BertModel(config).eval()


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_may_be_one_of_transformers(beams: int) -> None:
    model = varied_model(share_encoder_decoder_embeddings=False)
    inputs = source([6, 1, 8])
    settings = GREEDY | {"num_beams": beams}
    output = bert()(**inputs)
    states = output.last_hidden_state
    forms = [BaseModelOutput(states), output, dict(output), (states,)]
    settings["attention_mask"] = inputs["attention_mask"]
    expected, *others = (model.generate(encoder_outputs=form, **settings) for form in forms)
    model.model.encoder = bert()
    others.append(model.generate(inputs["input_ids"], **settings))
    for actual in others:
        assert torch.equal(actual, expected)


class Styled(Model):
    """Adds a vector to the logits of each sentence."""

    def forward(self, *args: Any, style: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if style is not None:
            outputs.logits = outputs.logits + style[:, None]
        return outputs


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_gives_an_argument_of_a_subclass_to_its_forward(beams: int) -> None:
    model = varied_model()
    model.__class__ = Styled
    style = torch.zeros(2, 24)
    style[0, 7] = style[1, 9] = 50.0
    settings = GREEDY | {"num_beams": beams, "max_new_tokens": 4}
    tokens = model.generate(**source([6, 3]), **settings, style=style)
    assert tokens[:, 1:].tolist() == [[7] * 4, [9] * 4]


# Masks and positions


@pytest.mark.parametrize("factor", [3, 0.5])
def test_every_number_but_0_of_a_mask_marks_a_token(factor: float) -> None:
    model = varied_model()
    inputs = source([5, 3, 7])
    scaled = inputs | {"attention_mask": inputs["attention_mask"] * factor}
    target = {
        "decoder_input_ids": torch.full((3, 4), 5),
        "decoder_attention_mask": torch.ones(3, 4),
    }
    expected = model(**inputs, **target).logits
    target["decoder_attention_mask"] *= factor
    assert torch.equal(model(**scaled, **target).logits, expected)
    limit = {"num_beams": 3, "max_length_over_source": 0}
    expected = model.generate(**inputs, **limit)
    assert torch.equal(model.generate(**scaled, **limit), expected)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_boolean_mask_marks_visible_keys(backend: str) -> None:
    model = varied_model(attn_implementation=backend)
    encoder = model.get_encoder()
    inputs = source([5, 3, 7])
    is_token = inputs["attention_mask"].bool()
    visible = is_token[:, None, None].expand(-1, 1, 7, -1)  # (B, 1, S, S)
    actual = encoder(inputs["input_ids"], visible).last_hidden_state
    expected = encoder(**inputs).last_hidden_state
    assert_near(actual[is_token], expected[is_token])


def test_eager_attention_computes_in_double_precision() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    visible = torch.rand(2, 1, 5, 5) < 0.8
    visible[..., 0] = True
    mask = torch.where(visible, 0.0, -1e9).double()
    output, _ = eager_attention_forward(
        nn.Module(),
        query,
        key,
        value,
        mask,
        scaling=8**-0.5,
    )
    scores = query @ key.transpose(2, 3) / 8**0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ value
    assert_near(output.transpose(1, 2), expected, 1e-14)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("position_ids", (1, 7), "position_ids of shape (1, 7)"),
        ("decoder_position_ids", (1, 7), "position_ids of shape (1, 7)"),
        ("inputs_embeds", (1, 1, 1), "embeddings of shape (1, 1, 1)"),
        ("attention_mask", (1, 1, 1), "attention_mask has shape (1, 1, 1)"),
    ],
)
def test_shapes_that_torch_would_repeat_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    token = torch.tensor([[5]])
    inputs = {"input_ids": token, "decoder_input_ids": token, name: torch.ones(shape)}
    if name == "inputs_embeds":
        del inputs["input_ids"]
    with pytest.raises(ValueError, match=re.escape(message)):
        varied_model()(**inputs)


def test_mask_of_the_encoders_places_needs_another_for_the_decoder() -> None:
    """A causal encoder. As many places on both sides, so that no shape tells them apart."""
    model = varied_model()
    inputs = source([5, 5])
    causal = torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5)
    states = model.get_encoder()(inputs["input_ids"], causal)
    target = {"decoder_input_ids": torch.full((2, 5), 6)}
    expected = model(encoder_outputs=states, **target, attention_mask=inputs["attention_mask"])
    inputs["attention_mask"], padding = causal, inputs["attention_mask"]
    with pytest.raises(
        ValueError, match=r"attention_mask of shape \(2, 1, 5, 5\) .*cross_attention_mask"
    ):
        model(**inputs, **target)
    actual = model(**inputs, **target, cross_attention_mask=padding)
    assert_near(actual.logits, expected.logits)


@pytest.mark.parametrize("shape", [(1, 1, 5, 5), (1, 1, 1, 5)])
def test_classifier_refuses_masks_of_four_dimensions(shape: tuple[int, ...]) -> None:
    model = VanillaTransformerForSequenceClassification(tiny_config())
    ids = torch.full((1, 5), 6)
    with pytest.raises(ValueError, match=r"attention_mask has shape .*: give \(B, S\)"):
        model(ids, torch.ones(shape).bool())


@pytest.mark.parametrize("shape", [(5,), (2, 0), (1, 2, 5)])
def test_labels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    ids = torch.full((2, 5), 6)
    with pytest.raises(
        ValueError, match=rf"labels have shape {re.escape(str(shape))}: give \(B, T\)"
    ):
        varied_model()(input_ids=ids, labels=torch.full(shape, 6))
