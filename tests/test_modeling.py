"""Properties of the model that do not depend on its weights, one by one."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils.output_capturing import OutputRecorder

from hf_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
)
from tests.model_helpers import (
    EOS,
    PAD,
    TYING_MODES,
    assert_near,
    gradients,
    padded,
    randomise,
    sentences,
    tiny_config,
    tiny_model,
    translation_batch,
    tying,
)

BACKENDS = ["eager", "sdpa"]


# Cache and masks


@torch.no_grad()
def test_cached_decoding_supports_left_padding() -> None:
    model = tiny_model()
    source = padded(sentences([6, 3]))
    tokens = sentences([7, 4], seed=5)
    target = padded(tokens, left=True)
    mask = target.ne(PAD).long()
    cache = None
    logits = []
    for i in range(target.shape[1]):
        step = model(
            input_ids=source,
            decoder_input_ids=target[:, i : i + 1],
            decoder_attention_mask=mask[:, : i + 1],
            past_key_values=cache,
            use_cache=True,
        )
        cache = step.past_key_values
        logits.append(step.logits)
    together = torch.cat(logits, dim=1)
    for ids, written, found in zip(source, tokens, together, strict=True):
        alone = model(input_ids=ids[None], decoder_input_ids=torch.tensor([written])).logits
        assert_near(found[-len(written) :], alone[0])


# Refused inputs

IDS = torch.tensor([[5, 6, 2]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.tensor([[5, 40, 2]])}, "input_ids .*40"),
        ({"input_ids": torch.tensor([[5, -1, 2]])}, "input_ids .*-1"),
        ({"decoder_input_ids": torch.tensor([[5, 99, 2]])}, "decoder_input_ids .*99"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, r"input_ids .*\(0, 3\)"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"input_ids .*\(1, 0\)"),
        (
            {"decoder_input_ids": torch.zeros(1, 0, dtype=torch.long)},
            r"decoder_input_ids .*\(1, 0\)",
        ),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask .*\(1, 4\).*\(1, 3\)"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask .*\(2, 3\).*\(1, 3\)"),
        (
            {"decoder_attention_mask": torch.ones(1, 2)},
            r"decoder_attention_mask .*\(1, 2\).*\(1, 3\)",
        ),
        (
            {"decoder_attention_mask": torch.ones(1, 1, 3, 4)},
            r"decoder_attention_mask .*4 keys, but there are 3",
        ),
        ({"input_ids": None}, "input_ids.*inputs_embeds"),
        ({"inputs_embeds": torch.ones(1, 3, 32)}, "input_ids.*inputs_embeds"),
        ({"decoder_input_ids": None}, "decoder_input_ids|decoder"),
    ],
)
def test_invalid_inputs_are_named(inputs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model()(**{"input_ids": IDS, "decoder_input_ids": IDS, **inputs})


@pytest.mark.parametrize("eos", [2, [7, 2]])
def test_padding_by_an_end_token_needs_a_mask(eos: int | list[int]) -> None:
    """Without one the end of a sentence would be hidden, as if it were padding."""
    model = tiny_model(pad_token_id=2, eos_token_id=eos)
    ids = torch.tensor([[5, 6, 2, 2], [5, 6, 7, 2]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    for call in (model.generate, model.get_encoder(), lambda ids: model(input_ids=ids, labels=ids)):
        with pytest.raises(ValueError, match="attention_mask.*pad_token_id=2"):
            call(ids)
    alone = model.get_encoder()(ids[:1, :3], mask[:1, :3]).last_hidden_state
    assert_near(model.get_encoder()(ids, mask).last_hidden_state[:1, :3], alone)


@pytest.mark.parametrize("labels", [[[5, 40, 6, 2]], [[5, 6, 40]], [[5, -7, 2]], [[5, 6, -7]]])
@pytest.mark.parametrize("training", [False, True])
def test_labels_outside_the_vocabulary_are_refused(labels: list, training: bool) -> None:
    with pytest.raises(ValueError, match="40|-7"):
        tiny_model().train(training)(input_ids=IDS, labels=torch.tensor(labels))


@pytest.mark.parametrize("long", ["input_ids", "decoder_input_ids"])
@torch.no_grad()
def test_learned_positions_refuse_longer_sequences(long: str) -> None:
    model = tiny_model(position_encoding_type="learned", max_position_embeddings=8)
    eight = torch.tensor(sentences([8]))
    inputs = {"input_ids": eight, "decoder_input_ids": eight}
    assert model(**inputs).logits.isfinite().all()
    inputs[long] = torch.tensor(sentences([9]))
    with pytest.raises(ValueError, match="contains 8.* max_position_embeddings=8"):
        model(**inputs)
    padded_left = torch.tensor([[PAD] * 5 + sentences([7])[0]])
    assert model(input_ids=padded_left, decoder_input_ids=IDS).logits.isfinite().all()


# Training


def test_forward_does_not_modify_inputs() -> None:
    model = tiny_model(label_smoothing=0.1)
    batch = translation_batch([7, 2, 5], [3, 8, 1])
    before = {name: tensor.clone() for name, tensor in batch.items()}
    for training in (True, False):
        model.train(training)(**batch).loss.backward()
        model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert all(batch[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_is_active_in_training_only(field: str, backend: str) -> None:
    batch = translation_batch([7, 2, 5], [3, 8, 1])
    model = tiny_model(attn_implementation=backend, **{field: 0.5})
    for training in (True, False):
        model.train(training)
        losses = {model(**batch).loss.item() for _ in range(2)}
        assert len(losses) == (2 if training else 1)


# Attentions and hidden states


@pytest.mark.skipif(
    not hasattr(OutputRecorder, "num_hidden_layers_key"),
    reason="this transformers gives all hidden states or none",
)
@torch.no_grad()
def test_hidden_states_accept_negative_indices_per_stack() -> None:
    model = tiny_model(encoder_layers=3, decoder_layers=1)
    output = model(**translation_batch([5, 3], [4, 4]), output_hidden_states=[-1])
    encoder = [state is not None for state in output.encoder_hidden_states]
    decoder = [state is not None for state in output.decoder_hidden_states]
    assert encoder == [False, False, False, True]
    assert decoder == [False, True]


# Initialisation


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_initialisation_has_documented_scales(share: bool, tie: bool) -> None:
    fields = tying(
        share,
        tie,
        d_model=64,
        vocab_size=300,
        lm_head_bias=True,
        position_encoding_type="learned",
    )
    model = VanillaTransformerForConditionalGeneration(tiny_config(**fields))
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.LayerNorm):
            assert (weight == 1).all(), name
            assert (module.bias == 0).all(), name
        elif isinstance(module, torch.nn.Embedding) or name == "lm_head":
            assert weight.std().item() == pytest.approx(64**-0.5, rel=0.1), name
            assert weight.mean().abs().item() < 5 * 64**-0.5 / math.sqrt(weight.numel()), name
        elif isinstance(module, torch.nn.Linear):
            bound = 0.25 * math.sqrt(
                6 / sum(weight.shape)
            )  # Glorot & Bengio 2010, at the gain that the model states
            assert 0.95 * bound < weight.abs().max().item() <= bound, name
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1), name
            assert (module.bias == 0).all(), name


def test_initial_logits_have_unit_variance() -> None:
    model = VanillaTransformerForConditionalGeneration(
        tiny_config(d_model=128, vocab_size=500)
    ).eval()
    batch = translation_batch([20] * 4, [20] * 4, vocab_size=500)
    assert model(**batch).logits.std().item() == pytest.approx(1.0, abs=0.35)


# Saving and loading


def assert_tied(
    model: VanillaTransformerForConditionalGeneration,
    share: bool,
    tie: bool,
) -> None:
    """As told, and no more."""
    target = model.model.decoder.embed_tokens.weight
    assert (model.get_input_embeddings().weight is target) == share
    assert (model.lm_head.weight is target) == tie


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "lm_head_bias": True,
            "final_layer_norm": True,
            "position_encoding_type": "learned",
        },
        {
            "head_dim": 3,
            "value_head_dim": 11,
            "attention_bias": False,
            "position_encoding_type": "sinusoidal_split",
        },
    ],
)
@torch.no_grad()
def test_save_and_load_keep_the_tied_weights(
    share: bool,
    tie: bool,
    fields: dict,
    tmp_path: Path,
) -> None:
    model = tiny_model(**tying(share, tie, **fields))
    batch = translation_batch([7, 4], [5, 3], vocab_size=31)
    model.save_pretrained(tmp_path)
    loaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.eval()(**batch).logits.equal(model(**batch).logits)

    assert_tied(loaded, share, tie)
    saved = load_file(tmp_path / "model.safetensors")
    matrices = {
        "model.encoder.embed_tokens.weight": True,
        "model.decoder.embed_tokens.weight": not share,
        "lm_head.weight": not tie,
    }
    assert {name: name in saved for name in matrices} == matrices
    learned = fields.get("position_encoding_type") == "learned"
    assert sum("position" in name for name in saved) == (2 if learned else 0)
    assert sum(weight.numel() for weight in saved.values()) == loaded.num_parameters()


def test_encoder_model_does_not_modify_its_configuration() -> None:
    config = tiny_config()
    before = config.to_dict()
    VanillaTransformerEncoderModel(config)
    assert config.to_dict() == before


# Resizing


def check_resized(
    model: VanillaTransformerForConditionalGeneration,
    source: int,
    target: int,
    folder: Path,
) -> None:
    """The sizes everywhere, a training step, and that the result can be saved and loaded."""
    config = model.config
    assert config.vocab_size == source
    assert config.target_vocab_size == target
    assert model.get_input_embeddings().weight.shape == (source, 32)
    assert model.model.decoder.embed_tokens.weight.shape == (target, 32)
    assert model.lm_head.weight.shape == (target, 32)
    assert model.lm_head.out_features == target
    if config.lm_head_bias:
        assert model.lm_head.bias.shape == (target,)
    assert_tied(
        model,
        config.share_encoder_decoder_embeddings,
        config.tie_word_embeddings,
    )
    batch = {
        "input_ids": torch.tensor([[source - 1, EOS]]),
        "labels": torch.tensor([[target - 1, EOS]]),
    }
    for training in (True, False):
        loss, _ = gradients(model.train(training), **batch)
        assert math.isfinite(loss)
    logits = assert_loads_as_it_is(model, folder, batch)
    assert logits.shape == (1, 2, target)


def assert_loads_as_it_is(
    model: Any,
    folder: Path,
    batch: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Save and load a model. Returns the first of its outputs, which loading must not change."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    name = "logits" if "labels" in batch else 0
    expected = model(**batch)[name]
    assert loaded(**batch)[name].equal(expected)
    return expected


RESIZED = [("resize_token_embeddings", *mode) for mode in TYING_MODES]
RESIZED += [("resize_decoder_token_embeddings", False, tie) for tie in (True, False)]


@pytest.mark.parametrize(("method", "share", "tie"), RESIZED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [53, 25])
def test_resize_token_embeddings(
    method: str,
    share: bool,
    tie: bool,
    bias: bool,
    size: int,
    tmp_path: Path,
) -> None:
    model = tiny_model(**tying(share, tie, lm_head_bias=bias))
    batch = translation_batch([7, 4], [5, 3], vocab_size=25)
    before = model(**batch).logits.detach()
    resized = getattr(model, method)(size)
    if method == "resize_token_embeddings":
        assert resized is model.get_input_embeddings()
        source = size
        target = size if share else 31
    else:
        assert resized is model.model.decoder.embed_tokens
        source = 40
        target = size
    kept = min(target, before.shape[-1])
    after = model(**batch).logits
    assert_near(
        after[..., :kept],
        before[..., :kept],
        1e-6,
        "logits of tokens that were there",
    )
    check_resized(model, source, target, tmp_path)


def test_resize_decoder_token_embeddings_refuses_a_shared_matrix() -> None:
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        tiny_model().resize_decoder_token_embeddings(50)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "model_class",
    [
        VanillaTransformerModel,
        VanillaTransformerEncoderModel,
        VanillaTransformerForSequenceClassification,
    ],
)
def test_resize_token_embeddings_without_an_output_layer(model_class, share, tmp_path):
    model = randomise(model_class(tiny_config(share_encoder_decoder_embeddings=share))).eval()
    model.resize_token_embeddings(53)
    target = 53 if share else 40
    assert model.get_input_embeddings().weight.shape == (53, 32)
    assert model.config.vocab_size == 53
    assert model.config.target_vocab_size == target
    inputs = {"input_ids": torch.tensor([[52, EOS]])}
    if model_class is VanillaTransformerModel:
        assert model.decoder.embed_tokens.weight.shape == (target, 32)
        inputs["decoder_input_ids"] = torch.tensor([[target - 1, EOS]])
    assert_loads_as_it_is(model, tmp_path, inputs)


def test_pad_token_id_may_be_none() -> None:
    model = tiny_model(pad_token_id=None)
    assert model(input_ids=IDS, decoder_input_ids=IDS).logits.isfinite().all()
