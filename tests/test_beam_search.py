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
from tests.model_helpers import (
    EOS,
    FIRST_WORD,
    PAD,
    START,
    assert_near,
    sentences,
    slow,
    tiny_model,
)
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

greedy_or_beams = pytest.mark.parametrize("beams", [1, 4])
two_or_five_beams = pytest.mark.parametrize("beams", [2, 5])

DECODERS = {"module": ModuleDecoder, "packed": PackedDecoder}
SOURCE = source(LENGTHS)
TWELVE = source([1 + i * 7 % 9 for i in range(12)])  # a batch that is large enough to lose rows
NEVER = -1e4  # bias of the end token: no hypothesis ends by itself


class Decoding:
    """One of the `DECODERS`, and how to translate with it."""

    def __init__(self, name: str):
        self.name = name
        self.made = set[type]()

    def prepare(self, model: Model) -> Model:
        return model if self.name == "module" else optimize_for_inference(model)

    def assert_same(
        self,
        model: Model,
        inputs: dict[str, Tensor],
        **settings: Any,
    ) -> list[list[int]]:
        """The same tokens and the same scores as from transformers' own loop. Returns the tokens of all."""
        self.prepare(model)
        sequences, scores = by_transformers_once(model, inputs, settings)
        ours = model.generate(**inputs, **settings, **AS_DICT)
        assert ours.sequences.tolist() == sequences.tolist()
        if scores is not None:
            has_ban = ours.sequences_scores.abs().max() >= 1e4  # or a forced token
            assert_near(
                ours.sequences_scores.float(),
                scores.float(),
                tolerance=1e30 if has_ban else 1e-5,
            )
        return ours.sequences.tolist()


Found = tuple[Tensor, Tensor | None]  # tokens and scores of all rows

_FOUND: dict[str, Found] = {}


def by_transformers_once(
    model: Model,
    inputs: dict[str, Tensor],
    settings: dict[str, Any],
) -> Found:
    """What transformers finds, which takes longer than our searches. Each decoder is compared with it."""
    key = repr(
        (
            model.config.to_dict(),
            model.generation_config.to_dict(),
            [parameter.double().sum().item() for parameter in model.parameters()],
            {name: tensor.tolist() for name, tensor in inputs.items()},
            settings,
        )
    )
    if key not in _FOUND:
        output = by_transformers(
            model,
            **inputs,
            **settings,
            **AS_DICT,
            output_scores=True,
        )
        _FOUND[key] = output.sequences, output.get("sequences_scores")
    return _FOUND[key]


@pytest.fixture(params=DECODERS)
def decoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    """Each decoder. What a test translates, it must have translated."""
    decoding = Decoding(request.param)
    make = Model.make_decoder

    def spy(*args: Any) -> Any:
        decoder = make(*args)
        of_ensemble = getattr(decoder, "decoders", [decoder])
        decoding.made |= set(map(type, of_ensemble))
        return decoder

    monkeypatch.setattr(Model, "make_decoder", spy)
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 0)
    yield decoding
    assert decoding.made <= {DECODERS[decoding.name]}


def hugging_face(beams: int, longest: int, penalty: float = 1.0) -> dict[str, Any]:
    """Settings of a search that transformers has, too. Without a penalty of the caller it is the paper's."""
    return {
        "num_beams": beams,
        "max_new_tokens": longest,
        "length_penalty": penalty,
    }


def assert_row(row: list[int], tokens: list[int]) -> None:
    """These tokens, and then padding."""
    assert row[: len(tokens)] == tokens
    assert set(row[len(tokens) :]) <= {PAD}


# The same tokens as transformers


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.6, -0.5, *slow(0.0, 2.0)])
@two_or_five_beams
def test_beam_search_equals_transformers(beams, length_penalty, early_stopping, decoding):
    settings = hugging_face(beams, 14, length_penalty)
    for seed in ENDS if decoding.name == "module" else [2]:
        decoding.assert_same(
            varied_model(seed),
            source(LENGTHS, seed=seed),
            early_stopping=early_stopping,
            **settings,
        )


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("left", [False, True])
@greedy_or_beams
def test_padding_does_not_change_tokens(
    beams: int,
    left: bool,
    positions: str,
    decoding: Decoding,
) -> None:
    model = varied_model(position_encoding_type=positions)
    inputs = source(LENGTHS, left)
    settings = hugging_face(beams, 14)
    together = decoding.assert_same(model, inputs, **settings)
    for row, ids in zip(together, inputs["input_ids"], strict=True):
        (alone,) = model.generate(ids[ids != PAD][None], **settings).tolist()
        assert_row(row, alone)
    if decoding.name == "module":
        model.set_attn_implementation("eager")
        decoding.assert_same(model, inputs, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64)])
@pytest.mark.parametrize("batch", [1, 2, 33])
@greedy_or_beams
def test_batches_of_any_size_equal_transformers(beams, batch, dtype, decoding):
    inputs = source([1 + i * 7 % 9 for i in range(batch)])
    decoding.assert_same(
        varied_model().to(dtype),
        inputs,
        **hugging_face(beams, 20, penalty=0.7),
    )


@pytest.mark.parametrize("wanted", [2, 4])
def test_num_return_sequences_and_scores_equal_transformers(
    wanted: int, decoding: Decoding
) -> None:
    settings = hugging_face(4, 12, penalty=0.8)
    found = decoding.assert_same(
        varied_model(),
        SOURCE,
        num_return_sequences=wanted,
        **settings,
    )
    assert len(found) == wanted * len(LENGTHS)


class NoOddTokenAfterAnother(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores)
        odd = torch.arange(scores.shape[1]) % 2 == 1
        follows_odd = input_ids[:, -1:] % 2 == 1
        return scores.masked_fill(odd & follows_odd, -torch.inf)


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
    {"max_length": 3, "max_new_tokens": None},
    {"max_new_tokens": 1},
]


def first_name(fields: dict[str, Any]) -> str:
    return next(iter(fields))


@greedy_or_beams
@pytest.mark.parametrize("settings", SETTINGS, ids=first_name)
def test_every_setting_equals_transformers(
    beams: int,
    settings: dict[str, Any],
    decoding: Decoding,
) -> None:
    usual = hugging_face(beams, 11)
    model = varied_model()
    found = decoding.assert_same(model, SOURCE, **usual | settings)
    if settings.get("forced_eos_token_id") is None and decoding.name == "module":
        plain = model.generate(**SOURCE, **usual)
        assert found != plain.tolist(), "the setting had no effect"


class EndAfterEvenToken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        is_end = torch.arange(scores.shape[1]) == EOS
        follows_even = input_ids[:, -1:] % 2 == 0
        return scores + 3.0 * (is_end & follows_even)


@two_or_five_beams
def test_processors_after_the_forced_end_change_its_score(beams: int, decoding: Decoding) -> None:
    found = decoding.assert_same(
        varied_model(end=-9.0),  # no hypothesis ends before the limit
        TWELVE,
        forced_eos_token_id=EOS,
        logits_processor=LogitsProcessorList([EndAfterEvenToken()]),
        **hugging_face(beams, 4),
    )
    assert all(len(row) == 5 and row[-1] == EOS for row in found)


@pytest.mark.parametrize("optimized", [False, True])
def test_one_of_several_forced_ends_is_the_last_token(optimized: bool) -> None:
    """They are equally probable. A greedy search takes the first, and the order of beams is free."""
    model = varied_model(end=-9.0)
    if optimized:
        optimize_for_inference(model)
    inputs = SOURCE | {"forced_eos_token_id": [9, 7]}
    greedy = inputs | hugging_face(1, 4)
    assert model.generate(**greedy).equal(by_transformers(model, **greedy))
    settings = {
        **inputs,
        **hugging_face(4, 4),
        **AS_DICT,
        "num_return_sequences": 4,
        "output_scores": True,
    }
    ours = model.generate(**settings)
    theirs = by_transformers(model, **settings)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores)
    assert sorted(ours.sequences.tolist()) == sorted(theirs.sequences.tolist())
    assert {row[-1] for row in ours.sequences.tolist()} == {7, 9}


@pytest.mark.parametrize("rule", [None, "opennmt2", "opennmt3"])
@greedy_or_beams
def test_search_ends_at_the_limit_whatever_the_scores_are(beams: int, rule: str | None) -> None:
    """A penalty that is too large for float32 gives infinite scores. Logits that are no numbers are refused."""
    model = varied_model()
    model.generation_config.beam_search_rule = rule
    tokens = model.generate(**SOURCE, **hugging_face(beams, 40, penalty=300.0))
    assert tokens.shape[1] <= 41
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate(**SOURCE, num_beams=beams, max_new_tokens=40)


@pytest.mark.parametrize("rule", ["opennmt2", "opennmt3"])
def test_search_with_too_few_hypotheses_ends_at_the_limit(rule: str) -> None:
    model = varied_model()
    model.generation_config.beam_search_rule = rule
    found = model.generate(
        **SOURCE,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=40,
        prefix_allowed_tokens_fn=lambda *_: [EOS],
    )
    assert found.tolist() == [[START, EOS]] * 3 * len(LENGTHS)


@pytest.mark.parametrize("longest", [1, 2])
@pytest.mark.parametrize("beams", [1, 2, 4, 8])
def test_best_hypothesis_fills_the_rows_without_one(
    beams: int,
    longest: int,
    decoding: Decoding,
) -> None:
    """An end that is forced at the first token leaves one hypothesis, for transformers too."""
    model = varied_model()
    for rows in {1, (beams + 1) // 2, beams}:
        settings = {
            **hugging_face(beams, longest),
            "forced_eos_token_id": EOS,
            "num_return_sequences": rows,
        }
        if longest == 2:
            decoding.assert_same(model, SOURCE, **settings)
            continue
        decoding.prepare(model)
        ours = model.generate(**SOURCE, **settings, **AS_DICT)
        assert ours.sequences.tolist() == [[START, EOS]] * rows * len(LENGTHS)
        if beams > 1:
            _, scores = by_transformers_once(model, SOURCE, settings)
            torch.testing.assert_close(ours.sequences_scores.float(), scores.float())
            assert (scores <= -1e8).sum() == (rows - 1) * len(LENGTHS)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "prefix_allowed_tokens_fn": lambda batch, tokens: (
                [12] if len(tokens) < 3 + batch else [EOS]
            )
        },
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
    ],
    ids=first_name,
)
@greedy_or_beams
def test_logits_processors_keep_their_rows_when_sentences_end(beams, settings, decoding):
    model = varied_model(end=-1.0)
    ends = {"eos_token_id": [EOS, 4]}
    found = decoding.assert_same(
        model,
        TWELVE,
        **hugging_face(beams, 16),
        **ends,
        **settings,
    )
    assert any(PAD in row for row in found), "some sentences must end before others"


@greedy_or_beams
def test_prefixes_equal_transformers(beams: int, decoding: Decoding) -> None:
    prefix = torch.tensor([[START, *ids[:3]] for ids in sentences([4] * 5, 24, seed=3)])
    inputs = {**SOURCE, "decoder_input_ids": prefix}
    tokens = torch.tensor(decoding.assert_same(varied_model(), inputs, **hugging_face(beams, 9)))
    assert tokens[:, :4].equal(prefix)


@greedy_or_beams
def test_encoder_outputs_and_embeddings_equal_transformers(beams: int, decoding: Decoding) -> None:
    model = decoding.prepare(varied_model())
    settings = hugging_face(beams, 9)
    expected = by_transformers(model, **SOURCE, **settings)
    settings["attention_mask"] = SOURCE["attention_mask"]
    encoded = model.get_encoder()(**SOURCE)
    states = encoded.last_hidden_state.clone()
    for _ in range(2):
        assert model.generate(encoder_outputs=encoded, **settings).equal(expected)
    assert encoded.last_hidden_state.equal(states), "the caller's own object must not change"
    embeds = model.get_input_embeddings()(SOURCE["input_ids"])
    assert model.generate(inputs_embeds=embeds, **settings).equal(expected)


@pytest.mark.parametrize(
    "fields", [{"pad_token_id": 0, "decoder_start_token_id": 0}, {"pad_token_id": EOS}]
)
@greedy_or_beams
def test_other_pad_tokens_equal_transformers(
    beams: int,
    fields: dict[str, int],
    decoding: Decoding,
) -> None:
    model = decoding.prepare(varied_model(**fields))
    settings = hugging_face(beams, 9)
    tokens = model.generate(**SOURCE, **settings)
    expected = by_transformers(model, **SOURCE, **settings)
    assert tokens.shape == expected.shape
    for ours, theirs in zip(tokens.tolist(), expected.tolist(), strict=True):
        end = theirs.index(EOS) + 1 if EOS in theirs else len(theirs)
        assert ours[:end] == theirs[:end]
        # transformers pads with the end where the pad token is 0
        assert set(ours[end:]) <= {fields["pad_token_id"]}


@pytest.mark.parametrize("size", [4, 5, 6])
def test_vocabularies_smaller_than_the_beam_equal_transformers(
    size: int, decoding: Decoding
) -> None:
    # one or two tokens beside the special ones
    model = decoding.prepare(tiny_model(vocab_size=size, tie_word_embeddings=False))
    ids = torch.tensor([[size - 1, EOS], [EOS, PAD]])
    inputs = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
    settings = hugging_face(5, 5)
    assert model.generate(**inputs, **settings).equal(by_transformers(model, **inputs, **settings))
    assert len(model.generate(**inputs)) == len(ids)


def test_beams_beyond_the_first_cache_slots_equal_transformers(decoding: Decoding) -> None:
    decoding.assert_same(varied_model(vocab_size=40), SOURCE, **hugging_face(18, 30))


def test_long_translations_equal_transformers(decoding: Decoding) -> None:
    (row,) = decoding.assert_same(
        varied_model(end=NEVER),
        source([4]),
        **hugging_face(2, 200),
    )
    assert len(row) == 201
    assert min(row[1:]) >= FIRST_WORD


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
    ids=first_name,
)
def test_every_kind_of_decoder_equals_transformers(
    fields: dict[str, Any], decoding: Decoding
) -> None:
    if "decoder_vocab_size" in fields and tuple(
        map(int, version("transformers").split(".")[:2])
    ) < (5, 23):
        pytest.skip(
            "the beam search of transformers 5.17 takes the source's vocabulary size; that of 5.23 does not"
        )
    decoding.assert_same(varied_model(**fields).double(), SOURCE, **hugging_face(4, 14))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_does_not_change_scores(dtype: torch.dtype, decoding: Decoding) -> None:
    model = decoding.prepare(varied_model())
    settings = {
        **SOURCE,
        "num_beams": 3,
        "max_new_tokens": 9,
        "decoder_input_ids": torch.full((len(LENGTHS), 3), 9),
        **AS_DICT,
    }
    expected = model.generate(**settings)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        found = model.generate(**settings)
    finally:
        torch.set_default_dtype(before)
    assert found.sequences.equal(expected.sequences)
    assert_near(found.sequences_scores, expected.sequences_scores, 1e-6)


# The paper's search


@functools.cache
def best_two(
    seed: int,
    ids: tuple[int, ...],
    beams: int,
    alpha: float,
) -> list[tuple[float, list[int]]]:
    return naive_search([varied_model(seed)], list(ids), beams, alpha, longest=9)[:2]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("beams", [2, 4])
def test_default_search_is_the_papers(
    beams: int,
    alpha: float,
    decoding: Decoding,
) -> None:
    lengths = [5, 2, 7]
    for seed in ENDS:
        model = decoding.prepare(varied_model(seed))
        model.generation_config.paper_length_penalty = alpha
        model.generation_config.num_beams = beams
        output = model.generate(
            **source(lengths),
            max_new_tokens=9,
            num_return_sequences=2,
            **AS_DICT,
        )
        expected = []
        for ids in sentences(lengths, 24):
            expected += best_two(seed, tuple(ids), beams, alpha)
        assert output.sequences_scores.tolist() == pytest.approx(
            [score for score, _ in expected], abs=1e-5
        )
        for row, (_, tokens) in zip(output.sequences.tolist(), expected, strict=True):
            assert_row(row, tokens)


@pytest.mark.parametrize("forced", [None, EOS])
@greedy_or_beams
@pytest.mark.parametrize("lengths", [[3, 9, 5], [4, 4, 1]])
def test_limit_counts_each_sentences_own_tokens_if_an_end_is_forced_too(
    lengths: list[int],
    beams: int,
    forced: int | None,
    decoding: Decoding,
) -> None:
    model = decoding.prepare(varied_model(end=NEVER))
    model.generation_config.max_length_over_source = 5
    tokens = model.generate(
        **source(lengths),
        num_beams=beams,
        forced_eos_token_id=forced,
    )
    for row, length in zip(tokens.tolist(), lengths, strict=True):
        written = [token for token in row if token != PAD]
        assert len(written) == 1 + length + 5
        assert (written[-1] == EOS) == (forced == EOS)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@greedy_or_beams
def test_limits_within_the_prefix_give_one_more_token(
    beams: int,
    positions: str,
    decoding: Decoding,
) -> None:
    model = decoding.prepare(
        varied_model(position_encoding_type=positions, max_position_embeddings=20)
    )
    model.generation_config.max_length_over_source = -3
    tokens = model.generate(
        **source([3, 2]),
        decoder_input_ids=torch.tensor([[START, 7, 9]] * 2),
        num_beams=beams,
    )
    assert tokens.shape[1] == 4


def test_fully_masked_source_ends(decoding: Decoding) -> None:
    model = decoding.prepare(varied_model())
    model.generation_config.max_length_over_source = 0
    ids, mask = source([3, 5]).values()
    mask[0] = 0
    (alone,) = model.generate(ids[1:], attention_mask=mask[1:]).tolist()
    found = model.generate(ids, attention_mask=mask)
    assert_row(found[1].tolist(), alone)
    assert found[0].ne(PAD).sum() == 2


@greedy_or_beams
@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_learned_positions_bound_prefix_and_continuation(
    length: int,
    beams: int,
    decoding: Decoding,
) -> None:
    model = decoding.prepare(
        varied_model(end=NEVER, position_encoding_type="learned", max_position_embeddings=12)
    )
    settings = {
        **source([4]),
        "decoder_input_ids": torch.tensor([[START, *range(5, 16)][:length]]),
        "num_beams": beams,
        "length_penalty": 1.0,
    }
    tokens = model.generate(**settings)
    assert tokens.equal(by_transformers(model, **settings, max_length=13))
    assert tokens.shape[1] == 13
    assert model.generate(**settings, max_length=40).equal(tokens)


# Batches: ensembles, sentences that come later, sentences that end


@greedy_or_beams
def test_ensemble_searches_with_the_mean_probability(beams: int, decoding: Decoding) -> None:
    lengths = [5, 2, 7]
    settings = {**source(lengths), "num_beams": beams, "max_new_tokens": 8}
    models = [
        varied_model(0, end=-1.0),
        varied_model(1, d_model=16, decoder_layers=1),
        varied_model(),
    ]
    for model in models:
        decoding.prepare(model)
    found = with_ensemble(models).generate(**settings).tolist()
    for row, ids in zip(found, sentences(lengths, 24), strict=True):
        if beams == 1:
            expected = naive_greedy_search(models, ids, longest=8)
        else:
            _, expected = naive_search(models, ids, beams, alpha=0.6, longest=8)[0]
        assert row[: len(expected)] == expected
    alone = models[0].generate(**settings).tolist()
    assert found != alone
    twice = with_ensemble([models[0], models[0]])
    assert twice.generate(**settings).tolist() == alone


def test_ensemble_of_different_decoders_is_that_of_modules() -> None:
    models = [varied_model(0), varied_model(1)]
    together = with_ensemble(models)
    expected = together.generate(**SOURCE, max_new_tokens=12)
    optimize_for_inference(models[1])
    assert together.generate(**SOURCE, max_new_tokens=12).equal(expected)


@pytest.mark.parametrize("beams", [1, 4])
def test_sentences_that_join_an_ensemble_later_have_every_decoder(beams: int) -> None:
    together = with_ensemble([varied_model(0), varied_model()])
    first = [3, 9, 4, 6]
    later = [8, 2, 7, 5, 3, 6]
    refilled = together.generate(
        **source(first), num_beams=beams, next_batch=batches(later, [], most=1)
    )
    alone = [
        together.generate(input_ids=torch.tensor([ids]), num_beams=beams)[0].tolist()
        for ids in sentences(first, 24) + sentences(later, 24, 9)
    ]
    for found, expected in zip(refilled.tolist(), alone, strict=True):
        assert found[: len(expected)] == expected


def next_batch_of(*tensors: Tensor) -> dict[str, Any]:
    return {"next_batch": lambda count: tensors or None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (next_batch_of() | {"do_sample": True}, "next_batch: .* do_sample"),
        (
            next_batch_of() | {"encoder_repetition_penalty": 1.5},
            "next_batch: .* encoder_repetition_p",
        ),
        (
            next_batch_of() | {"prefix_allowed_tokens_fn": len},
            "next_batch: .* prefix_allowed_tokens",
        ),
        (next_batch_of(torch.zeros(0, 3).long(), torch.zeros(0, 3).long()), "next_batch: .* 0"),
        (next_batch_of(*source([3, 3]).values()), "next_batch: .* 2"),
        (next_batch_of(*source([3]).values(), torch.ones(1, 4).long()), "next_batch: .* 4"),
        ({"decoder_input_ids": torch.tensor([[START, 24]])}, "decoder_input_ids .* 24"),
        ({"decoder_input_ids": torch.tensor([[START, -1, 5]])}, "decoder_input_ids .* -1"),
        ({"num_beam": 2}, "num_beam"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    given: dict[str, Any],
    message: str,
    decoding: Decoding,
) -> None:
    model = decoding.prepare(varied_model())
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            model.generate(**source([3]), **given)


@pytest.mark.parametrize("kind", ["do_sample", "encoder_outputs", "inputs_embeds"])
def test_ensemble_refuses_sampling_and_encoded_sources(kind: str) -> None:
    model = varied_model()
    inputs: dict[str, Any] = source([3])
    if kind == "do_sample":
        inputs[kind] = True
    elif kind == "encoder_outputs":
        inputs[kind] = model.get_encoder()(**inputs)
        del inputs["input_ids"]
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
    now = [7, 2, 5, 9, 1, 3]
    later = [4, 12, 1, 8, 8, 3, 2, 6, 10, 1, 5]
    asked: list[int] = []
    alone = [
        alone_by_modules(case, tuple(ids))
        for ids in sentences(now, 24)
        + sentences(
            later,
            24,
            seed=9,
        )
    ]
    decoding.made.clear()
    model, settings = refilled(case)
    decoding.prepare(model)
    if case == "prefix":
        settings["decoder_input_ids"] = settings["decoder_input_ids"].expand(len(now), -1)
    found = model.generate(
        **source(now),
        **settings,
        next_batch=batches(later, asked),
        **AS_DICT,
    )
    assert max(asked) <= len(now)
    expected = [row for each in alone for row in each.sequences.tolist()]
    for row, tokens in zip(found.sequences.tolist(), expected, strict=True):
        assert_row(row, tokens)
    if case != "greedy":
        assert_near(found.sequences_scores, torch.cat([each.sequences_scores for each in alone]))


def test_batch_is_refilled_before_all_sentences_end() -> None:
    asked: list[int] = []
    varied_model().generate(
        **source([5] * 30),
        num_beams=2,
        next_batch=batches([5] * 60, asked),
    )
    assert all(
        1 < count < 30 for count in asked[:5]
    )  # neither for each alone nor only when all are done


def test_next_batch_is_asked_until_no_row_is_empty() -> None:
    asked: list[int] = []
    found = varied_model().generate(
        **source([5] * 4),
        num_beams=2,
        next_batch=batches([5] * 12, asked, most=1),
    )
    assert len(found) == 16
    assert len(asked) == 13


def test_ensemble_is_refilled(decoding: Decoding) -> None:
    models = [varied_model(0, end=-1.0), varied_model(1, d_model=16, decoder_layers=1)]
    for model in models:
        decoding.prepare(model)
    models[0].generation_config.max_length_over_source = 6
    now = [5, 2, 7]
    later = [3, 9, 4]
    together = with_ensemble(models)
    found = together.generate(**source(now), next_batch=batches(later, []))
    for row, ids in zip(
        found.tolist(), sentences(now, 24) + sentences(later, 24, seed=9), strict=True
    ):
        (alone,) = together.generate(input_ids=torch.tensor([ids])).tolist()
        assert_row(row, alone)


def test_finished_sentences_leave_the_batch(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    extend = SearchConfig.extend
    monkeypatch.setattr(
        SearchConfig,
        "extend",
        lambda *args: rows.append(len(args[2])) or extend(*args),
    )
    model = decoding.prepare(varied_model())
    tokens = model.generate(
        **source([1 + i % 9 for i in range(20)]),
        num_beams=1,
        max_new_tokens=30,
    )
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 20
    assert rows[-1] < 16, "some sentences end early"
    assert len(tokens) == 20


@pytest.mark.parametrize("at_once", [3, 8])
@greedy_or_beams
def test_steps_between_synchronisations_do_not_change_tokens(beams, at_once, decoding, monkeypatch):
    for module in (decoding_step, search):
        monkeypatch.setattr(module, "steps_at_once", lambda device: at_once)
    settings = hugging_face(beams, 13, penalty=0.9)
    decoding.assert_same(varied_model(), SOURCE, **settings)
    decoding.assert_same(varied_model(), SOURCE, **settings, no_repeat_ngram_size=2)
