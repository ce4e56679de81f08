"""Decoding with `generate`: the paper's settings (§6.1), and the caller's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import EOS, PAD, START, TYING_MODES, assert_near, padded, sentences, tiny_model

BACKENDS = ["eager", "sdpa"]
AS_DICT = {"return_dict_in_generate": True}


def talkative_model(**fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A model that never says the end by itself, so that only a limit stops it."""
    model = tiny_model(lm_head_bias=True, **fields)
    with torch.no_grad():
        model.lm_head.bias[EOS] = -1e4
        model.lm_head.bias[PAD] = -1e4
    return model


def source(lengths: list[int], left: bool = False) -> dict[str, Tensor]:
    ids = padded(sentences(lengths), left=left)
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


@torch.no_grad()
def greedy(model: VanillaTransformerForConditionalGeneration, inputs: dict[str, Tensor], words: int) -> Tensor:
    """The likeliest word, again and again, without a cache or `generate`."""
    target = torch.full((len(inputs["input_ids"]), 1), START)
    done = torch.zeros(len(target), dtype=torch.bool)
    for _ in range(words):
        following = model(**inputs, decoder_input_ids=target, use_cache=False).logits[:, -1].argmax(dim=-1)
        following[done] = PAD
        done |= following.eq(EOS)
        target = torch.cat([target, following[:, None]], dim=1)
        if done.all():
            break
    return target


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("fields", [{}, {"position_encoding_type": "learned", "lm_head_bias": True}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_generate_is_beam_1(backend: str, fields: dict, use_cache: bool) -> None:
    # with a tied output layer a random model only repeats itself
    model = tiny_model(attn_implementation=backend, tie_word_embeddings=False, **fields)
    inputs = source([6, 3, 8])
    written = model.generate(**inputs, num_beams=1, max_new_tokens=12, use_cache=use_cache)
    expected = greedy(model, inputs, 12)
    assert written.tolist() == expected.tolist()
    assert written.shape[1] > 3


@torch.no_grad()
def test_scores_of_a_beam_are_those_of_its_words() -> None:
    # log P / length^0.6, of the words that a cached beam search chose, scored without a cache
    model = tiny_model()
    inputs = source([6, 3])
    output = model.generate(**inputs, max_new_tokens=9, output_scores=True, **AS_DICT)
    logits = model(**inputs, decoder_input_ids=output.sequences[:, :-1]).logits.log_softmax(dim=-1)
    words = output.sequences[:, 1:]
    real = words.ne(PAD)
    log_p = logits.gather(2, words[..., None]).squeeze(2).mul(real).sum(dim=1)
    assert_near(output.sequences_scores, log_p / real.sum(dim=1) ** 0.6)


@torch.no_grad()
def test_beams_find_what_greedy_search_misses() -> None:
    inputs = source([6, 3, 8, 5])
    gains = []
    for seed in range(5):
        model = tiny_model(seed=seed)
        scores = {}
        for beams in (1, 4):
            words = model.generate(**inputs, num_beams=beams, length_penalty=0.0, max_new_tokens=6, min_new_tokens=6)
            logits = model(**inputs, decoder_input_ids=words[:, :-1]).logits.log_softmax(dim=-1)
            scores[beams] = logits.gather(2, words[:, 1:, None]).sum(dim=(1, 2))
        gains.append(scores[4] - scores[1])
    assert torch.cat(gains).mean() > 0.01


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("left", [False, True])
def test_translation_does_not_depend_on_the_batch(beams: int, left: bool) -> None:
    model = tiny_model(tie_word_embeddings=False)
    inputs = source([7, 2, 5], left)
    together = model.generate(**inputs, num_beams=beams, max_new_tokens=10)
    for row, words in zip(together, sentences([7, 2, 5]), strict=True):
        alone = model.generate(torch.tensor([words]), num_beams=beams, max_new_tokens=10)[0]
        assert [word for word in row.tolist() if word != PAD] == [word for word in alone.tolist() if word != PAD]


@pytest.mark.parametrize("beams", [1, 4])
def test_missing_mask_is_made_from_the_pad_token(beams: int) -> None:
    # `GenerationMixin` makes none for models with an encoder.
    model = tiny_model()
    inputs = source([7, 2, 5])
    expected = model.generate(**inputs, num_beams=beams, max_new_tokens=10, output_scores=True, **AS_DICT)
    for given in ({"inputs": inputs["input_ids"]}, {"input_ids": inputs["input_ids"]}):
        actual = model.generate(**given, num_beams=beams, max_new_tokens=10, output_scores=True, **AS_DICT)
        assert actual.sequences.tolist() == expected.sequences.tolist()
        assert_near(actual.scores[0], expected.scores[0])


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_generation_in_every_tying_mode(share: bool, tie: bool) -> None:
    own = {} if share else {"decoder_vocab_size": 31}
    model = tiny_model(share_encoder_decoder_embeddings=share, tie_word_embeddings=tie, **own)
    written = model.generate(**source([6, 3]), num_beams=1, max_new_tokens=8)
    assert written.tolist() == greedy(model, source([6, 3]), 8).tolist()
    assert written.max() < model.config.target_vocab_size


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------


def test_default_limit_is_source_plus_50() -> None:
    model = talkative_model()
    for length in (3, 11):
        inputs = source([length, 2])
        assert model.generate(**inputs).shape[1] == 1 + length + 50
        assert model.generate(inputs["input_ids"], num_beams=1).shape[1] == 1 + length + 50


def test_default_limit_knows_other_kinds_of_source() -> None:
    model = talkative_model()
    inputs = source([5, 3])
    expected = model.generate(**inputs, num_beams=1)
    encoded = model.get_encoder()(**inputs)
    mask = inputs["attention_mask"]
    from_states = model.generate(encoder_outputs=encoded, attention_mask=mask, num_beams=1)
    assert from_states.tolist() == expected.tolist()
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    from_embeds = model.generate(inputs_embeds=embeds, attention_mask=mask, num_beams=1)
    assert from_embeds.tolist() == expected.tolist()


@pytest.mark.parametrize("beams", [1, 4])
def test_encoder_outputs_can_be_given(beams: int) -> None:
    model = tiny_model()
    inputs = source([5, 3, 6])
    encoded = model.get_encoder()(**inputs)
    from_states = model.generate(
        encoder_outputs=encoded, attention_mask=inputs["attention_mask"], num_beams=beams, max_new_tokens=9
    )
    assert from_states.tolist() == model.generate(**inputs, num_beams=beams, max_new_tokens=9).tolist()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_of_fixed_size(backend: str, beams: int) -> None:
    model = tiny_model(attn_implementation=backend, tie_word_embeddings=False)
    settings = {**source([6, 3]), "num_beams": beams, "max_new_tokens": 8}
    expected = model.generate(**settings)
    assert model.generate(**settings, cache_implementation="static").tolist() == expected.tolist()


def test_translation_can_be_started() -> None:
    model = tiny_model(tie_word_embeddings=False)
    inputs = source([6, 3])
    whole = model.generate(**inputs, num_beams=1, max_new_tokens=8)
    rest = model.generate(**inputs, num_beams=1, max_new_tokens=5, decoder_input_ids=whole[:, :4])
    assert rest.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_new_tokens": 7}, 8),
        ({"max_length": 9}, 9),
        ({"max_length": 20}, 20),
        ({"max_new_tokens": 70}, 71),
        ({"generation_config": GenerationConfig(max_new_tokens=6, decoder_start_token_id=START)}, 7),
        ({"generation_config": GenerationConfig(max_length=11, decoder_start_token_id=START)}, 11),
    ],
)
def test_callers_limit_wins(settings: dict, length: int) -> None:
    assert talkative_model().generate(**source([4, 3]), **settings).shape[1] == length


def test_limit_of_the_models_own_generation_config_wins() -> None:
    model = talkative_model()
    model.generation_config.max_new_tokens = 5
    assert model.generate(**source([4])).shape[1] == 6
    assert model.generate(**source([4]), max_new_tokens=8).shape[1] == 9


def test_default_is_a_beam_of_four() -> None:
    model = tiny_model()
    inputs = source([6, 3])
    output = model.generate(**inputs, max_new_tokens=5, output_scores=True, **AS_DICT)
    assert output.scores[0].shape[0] == 2 * 4
    expected = model.generate(**inputs, max_new_tokens=5, num_beams=4)
    assert model.generate(**inputs, max_new_tokens=5).tolist() == expected.tolist()
    assert model.generate(**inputs, max_new_tokens=5, num_return_sequences=4).shape[0] == 8


def test_generation_config_is_saved(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    expected = {"num_beams": 4, "paper_length_penalty": 0.6, "max_length_over_source": 50}
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    assert {name: saved.get(name) for name in expected | special} == expected | special
    assert "length_penalty" not in saved, "it would have Hugging Face's meaning"
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.generation_config.num_beams == 4
    assert loaded.generate(**source([6, 3])).tolist() == model.generate(**source([6, 3])).tolist()


def test_users_generation_config_survives_saving(tmp_path: Path) -> None:
    model = talkative_model()
    model.generation_config.num_beams = 2
    model.generation_config.max_new_tokens = 13
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (loaded.generation_config.num_beams, loaded.generation_config.max_new_tokens) == (2, 13)
    assert loaded.generate(**source([4])).shape[1] == 14


def test_special_words_come_from_the_configuration() -> None:
    model = tiny_model(decoder_start_token_id=7, eos_token_id=[2, 3])
    written = model.generate(**source([4, 6]), max_new_tokens=4)
    assert written[:, 0].tolist() == [7, 7]
    assert model.generation_config.eos_token_id == [2, 3]


def test_sampling() -> None:
    model = tiny_model()
    inputs = source([6, 3])
    settings = {"do_sample": True, "num_beams": 1, "max_new_tokens": 8}
    several = model.generate(**inputs, **settings, num_return_sequences=5)
    assert several.shape[0] == 10
    assert len({tuple(row) for row in several.tolist()}) > 2
    torch.manual_seed(1)
    first = model.generate(**inputs, **settings)
    torch.manual_seed(1)
    assert model.generate(**inputs, **settings).tolist() == first.tolist()


def test_attentions_of_a_translation() -> None:
    model = tiny_model(attn_implementation="eager")
    inputs = source([6, 3])
    output = model.generate(**inputs, num_beams=1, max_new_tokens=4, output_attentions=True, **AS_DICT)
    steps = output.sequences.shape[1] - 1
    assert len(output.cross_attentions) == steps
    for layers in output.cross_attentions:
        assert [tuple(weights.shape) for weights in layers] == [(2, 4, 1, 6)] * 2
        assert_near(layers[0].sum(dim=-1), torch.ones(2, 4, 1), 1e-6)
        assert layers[0][1, :, :, 3:].abs().max() == 0


def test_long_source() -> None:
    assert talkative_model().generate(**source([1100]), num_beams=1, max_new_tokens=3).shape == (1, 4)


def test_a_length_of_20_that_the_caller_gives_counts() -> None:
    model = talkative_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    given = GenerationConfig(max_length=20, num_beams=1, decoder_start_token_id=0, pad_token_id=1)
    assert model.generate(ids, generation_config=given).shape[1] == 20
    assert given.max_length == 20
    model.generation_config.max_length = 20  # as the trainer leaves it
    assert model.generate(ids, num_beams=1).shape[1] == 1 + 4 + 50


def test_learned_positions_end_a_translation_before_they_end() -> None:
    model = talkative_model(position_encoding_type="learned", max_position_embeddings=12)
    assert model.generate(torch.tensor([[5, 6, 7, 8]]), num_beams=1).shape[1] == 1 + 12
