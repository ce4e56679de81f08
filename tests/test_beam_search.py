"""The search over every decoder, against transformers' own loop, and the paper's against a naive one without a cache.

"module" decodes with the model's own modules, "packed" with packed weights.
"""

import functools
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_vanilla_transformer import decoding_vanilla_transformer as decoding_step
from hf_vanilla_transformer import search_vanilla_transformer as search
from hf_vanilla_transformer.decoding_vanilla_transformer import ModuleDecoder
from hf_vanilla_transformer.engine import linear
from hf_vanilla_transformer.engine.ensemble import with_ensemble
from hf_vanilla_transformer.engine.packed_decoder import PackedDecoder
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.search_vanilla_transformer import SearchConfig
from tests.model_helpers import EOS, FIRST_WORD, PAD, START, assert_near, sentences, slow, tiny_model
from tests.search_helpers import (
    AS_DICT,
    ENDS,
    LENGTHS,
    Model,
    batches,
    by_transformers,
    naive_greedy_search,
    naive_search,
    source,
    varied_model,
)

pytestmark = pytest.mark.covering(2)

DECODERS = {"module": ModuleDecoder, "packed": PackedDecoder}


class Decoding:
    """One of the `DECODERS`, and how to translate with it."""

    def __init__(self, name: str):
        self.name, self.made = name, set[type]()

    def prepare(self, model: Model) -> Model:
        return model if self.name == "module" else optimize_for_inference(model)

    def assert_same(self, model: Model, inputs: dict[str, Tensor], **settings: Any) -> list[list[int]]:
        """The same tokens and the same scores as from transformers' own loop. Returns the tokens of all."""
        self.prepare(model)
        sequences, scores = by_transformers_once(model, inputs, settings)
        ours = model.generate(**inputs, **settings, **AS_DICT)
        assert ours.sequences.tolist() == sequences.tolist()
        if scores is not None:
            tolerance = 1e-5 if ours.sequences_scores.abs().max() < 1e4 else 1e30  # bans and forced tokens
            assert_near(ours.sequences_scores.float(), scores.float(), tolerance)
        return ours.sequences.tolist()


Found = tuple[Tensor, Tensor | None]  # tokens and scores of all rows

_FOUND: dict[str, Found] = {}


def by_transformers_once(model: Model, inputs: dict[str, Tensor], settings: dict[str, Any]) -> Found:
    """What transformers finds, which takes longer than our searches. Each decoder is compared with it."""
    sums = [parameter.double().sum().item() for parameter in model.parameters()]
    given = {name: tensor.tolist() for name, tensor in inputs.items()}
    search = repr((model.config.to_dict(), model.generation_config.to_dict(), sums, given, settings))
    if search not in _FOUND:
        output = by_transformers(model, **inputs, **settings, **AS_DICT, output_scores=True)
        _FOUND[search] = output.sequences, output.get("sequences_scores")
    return _FOUND[search]


@pytest.fixture(params=DECODERS)
def decoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    """Each decoder. What a test translates, it must have translated."""
    decoding, make = Decoding(request.param), Model.make_decoder

    def spy(*args: Any) -> Any:
        decoder = make(*args)
        decoding.made |= {type(each) for each in getattr(decoder, "decoders", [decoder])}  # of an ensemble
        return decoder

    monkeypatch.setattr(Model, "make_decoder", spy)
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 0)
    yield decoding
    assert decoding.made <= {DECODERS[decoding.name]}


# The same tokens as transformers


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.6, -0.5, *slow(0.0, 2.0)])
@pytest.mark.parametrize("beams", [2, 5])
def test_beam_search_equals_transformers(beams, length_penalty, early_stopping, decoding):
    settings = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    for seed in ENDS if decoding.name == "module" else [2]:
        decoding.assert_same(varied_model(seed), source(LENGTHS, seed=seed), **settings, max_new_tokens=14)


@pytest.mark.parametrize("positions", ["sinusoidal", *slow("learned")])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("beams", [1, 4])
def test_padding_does_not_change_tokens(beams: int, left: bool, positions: str, decoding: Decoding) -> None:
    model, inputs = varied_model(position_encoding_type=positions), source(LENGTHS, left)
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 14}
    for row, ids in zip(decoding.assert_same(model, inputs, **settings), inputs["input_ids"], strict=True):
        alone = model.generate(ids[ids != PAD][None], **settings)[0].tolist()
        assert row[: len(alone)] == alone


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("beams", [1, 4])
def test_eager_attention_equals_transformers(beams: int, left: bool, positions: str) -> None:
    model = varied_model(attn_implementation="eager", position_encoding_type=positions)
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 14}
    Decoding("module").assert_same(model, source(LENGTHS, left), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64)])
@pytest.mark.parametrize("batch", [1, 2, 33])
@pytest.mark.parametrize("beams", [1, 4])
def test_batches_of_any_size_equal_transformers(beams, batch, dtype, decoding):
    lengths = [1 + i * 7 % 9 for i in range(batch)]
    settings = {"num_beams": beams, "length_penalty": 0.7, "max_new_tokens": 20}
    decoding.assert_same(varied_model().to(dtype), source(lengths), **settings)


@pytest.mark.parametrize("wanted", [2, 4])
def test_num_return_sequences_and_scores_equal_transformers(wanted: int, decoding: Decoding) -> None:
    settings = {"num_beams": 4, "num_return_sequences": wanted, "length_penalty": 0.8, "max_new_tokens": 12}
    found = decoding.assert_same(varied_model(), source(LENGTHS), **settings)
    assert len(found) == wanted * len(LENGTHS)


class NoOddTokenAfterAnother(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores)
        odd = torch.arange(scores.shape[1]) % 2 == 1
        return scores.masked_fill(odd & (input_ids[:, -1:] % 2 == 1), -torch.inf)


SETTINGS: list[dict[str, Any]] = [
    {"min_new_tokens": 6},
    {"min_length": 9},
    {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.7},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 1.9},
    {"bad_words_ids": [[13], [4, 4]]},
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": EOS},
    {"suppress_tokens": [4, 13]},
    {"begin_suppress_tokens": [4, 13, EOS]},
    {"sequence_bias": [[[8], 3.0]]},
    {"exponential_decay_length_penalty": (3, 1.3)},
    {"remove_invalid_values": True, "no_repeat_ngram_size": 1},
    {"renormalize_logits": True, "no_repeat_ngram_size": 2},
    {"logits_processor": LogitsProcessorList([NoOddTokenAfterAnother()])},
    {"prefix_allowed_tokens_fn": lambda batch, tokens: [EOS, 5 + batch, 6 + len(tokens), 12]},
    {"eos_token_id": [EOS, 4, 13]},
    {"eos_token_id": None},
    {"max_length": 3},
    {"max_new_tokens": 1},
]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_every_setting_equals_transformers(beams: int, settings: dict[str, Any], decoding: Decoding) -> None:
    limit = {} if {"max_length", "max_new_tokens"} & settings.keys() else {"max_new_tokens": 11}
    model, inputs = varied_model(), source(LENGTHS)
    found = decoding.assert_same(model, inputs, num_beams=beams, length_penalty=1.0, **settings, **limit)
    if settings.get("forced_eos_token_id") is None and decoding.name == "module":
        plain = model.generate(**inputs, num_beams=beams, length_penalty=1.0, max_new_tokens=11)
        assert found != plain.tolist(), "the setting had no effect"


class EndAfterEvenToken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = torch.arange(scores.shape[1]) == EOS
        return scores + 3.0 * (ends & (input_ids[:, -1:] % 2 == 0))


@pytest.mark.parametrize("beams", [2, 5])
def test_processors_after_the_forced_end_change_its_score(beams: int, decoding: Decoding) -> None:
    after = {"logits_processor": LogitsProcessorList([EndAfterEvenToken()])}
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 4, "forced_eos_token_id": EOS}
    inputs = source([1 + i * 7 % 9 for i in range(12)])
    # no hypothesis ends before the limit
    found = decoding.assert_same(varied_model(end=-9.0), inputs, **settings, **after)
    assert all(len(row) == 5 and row[-1] == EOS for row in found)


@pytest.mark.parametrize("optimized", [False, True])
def test_one_of_several_forced_ends_is_the_last_token(optimized: bool) -> None:
    """They are equally probable. A greedy search takes the first, and the order of beams is free."""
    model = optimize_for_inference(varied_model(end=-9.0)) if optimized else varied_model(end=-9.0)
    greedy = {"num_beams": 1, "max_new_tokens": 4, "forced_eos_token_id": [9, 7]}
    assert model.generate(**source(LENGTHS), **greedy).equal(by_transformers(model, **source(LENGTHS), **greedy))
    settings = {"num_beams": 4, "length_penalty": 1.0, "max_new_tokens": 4, "forced_eos_token_id": [9, 7]}
    settings |= {"num_return_sequences": 4, **AS_DICT}
    ours = model.generate(**source(LENGTHS), **settings)
    theirs = by_transformers(model, **source(LENGTHS), **settings, output_scores=True)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores)
    assert sorted(ours.sequences.tolist()) == sorted(theirs.sequences.tolist())
    assert {row[-1] for row in ours.sequences.tolist()} == {7, 9}


@pytest.mark.parametrize("rule", [None, "opennmt2", "opennmt3"])
@pytest.mark.parametrize("beams", [1, 3])
def test_search_ends_at_the_limit_whatever_the_scores_are(beams: int, rule: str | None) -> None:
    """A penalty that is too large for float32 gives infinite scores. Logits that are no numbers are refused."""
    model = varied_model()
    model.generation_config.beam_search_rule = rule
    settings = {"num_beams": beams, "max_new_tokens": 40}
    assert model.generate(**source(LENGTHS), **settings, length_penalty=300.0).shape[1] <= 41
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate(**source(LENGTHS), **settings)


@pytest.mark.parametrize("rule", ["opennmt2", "opennmt3"])
def test_search_with_too_few_hypotheses_ends_at_the_limit(rule: str) -> None:
    model = varied_model()
    model.generation_config.beam_search_rule = rule
    settings = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40}
    found = model.generate(**source(LENGTHS), prefix_allowed_tokens_fn=lambda *_: [EOS], **settings)
    assert found.tolist() == [[START, EOS]] * 3 * len(LENGTHS)


@pytest.mark.parametrize("longest", [1, 2])
@pytest.mark.parametrize("beams", [1, 2, 4, 8])
def test_best_hypothesis_fills_the_rows_without_one(beams: int, longest: int, decoding: Decoding) -> None:
    """An end that is forced at the first token leaves one hypothesis, for transformers too."""
    model = decoding.prepare(varied_model())
    settings = {"max_new_tokens": longest, "forced_eos_token_id": EOS, "num_beams": beams, "length_penalty": 1.0}
    inputs = source(LENGTHS)
    for rows in {1, (beams + 1) // 2, beams}:
        ours = model.generate(**inputs, **settings, num_return_sequences=rows, **AS_DICT)
        theirs = by_transformers(model, **inputs, **settings, num_return_sequences=rows, output_scores=True, **AS_DICT)
        assert_same_but_for_missing(ours, theirs, rows)
        assert (longest == 1 and rows > 1) == any(has_no_hypothesis(ours))


def has_no_hypothesis(output: Any) -> list[bool]:
    """transformers gives such a row this score."""
    return [] if output.get("sequences_scores") is None else (output.sequences_scores <= -1e8).tolist()


def assert_same_but_for_missing(ours: Any, theirs: Any, rows: int) -> None:
    """Of transformers' equal scores of missing hypotheses, `topk` takes one without tokens last."""
    assert has_no_hypothesis(ours) == has_no_hypothesis(theirs)
    missing = has_no_hypothesis(ours) or [False] * len(ours.sequences)
    best = [row for row in ours.sequences.tolist()[::rows] for _ in range(rows)]
    for row, expected, is_missing, first in zip(
        ours.sequences.tolist(), theirs.sequences.tolist(), missing, best, strict=True
    ):
        if is_missing:
            assert row == first
            assert expected == first or set(expected[1:]) == {PAD}
        else:
            assert row == expected
    if theirs.get("sequences_scores") is not None:
        torch.testing.assert_close(ours.sequences_scores.float(), theirs.sequences_scores.float())


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_allowed_tokens_fn": lambda batch, tokens: [12] if len(tokens) < 3 + batch else [EOS]},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("decoder", ["module", "packed"])
def test_logits_processors_keep_their_rows_when_sentences_end(decoder, beams, settings):
    limit = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 16, "eos_token_id": [EOS, 4]}
    inputs = source([1 + i % 9 for i in range(12)])
    found = Decoding(decoder).assert_same(varied_model(end=-1.0), inputs, **limit, **settings)
    assert any(PAD in row for row in found), "some sentences must end before others"


@pytest.mark.parametrize("beams", [1, 4])
def test_prefixes_equal_transformers(beams: int, decoding: Decoding) -> None:
    model = varied_model()
    prefix = torch.cat([torch.full((5, 1), START), torch.tensor(sentences([4] * 5, 24, seed=3))[:, :3]], dim=1)
    inputs = {**source(LENGTHS), "decoder_input_ids": prefix}
    tokens = decoding.assert_same(model, inputs, num_beams=beams, length_penalty=1.0, max_new_tokens=9)
    assert all(row[:4] == start for row, start in zip(tokens, prefix.tolist(), strict=True))


@pytest.mark.parametrize("beams", [1, 4])
def test_encoder_outputs_and_embeddings_equal_transformers(beams: int, decoding: Decoding) -> None:
    model = decoding.prepare(varied_model())
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 9}
    inputs = source(LENGTHS)
    expected = by_transformers(model, **inputs, **settings).tolist()
    mask, encoded = inputs["attention_mask"], model.get_encoder()(**inputs)
    states = encoded.last_hidden_state.clone()
    for _ in range(2):
        assert model.generate(encoder_outputs=encoded, attention_mask=mask, **settings).tolist() == expected
    assert encoded.last_hidden_state.equal(states), "the caller's own object must not change"
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    assert model.generate(inputs_embeds=embeds, attention_mask=mask, **settings).tolist() == expected


@pytest.mark.parametrize("fields", [{"pad_token_id": 0, "decoder_start_token_id": 0}, {"pad_token_id": EOS}])
@pytest.mark.parametrize("beams", [1, 3])
def test_other_pad_tokens_equal_transformers(beams: int, fields: dict[str, int], decoding: Decoding) -> None:
    model = decoding.prepare(varied_model(**fields))
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 9}
    inputs = source(LENGTHS)
    tokens, expected = model.generate(**inputs, **settings), by_transformers(model, **inputs, **settings)
    assert tokens.shape == expected.shape
    for ours, theirs in zip(tokens.tolist(), expected.tolist(), strict=True):
        end = theirs.index(EOS) + 1 if EOS in theirs else len(theirs)
        assert ours[:end] == theirs[:end]
        # transformers pads with the end where the pad token is 0
        assert set(ours[end:]) <= {fields["pad_token_id"]}


@pytest.mark.parametrize("size", [4, 5, 6])
def test_vocabularies_smaller_than_the_beam_equal_transformers(size: int, decoding: Decoding) -> None:
    # one or two tokens beside the special ones
    model = tiny_model(vocab_size=size, tie_word_embeddings=False)
    ids = torch.tensor([[size - 1, EOS], [EOS, PAD]])
    inputs = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
    decoding.prepare(model)
    settings = {"num_beams": 5, "length_penalty": 1.0, "max_new_tokens": 5}
    assert model.generate(**inputs, **settings).equal(by_transformers(model, **inputs, **settings))
    assert len(model.generate(**inputs)) == len(ids)


def test_beams_beyond_the_first_cache_slots_equal_transformers(decoding: Decoding) -> None:
    settings = {"num_beams": 18, "length_penalty": 1.0, "max_new_tokens": 30}
    decoding.assert_same(varied_model(vocab_size=40), source(LENGTHS), **settings)


def test_long_translations_equal_transformers(decoding: Decoding) -> None:
    settings = {"num_beams": 2, "length_penalty": 1.0, "max_new_tokens": 200}
    tokens = torch.tensor(decoding.assert_same(varied_model(end=-1e4), source([4]), **settings))
    assert tokens.shape == (1, 201)
    assert tokens[:, 1:].min() >= FIRST_WORD


@pytest.mark.parametrize(
    "fields",
    [
        {"final_layer_norm": True},
        {"layer_norm_position": "pre"},
        {"position_encoding_type": "learned"},
        {"position_encoding_type": "sinusoidal_fairseq"},
        {"head_dim": 6, "value_head_dim": 10, "scale_embedding": False},
        {"activation_function": "gelu", "attention_bias": False},
        {"decoder_vocab_size": 30, "share_encoder_decoder_embeddings": False, "decoder_layers": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_kind_of_decoder_equals_transformers(fields: dict[str, Any], decoding: Decoding) -> None:
    if "decoder_vocab_size" in fields and tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):
        pytest.skip("the beam search of transformers 5.17 takes the source's vocabulary size; that of 5.23 does not")
    settings = {"num_beams": 4, "length_penalty": 1.0, "max_new_tokens": 14}
    decoding.assert_same(varied_model(**fields).double(), source(LENGTHS), **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_does_not_change_scores(dtype: torch.dtype, decoding: Decoding) -> None:
    model, before = decoding.prepare(varied_model()), torch.get_default_dtype()
    inputs = source(LENGTHS)
    prefix = torch.full_like(inputs["input_ids"][:, :3], 9)
    settings = {"num_beams": 3, "max_new_tokens": 9, "decoder_input_ids": prefix}
    expected = model.generate(**inputs, **settings, **AS_DICT)
    try:
        torch.set_default_dtype(dtype)
        found = model.generate(**inputs, **settings, **AS_DICT)
    finally:
        torch.set_default_dtype(before)
    assert found.sequences.equal(expected.sequences)
    assert_near(found.sequences_scores, expected.sequences_scores, 1e-6)


# The paper's search


@functools.cache
def best_two(seed: int, ids: tuple[int, ...], beams: int, alpha: float, longest: int) -> list[tuple[float, list[int]]]:
    return naive_search([varied_model(seed)], list(ids), beams, alpha, longest)[:2]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("beams", [2, 4])
def test_default_search_is_the_papers(beams: int, alpha: float, decoding: Decoding) -> None:
    longest, lengths = 9, [5, 2, 7]
    for seed in ENDS:
        model = decoding.prepare(varied_model(seed))
        model.generation_config.paper_length_penalty = alpha
        model.generation_config.num_beams = beams
        settings = {"max_new_tokens": longest, "num_return_sequences": 2, **AS_DICT}
        output = model.generate(**source(lengths), **settings)
        sequences, scores = output.sequences.tolist(), output.sequences_scores.tolist()
        expected = [
            pair for ids in sentences(lengths, 24) for pair in best_two(seed, tuple(ids), beams, alpha, longest)
        ]
        for row, score, (wanted_score, wanted) in zip(sequences, scores, expected, strict=True):
            assert score == pytest.approx(wanted_score, abs=1e-5)
            assert row[: len(wanted)] == wanted
            assert set(row[len(wanted) :]) <= {PAD}


@pytest.mark.parametrize("lengths", [[3, 9, 5], [4, 4, 1]])
def test_default_limit_counts_each_sentences_own_tokens(lengths: list[int], decoding: Decoding) -> None:
    model = decoding.prepare(varied_model(end=-1e4))  # no hypothesis ends by itself
    model.generation_config.max_length_over_source = 5
    tokens = model.generate(**source(lengths), num_beams=2)
    assert tokens.ne(PAD).sum(dim=1).tolist() == [1 + length + 5 for length in lengths]


def test_forced_eos_token_ends_each_sentence_at_its_own_limit(decoding: Decoding) -> None:
    model = decoding.prepare(varied_model(end=-1e4))
    model.generation_config.max_length_over_source = 4
    for beams in (1, 3):
        for row in model.generate(**source([3, 7, 1]), num_beams=beams, forced_eos_token_id=EOS).tolist():
            tokens = [token for token in row if token != PAD]
            assert tokens[-1] == EOS
        for ids, length in zip(sentences([3, 7, 1], 24), (3, 7, 1), strict=True):
            alone = model.generate(torch.tensor([ids]), num_beams=beams, forced_eos_token_id=EOS)
            assert alone.shape[1] == 1 + length + 4


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("beams", [1, 3])
def test_limits_within_the_prefix_give_one_more_token(beams: int, positions: str, decoding: Decoding) -> None:
    model = decoding.prepare(varied_model(position_encoding_type=positions, max_position_embeddings=20))
    model.generation_config.max_length_over_source = -3
    prefix = torch.tensor([[START, 7, 9]] * 2)
    assert model.generate(**source([3, 2]), decoder_input_ids=prefix, num_beams=beams).shape[1] == 4


@pytest.mark.parametrize("decoder", ["module", "packed"])
def test_fully_masked_source_ends(decoder: str) -> None:
    model, inputs = Decoding(decoder).prepare(varied_model()), source([3, 5])
    model.generation_config.max_length_over_source = 0
    inputs["attention_mask"][0] = 0
    alone = model.generate(inputs["input_ids"][1:], attention_mask=inputs["attention_mask"][1:])[0].tolist()
    found = model.generate(**inputs)
    assert found[1].tolist()[: len(alone)] == alone
    assert found[0].ne(PAD).sum() == 2


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_learned_positions_bound_prefix_and_continuation(length: int, beams: int, decoding: Decoding) -> None:
    fields = {"position_encoding_type": "learned", "max_position_embeddings": 12}
    model = decoding.prepare(varied_model(end=-1e4, **fields))
    prefix = torch.tensor([[START, *range(5, 16)][:length]])
    tokens = model.generate(**source([4]), decoder_input_ids=prefix, num_beams=beams, length_penalty=1.0)
    expected = {"max_length": 13, "num_beams": beams, "length_penalty": 1.0}
    assert tokens.equal(by_transformers(model, **source([4]), decoder_input_ids=prefix, **expected))
    assert tokens.shape[1] == 13
    longer = {**expected, "max_length": 40}
    assert model.generate(**source([4]), decoder_input_ids=prefix, **longer).equal(tokens)


# Batches: ensembles, sentences that come later, sentences that end


@pytest.mark.parametrize("beams", [1, 3])
def test_ensemble_searches_with_the_mean_probability(beams: int, decoding: Decoding) -> None:
    lengths, settings = [5, 2, 7], {"num_beams": beams, "max_new_tokens": 8}
    models = [varied_model(0, end=-1.0), varied_model(1, d_model=16, decoder_layers=1), varied_model()]
    for model in models:
        decoding.prepare(model)
    found = with_ensemble(models).generate(**source(lengths), **settings).tolist()
    for row, ids in zip(found, sentences(lengths, 24), strict=True):
        if beams == 1:
            expected = naive_greedy_search(models, ids, 8)
        else:
            expected = naive_search(models, ids, beams, 0.6, 8)[0][1]
        assert row[: len(expected)] == expected
    alone = models[0].generate(**source(lengths), **settings).tolist()
    assert found != alone
    twice = with_ensemble([models[0], models[0]])
    assert twice.generate(**source(lengths), **settings).tolist() == alone


def test_ensemble_of_different_decoders_is_that_of_modules() -> None:
    models, settings = [varied_model(0), varied_model(1)], {**source(LENGTHS), "max_new_tokens": 12}
    together = with_ensemble(models)
    expected = together.generate(**settings)
    optimize_for_inference(models[1])
    assert together.generate(**settings).equal(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"next_batch": lambda count: None, "do_sample": True}, "next_batch: .* do_sample"),
        ({"next_batch": lambda count: None, "encoder_repetition_penalty": 1.5}, "next_batch: .* encoder_repetition_p"),
        ({"next_batch": lambda count: None, "prefix_allowed_tokens_fn": len}, "next_batch: .* prefix_allowed_tokens"),
        ({"next_batch": lambda count: (torch.zeros(0, 3).long(),) * 2}, "next_batch: .* 0"),
        ({"next_batch": lambda count: tuple(source([3, 3]).values())}, "next_batch: .* 2"),
        ({"next_batch": lambda count: (*source([3]).values(), torch.ones(1, 4).long())}, "next_batch: .* 4"),
        ({"decoder_input_ids": torch.tensor([[START, 24]])}, "decoder_input_ids .* 24"),
        ({"decoder_input_ids": torch.tensor([[START, -1, 5]])}, "decoder_input_ids .* -1"),
        ({"num_beam": 2}, "num_beam"),
    ],
)
@pytest.mark.parametrize("decoder", ["module", "packed"])
def test_wrong_arguments_are_refused_by_name(decoder: str, given: dict[str, Any], message: str) -> None:
    model = Decoding(decoder).prepare(varied_model())
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            model.generate(**source([3]), **given)


@pytest.mark.parametrize("kind", ["do_sample", "encoder_outputs", "inputs_embeds"])
def test_ensemble_refuses_sampling_and_encoded_sources(kind: str) -> None:
    model, inputs = varied_model(), source([3])
    if kind == "do_sample":
        inputs["do_sample"] = True
    elif kind == "encoder_outputs":
        inputs = {kind: model.get_encoder()(**inputs), "attention_mask": inputs["attention_mask"]}
    else:
        inputs[kind] = model.get_input_embeddings()(inputs.pop("input_ids"))
    message = "do_sample" if kind == "do_sample" else "input_ids"
    together = with_ensemble([model, varied_model(1)])
    with pytest.raises(ValueError, match=f"ensemble: .*{message}"):
        together.generate(**inputs)


REFILLED = {
    "default": {},
    "length_penalty": {"length_penalty": 1.3, "max_new_tokens": 12},
    "greedy": {"num_beams": 1},
    "early_stopping": {"length_penalty": 0.5, "early_stopping": True, "max_new_tokens": 9},
    "num_return_sequences": {"num_return_sequences": 3},
    "learned positions": {"position_encoding_type": "learned", "max_position_embeddings": 30},
    "processors": {"no_repeat_ngram_size": 2, "max_new_tokens": 10},
    "prefix": {"decoder_input_ids": torch.tensor([[START, 9, 12]])},
}


def refilled(case: str) -> tuple[Model, dict[str, Any]]:
    """The model of a case, and the arguments of its search."""
    settings = dict(REFILLED[case])
    fields = {name: settings.pop(name) for name in list(settings) if "position" in name}
    model = varied_model(**fields)
    model.generation_config.max_length_over_source = 6
    return model, settings


@functools.cache
def alone_by_modules(case: str, ids: tuple[int, ...]) -> Any:
    model, settings = refilled(case)
    return model.generate(input_ids=torch.tensor([ids]), **settings, **AS_DICT)


@pytest.mark.parametrize("case", REFILLED)
def test_refilled_sentences_equal_sentences_alone(case: str, decoding: Decoding) -> None:
    now, later, asked = [7, 2, 5, 9, 1, 3], [4, 12, 1, 8, 8, 3, 2, 6, 10, 1, 5], []
    alone = [alone_by_modules(case, tuple(ids)) for ids in sentences(now, 24) + sentences(later, 24, seed=9)]
    decoding.made.clear()
    model, settings = refilled(case)
    decoding.prepare(model)
    given = {
        name: value.expand(len(now), -1) if isinstance(value, Tensor) else value for name, value in settings.items()
    }
    found = model.generate(**source(now), **given, next_batch=batches(later, asked), **AS_DICT)
    assert max(asked) <= len(now)
    wanted = settings.get("num_return_sequences", 1)
    rows = found.sequences.unflatten(0, (-1, wanted)).tolist()
    assert len(rows) == len(alone)
    for i, expected in enumerate(alone):
        for row, one in zip(rows[i], expected.sequences.tolist(), strict=True):
            assert row[: len(one)] == one
            assert set(row[len(one) :]) <= {PAD}
        if settings.get("num_beams") != 1:
            assert_near(found.sequences_scores[i * wanted : (i + 1) * wanted], expected.sequences_scores)


def test_batch_is_refilled_before_all_sentences_end() -> None:
    asked: list[int] = []
    varied_model().generate(**source([5] * 30), num_beams=2, next_batch=batches([5] * 60, asked))
    assert all(1 < count < 30 for count in asked[:5])  # neither for each alone nor only when all are done


def test_next_batch_is_asked_until_no_row_is_empty() -> None:
    asked: list[int] = []
    found = varied_model().generate(**source([5] * 4), num_beams=2, next_batch=batches([5] * 12, asked, most=1))
    assert len(found) == 16
    assert len(asked) == 13


def test_ensemble_is_refilled(decoding: Decoding) -> None:
    models = [varied_model(0, end=-1.0), varied_model(1, d_model=16, decoder_layers=1)]
    for model in models:
        decoding.prepare(model)
    models[0].generation_config.max_length_over_source = 6
    now = [5, 2, 7]
    together = with_ensemble(models)
    found = together.generate(**source(now), next_batch=batches([3, 9, 4], []))
    for row, ids in zip(found.tolist(), sentences(now, 24) + sentences([3, 9, 4], 24, 9), strict=True):
        alone = together.generate(input_ids=torch.tensor([ids]))[0].tolist()
        assert row[: len(alone)] == alone


@pytest.mark.parametrize("decoder", ["module", "packed"])
def test_finished_sentences_leave_the_batch(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, extend = [], SearchConfig.extend
    monkeypatch.setattr(SearchConfig, "extend", lambda *args: rows.append(len(args[2])) or extend(*args))
    model = Decoding(decoder).prepare(varied_model())
    tokens = model.generate(**source([1 + i % 9 for i in range(20)]), num_beams=1, max_new_tokens=30)
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 20
    assert rows[-1] < 16, "some sentences end early"
    assert len(tokens) == 20


@pytest.mark.parametrize("at_once", [3, 8])
@pytest.mark.parametrize("beams", [1, 4])
def test_steps_between_synchronisations_do_not_change_tokens(beams, at_once, decoding, monkeypatch):
    for module in (decoding_step, search):
        monkeypatch.setattr(module, "steps_at_once", lambda device: at_once)
    settings = {"num_beams": beams, "length_penalty": 0.9, "max_new_tokens": 13}
    decoding.assert_same(varied_model(), source(LENGTHS), **settings)
    decoding.assert_same(varied_model(), source(LENGTHS), **settings, no_repeat_ngram_size=2)
