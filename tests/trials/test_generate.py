"""A part of the trial of `generate`. `python -m scripts.trials.generate` runs all of it."""

import pytest
import torch

from hf_vanilla_transformer.engine import optimize
from hf_vanilla_transformer.search_vanilla_transformer import LengthPenalty
from scripts.trials import generate
from scripts.trials.generate import Case, Request
from tests.search_helpers import varied_model


@pytest.mark.slow
def test_random_requests_are_translated_as_by_transformers() -> None:
    tally = generate.run(100, None)
    assert not tally.differences, "\n\n".join(tally.differences)
    assert tally.cases == 100 and all(tally.names[f"engine {name}"] for name in generate.ENGINES)


def request(**arguments: object) -> Request:
    arguments = {"num_beams": 3, "length_penalty": 1.0, "max_new_tokens": 7} | arguments
    return Request([4, 7], False, 1, "input_ids", "of padding", 1, arguments)


def test_trial_notices_stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        {}, 2, 0.0, torch.float32, "packed", [("none", request()), ("write_in_place", request())]
    )
    generate.check(case, generate.Tally())
    monkeypatch.setattr(optimize, "_state", lambda *args: [])
    with pytest.raises(AssertionError, match="translation 0|scores"):
        generate.check(case, generate.Tally())


def test_trial_notices_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case({}, 2, 0.0, torch.float32, "modules", [("none", request(length_penalty=2.0))])
    generate.check(case, generate.Tally())
    monkeypatch.setattr(LengthPenalty, "__call__", lambda self, lengths: lengths)
    with pytest.raises(AssertionError, match="translation |scores"):
        generate.check(case, generate.Tally())


@torch.no_grad()
def test_tie_is_what_rounding_decides() -> None:
    model = varied_model(2, 0.0)
    greedy = request(num_beams=1, max_new_tokens=1)
    (first, second), _ = generate.by_their_loop(model, greedy)
    before = [weight.clone() for weight in model.parameters()]
    assert not generate.is_tie(model, greedy, 0, [first, [*first[:-1], 9]])
    assert all(weight.equal(old) for weight, old in zip(model.parameters(), before, strict=True))
    token, other = first[-1], 5 if first[-1] != 5 else 6
    model.lm_head.weight[other] = model.lm_head.weight[token]
    model.lm_head.bias[other] = model.lm_head.bias[token]
    assert generate.is_tie(model, greedy, 0, [first, [*first[:-1], other]])
