"""Arguments of every forward pass: both names of the cache, and nothing that is swallowed."""

from collections.abc import Callable
from functools import partial
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
from tests.model_helpers import (
    PAD,
    assert_near,
    assert_same_gradients,
    gradients,
    padded,
    randomise,
    sentences,
    tiny_config,
    tiny_model,
)

SOURCE = padded(sentences([6, 4]))
TARGET = padded(sentences([5, 5]))


def empty_cache() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def decoder_alone() -> VanillaTransformerForCausalLM:
    return randomise(VanillaTransformerForCausalLM(tiny_config())).eval()


def _calls() -> dict[str, Callable[..., Any]]:
    """A valid call of the forward pass of each class."""
    translator = tiny_model()
    encoder = translator.get_encoder()
    decoder = translator.get_decoder()
    layer = decoder.layers[0]
    states = encoder(SOURCE).last_hidden_state
    pair = {"input_ids": SOURCE, "decoder_input_ids": TARGET}
    return {
        "translator": partial(translator, **pair),
        "base model": partial(translator.model, **pair),
        "encoder": partial(encoder, SOURCE),
        "decoder": partial(decoder, TARGET, encoder_hidden_states=states),
        "decoder alone": partial(decoder_alone(), TARGET),
        "encoder alone": partial(VanillaTransformerEncoderModel(tiny_config()), SOURCE),
        "classifier": partial(VanillaTransformerForSequenceClassification(tiny_config()), SOURCE),
        "layer": partial(layer, states, states, None, None),
        "attention": partial(layer.self_attn, states),
    }


CALLS = _calls()
UNREAD = {
    "kv_cache": empty_cache(),  # under a third name
    "token_type_ids": torch.zeros_like(SOURCE),
    "cu_seq_lens_q": torch.tensor([0, 3, 6]),  # of another packing
    "attention_maks": 1,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("argument", UNREAD)
def test_unknown_arguments_are_refused(name: str, argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        CALLS[name](**{argument: UNREAD[argument]})


@pytest.mark.parametrize("name", CALLS)
def test_standard_arguments_are_taken(name: str) -> None:
    CALLS[name](output_attentions=False, num_items_in_batch=torch.tensor(10), unknown=None)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("translates", [True, False])
def test_cache_has_two_names(name: str, translates: bool) -> None:
    """A step with a cache under either name has the logits of a pass over the whole target."""
    model: PreTrainedModel = decoder_alone()
    target = "input_ids"
    source = {}
    if translates:
        model = tiny_model()
        target = "decoder_input_ids"
        source["encoder_outputs"] = model.get_encoder()(SOURCE)
        source["attention_mask"] = SOURCE.ne(PAD).long()

    def read(places: slice, **settings: Any) -> Any:
        return model(**source, **{target: TARGET[:, places]}, **settings)

    whole = read(slice(None), use_cache=False)
    assert whole.get(CACHE) is None
    outputs = read(slice(2), use_cache=True)
    for place in range(2, TARGET.shape[1]):
        cache = outputs[CACHE]
        outputs = read(slice(place, place + 1), **{name: cache}, use_cache=True)
        assert outputs[CACHE] is cache
        assert_near(outputs.logits[:, 0], whole.logits[:, place], 1e-5)


def test_two_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="two names"):
        CALLS["translator"](past_key_values=empty_cache(), cache=empty_cache())


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_a_cache_under_both_names(name: str) -> None:
    model = tiny_model()
    settings = {"max_new_tokens": 6, "num_beams": 1}
    expected = model.generate(SOURCE, **settings)
    found = model.generate(SOURCE, **settings, **{name: empty_cache()})
    assert found.equal(expected)


def test_mask_for_more_keys_than_there_are_is_refused() -> None:
    """One new token, a mask for several, and no cache: its caller has lost the cache."""
    step = {"decoder_input_ids": TARGET[:, :1], "use_cache": True}
    for shape in ((2, 4), (2, 1, 1, 4)):
        with pytest.raises(ValueError, match="decoder_attention_mask"):
            tiny_model()(SOURCE, **step, decoder_attention_mask=torch.ones(shape))


def test_cache_with_gradient_checkpointing_is_refused() -> None:
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(SOURCE, decoder_input_ids=TARGET, past_key_values=empty_cache())


# Attention functions of the user


def _same(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any
) -> Any:
    assert mask is not None
    return eager_attention_forward(module, q, k, v, mask, scaling, **kwargs)


def _boolean(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> Any:
    """Attention with the Boolean masks that are registered under its name."""
    if mask is not None:
        assert mask.dtype == torch.bool
        least = torch.finfo(q.dtype).min
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, least)
    return eager_attention_forward(module, q, k, v, mask, scaling, **kwargs)


def _whole_boolean_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


@pytest.fixture(params=[_same, _boolean])
def own_attention(request: pytest.FixtureRequest) -> Any:
    """The name of an attention function that computes what eager attention does."""
    name = request.param.__name__
    AttentionInterface.register(name, request.param)
    if request.param is _boolean:
        AttentionMaskInterface.register(name, _whole_boolean_mask)
    yield name
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


WAYS_TO_DECODE: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"do_sample": True, "top_k": 1},
    {"cache_implementation": "static", "num_beams": 1},
]


def test_own_attention_has_the_masks_of_eager(own_attention: str) -> None:
    """Forward, backward and each way to decode, of padded pairs."""
    model = tiny_model()
    encoder = VanillaTransformerEncoderModel(tiny_config())

    def results(attention: str) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
        model.set_attn_implementation(attention)
        encoder.set_attn_implementation(attention)
        _, found = gradients(model, input_ids=SOURCE, labels=TARGET)
        states = [model(SOURCE, labels=TARGET).logits, encoder(SOURCE).last_hidden_state]
        tokens = [model.generate(SOURCE, max_new_tokens=5, **way) for way in WAYS_TO_DECODE]
        return states, found, tokens

    expected, expected_gradients, expected_tokens = results("eager")
    actual, actual_gradients, actual_tokens = results(own_attention)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_near(mine, theirs, 1e-6)
    assert_same_gradients(actual_gradients, expected_gradients, 1e-6)
    for mine, theirs in zip(actual_tokens, expected_tokens, strict=True):
        assert mine.equal(theirs)


def test_own_attention_reads_arguments_of_its_own(own_attention: str) -> None:
    """What the function does not name it may read from its `kwargs`. A cache is refused all the same."""
    model = tiny_model()
    model.set_attn_implementation(own_attention)
    model(SOURCE, decoder_input_ids=TARGET, temperature=2.0)
    with pytest.raises(ValueError, match="kv_cache"):
        model(SOURCE, decoder_input_ids=TARGET, kv_cache=empty_cache())


def test_marian_of_the_same_weights_agrees_with_own_attention(own_attention: str) -> None:
    """An independent forward pass of padded pairs."""
    model = tiny_model(position_encoding_type="sinusoidal_split", lm_head_bias=True)
    marian: MarianMTModel = to_marian(model).eval()
    model.set_attn_implementation(own_attention)
    mask = SOURCE.ne(PAD).long()
    expected = marian(SOURCE, attention_mask=mask, decoder_input_ids=TARGET).logits
    assert_near(model(SOURCE, mask, TARGET).logits, expected, 1e-5)
