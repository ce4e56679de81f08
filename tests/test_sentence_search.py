"""The search for one sentence, made of numbers and lists, against transformers' own loop and the naive one.

There is no compiler here: a program is the module that it would be made of.
"""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationMixin

from hf_vanilla_transformer import sentence_vanilla_transformer as sentence
from tests.model_helpers import EOS, PAD, START, assert_near, padded, sentences, tiny_model
from tests.test_beam_search import (
    AS_DICT,
    ENDS,
    LENGTHS,
    SETTINGS,
    Translator,
    by_transformers,
    eloquent_model,
    naive_search,
    source,
)


class NotCompiled:
    def __init__(self, module: nn.Module):
        self.module = copy.copy(module)

    def __call__(self, *args: Any, kind: Any = None) -> Any:
        return self.module.forward(*args)


@pytest.fixture(autouse=True)
def searches(monkeypatch: pytest.MonkeyPatch) -> list[sentence.SentenceSearch]:
    """Those that have run."""
    seen: list[sentence.SentenceSearch] = []
    original = sentence.SentenceSearch.run
    monkeypatch.setattr(sentence, "Program", NotCompiled)
    monkeypatch.setattr(sentence.SentenceSearch, "run", lambda self: seen.append(self) or original(self))
    return seen


def assert_same(model: Translator, searches: list[Any], lengths: list[int] = LENGTHS, **settings: Any) -> None:
    """The same words for each sentence alone, and the same scores."""
    settings |= AS_DICT
    for seed, length in enumerate(lengths):
        inputs = source([length], seed=seed)
        ours = model.generate(**inputs, compiled=True, **settings)
        theirs = by_transformers(model, **inputs, **settings, output_scores=True)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        if settings["num_beams"] > 1:
            assert_near(ours.sequences_scores, theirs.sequences_scores)
    assert len(searches) == len(lengths)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0, -0.5])
@pytest.mark.parametrize("beams", [2, 5])
def test_beam_search_is_that_of_transformers(
    beams: int, length_penalty: float, early_stopping: bool | str, searches: list[Any]
) -> None:
    for seed in ENDS:
        settings = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        assert_same(eloquent_model(seed), searches, **settings, max_new_tokens=14)
        searches.clear()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_same_words_under_every_setting(beams: int, settings: dict[str, Any], searches: list[Any]) -> None:
    limit = {} if {"max_length", "max_new_tokens"} & settings.keys() else {"max_new_tokens": 11}
    assert_same(eloquent_model(), searches, num_beams=beams, length_penalty=1.0, **settings, **limit)


@pytest.mark.parametrize("beams", [1, 4])
def test_same_words_after_a_prefix(beams: int, searches: list[Any]) -> None:
    prefix = torch.tensor([[START, 9, 12, 7]])
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 9, "decoder_input_ids": prefix}
    assert_same(eloquent_model(), searches, **settings)


@pytest.mark.parametrize(
    "fields",
    [
        {"final_layer_norm": True},
        {"position_encoding_type": "learned"},
        {"head_dim": 6, "value_head_dim": 10, "scale_embedding": False},
        {"activation_function": "gelu", "attention_bias": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_kind_of_decoder_is_read(fields: dict[str, Any], searches: list[Any]) -> None:
    settings = {"num_beams": 4, "length_penalty": 1.0, "max_new_tokens": 14}
    assert_same(eloquent_model(**fields).double(), searches, **settings)


@pytest.mark.parametrize("wanted", [2, 4])
def test_several_translations_and_their_scores(wanted: int, searches: list[Any]) -> None:
    settings = {"num_beams": 4, "num_return_sequences": wanted, "length_penalty": 0.8, "max_new_tokens": 12}
    assert_same(eloquent_model(), searches, **settings)


def test_more_beams_than_places_at_first(searches: list[Any]) -> None:
    model = eloquent_model(vocab_size=40)
    assert_same(model, searches, num_beams=18, length_penalty=1.0, max_new_tokens=30)


@pytest.mark.parametrize("words", [4, 5, 6])
def test_vocabulary_smaller_than_the_beam(words: int, searches: list[Any]) -> None:
    model, ids = tiny_model(vocab_size=words, tie_word_embeddings=False), torch.tensor([[words - 1, EOS]])
    settings = {"num_beams": 5, "length_penalty": 1.0, "max_new_tokens": 5}
    expected = by_transformers(model, input_ids=ids, attention_mask=ids.ne(PAD).long(), **settings)
    assert model.generate(ids, compiled=True, **settings).tolist() == expected.tolist()
    assert len(searches) == 1


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("beams", [2, 4])
def test_default_search_is_the_papers(beams: int, alpha: float, searches: list[Any]) -> None:
    longest = 9
    for seed in ENDS:
        model = eloquent_model(seed)
        settings = {"num_beams": beams, "paper_length_penalty": alpha, "max_new_tokens": longest}
        for words in sentences([5, 2, 7], 24):
            output = model.generate(
                torch.tensor([words]), compiled=True, num_return_sequences=2, **settings, **AS_DICT
            )
            expected = naive_search([model], words, beams, alpha, longest)[:2]
            found = zip(output.sequences.tolist(), output.sequences_scores.tolist(), expected, strict=True)
            for row, score, (wanted_score, wanted) in found:
                assert score == pytest.approx(wanted_score, abs=1e-5)
                assert row[: len(wanted)] == wanted
                assert set(row[len(wanted) :]) <= {PAD}
    assert len(searches) == 9


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_not_read(left: bool, searches: list[Any]) -> None:
    model, rows = eloquent_model(), padded(sentences([6, 3], 24), left=left)
    mask = rows.ne(PAD).long()
    expected = model.generate(rows, attention_mask=mask)[1].tolist()
    found = model.generate(rows[1:], attention_mask=mask[1:], compiled=True)[0].tolist()
    assert found == expected[: len(found)]
    assert len(searches) == 1


def test_source_that_shows_nothing_is_left_to_the_other_search(searches: list[Any]) -> None:
    model, ids = eloquent_model(), padded(sentences([3], 24))
    nothing = torch.zeros_like(ids)
    expected = model.generate(ids, attention_mask=nothing, max_new_tokens=5)
    assert model.generate(ids, attention_mask=nothing, max_new_tokens=5, compiled=True).equal(expected)
    assert not searches


def test_ensemble_goes_without_programs(searches: list[Any]) -> None:
    models, inputs = [eloquent_model(0), eloquent_model(1)], source([5])
    expected = models[0].generate(**inputs, ensemble=models[1:])
    assert models[0].generate(**inputs, ensemble=models[1:], compiled=True).equal(expected)
    assert not searches


def test_places_that_nobody_sees_are_written_again() -> None:
    programs = sentence.programs_for(eloquent_model(), None)
    assert programs is not None
    reader = sentence.SentenceReader(programs, programs.source(torch.tensor([[5, 6, EOS]])), 2)
    assert reader._places([0, 0]) == [0, 1]
    assert reader._places([0, 1]) == [2, 3]
    assert reader._places([1, 1]) == [0, 2]
    assert reader.seen == [0b1011, 0b1110]


def test_source_outside_the_vocabulary_says_so() -> None:
    with pytest.raises(ValueError, match="input_ids holds 99, but the vocabulary ends at 23"):
        eloquent_model().generate(torch.tensor([[5, 99, EOS]]), compiled=True)


def test_encoder_outputs_are_taken_as_they_are(searches: list[Any]) -> None:
    model, inputs = eloquent_model(), source([5])
    encoded = model.get_encoder()(**inputs)
    found = model.generate(encoder_outputs=encoded, attention_mask=inputs["attention_mask"], compiled=True)
    assert found.equal(model.generate(**inputs))
    assert not searches


# ---------------------------------------------------------------------------------------------------------------------
# The same request again
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that transformers has prepared."""
    seen: list[Any] = []
    original = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda *args, **kw: seen.append(1) or original(*args, **kw))
    return seen


def test_a_request_is_prepared_once(searches: list[Any], prepared: list[Any]) -> None:
    model, settings = eloquent_model(), {"num_beams": 3, "length_penalty": 1.0, **AS_DICT}
    for seed, length in enumerate(LENGTHS):
        inputs = source([length], seed=seed)
        found = model.generate(**inputs, compiled=True, **settings)
        alone = model.generate(**inputs, **settings)
        assert found.sequences.tolist() == alone.sequences.tolist()
        assert_near(found.sequences_scores, alone.sequences_scores)
    assert len(searches) == len(LENGTHS)
    assert len(prepared) == 1 + len(LENGTHS)


def another_argument(model: Translator) -> dict[str, Any]:
    return {"num_beams": 2}


def another_field(model: Translator) -> dict[str, Any]:
    model.generation_config.max_length_over_source = 2
    return {}


def a_field_changed_in_place(model: Translator) -> dict[str, Any]:
    model.generation_config.eos_token_id.append(4)
    return {}


def processors(model: Translator) -> dict[str, Any]:
    return {"no_repeat_ngram_size": 1}


@pytest.mark.parametrize("change", [another_argument, another_field, a_field_changed_in_place, processors])
def test_another_request_is_another(change: Any, prepared: list[Any]) -> None:
    model, inputs = eloquent_model(end=-2.0), source([6])
    model.generation_config.eos_token_id = [EOS]
    model.generate(**inputs, compiled=True)
    changed = change(model)
    prepared.clear()
    found = model.generate(**inputs, compiled=True, **changed)
    assert len(prepared) == 1
    assert found.equal(model.generate(**inputs, **changed))


def test_a_wrong_name_is_found_again() -> None:
    model = eloquent_model()
    for _ in range(2):
        model.generate(**source([6]), compiled=True)
        with pytest.raises(ValueError, match="compiled: with these settings transformers' own loop translates"):
            model.generate(**source([6]), compiled=True, num_beam=2)


def test_requests_do_not_keep_models() -> None:
    model = eloquent_model()
    model.generate(**source([6]), compiled=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
