"""Captured steps. On a CPU a recorder repeats operations on the same memory, as a CUDA graph does."""

import gc
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_vanilla_transformer.engine import captured
from hf_vanilla_transformer.engine.captured import CapturedDecoder, rounded_up
from hf_vanilla_transformer.engine.continuous import ContinuousSearch
from hf_vanilla_transformer.engine.ensemble import with_ensemble
from hf_vanilla_transformer.generation_vanilla_transformer import _output
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.search_vanilla_transformer import (
    BeamSearch,
    BeamState,
    Hypotheses,
    LengthPenalty,
    SearchBatch,
    SearchConfig,
    likely_tokens,
    topk_log_probs,
)
from tests.engine.pretended_cuda import NO_END, narrow_model
from tests.engine.recorded_steps import Eager, Recorder, recording
from tests.engine.test_continuous import SOURCES, results_of, translate_all
from tests.engine.test_packed_decoder import sources
from tests.model_helpers import EOS, START, sentences, slow
from tests.pretended_gpu import autocast, counted, held_memory, on_cpu, on_gpu
from tests.search_helpers import (
    AS_DICT,
    LENGTHS,
    Model,
    batches,
    by_transformers,
    source,
    varied_model,
)

LONG = [3 + 5 * i % 9 for i in range(24)]  # sources of a batch that is compacted


@pytest.fixture
def recorder() -> Any:
    """Records the steps of the whole test."""
    with recording(Recorder()) as recorder:
        yield recorder


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Why steps are not captured."""
    caplog.set_level(logging.DEBUG, logger=captured.__name__)
    return caplog


def packed_model(**fields: Any) -> Model:
    return optimize_for_inference(varied_model(**fields))


def endless_model() -> Model:
    """Its hypotheses do not end."""
    return packed_model(end=-1e4)


def searching(
    model: Model,
    rows: list[list[int]],
    **settings: Any,
) -> ContinuousSearch:
    """A search that all of these sentences have joined."""
    search = ContinuousSearch(model, num_beams=4, **settings)
    search.join([(number, row, 1, []) for number, row in enumerate(rows)])
    return search


# The same as without


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[BeamState]:
    """Copies of the states between the steps of a search."""
    seen: list[BeamState] = []
    read_done = CapturedDecoder.read_done

    def spy(self: CapturedDecoder, state: BeamState) -> list[bool]:
        seen.append(BeamState(*(part.clone() for part in state)))
        return read_done(self, state)

    monkeypatch.setattr(CapturedDecoder, "read_done", spy)
    return seen


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("formula", [{}, {"length_penalty": 0.8}], ids=["gnmt", "power"])
@pytest.mark.parametrize("beams", [1, 4, *slow(8)])
def test_repeated_steps_have_every_field_of_eager_steps(
    beams: int,
    formula: dict[str, float],
    early_stopping: bool,
    dtype: torch.dtype,
    states: list[BeamState],
) -> None:
    """And they find what a packed search finds."""

    def translate() -> Any:
        return optimize_for_inference(varied_model().to(dtype)).generate(
            **source(LONG),
            **formula,
            **AS_DICT,
            num_beams=beams,
            early_stopping=early_stopping,
            next_batch=batches([4, 30, 2, 6, 5, 3], []),
        )

    with recording(Recorder(), steps_at_once=3) as recorder:
        found = translate()
    assert recorder.repeated > 12
    ours = states.copy()
    states.clear()
    with recording(Eager(), steps_at_once=3):
        translate()
    assert len(ours) == len(states) > 3
    for mine, other in zip(ours, states, strict=True):
        for name in BeamState._fields:
            assert getattr(mine, name).equal(getattr(other, name)), name
    rows = [len(state.done) for state in ours]
    assert min(rows) < max(rows), "the batch was compacted"
    if dtype == torch.bfloat16:
        return  # a packed search rounds elsewhere
    expected = translate()
    assert found.sequences.equal(expected.sequences)
    if beams > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("forced", [{"forced_eos_token_id": EOS}, {}], ids=["forced", "free"])
def test_captured_search_repeats_the_best_of_too_few_hypotheses(forced: dict[str, Any]) -> None:
    """An end that is forced at the first token leaves one hypothesis. Without, there are as many as beams."""
    settings = {
        **source(LENGTHS),
        **AS_DICT,
        **forced,
        "num_beams": 4,
        "num_return_sequences": 4,
        "max_new_tokens": 1,
        "length_penalty": 1.0,
    }
    model = packed_model()
    found = model.generate(**settings)
    expected = by_transformers(model, **settings, output_scores=True)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    if forced:
        assert found.sequences.tolist() == [[START, EOS]] * 4 * len(LENGTHS)
    else:
        assert found.sequences.equal(expected.sequences)


def test_first_step_is_captured(reasons: pytest.LogCaptureFixture) -> None:
    with recording(Recorder(), steps_at_once=1) as recorder:
        endless_model().generate(
            **source(LENGTHS),
            num_beams=4,
            max_new_tokens=6,
        )
    assert recorder.repeated == 6
    assert not reasons.text


@pytest.mark.parametrize("beams", [1, 4])
def test_sentences_may_join_twice_before_a_step(beams: int) -> None:
    rows = sentences(LENGTHS, 24)

    def translate(model: Model, first: int) -> dict[int, list[Any]]:
        search = ContinuousSearch(model, num_beams=beams)
        numbers = range(len(rows))
        for group in (numbers[:first], numbers[first:]):
            search.join([(number, rows[number], 1, []) for number in group])
        return results_of(search)

    expected = translate(varied_model(), first=len(rows))
    together = translate(varied_model(), first=2)
    with recording(Recorder(), steps_at_once=4):
        captured_steps = translate(packed_model(), first=2)
    for found in (together, captured_steps):
        for number, (right,) in expected.items():
            (hypothesis,) = found[number]
            assert hypothesis.tokens == right.tokens
            # The width of a batch decides the order of additions, and float32 has seven digits of their sums.
            assert hypothesis.score == pytest.approx(right.score, abs=1e-5)


def test_server_joins_a_captured_batch_while_it_runs() -> None:
    def translate(model: Model) -> dict[int, list[list[int]]]:
        search = ContinuousSearch(model, batch_size=8, num_beams=4)
        found = translate_all(search, [2] * len(SOURCES))
        return {
            number: [each.tokens for each in hypotheses] for number, hypotheses in found.items()
        }

    expected = translate(packed_model())
    with recording(Recorder(), steps_at_once=4) as recorder:
        assert translate(packed_model()) == expected
    assert recorder.repeated > recorder.recorded


@pytest.mark.usefixtures("recorder")
def test_sentences_that_are_done_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence that never ends runs next to one that ends at once, whose row stays."""
    monkeypatch.setattr(captured, "ROWS", (8,))
    search = searching(
        endless_model(),
        [[5, EOS], [7, 8, EOS]],
        batch_size=2,
        max_new_tokens=200,
    )
    search.step()
    search.drop({0})
    search.search.state.done[0] = True
    for _ in range(6):
        search.step()
    decoder: Any = search.search.decoder
    assert decoder.captured is not None
    slots_of_done, slots_of_running = decoder.slots.visible[:2].sum(dim=2).amax(dim=1)
    assert slots_of_done <= 4 * 16 < slots_of_running


def test_rows_without_a_sentence_take_no_room() -> None:
    """They are computed until the search moves, and nobody reads how many slots they need."""
    with recording(Recorder(), steps_at_once=2):
        search = searching(
            endless_model(),
            [[5, 7, EOS], [5, 8, EOS], [5, 9, EOS]],
            batch_size=3,
            max_new_tokens=100,
        )
        for _ in range(20):
            search.step()
            decoder: Any = search.search.decoder
            if decoder.captured is not None:
                visible = decoder.captured.memory.visible
                assert len(visible) == 4
                assert visible[:3].any()
                assert not visible[3:].any()
        assert decoder.captured is not None


# Memory


def test_sizes_are_powers_of_two_or_multiples_of_32() -> None:
    tables = captured.ROWS, captured.SLOTS, captured.SOURCE_LENGTHS, captured.CAPACITIES
    for sizes in tables:
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == 512
        for size in sizes:
            assert size % 32 == 0 or size in (1, 2, 4, 8, 16)


def test_sizes_are_few(recorder: Recorder) -> None:
    for size, rounded in {1: 4, 4: 4, 5: 8, 8: 8, 9: 16, 17: 24}.items():
        assert rounded_up(size, (4, 8)) == rounded
    model = packed_model()
    for seed in range(6):
        model.generate(
            **source([3 + seed, 5, 2], seed=seed),
            num_beams=4,
            max_new_tokens=20,
        )
    assert recorder.recorded <= 3


def test_static_memory_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model()
    steps = model.inference_engine.weights(model).steps

    def translate(count: int) -> None:
        model.generate(**source([5] * count), num_beams=2, max_new_tokens=20)
        gc.collect()
        assert steps.in_use == 0

    translate(1)
    held = steps.nbytes()
    assert held > steps.pool > 0
    assert len(steps.idle) == recorder.recorded
    monkeypatch.setattr(captured, "MAX_BYTES", 2 * held)
    for count in (2, 4, 8):
        translate(count)
        assert steps.nbytes() <= 2 * held
    monkeypatch.setattr(captured, "MAX_BYTES", 2**30)
    monkeypatch.setattr(captured, "MAX_STEPS", 3)
    for count in (1, 2, 4, 8):
        translate(count)
    assert len(steps.idle) == 3


def test_two_searches_at_once_have_memory_of_their_own() -> None:
    expected = packed_model().generate(**source(LENGTHS), num_beams=4).tolist()
    found: list[dict[int, Any]] = [{}, {}]
    with recording(Recorder(), steps_at_once=2):
        model = packed_model()
        searches = [searching(model, sentences(LENGTHS, 24)) for _ in found]
        while any(searches):
            for search, results in zip(searches, found, strict=True):
                results |= dict(search.step())
    for results in found:
        for number, row in enumerate(expected):
            tokens = results[number][0].tokens
            assert row[1 : 1 + len(tokens)] == tokens


@pytest.mark.parametrize(
    ("error", "reason", "attempts"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", 3),  # one for each size
        (RuntimeError("not permitted"), "no step can be captured: not permitted", 1),
    ],
)
def test_search_that_cannot_be_captured_is_eager(
    error: Exception,
    reason: str,
    attempts: int,
    reasons: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def record(function: Callable[[], None]) -> None:
        tried.append(function)
        raise error

    settings = {**source([5, 3]), "num_beams": 2, "max_new_tokens": 40}
    expected = varied_model(end=-1e4).generate(**settings)
    with recording(Recorder(), steps_at_once=4) as recorder:
        monkeypatch.setattr(recorder, "record", record)
        model = endless_model()
        assert model.generate(**settings).equal(expected)
        assert 0 < len(tried) <= attempts
        assert model.generate(**settings).equal(expected)
    assert len(tried) == 1 or attempts > 1
    assert reason in reasons.text


def test_search_that_outgrows_the_memory_goes_on_eagerly(
    reasons: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {**source(LENGTHS), "num_beams": 4, "max_new_tokens": 120}
    expected = varied_model(end=-1e4).generate(**settings)
    with recording(Recorder(), steps_at_once=4) as recorder:
        model = endless_model()
        record = recorder.record

        def record_once(function: Callable[[], None]) -> Callable[[], None]:
            monkeypatch.setattr(captured, "MAX_BYTES", 1)
            return record(function)

        monkeypatch.setattr(recorder, "record", record_once)
        assert model.generate(**settings).equal(expected)
        assert 0 < recorder.repeated < 100
    assert "exceeds" in reasons.text


@pytest.mark.parametrize(
    ("settings", "members", "reason"),
    [
        ({"no_repeat_ngram_size": 2}, 1, "logits processors"),
        ({"min_new_tokens": 3}, 1, "logits processors"),
        ({"prefix_allowed_tokens_fn": lambda *_: [EOS, 7]}, 1, "logits processors"),
        ({}, 2, "ensemble"),
    ],
    ids=["n-grams", "minimum", "constraint", "ensemble"],
)
def test_processors_constraints_and_ensembles_take_the_eager_step(
    settings: dict[str, Any],
    members: int,
    reason: str,
    recorder: Recorder,
    reasons: pytest.LogCaptureFixture,
) -> None:
    models = [packed_model(seed=seed) for seed in range(members)]
    model = with_ensemble(models) if members > 1 else models[0]
    model.generate(**source(LENGTHS), num_beams=2, **settings)
    assert recorder.recorded == 0
    assert reason in reasons.text


# What a GPU is asked to do, counted on a pretended one

LAUNCHES = {
    1: 101,
    4: 130,
}  # of a step with so many beams and six layers, eleven of them copies into static memory
WAITS = 8  # of a request of 64 steps: three of transformers, one for each 16 steps, one for the width of the result


@pytest.fixture
def gpu_model(eager_recorder: None) -> Any:
    return optimize_for_inference(on_gpu(narrow_model().to(torch.bfloat16)))


def gpu_batch(*lengths: int) -> Any:
    ids, mask = sources(*lengths)
    return on_gpu({"input_ids": ids, "attention_mask": mask})


def config_of(beams: int, *ends: int) -> SearchConfig:
    return SearchConfig(
        num_beams=beams,
        early_stopping=False,
        eos_token_ids=ends,
        forced_eos_token_id=None,
        can_grow=True,
    )


@pytest.mark.parametrize(
    "size", [5, 40, 4999, 20003]
)  # fewer tokens than candidates, all tokens, blocks of tokens
@pytest.mark.parametrize("ends", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("running", [1, 4])
def test_gpu_chooses_the_tokens_that_a_cpu_chooses(
    running: int,
    ends: tuple[int, ...],
    size: int,
) -> None:
    """A GPU takes the best of all beams at once, a CPU the best of each beam first."""
    generator = torch.Generator().manual_seed(0)
    penalties = LengthPenalty(0.6, "gnmt").table(32, 1, torch.device("cpu"))
    ours = BeamState.start(
        torch.ones(6, 1, dtype=torch.long),
        torch.tensor([3, 4, 5, 6, 7, 8]),
        penalties,
        torch.tensor([0, 1, 2, 3, 0, 1]),
        running,
        4,
    )
    theirs = on_gpu(ours)
    config = config_of(4, *ends)
    for _ in range(7):
        logits = 3 * torch.randn(6, ours.parents.shape[1], size, generator=generator)
        with counted():
            theirs = config.advance(theirs, on_gpu(logits), on_gpu(penalties))
        ours = config.advance(ours, logits, penalties)
        assert_same_hypotheses(ours, on_cpu(theirs))
    assert ours.done.all()


def assert_same_hypotheses(ours: BeamState, theirs: BeamState) -> None:
    """Beams without a hypothesis may hold anything."""
    every = torch.ones_like(ours.done)
    running = ours.log_probs > -1e8
    ended = ours.ended_scores > -1e8
    compared = {
        "log_probs": every,
        "ended_scores": every,
        "lengths": every,
        "done": every,
        "tokens": running,
        "next_tokens": running,
        "parents": running,
        "ended_tokens": ended,
        "ended_lengths": ended,
    }
    for name, beams in compared.items():
        assert getattr(ours, name)[beams].equal(getattr(theirs, name)[beams]), name


def random_numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_gpu_reads_the_logits_of_a_greedy_step_as_they_are() -> None:
    logits = random_numbers(3, 1, 300).bfloat16()
    with counted() as count:
        _, tokens = topk_log_probs(on_gpu(logits), 1, normalize=False)
    assert on_cpu(tokens).equal(logits.argmax(dim=-1, keepdim=True))
    assert count.launches == 1


def test_gpu_searches_blocks_of_a_vocabulary_of_a_few_thousand_tokens() -> None:
    scores = random_numbers(2, 10_000)
    with counted():
        likely, tokens = likely_tokens(on_gpu(scores), 8)
    assert tokens is not None
    assert tokens.shape[1] < 600
    assert on_cpu(likely).topk(8).values.equal(scores.topk(8).values)


def test_gpu_cuts_the_translations_of_a_search_together() -> None:
    tokens = on_gpu(torch.full((50, 1, 64), 7))
    lengths = on_gpu(torch.arange(1, 51)[:, None])
    found = [Hypotheses(*row, row[1].float()) for row in zip(tokens, lengths, strict=True)]
    with counted() as count:
        output = _output(found, GenerationConfig(pad_token_id=0))
    assert output.ne(0).sum(dim=1).tolist() == list(range(1, 51))
    assert count.launches < 20


@pytest.mark.parametrize(
    ("beams", "lengths"),
    [
        (1, [9, 4, 12]),
        (1, [9]),
        (4, [9, 4, 12]),
    ],
    ids=str,
)
@torch.no_grad()
def test_captured_step_launches_few_kernels_and_waits_for_none(
    beams: int,
    lengths: list[int],
    gpu_model: Any,
) -> None:
    ids, mask = gpu_batch(*lengths).values()
    rows = len(lengths)
    config = config_of(beams, NO_END)
    search = BeamSearch(
        config,
        LengthPenalty(0.6, "gnmt"),
        max_length=100,
        over=50,
    )
    with counted():
        decoder = gpu_model.make_decoder(gpu_model.encode(ids, mask), beams)
        assert isinstance(decoder, CapturedDecoder)
        prefix = on_gpu(torch.full((rows, 1), START))
        search.join(SearchBatch(decoder, prefix, mask, range(rows), [1] * rows))
        search.step()
        assert decoder.captured is not None
        with counted() as count:
            search.state = decoder.step(search.state, config, search.penalties)
    assert count.launches <= LAUNCHES[beams], count.operations.most_common()
    assert not count.waits
    assert not count.copies


@torch.no_grad()
def test_step_needs_the_memory_that_is_counted_for_it(gpu_model: Any) -> None:
    weights = gpu_model.inference_engine.weights(gpu_model)
    sizes = captured.Sizes(
        config_of(4, NO_END),
        rows=4,
        slots=32,
        source=16,
        tokens=64,
    )
    with counted():
        step = captured.CapturedStep(weights, sizes, 0, Eager())
        with held_memory() as held:
            step.repeat()
    assert held.peak <= captured.pool_bytes(weights, sizes) <= 1.5 * held.peak
    static = sum(tensor.nbytes for tensor in on_cpu(step.memory.tensors()))
    waiting = 4 * 16 * 64 * 2  # states in bfloat16 of as many sentences, as long
    assert captured.static_bytes(weights, sizes) == static + waiting


@pytest.mark.usefixtures("eager_recorder")
@pytest.mark.parametrize("settings", [{}, {"suppress_tokens": [NO_END]}], ids=["captured", "eager"])
def test_gpu_decodes_in_autocast(settings: dict[str, Any]) -> None:
    """As evaluations of a training in bfloat16 do. Autocast computes norms in float32."""
    model: Any = optimize_for_inference(on_gpu(narrow_model()))
    prefix = on_gpu(torch.tensor([[START, 7]] * 3))
    with counted() as count, autocast():
        model.generate(
            **gpu_batch(9, 4, 12),
            **settings,
            decoder_input_ids=prefix,
            num_beams=4,
            max_new_tokens=10,
        )
    products = Counter(shape[0] for shape in count.shapes.elements())
    assert products["attend"] > 6 * 2 * 10
    assert model.inference_engine.packed.keys() == {torch.float32, torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
@torch.no_grad()
def test_request_of_64_steps_waits_a_few_times(beams: int, gpu_model: Any) -> None:
    with counted() as count:
        tokens = gpu_model.generate(
            **gpu_batch(9, 4, 12, 6, 3, 8),
            num_beams=beams,
            max_new_tokens=64,
            eos_token_id=NO_END,
        )
    assert tokens.shape == (6, 65)
    assert sum(count.waits.values()) <= WAITS, count.waits
