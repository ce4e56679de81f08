"""Our search against transformers' own, and the paper's against a naive one that keeps no cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.decoding_vanilla_transformer import BeamPlaces
from hf_vanilla_transformer.generation_vanilla_transformer import chosen_settings
from hf_vanilla_transformer.search_vanilla_transformer import Score, _largest
from tests.model_helpers import EOS, FIRST_WORD, PAD, START, assert_near, padded, sentences, tiny_model

Translator = VanillaTransformerForConditionalGeneration
AS_DICT = {"return_dict_in_generate": True}


ENDS = {0: 1.0, 1: 2.0, 2: 1.0}  # seed: how much the end is favoured, so that some sentences end


def eloquent_model(seed: int = 2, end: float | None = None, **fields: Any) -> Translator:
    """A model that says something new, and ends its sentences at different lengths."""
    fields = {"tie_word_embeddings": False, "lm_head_bias": True, "vocab_size": 24, **fields}
    model = tiny_model(seed, **fields)
    with torch.no_grad():
        for name, parameter in model.model.decoder.named_parameters():
            if name.endswith("proj.weight") or ".fc" in name:
                parameter *= 2
        model.lm_head.bias[EOS] += ENDS[seed] if end is None else end
        model.lm_head.bias[[PAD, START]] = -1e4
    return model


def source(lengths: list[int], left: bool = False, seed: int = 0) -> dict[str, Tensor]:
    ids = padded(sentences(lengths, 24, seed), left=left)
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


def by_transformers(model: Translator, **kwargs: Any) -> Any:
    """transformers' own `generate`, which knows nothing of our search."""
    return GenerationMixin.generate(model, **kwargs)


def assert_same_words(model: Translator, **kwargs: Any) -> Tensor:
    ours = model.generate(**kwargs)
    assert ours.tolist() == by_transformers(model, **kwargs).tolist()
    return ours


# ---------------------------------------------------------------------------------------------------------------------
# The same tokens as transformers
# ---------------------------------------------------------------------------------------------------------------------

LENGTHS = [6, 3, 8, 1, 5]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("seed", ENDS)
def test_models_of_these_tests_are_eloquent(seed: int, beams: int) -> None:
    words = eloquent_model(seed).generate(**source(LENGTHS), num_beams=beams, length_penalty=1.0, max_new_tokens=15)
    lengths = words.ne(PAD).sum(dim=1)
    assert len(set(lengths.tolist())) > 1
    assert len({tuple(row) for row in words.tolist()}) > 1


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("beams", [2, 5])
def test_beam_search_is_that_of_transformers(beams: int, length_penalty: float, early_stopping: bool | str) -> None:
    for seed in ENDS:
        settings = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        assert_same_words(eloquent_model(seed), **source(LENGTHS, seed=seed), **settings, max_new_tokens=14)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("beams", [1, 4])
def test_same_words_with_padding(beams: int, left: bool, positions: str, backend: str) -> None:
    model = eloquent_model(attn_implementation=backend, position_encoding_type=positions)
    assert_same_words(model, **source(LENGTHS, left), num_beams=beams, length_penalty=1.0, max_new_tokens=14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 2, 33])
@pytest.mark.parametrize("beams", [1, 4])
def test_same_words_in_batches_of_any_size(beams: int, batch: int, dtype: torch.dtype) -> None:
    lengths = [1 + i * 7 % 9 for i in range(batch)]
    model = eloquent_model().to(dtype)
    assert_same_words(model, **source(lengths), num_beams=beams, length_penalty=0.7, max_new_tokens=20)


@pytest.mark.parametrize("wanted", [2, 4])
def test_several_translations_and_their_scores(wanted: int) -> None:
    model, inputs = eloquent_model(), source(LENGTHS)
    settings = {"num_beams": 4, "num_return_sequences": wanted, "length_penalty": 0.8, "max_new_tokens": 12, **AS_DICT}
    ours = model.generate(**inputs, **settings)
    theirs = by_transformers(model, **inputs, **settings, output_scores=True)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.sequences) == wanted * len(LENGTHS)
    assert_near(ours.sequences_scores, theirs.sequences_scores)


class NoOddWordAfterAnother(LogitsProcessor):
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
    {"bad_words_ids": [[13], [4, 4]]},
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": EOS},
    {"suppress_tokens": [4, 13]},
    {"begin_suppress_tokens": [4, 13, EOS]},
    {"sequence_bias": [[[8], 3.0]]},
    {"exponential_decay_length_penalty": (3, 1.3)},
    {"renormalize_logits": True, "no_repeat_ngram_size": 2},
    {"logits_processor": LogitsProcessorList([NoOddWordAfterAnother()])},
    {"prefix_allowed_tokens_fn": lambda batch, words: [EOS, 5 + batch, 6 + len(words), 12]},
    {"eos_token_id": [EOS, 4, 13]},
    {"eos_token_id": None},
    {"max_length": 3},
    {"max_new_tokens": 1},
]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_same_words_under_every_setting(beams: int, settings: dict[str, Any]) -> None:
    limit = {} if {"max_length", "max_new_tokens"} & settings.keys() else {"max_new_tokens": 11}
    model, inputs = eloquent_model(), source(LENGTHS)
    plain = model.generate(**inputs, num_beams=beams, length_penalty=1.0, max_new_tokens=11)
    words = assert_same_words(model, **inputs, num_beams=beams, length_penalty=1.0, **settings, **limit)
    if settings.get("forced_eos_token_id") is None:
        assert words.tolist() != plain.tolist(), "the setting had no effect"


@pytest.mark.parametrize("beams", [1, 4])
def test_same_words_after_a_prefix(beams: int) -> None:
    model, inputs = eloquent_model(), source(LENGTHS)
    prefix = torch.cat([torch.full((5, 1), START), torch.tensor(sentences([4] * 5, 24, seed=3))[:, :3]], dim=1)
    words = assert_same_words(
        model, **inputs, decoder_input_ids=prefix, num_beams=beams, length_penalty=1.0, max_new_tokens=9
    )
    assert words[:, :4].equal(prefix)


@pytest.mark.parametrize("beams", [1, 4])
def test_same_words_from_encoder_outputs_and_embeddings(beams: int) -> None:
    model, inputs = eloquent_model(), source(LENGTHS)
    settings = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 9}
    expected = by_transformers(model, **inputs, **settings).tolist()
    mask = inputs["attention_mask"]
    encoded = model.get_encoder()(**inputs)
    assert model.generate(encoder_outputs=encoded, attention_mask=mask, **settings).tolist() == expected
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    assert model.generate(inputs_embeds=embeds, attention_mask=mask, **settings).tolist() == expected


@pytest.mark.parametrize("fields", [{"pad_token_id": 0, "decoder_start_token_id": 0}, {"pad_token_id": EOS}])
@pytest.mark.parametrize("beams", [1, 3])
def test_same_words_where_padding_is_another_special_word(beams: int, fields: dict[str, int]) -> None:
    model = eloquent_model(**fields)
    words = model.generate(**source(LENGTHS), num_beams=beams, length_penalty=1.0, max_new_tokens=9)
    expected = by_transformers(model, **source(LENGTHS), num_beams=beams, length_penalty=1.0, max_new_tokens=9)
    # transformers fills with the end where the pad token is 0
    assert words.shape == expected.shape
    for ours, theirs in zip(words.tolist(), expected.tolist(), strict=True):
        end = theirs.index(EOS) + 1 if EOS in theirs else len(theirs)
        assert ours[:end] == theirs[:end]
        assert set(ours[end:]) <= {fields["pad_token_id"]}


@pytest.mark.parametrize("words", [4, 5, 6])
def test_vocabulary_smaller_than_the_beam(words: int) -> None:
    # one or two words beside the special ones
    model = tiny_model(vocab_size=words, tie_word_embeddings=False)
    ids = torch.tensor([[words - 1, EOS], [EOS, PAD]])
    settings = {"num_beams": 5, "length_penalty": 1.0, "max_new_tokens": 5}
    assert_same_words(model, input_ids=ids, attention_mask=ids.ne(PAD).long(), **settings)
    assert model.generate(ids).shape[0] == 2


# ---------------------------------------------------------------------------------------------------------------------
# The paper's score
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def naive_search(
    models: list[Translator], words: list[int], beams: int, alpha: float, longest: int
) -> list[tuple[float, list[int]]]:
    """§6.1 in plain Python: no cache, no batch, and no end before the greatest length.

    Of several models a word's probability is the mean.

    Returns:
        All hypotheses that ended among the K best of their step, the best first, with their scores.
    """
    source = torch.tensor([words])
    running, ended = [(0.0, [START])], []
    for length in range(1, longest + 1):
        continuations = []
        for log_p, hypothesis in running:
            target = torch.tensor([hypothesis])
            each = [model(input_ids=source, decoder_input_ids=target).logits[0, -1].double() for model in models]
            mean = torch.stack(each).softmax(dim=-1).mean(dim=0)
            for word, more in enumerate(mean.log().tolist()):
                continuations.append((log_p + more, [*hypothesis, word]))
        continuations.sort(key=lambda pair: -pair[0])
        penalty = ((5 + length) / 6) ** alpha  # Wu et al. 2016, Eq. 14
        for log_p, hypothesis in continuations[:beams]:
            if hypothesis[-1] == EOS or length == longest:
                ended.append((log_p / penalty, hypothesis))
        running = [pair for pair in continuations if pair[1][-1] != EOS][:beams]
    return sorted(ended, key=lambda pair: -pair[0])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("beams", [2, 4])
def test_default_search_is_the_papers(beams: int, alpha: float) -> None:
    longest, lengths = 9, [5, 2, 7]
    for seed in ENDS:
        model = eloquent_model(seed)
        model.generation_config.paper_length_penalty = alpha
        model.generation_config.num_beams = beams
        output = model.generate(**source(lengths), max_new_tokens=longest, num_return_sequences=2, **AS_DICT)
        sequences = output.sequences.unflatten(0, (3, 2)).tolist()
        scores = output.sequences_scores.unflatten(0, (3, 2)).tolist()
        for i, words in enumerate(sentences(lengths, 24)):
            expected = naive_search([model], words, beams, alpha, longest)[:2]
            for row, score, (wanted_score, wanted) in zip(sequences[i], scores[i], expected, strict=True):
                assert score == pytest.approx(wanted_score, abs=1e-5)
                assert row[: len(wanted)] == wanted
                assert set(row[len(wanted) :]) <= {PAD}


@pytest.mark.parametrize("beams", [1, 3])
def test_ensemble_searches_with_the_mean_probability(beams: int) -> None:
    lengths = [5, 2, 7]
    models = [eloquent_model(0, end=-1.0), eloquent_model(1, d_model=16, decoder_layers=1), eloquent_model()]
    inputs = source(lengths)
    found = models[0].generate(**inputs, ensemble=models[1:], num_beams=beams, max_new_tokens=8).tolist()
    for row, words in zip(found, sentences(lengths, 24), strict=True):
        expected = naive_search(models, words, beams, 0.6, 8)
        wanted = greedy_path(models, words, 8) if beams == 1 else expected[0][1]
        assert row[: len(wanted)] == wanted
    alone = models[0].generate(**inputs, num_beams=beams, max_new_tokens=8).tolist()
    assert found != alone
    assert models[0].generate(**inputs, ensemble=[models[0]], num_beams=beams, max_new_tokens=8).tolist() == alone


def greedy_path(models: list[Translator], words: list[int], longest: int) -> list[int]:
    """The likeliest word, again and again."""
    hypothesis = [START]
    while hypothesis[-1] != EOS and len(hypothesis) <= longest:
        each = [
            model(input_ids=torch.tensor([words]), decoder_input_ids=torch.tensor([hypothesis])).logits[0, -1]
            for model in models
        ]
        hypothesis.append(int(torch.stack(each).softmax(dim=-1).mean(dim=0).argmax()))
    return hypothesis


def test_ensemble_needs_one_vocabulary() -> None:
    with pytest.raises(ValueError, match="30 target words beside one with 24"):
        eloquent_model().generate(**source([3]), ensemble=[eloquent_model(vocab_size=30)])


def test_score_is_that_of_wu_et_al() -> None:
    score = Score(0.6, of_paper=True)
    assert score.penalty(1) == 1.0
    assert score.penalty(13) == pytest.approx(3**0.6)
    assert Score(0.6, of_paper=False).penalty(13) == pytest.approx(13**0.6)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Score]:
    """The scores with which our search was started."""
    seen: list[Score] = []
    original = Score.penalty
    monkeypatch.setattr(Score, "penalty", lambda self, length: seen.append(self) or original(self, length))
    return seen


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ({}, {}, Score(0.6, True)),
        ({}, {"paper_length_penalty": 0.9}, Score(0.9, True)),
        ({"paper_length_penalty": 0.3}, {}, Score(0.3, True)),
        ({}, {"length_penalty": 1.0}, Score(1.0, False)),
        ({"length_penalty": 1.5}, {}, Score(1.5, False)),
        ({}, {"generation_config": GenerationConfig(length_penalty=2.0)}, Score(2.0, False)),
        ({}, {"generation_config": GenerationConfig(num_beams=3)}, Score(0.6, True)),
    ],
)
def test_who_says_how_hypotheses_are_compared(
    own: dict, given: dict, expected: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = eloquent_model()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    seen = spied(monkeypatch)
    model.generate(**source([4, 3]), **given)
    assert set(seen) == {expected}


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"output_scores": True, **AS_DICT},
        {"output_attentions": True, **AS_DICT},
        {"output_hidden_states": True, **AS_DICT},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"stopping_criteria": [lambda words, scores: torch.zeros(len(words), dtype=torch.bool)]},
        {"max_time": 100.0},
        {"decoder_input_ids": torch.full((2, 2), 5), "decoder_attention_mask": torch.ones(2, 2, dtype=torch.long)},
    ],
)
def test_what_is_not_covered_goes_to_transformers(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = eloquent_model(attn_implementation="eager"), spied(monkeypatch)
    torch.manual_seed(1)
    ours = model.generate(**source([4, 3]), **settings, max_new_tokens=6)
    assert seen == []
    # in Hugging Face's words α is a length penalty
    torch.manual_seed(1)
    theirs = by_transformers(model, **source([4, 3]), **settings, length_penalty=0.6, max_new_tokens=6)
    if isinstance(ours, Tensor):
        assert ours.tolist() == theirs.tolist()
    else:
        assert ours.keys() == theirs.keys()
        assert ours.sequences.tolist() == theirs.sequences.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The batch
# ---------------------------------------------------------------------------------------------------------------------


def test_finished_sentences_leave_the_batch() -> None:
    model, sizes = eloquent_model(), []  # a hook, so the modules are asked
    model.model.decoder.layers[0].fc1.register_forward_hook(lambda _, inputs, output: sizes.append(len(output)))
    words = model.generate(**source([1 + i % 9 for i in range(20)]), num_beams=1, max_new_tokens=30)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 20
    assert sizes[-1] < 16, "seven sentences end early"
    assert len(words) == 20


def arriving(rest: list[int], asked: list[int], seed: int = 9) -> Callable[[int], tuple[Tensor, Tensor] | None]:
    """What `more` may be: sentences of these lengths, as many at a time as there is room."""
    ids = sentences(rest, 24, seed)

    def more(room: int) -> tuple[Tensor, Tensor] | None:
        asked.append(room)
        some, ids[:] = ids[:room], ids[room:]
        return (padded(some), padded(some).ne(PAD).long()) if some else None

    return more


WAYS = {
    "the paper's": {},
    "Hugging Face's": {"length_penalty": 1.3, "max_new_tokens": 12},
    "one beam": {"num_beams": 1},
    "early stopping": {"length_penalty": 0.5, "early_stopping": True, "max_new_tokens": 9},
    "several wanted": {"num_return_sequences": 3},
    "learned positions": {"position_encoding_type": "learned", "max_position_embeddings": 30},
    "processors": {"no_repeat_ngram_size": 2, "max_new_tokens": 10},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("way", WAYS)
def test_sentences_that_come_later_are_translated_as_if_alone(way: str) -> None:
    settings = dict(WAYS[way])
    fields = {name: settings.pop(name) for name in list(settings) if "position" in name or "attn" in name}
    model = eloquent_model(**fields)
    now, rest, asked = [7, 2, 5, 9, 1, 3], [4, 12, 1, 8, 8, 3, 2, 6, 10, 1, 5], []
    found = model.generate(**source(now), **settings, more=arriving(rest, asked), **AS_DICT)
    assert max(asked) <= len(now)
    wanted = settings.get("num_return_sequences", 1)
    rows = found.sequences.unflatten(0, (-1, wanted)).tolist()
    alone = sentences(now, 24) + sentences(rest, 24, seed=9)
    assert len(rows) == len(alone)
    for i, words in enumerate(alone):
        expected = model.generate(input_ids=torch.tensor([words]), **settings, **AS_DICT)
        for row, one in zip(rows[i], expected.sequences.tolist(), strict=True):
            assert row[: len(one)] == one
            assert set(row[len(one) :]) <= {PAD}
        if settings.get("num_beams") != 1:
            assert_near(found.sequences_scores[i * wanted : (i + 1) * wanted], expected.sequences_scores)


def test_room_is_given_to_others_while_the_search_goes_on() -> None:
    asked: list[int] = []
    eloquent_model().generate(**source([5] * 30), num_beams=2, more=arriving([5] * 60, asked))
    assert all(1 < room < 30 for room in asked[:5])  # neither for each alone nor only when all are done


def test_sentences_that_come_one_by_one_leave_no_room_empty() -> None:
    asked: list[int] = []
    bring = arriving([5] * 12, asked)
    found = eloquent_model().generate(**source([5] * 4), num_beams=2, more=lambda room: bring(1))
    assert len(found) == 16
    assert asked == [1] * len(asked)


def test_places_that_nobody_sees_any_more_are_not_attended_to() -> None:
    pasts = BeamPlaces(1, 1, 2, torch.device("cpu"))
    for _ in range(5):
        pasts.append(torch.tensor([[0, 1]]))  # two pasts that share one word
    assert pasts.seen.shape[2] == 11
    for _ in range(7):
        pasts.append(torch.tensor([[0, 0]]))  # one past, and the last words of two
    longest = pasts.seen.shape[2]
    pasts.put(torch.tensor([0]), 0)
    pasts.append(torch.tensor([[0, 0]]))
    assert pasts.seen.tolist() == [[[True, False], [False, True]]]
    assert longest == 14


def test_ensemble_takes_sentences_that_come_later() -> None:
    models = [eloquent_model(0, end=-1.0), eloquent_model(1, d_model=16, decoder_layers=1)]
    found = models[0].generate(**source([5, 2, 7]), ensemble=models[1:], more=arriving([3, 9, 4], []))
    for row, words in zip(found.tolist(), sentences([5, 2, 7], 24) + sentences([3, 9, 4], 24, 9), strict=True):
        alone = models[0].generate(input_ids=torch.tensor([words]), ensemble=models[1:])[0].tolist()
        assert row[: len(alone)] == alone


def test_later_sentences_need_our_search() -> None:
    with pytest.raises(ValueError, match="more"):
        eloquent_model().generate(**source([3]), do_sample=True, more=arriving([3], []))


def test_a_penalty_of_one_counts_without_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = eloquent_model()
    config = model.generation_config
    config.length_penalty = 1.0
    del config.paper_length_penalty
    config.update(**config._get_default_generation_params(), defaults_only=True)
    assert chosen_settings(config)["length_penalty"] == 1.0
    seen = spied(monkeypatch)
    model.generate(**source([3, 4]))
    assert set(seen) == {Score(1.0, of_paper=False)}


@pytest.mark.parametrize("lengths", [[3, 9, 5], [4, 4, 1]])
def test_a_translation_ends_50_words_after_its_own_source(lengths: list[int]) -> None:
    model = eloquent_model(end=-1e4)  # a sentence never ends by itself
    model.generation_config.max_length_over_source = 5
    words = model.generate(**source(lengths), num_beams=2)
    assert words.ne(PAD).sum(dim=1).tolist() == [1 + length + 5 for length in lengths]


@pytest.mark.parametrize("own", [{}, {"length_penalty": 1.7}, {"num_beams": 2}])
def test_what_the_trainer_fills_in_says_nothing(own: dict[str, Any]) -> None:
    # as `Seq2SeqTrainer.prediction_step` does after each evaluation
    clean, filled = eloquent_model(), eloquent_model()
    for model in (clean, filled):
        model.generation_config.update(**own)
    config = filled.generation_config
    config.update(**config._get_default_generation_params(), defaults_only=True)
    found, wanted = filled.generate(**source(LENGTHS), **AS_DICT), clean.generate(**source(LENGTHS), **AS_DICT)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    assert found.sequences_scores.equal(wanted.sequences_scores)


def test_long_translation() -> None:
    model = eloquent_model(end=-1e4)
    words = assert_same_words(model, **source([4]), num_beams=2, length_penalty=1.0, max_new_tokens=300)
    assert words.shape == (1, 301)
    assert words[:, 1:].min() >= FIRST_WORD


@pytest.mark.parametrize("size", [5, 63, 64, 600, 1024, 1025, 1087])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_largest_numbers_are_those_of_topk(size: int, count: int) -> None:
    for seed in range(5):
        logits = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(seed))
        count = min(count, size)
        values, places = _largest(logits, count)
        expected = logits.topk(count)
        assert values.equal(expected.values)
        assert places.equal(expected.indices)
        ascending = logits.sort(dim=-1).values  # all of them in the last blocks
        assert _largest(ascending, count)[1].equal(ascending.topk(count).indices)
