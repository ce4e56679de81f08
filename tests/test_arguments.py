"""Arguments of every forward pass: both names of the cache, and nothing that is swallowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, MarianMTModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from hf_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForSequenceClassification,
)
from hf_vanilla_transformer.arguments_vanilla_transformer import CACHE
from hf_vanilla_transformer.attention_vanilla_transformer import eager_attention_forward
from hf_vanilla_transformer.interop.marian import to_marian
from tests.model_helpers import PAD, assert_near, padded, randomise, sentences, tiny_config, tiny_model

SOURCE = padded(sentences([6, 4]))
TARGET = padded(sentences([5, 5]))


def _calls() -> dict[str, Callable[..., Any]]:
    """A valid call of the forward pass of each class."""
    translator = tiny_model()
    states = translator.get_encoder()(SOURCE).last_hidden_state
    layer = translator.get_decoder().layers[0]
    pair = {"input_ids": SOURCE, "decoder_input_ids": TARGET}
    alone = randomise(VanillaTransformerForCausalLM(tiny_config())).eval()
    encoder = randomise(VanillaTransformerEncoderModel(tiny_config())).eval()
    classifier = randomise(VanillaTransformerForSequenceClassification(tiny_config())).eval()
    return {
        "translator": lambda **extra: translator(**pair, **extra),
        "base model": lambda **extra: translator.model(**pair, **extra),
        "encoder": lambda **extra: translator.get_encoder()(SOURCE, **extra),
        "decoder": lambda **extra: translator.get_decoder()(TARGET, encoder_hidden_states=states, **extra),
        "decoder alone": lambda **extra: alone(TARGET, **extra),
        "encoder alone": lambda **extra: encoder(SOURCE, **extra),
        "classifier": lambda **extra: classifier(SOURCE, **extra),
        "layer": lambda **extra: layer(states, states, None, None, **extra),
        "attention": lambda **extra: layer.self_attn(states, **extra),
    }


CALLS = _calls()
UNREAD = {
    "a cache under a third name": {"kv_cache": EncoderDecoderCache(DynamicCache(), DynamicCache())},
    "a tensor": {"token_type_ids": torch.zeros_like(SOURCE)},
    "a tensor of another packing": {"cu_seq_lens_q": torch.tensor([0, 3, 6])},
    "a misspelt name": {"attention_maks": 1},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("case", UNREAD)
def test_unknown_arguments_are_refused(name: str, case: str) -> None:
    ((argument, _),) = UNREAD[case].items()
    with pytest.raises(ValueError, match=argument):
        CALLS[name](**UNREAD[case])


@pytest.mark.parametrize("name", CALLS)
def test_standard_arguments_are_taken(name: str) -> None:
    CALLS[name](output_attentions=False, num_items_in_batch=torch.tensor(10), unknown=None)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("translates", [True, False])
def test_cache_has_two_names(name: str, translates: bool) -> None:
    """A step with a cache under either name has the logits of a pass over the whole target."""
    model: PreTrainedModel = tiny_model()
    source = {"encoder_outputs": model.get_encoder()(SOURCE), "attention_mask": SOURCE.ne(PAD).long()}
    target = "decoder_input_ids"
    if not translates:
        model = randomise(VanillaTransformerForCausalLM(tiny_config())).eval()
        source = {}
        target = "input_ids"
    whole = model(**source, **{target: TARGET}, use_cache=False)
    assert whole.get(CACHE) is None
    outputs = model(**source, **{target: TARGET[:, :2]}, use_cache=True)
    for place in range(2, TARGET.shape[1]):
        cache = outputs[CACHE]
        step = {target: TARGET[:, place : place + 1], name: cache}
        outputs = model(**source, **step, use_cache=True)
        assert outputs[CACHE] is cache
        assert_near(outputs.logits[:, 0], whole.logits[:, place], 1e-5)


def test_two_caches_are_refused() -> None:
    caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
    with pytest.raises(ValueError, match="two names"):
        CALLS["translator"](past_key_values=caches[0], cache=caches[1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_a_cache_under_both_names(name: str) -> None:
    model = tiny_model()
    settings = {"max_new_tokens": 6, "num_beams": 1}
    expected = model.generate(SOURCE, **settings)
    given = {name: EncoderDecoderCache(DynamicCache(), DynamicCache())}
    assert model.generate(SOURCE, **settings, **given).equal(expected)


def test_mask_for_more_keys_than_there_are_is_refused() -> None:
    """One new token, a mask for several, and no cache: its caller has lost the cache."""
    step = {"input_ids": SOURCE, "decoder_input_ids": TARGET[:, :1], "use_cache": True}
    for mask in (torch.ones(2, 4), torch.zeros(2, 1, 1, 4)):
        with pytest.raises(ValueError, match="decoder_attention_mask"):
            tiny_model()(**step, decoder_attention_mask=mask)


def test_cache_with_gradient_checkpointing_is_refused() -> None:
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(SOURCE, decoder_input_ids=TARGET, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))


# Attention functions of the user


def _same(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
    assert mask is not None
    return eager_attention_forward(module, query, key, value, mask, scaling, **kwargs)


def _boolean(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
    """Attention with the Boolean masks that are registered under its name."""
    assert mask is None or mask.dtype == torch.bool
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager_attention_forward(module, query, key, value, mask, scaling, **kwargs)


def _whole_boolean_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


@pytest.fixture(params=["same", "boolean"])
def own_attention(request: pytest.FixtureRequest) -> Any:
    """The name of an attention function that computes what eager attention does."""
    AttentionInterface.register("same", _same)
    AttentionInterface.register("boolean", _boolean)
    AttentionMaskInterface.register("boolean", _whole_boolean_mask)
    yield request.param
    for name in ("same", "boolean"):
        AttentionInterface._global_mapping.pop(name)
    AttentionMaskInterface._global_mapping.pop("boolean")


def test_own_attention_has_the_masks_of_eager(own_attention: str) -> None:
    """Forward, backward and each way to decode, of padded pairs."""
    results = {}
    for name in ("eager", own_attention):
        model = tiny_model()
        model.set_attn_implementation(name)
        outputs = model(SOURCE, labels=TARGET)
        outputs.loss.backward()
        gradients = {key: weight.grad for key, weight in model.named_parameters()}
        steps = [{"num_beams": 3}, {"do_sample": True, "top_k": 1}, {"cache_implementation": "static", "num_beams": 1}]
        tokens = [model.generate(SOURCE, max_new_tokens=5, **settings) for settings in steps]
        encoder = randomise(VanillaTransformerEncoderModel(tiny_config(attn_implementation=name)))
        results[name] = outputs.logits, gradients, tokens, encoder.eval()(SOURCE).last_hidden_state
    expected = results["eager"]
    actual = results[own_attention]
    assert_near(actual[0], expected[0], 1e-6)
    for key, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][key], gradient, rtol=1e-5, atol=1e-6, msg=key)
    assert all(mine.equal(theirs) for mine, theirs in zip(actual[2], expected[2], strict=True))
    assert_near(actual[3], expected[3], 1e-6)


def test_own_attention_does_not_see_the_future(own_attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(own_attention)
    changed = TARGET.clone()
    changed[:, -1] = 7
    first = model(SOURCE, decoder_input_ids=TARGET).logits
    second = model(SOURCE, decoder_input_ids=changed).logits
    assert_near(second[:, :-1], first[:, :-1], 1e-6)


def test_own_attention_reads_arguments_of_its_own(own_attention: str) -> None:
    """What the function does not name it may read from its `kwargs`. A cache is refused all the same."""
    model = tiny_model()
    model.set_attn_implementation(own_attention)
    model(SOURCE, decoder_input_ids=TARGET, temperature=2.0)
    with pytest.raises(ValueError, match="kv_cache"):
        model(SOURCE, decoder_input_ids=TARGET, **UNREAD["a cache under a third name"])


def test_marian_of_the_same_weights_agrees_with_own_attention(own_attention: str) -> None:
    """An independent forward pass of padded pairs."""
    model = tiny_model(position_encoding_type="sinusoidal_split", lm_head_bias=True)
    marian: MarianMTModel = to_marian(model).eval()
    model.set_attn_implementation(own_attention)
    mask = SOURCE.ne(PAD).long()
    expected = marian(SOURCE, attention_mask=mask, decoder_input_ids=TARGET).logits
    assert_near(model(SOURCE, mask, TARGET).logits, expected, 1e-5)
