"""Properties of the model over every option of the configuration, with random shapes and batches.

`hypothesis` looks for combinations that nobody thought of. Its examples are the same in every run.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_vanilla_transformer.configuration_vanilla_transformer import POSITION_ENCODING_TYPES
from tests.model_helpers import (
    PAD,
    assert_near,
    assert_same_gradients,
    gradients,
    padded,
    sentences,
    tiny_model,
    translation_batch,
)

BACKENDS = ["eager", "sdpa"]
WORDS = 12  # of the smallest vocabulary

settings.register_profile(
    "promises",
    max_examples=15,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # looking for a smaller example takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
promised = settings(settings.get_profile("promises"))


@st.composite
def heads_and_widths(draw: st.DrawFn) -> dict[str, Any]:
    """d_model, h of both stacks, and perhaps d_k and d_v free of them (§3.2.2; Table 3, rows A and B)."""
    heads = draw(st.integers(1, 3))
    decoder_heads = draw(st.integers(1, 3))
    fields = {
        "encoder_attention_heads": heads,
        "decoder_attention_heads": decoder_heads,
        "d_model": heads * decoder_heads * draw(st.integers(4, 6)),
    }
    if draw(st.booleans()):
        fields["head_dim"] = draw(st.integers(1, 9))
        fields["value_head_dim"] = draw(st.integers(1, 9))
        fields["d_model"] = draw(st.integers(4, 25))
    return fields


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, Any]:
    """A tying mode, and two vocabularies where they may differ (§3.4)."""
    fields = {
        "share_encoder_decoder_embeddings": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "vocab_size": draw(st.integers(WORDS, 40)),
    }
    if not fields["share_encoder_decoder_embeddings"]:
        fields["decoder_vocab_size"] = draw(st.integers(WORDS, 40))
    return fields


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Every option that changes the results."""
    final_norms = [{}, {"final_layer_norm": True}, {"layer_norm_position": "pre"}]
    return {
        **draw(heads_and_widths()),
        **draw(vocabularies()),
        **draw(st.sampled_from(final_norms)),
        "encoder_layers": draw(st.integers(1, 2)),
        "decoder_layers": draw(st.integers(1, 2)),
        "encoder_ffn_dim": draw(st.integers(1, 40)),
        "decoder_ffn_dim": draw(st.integers(1, 40)),
        "activation_function": draw(st.sampled_from(["relu", "gelu", "swish", "tanh"])),
        "position_encoding_type": draw(st.sampled_from(POSITION_ENCODING_TYPES)),
        "scale_embedding": draw(st.booleans()),
        "layer_norm_eps": draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
        "attention_bias": draw(st.booleans()),
        "lm_head_bias": draw(st.booleans()),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
    }


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
several = st.lists(st.integers(1, 9), min_size=2, max_size=4)
seeds = st.integers(0, 1000)


def batch_of(sizes: list[int], seed: int) -> dict[str, Tensor]:
    """Sources of the given lengths, and targets of the same lengths in another order."""
    return translation_batch(sizes, sizes[::-1], WORDS, seed)


@promised
@pytest.mark.parametrize("backend", BACKENDS)
@given(
    fields=options(),
    sizes=lengths,
    seed=seeds,
    at_once=st.sampled_from([1, 1, 3]),
)
@torch.no_grad()
def test_cached_decoding_equals_uncached_for_any_configuration(
    backend, fields, sizes, seed, at_once
):
    model = tiny_model(seed, attn_implementation=backend, **fields)
    batch = batch_of(sizes, seed)
    target = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    encoded = model.model.encoder(**batch)
    cache = None
    for start in range(0, target.shape[1], at_once):
        end = min(start + at_once, target.shape[1])
        uncached = model(**batch, decoder_input_ids=target[:, :end], use_cache=False).logits
        step = model(
            encoder_outputs=encoded,
            attention_mask=batch["attention_mask"],
            decoder_input_ids=target[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = step.past_key_values
        assert cache.get_seq_length() == end
        assert_near(step.logits, uncached[:, start:], 1e-5, f"tokens {start} to {end}")


@promised
@pytest.mark.parametrize("backend", BACKENDS)
@given(
    fields=options(),
    sizes=lengths,
    seed=seeds,
    left=st.booleans(),
)
@torch.no_grad()
def test_outputs_do_not_depend_on_the_rest_of_the_batch(backend, fields, sizes, seed, left):
    model = tiny_model(seed, attn_implementation=backend, **fields)
    sources = sentences(sizes, WORDS, seed)
    targets = sentences(sizes[::-1], WORDS, seed + 1)
    target = padded(targets, left=left)
    together = model(
        input_ids=padded(sources, left=left),
        decoder_input_ids=target,
        decoder_attention_mask=target.ne(PAD).long(),
    )
    for i, (source_ids, target_ids) in enumerate(zip(sources, targets, strict=True)):
        alone = model(torch.tensor([source_ids]), decoder_input_ids=torch.tensor([target_ids]))
        here = slice(-len(target_ids), None) if left else slice(len(target_ids))
        assert_near(together.logits[i, here], alone.logits[0], 1e-5, f"sentence {i}")


@promised
@given(
    fields=options(),
    sizes=lengths,
    seed=seeds,
    training=st.booleans(),
)
def test_attention_backends_agree(
    fields: dict[str, Any], sizes: list[int], seed: int, training: bool
) -> None:
    batch = batch_of(sizes, seed)

    def numbers(backend: str) -> tuple[Tensor, dict[str, Tensor]]:
        model = tiny_model(seed, attn_implementation=backend, **fields).train(training)
        _, found = gradients(model, **batch, num_items_in_batch=1)
        return model(**batch, skip_logits=False).logits, found

    logits, found = numbers("sdpa")
    expected, expected_gradients = numbers("eager")
    assert_near(logits, expected)
    assert_same_gradients(found, expected_gradients)


@promised
@pytest.mark.parametrize("backend", BACKENDS)
@given(
    fields=options(),
    sizes=several,
    seed=seeds,
    training=st.booleans(),
    empty=st.integers(0, 3),
)
def test_fully_masked_row_is_finite(backend, fields, sizes, seed, training, empty):
    model = tiny_model(seed, attn_implementation=backend, **fields).train(training)
    batch = batch_of(sizes, seed)
    empty %= len(sizes)
    expected = model(**batch, skip_logits=False).logits
    batch["attention_mask"][empty] = 0
    loss, found = gradients(model, **batch)
    logits = model(**batch, skip_logits=False).logits
    for numbers in (torch.tensor(loss), logits, *found.values()):
        assert numbers.isfinite().all()
    others = [i for i in range(len(sizes)) if i != empty]
    assert_near(logits[others], expected[others], 1e-5, "the other sentences")


@promised
@given(fields=options(), sizes=several, seed=seeds, data=st.data())
def test_gradients_do_not_depend_on_batch_splitting(fields, sizes, seed, data):
    model = tiny_model(seed, **fields).train()
    batch = batch_of(sizes, seed)
    tokens = int(batch["labels"].ne(-100).sum())
    whole_loss, whole = gradients(model, **batch)
    places = st.sets(st.integers(1, len(sizes) - 1), min_size=1)
    cuts = sorted(data.draw(places))
    model.zero_grad()
    total = 0.0
    for start, end in pairwise([0, *cuts, len(sizes)]):
        part = {name: tensor[start:end] for name, tensor in batch.items()}
        loss = model(**part, num_items_in_batch=torch.tensor(tokens)).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole_loss, rel=1e-5)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(found, whole)
