"""Sentences that join and leave a running batch get the translations that `generate` gives to each alone."""

import functools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hf_vanilla_transformer.engine.continuous import ContinuousSearch, FoundHypothesis
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.model_helpers import EOS, PAD, START, sentences
from tests.search_helpers import Model, varied_model

SOURCES = sentences([2 + (7 * i) % 12 for i in range(14)], 24, seed=3)


def results_of(search: ContinuousSearch) -> dict[int, list[FoundHypothesis]]:
    """Of the sentences that have joined, whose search ends here."""
    found: dict[int, list[FoundHypothesis]] = {}
    while search:
        found |= dict(search.step())
    return found


def join(
    search: ContinuousSearch,
    numbers: Iterable[int],
    wanted: int = 1,
) -> None:
    search.join([(number, SOURCES[number], wanted, []) for number in numbers])


def translate_all(search: ContinuousSearch, wanted: list[int]) -> dict[int, list[FoundHypothesis]]:
    """Everything in `SOURCES`, a few joining at a time; also when others are half done."""
    draw = random.Random(0)
    waiting = list(range(len(SOURCES)))
    found: dict[int, list[FoundHypothesis]] = {}
    while waiting or search:
        joining: list[int] = []
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            if waiting and search.fits([SOURCES[i] for i in (*joining, waiting[0])]):
                joining.append(waiting.pop(0))
        search.join([(i, SOURCES[i], wanted[i], []) for i in joining])
        for key, hypotheses in search.step():
            assert key not in found
            found[key] = hypotheses
    return found


def alone(
    model: Model,
    source: list[int],
    beams: int,
    wanted: int = 1,
    **settings: Any,
) -> list[tuple[list[int], Any]]:
    """Tokens without padding and start token, and score, of each hypothesis of `generate`."""
    output = model.generate(
        torch.tensor([source]),
        num_beams=beams,
        num_return_sequences=wanted,
        return_dict_in_generate=True,
        **settings,
    )
    scores = output.sequences_scores.tolist() if beams > 1 else [None]
    hypotheses = []
    for (_, *tokens), score in zip(output.sequences.tolist(), scores, strict=True):
        length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        hypotheses.append((tokens[:length], score))
    return hypotheses


PROCESSORS = {
    "bad_words_ids": [[7]],
    "min_length": 5,
    "no_repeat_ngram_size": 2,
}


@pytest.mark.parametrize(
    ("optimized", "beams", "settings"),
    [
        (False, 4, {}),
        (True, 4, {}),
        (True, 4, {"length_penalty": 1.0}),
        (True, 4, {"max_new_tokens": 7}),
        (True, 4, PROCESSORS),
        (True, 1, {}),
        (False, 1, PROCESSORS),
    ],
    ids=["modules", "paper", "power", "limit", "processors", "greedy", "greedy-processors"],
)
def test_continuous_search_equals_generate(
    optimized: bool,
    beams: int,
    settings: dict[str, Any],
) -> None:
    model = varied_model()
    if optimized:
        optimize_for_inference(model)
    wanted = [1 + i % beams for i in range(len(SOURCES))]
    search = ContinuousSearch(
        model,
        batch_size=5,
        num_beams=beams,
        **settings,
    )
    found = translate_all(search, wanted)
    assert sorted(found) == list(range(len(SOURCES)))
    for i, source in enumerate(SOURCES):
        expected = alone(model, source, beams, wanted[i], **settings)
        assert found[i][0].tokens == expected[0][0]
        # hypotheses of a random model may tie up to rounding, and then swap ranks
        for hypothesis, (_, score) in zip(found[i], expected, strict=True):
            assert hypothesis.score == (None if beams == 1 else pytest.approx(score, abs=1e-4))
    assert len({tuple(each[0].tokens) for each in found.values()}) > 2


def test_sentence_without_tokens_is_a_row_of_padding() -> None:
    """A tokenizer that adds no end may leave nothing of a text."""
    model = varied_model()
    search = ContinuousSearch(model, num_beams=2, max_new_tokens=5)
    search.join([(0, [], 1, []), (1, [5, 6, EOS], 1, [])])
    ids = torch.tensor([[PAD] * 3, [5, 6, EOS]])
    rows = model.generate(ids, attention_mask=ids.ne(PAD).long(), num_beams=2, max_new_tokens=5)
    found = results_of(search)
    for number, row in enumerate(rows[:, 1:].tolist()):
        tokens = found[number][0].tokens
        assert tokens == row[: len(tokens)]


def test_batch_keeps_its_limits() -> None:
    search = ContinuousSearch(
        varied_model(),
        batch_size=3,
        max_tokens=20,
        num_beams=2,
    )

    def fits(*lengths: int) -> bool:
        return search.fits([[5] * length for length in lengths])

    assert fits(100), "a longer sentence goes alone"
    assert fits(6, 6, 6)
    assert not fits(6, 6, 6, 6)
    assert fits(10, 10)
    assert not fits(3, 11)
    join(search, [0])
    assert len(search) == 1
    assert fits(10)
    assert not fits(11)


def test_free_rows_are_removed_once_a_fifth_is_free() -> None:
    """This copies the caches. The search takes the others' next token afterwards."""
    search = ContinuousSearch(varied_model(), num_beams=2, min_new_tokens=6)
    join(search, range(10))
    rows = []
    for key in range(4):
        search.step()
        rows.append(len(search.search.keys))
        search.drop({key})
    assert rows == [10, 10, 8, 8]


def test_dropped_sentences_leave_the_others_as_they_are() -> None:
    model = varied_model()
    search = ContinuousSearch(model, num_beams=4)
    join(search, range(6))
    search.step()
    search.drop({0, 3, 4})
    assert len(search) == 3
    found = results_of(search)
    assert sorted(found) == [1, 2, 5]
    for i, (hypothesis,) in found.items():
        assert hypothesis.tokens == alone(model, SOURCES[i], 4)[0][0]
    join(search, [7])
    search.drop({7})
    assert not search
    assert search.step() == []
    assert search.search.state is None


def test_translations_of_a_step_are_copied_to_the_host_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each copy waits for a GPU."""
    search = ContinuousSearch(
        optimize_for_inference(endless_model()),
        num_beams=2,
        max_new_tokens=3,
    )
    join(search, range(6), wanted=2)
    tolist = torch.Tensor.tolist
    copied: list[torch.Tensor] = []

    def seen_tolist(tensor: torch.Tensor) -> Any:
        copied.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", seen_tolist)
    found: list[Any] = []
    while search:
        copied.clear()
        found = search.step()
    assert [len(hypotheses) for _, hypotheses in found] == [2] * 6
    assert len(copied) <= 5


def endless_model() -> Model:
    """Every translation is as long as it may be."""
    return varied_model(end=-1e4)


@functools.cache
def alone_by_modules(over: int, *prefix: int) -> list[list[int]]:
    """The tokens of each of `SOURCES`."""
    model = endless_model()
    settings = {
        "decoder_input_ids": torch.tensor([[START, *prefix]]),
        "max_length_over_source": over,
    }
    return [alone(model, source, 3, **settings)[0][0] for source in SOURCES]


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("over", [-5, 0, 1])
@pytest.mark.parametrize("prefix", [[], [7], [7, 9, 11]], ids=len)
def test_limit_of_the_source_does_not_count_a_prefix(
    prefix: list[int],
    over: int,
    optimized: bool,
) -> None:
    model = endless_model()
    if optimized:
        optimize_for_inference(model)
    search = ContinuousSearch(
        model,
        prefix_length=len(prefix),
        num_beams=3,
        max_length_over_source=over,
    )
    search.join([(i, source, 1, prefix) for i, source in enumerate(SOURCES)])
    found = results_of(search)
    for i, tokens in enumerate(alone_by_modules(over, *prefix)):
        assert found[i][0].tokens == tokens
        assert len(tokens) == len(prefix) + max(len(SOURCES[i]) + over, 1)
