"""Captured steps. On a CPU a recorder repeats operations on the same memory, as a CUDA graph does."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.engine import captured, optimize
from hf_vanilla_transformer.engine.captured import CapturedDecoder, CapturedSteps, rounded_up
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
from tests.engine.recorded_steps import Eager, Recorder, recording
from tests.model_helpers import EOS, PAD, START, padded, sentences, six_layers, slow
from tests.pretended_gpu import autocast, counted, held_memory, on_cpu, on_gpu
from tests.search_helpers import AS_DICT, LENGTHS, Model, batches, by_transformers, source, varied_model

LONG = [3 + 5 * i % 9 for i in range(24)]  # sources of a batch that is compacted


def packed(recorder: Any, **fields: Any) -> Model:
    """A packed model with captured steps."""
    model = varied_model(**fields)
    optimize_for_inference(model)
    model.inference_engine.weights(model).steps = CapturedSteps(recorder)
    return model


def steps_of(model: Model) -> CapturedSteps:
    return model.inference_engine.weights(model).steps


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
@pytest.mark.parametrize("formula", ["gnmt", "power"])
@pytest.mark.parametrize("beams", [1, 4, *slow(8)])
def test_repeated_steps_have_every_field_of_eager_steps(
    beams: int, formula: str, early_stopping: bool, dtype: torch.dtype, states: list[BeamState]
) -> None:
    settings: dict[str, Any] = {"num_beams": beams, "early_stopping": early_stopping}
    if formula == "power":
        settings["length_penalty"] = 0.8
    found = []
    for recorder in (Recorder(), Eager()):
        with recording(recorder, steps_at_once=3):
            model = packed(recorder).to(dtype)
            optimize_for_inference(model)
            next_batch = batches([4, 30, 2, 6, 5, 3], [])
            tokens = model.generate(**source(LONG), next_batch=next_batch, **settings)
        found.append((tokens, list(states)))
        states.clear()
    (tokens, ours), (expected, theirs) = found
    assert tokens.equal(expected)
    assert len(ours) == len(theirs) > 3
    for mine, other in zip(ours, theirs, strict=True):
        for name, part, its in zip(BeamState._fields, mine, other, strict=True):
            assert part.equal(its), name
    rows = [len(state.done) for state in ours]
    assert min(rows) < max(rows), "the batch was compacted"


@pytest.mark.covering(1)
@pytest.mark.parametrize("beams", [1, 4, *slow(8)])
@pytest.mark.parametrize("settings", [{}, {"length_penalty": 0.8, "early_stopping": True}], ids=["gnmt", "power"])
def test_captured_search_finds_what_a_packed_one_finds(beams: int, settings: dict[str, Any]) -> None:
    def translate(model: Model) -> Any:
        next_batch = batches([4, 30, 2, 6, 5, 3], [])
        return model.generate(**source(LONG), num_beams=beams, next_batch=next_batch, **settings, **AS_DICT)

    expected = translate(optimize_for_inference(varied_model()))
    recorder = Recorder()
    with recording(recorder):
        model = optimize_for_inference(varied_model())
        found = translate(model)
        assert recorder.repeated > 16
        recorded = recorder.recorded
        again = translate(model)
    assert found.sequences.tolist() == again.sequences.tolist() == expected.sequences.tolist()
    if beams > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    assert recorder.recorded == recorded, "the same sizes are recorded once"


@pytest.mark.parametrize("forced", [{"forced_eos_token_id": EOS}, {}], ids=["forced", "free"])
def test_captured_search_repeats_the_best_of_too_few_hypotheses(forced: dict[str, Any]) -> None:
    """An end that is forced at the first token leaves one hypothesis. Without, there are as many as beams."""
    inputs = source(LENGTHS)
    settings = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 1, "length_penalty": 1.0, **forced}
    with recording(Recorder()):
        model = optimize_for_inference(varied_model())
        found = model.generate(**inputs, **settings, **AS_DICT)
    expected = by_transformers(model, **inputs, **settings, **AS_DICT, output_scores=True)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    if forced:
        assert found.sequences.tolist() == [[START, EOS]] * 4 * len(LENGTHS)
    else:
        assert found.sequences.tolist() == expected.sequences.tolist()


def test_first_step_is_captured(reasons: Callable[[], str]) -> None:
    recorder = Recorder()
    with recording(recorder, steps_at_once=1):
        model = optimize_for_inference(varied_model(end=-1e4))
        model.generate(**source(LENGTHS), num_beams=4, max_new_tokens=6)
    assert recorder.repeated == 6
    assert not reasons()


@pytest.mark.parametrize("beams", [1, 4])
def test_sentences_may_join_twice_before_a_step(beams: int) -> None:
    rows = sentences(LENGTHS, 24)

    def translate(model: Model, groups: list[list[int]]) -> dict[int, list[Any]]:
        search = ContinuousSearch(model, num_beams=beams)
        for group in groups:
            search.join([(number, rows[number], 1, []) for number in group])
        found: dict[int, list[Any]] = {}
        while search:
            found |= dict(search.step())
        return found

    numbers = list(range(len(rows)))
    groups = [numbers[:2], numbers[2:]]
    expected = translate(varied_model(), [numbers])
    together = translate(varied_model(), groups)
    with recording(Recorder(), steps_at_once=4):
        captured_steps = translate(optimize_for_inference(varied_model()), groups)
    for found in (together, captured_steps):
        for number in numbers:
            assert [each.tokens for each in found[number]] == [each.tokens for each in expected[number]]
            # The width of a batch decides the order of additions, and float32 has seven digits of their sums.
            scores = [each.score for each in expected[number]]
            assert [each.score for each in found[number]] == pytest.approx(scores, abs=1e-5)


def test_server_joins_a_captured_batch_while_it_runs() -> None:
    rows = sentences(LONG, 24)

    def translate(model: Model) -> dict[int, list[Any]]:
        search = ContinuousSearch(model, batch_size=8, num_beams=4)
        waiting = [(number, row, 2, []) for number, row in enumerate(rows)]
        found: dict[int, list[Any]] = {}
        while waiting or search:
            count = min(3, 8 - len(search))
            search.join(waiting[:count])
            del waiting[:count]
            found |= dict(search.step())
        return found

    expected = translate(optimize_for_inference(varied_model()))
    recorder = Recorder()
    with recording(recorder, steps_at_once=4):
        found = translate(optimize_for_inference(varied_model()))
    assert recorder.repeated > recorder.recorded
    for number, hypotheses in expected.items():
        assert [each.tokens for each in found[number]] == [each.tokens for each in hypotheses]


def test_sentences_that_are_done_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence that never ends runs next to one that ends at once, whose row stays."""
    monkeypatch.setattr(captured, "ROWS", (8,))
    recorder = Recorder()
    with recording(recorder):
        model = optimize_for_inference(varied_model(end=-1e4))
        search = ContinuousSearch(model, batch_size=2, num_beams=4, max_new_tokens=200)
        search.join([(0, [5, EOS], 1, []), (1, [7, 8, EOS], 1, [])])
        search.step()
        search.drop({0})
        search.search.state.done[0] = True
        for _ in range(6):
            search.step()
        decoder: Any = search.search.decoder
        assert decoder.captured is not None
        assert decoder.slots.visible[0].sum(dim=1).max() <= 4 * 16
        assert decoder.slots.visible[1].sum(dim=1).max() > 4 * 16


def test_rows_without_a_sentence_take_no_room() -> None:
    """They are computed until the search moves, and nobody reads how many slots they need."""
    with recording(Recorder(), steps_at_once=2):
        model = optimize_for_inference(varied_model(end=-1e4))
        search = ContinuousSearch(model, batch_size=3, num_beams=4, max_new_tokens=100)
        search.join([(number, [5, 7 + number, EOS], 1, []) for number in range(3)])
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


def test_sizes_are_few() -> None:
    assert [rounded_up(size, (4, 8)) for size in (1, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 24]
    recorder = Recorder()
    with recording(recorder):
        model = optimize_for_inference(varied_model())
        for seed in range(6):
            model.generate(**source([3 + seed, 5, 2], seed=seed), num_beams=4, max_new_tokens=20)
    assert recorder.recorded <= 3


def test_static_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    with recording(recorder):
        model = optimize_for_inference(varied_model())
        translate = lambda count: model.generate(**source([5] * count), num_beams=2, max_new_tokens=20)  # noqa: E731
        translate(1)
        gc.collect()
        steps = steps_of(model)
        assert steps.in_use == 0
        held = steps.nbytes()
        assert held > steps.pool > 0
        assert len(steps.idle) == recorder.recorded
        monkeypatch.setattr(captured, "MAX_BYTES", 2 * held)
        for count in (2, 4, 8):
            translate(count)
            gc.collect()
            assert steps.in_use == 0
            assert steps.nbytes() <= 2 * held
        monkeypatch.setattr(captured, "MAX_BYTES", 2**30)
        monkeypatch.setattr(captured, "MAX_STEPS", 2)
        for count in (1, 2, 4):
            translate(count)
        gc.collect()
        assert len(steps.idle) == 2


def test_two_searches_at_once_have_memory_of_their_own() -> None:
    expected = optimize_for_inference(varied_model()).generate(**source(LENGTHS), num_beams=4).tolist()
    recorder = Recorder()
    with recording(recorder, steps_at_once=2):
        model = optimize_for_inference(varied_model())
        searches = [ContinuousSearch(model, num_beams=4), ContinuousSearch(model, num_beams=4)]
        rows = sentences(LENGTHS, 24)
        found: list[dict] = [{}, {}]
        for search in searches:
            search.join([(number, row, 1, []) for number, row in enumerate(rows)])
        while any(searches):
            for search, results in zip(searches, found, strict=True):
                results |= dict(search.step())
    for results in found:
        for number, row in enumerate(expected):
            tokens = results[number][0].tokens
            assert row[1 : 1 + len(tokens)] == tokens


class Failing(Recorder):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        raise self.error


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    caplog.set_level(logging.DEBUG, logger=captured.__name__)
    yield lambda: caplog.text


NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (NOT_PERMITTED, "no step can be captured: operation not permitted"),
    ],
)
def test_search_that_cannot_be_captured_is_eager(error: Exception, reason: str, reasons: Callable[[], str]) -> None:
    settings = {"num_beams": 4, "max_new_tokens": 30}
    expected = varied_model().generate(**source(LENGTHS), **settings)
    recorder = Failing(error)
    with recording(recorder):
        model = optimize_for_inference(varied_model())
        for _ in range(2):
            assert model.generate(**source(LENGTHS), **settings).equal(expected)
    assert recorder.recorded == 1 or error is not NOT_PERMITTED
    assert reason in reasons()


def test_search_that_outgrows_the_memory_goes_on_eagerly(
    reasons: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_beams": 4, "max_new_tokens": 120}
    expected = varied_model(end=-1e4).generate(**source(LENGTHS), **settings)
    recorder = Recorder()
    with recording(recorder, steps_at_once=4):
        model = optimize_for_inference(varied_model(end=-1e4))
        record = recorder.record

        def record_once(function: Callable[[], None]) -> Callable[[], None]:
            monkeypatch.setattr(captured, "MAX_BYTES", 1)
            return record(function)

        monkeypatch.setattr(recorder, "record", record_once)
        assert model.generate(**source(LENGTHS), **settings).equal(expected)
        assert 0 < recorder.repeated < 100
    assert "exceeds" in reasons()


@pytest.mark.parametrize(
    "settings", [{"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}, {"prefix_allowed_tokens_fn": lambda *_: [EOS, 7]}]
)
def test_processors_and_constraints_take_the_eager_step(settings: dict[str, Any], reasons: Callable[[], str]) -> None:
    recorder = Recorder()
    with recording(recorder):
        optimize_for_inference(varied_model()).generate(**source(LENGTHS), num_beams=2, **settings)
    assert recorder.recorded == 0
    assert "logits processors" in reasons()


def test_ensembles_take_the_eager_step(reasons: Callable[[], str]) -> None:
    recorder = Recorder()
    with recording(recorder):
        models = [optimize_for_inference(varied_model(seed)) for seed in range(2)]
        with_ensemble(models).generate(**source(LENGTHS), num_beams=2)
    assert recorder.recorded == 0
    assert "ensemble" in reasons()


# What a GPU is asked to do, counted on a pretended one

LAUNCHES = {1: 101, 4: 130}  # of a step with so many beams and six layers, eleven of them copies into static memory
WAITS = 8  # of a request of 64 steps: three of transformers, one for each 16 steps, one for the width of the result
NO_END = 1499  # a token that the model never writes


def narrow_model() -> VanillaTransformerForConditionalGeneration:
    return six_layers(1500).eval().to(torch.bfloat16)


@pytest.fixture
def gpu_model(monkeypatch: pytest.MonkeyPatch) -> VanillaTransformerForConditionalGeneration:
    monkeypatch.setattr(optimize, "not_optimizable", lambda model: None)  # its parameters are of another class
    monkeypatch.setattr(captured, "recorder_of", lambda device: Eager())
    return optimize_for_inference(on_gpu(narrow_model()))


@pytest.mark.parametrize("size", [5, 40, 4999, 20003])  # fewer tokens than candidates, all tokens, blocks of tokens
@pytest.mark.parametrize("ends", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("running", [1, 4])
def test_gpu_chooses_the_tokens_that_a_cpu_chooses(running: int, ends: tuple[int, ...], size: int) -> None:
    """A GPU takes the best of all beams at once, a CPU the best of each beam first."""
    generator = torch.Generator().manual_seed(0)
    batch = 6
    penalties = LengthPenalty(0.6, "gnmt").table(32, 1, torch.device("cpu"))
    limits = torch.tensor([3, 4, 5, 6, 7, 8])
    decisive = torch.tensor([0, 1, 2, 3, 0, 1])
    state = BeamState.start(torch.ones(batch, 1, dtype=torch.long), limits, penalties, decisive, running, 4)
    config = SearchConfig(4, False, ends, None, True)
    ours = state
    theirs = on_gpu(state)
    for _ in range(7):
        logits = 3 * torch.randn(batch, ours.parents.shape[1], size, generator=generator)
        with counted():
            theirs = config.advance(theirs, on_gpu(logits), on_gpu(penalties))
        ours = config.advance(ours, logits, penalties)
        assert_same_hypotheses(ours, on_cpu(theirs))
    assert ours.done.all()


def assert_same_hypotheses(ours: BeamState, theirs: BeamState) -> None:
    """Beams without a hypothesis may hold anything."""
    for name in ("log_probs", "ended_scores", "lengths", "done"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name
    running = ours.log_probs > -1e8
    for name in ("tokens", "next_tokens", "parents"):
        assert getattr(ours, name)[running].equal(getattr(theirs, name)[running]), name
    ended = ours.ended_scores > -1e8
    for name in ("ended_tokens", "ended_lengths"):
        assert getattr(ours, name)[ended].equal(getattr(theirs, name)[ended]), name


def test_gpu_reads_the_logits_of_a_greedy_step_as_they_are() -> None:
    logits = torch.randn(3, 1, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    with counted() as count:
        _, tokens = topk_log_probs(on_gpu(logits), 1, normalize=False)
    assert on_cpu(tokens).equal(logits.argmax(dim=-1, keepdim=True))
    assert count.launches == 1


def test_gpu_searches_blocks_of_a_vocabulary_of_a_few_thousand_tokens() -> None:
    scores = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    with counted():
        likely, tokens = likely_tokens(on_gpu(scores), 8)
    assert tokens is not None and tokens.shape[1] < 600
    assert on_cpu(likely).topk(8).values.equal(scores.topk(8).values)


def test_gpu_cuts_the_translations_of_a_search_together() -> None:
    numbers = on_gpu({"tokens": torch.full((50, 1, 64), 7), "lengths": torch.arange(1, 51)[:, None]})
    found = [Hypotheses(*rows, rows[1].float()) for rows in zip(*numbers.values(), strict=True)]
    with counted() as count:
        tokens = _output(found, GenerationConfig(pad_token_id=0))
    assert tokens.ne(0).sum(dim=1).tolist() == list(range(1, 51))
    assert count.launches < 20


@pytest.mark.parametrize(("beams", "lengths"), [(1, [9, 4, 12]), (1, [9]), (4, [9, 4, 12])], ids=str)
@torch.no_grad()
def test_captured_step_launches_few_kernels_and_waits_for_none(beams: int, lengths: list, gpu_model: Any) -> None:
    ids = padded(sentences(lengths))
    rows = len(lengths)
    mask = ids.ne(PAD).long()
    with counted():
        encoded = gpu_model.encode(on_gpu(ids), on_gpu(mask))
        decoder = gpu_model.make_decoder(encoded, beams)
        assert isinstance(decoder, CapturedDecoder)
        config = SearchConfig(beams, False, (NO_END,), None, True)
        search = BeamSearch(config, LengthPenalty(0.6, "gnmt"), max_length=100, over=50)
        prefix = on_gpu(torch.full((rows, 1), START))
        search.join(SearchBatch(decoder, prefix, on_gpu(mask), range(rows), [1] * rows))
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
    config = SearchConfig(4, False, (NO_END,), None, True)
    sizes = captured.Sizes(config, rows=4, slots=32, source=16, tokens=64)
    with counted():
        step = captured.CapturedStep(weights, sizes, 0, Eager())
        with held_memory() as held:
            step.repeat()
    assert held.peak <= captured.pool_bytes(weights, sizes) <= 1.5 * held.peak
    static = sum(tensor.nbytes for tensor in on_cpu(step.memory.tensors()))
    waiting = 4 * 16 * 64 * 2  # states in bfloat16 of as many sentences, as long
    assert captured.static_bytes(weights, sizes) == static + waiting


@pytest.mark.parametrize("settings", [{}, {"suppress_tokens": [NO_END]}], ids=["captured", "eager"])
def test_gpu_decodes_in_autocast(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As evaluations of a training in bfloat16 do. Autocast computes norms in float32."""
    monkeypatch.setattr(optimize, "not_optimizable", lambda model: None)
    monkeypatch.setattr(captured, "recorder_of", lambda device: Eager())
    model: Any = optimize_for_inference(on_gpu(narrow_model().float()))
    ids = padded(sentences([9, 4, 12]))
    batch = on_gpu({"input_ids": ids, "attention_mask": ids.ne(PAD).long()})
    prefix = on_gpu(torch.tensor([[START, 7]] * 3))
    with counted() as count, autocast():
        model.generate(**batch, **settings, decoder_input_ids=prefix, num_beams=4, max_new_tokens=10)
    products = Counter(shape[0] for shape in count.shapes.elements())
    assert products["attend"] > 6 * 2 * 10
    assert model.inference_engine.packed.keys() == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("beams", [*slow(1), 4])
@torch.no_grad()
def test_request_of_64_steps_waits_a_few_times(beams: int, gpu_model: Any) -> None:
    ids = padded(sentences([9, 4, 12, 6, 3, 8]))
    batch = on_gpu({"input_ids": ids, "attention_mask": ids.ne(PAD).long()})
    with counted() as count:
        tokens = gpu_model.generate(**batch, num_beams=beams, max_new_tokens=64, eos_token_id=NO_END)
    assert tokens.shape == (6, 65)
    assert sum(count.waits.values()) <= WAITS, count.waits
