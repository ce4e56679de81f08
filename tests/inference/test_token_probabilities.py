"""The probability of each token of a translation: those that the search multiplied, for any batch and ensemble."""

import itertools
import math
from functools import partial
from typing import Any

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference import token_probabilities
from hf_vanilla_transformer.inference.token_probabilities import token_log_probabilities
from tests.serving_helpers import CORPUS, echo_translator


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


def test_probabilities_multiply_to_the_score(translator: Translator) -> None:
    found = list(translator.translate_nbest([*CORPUS, " "], 4, probabilities=True))
    (blank, *_) = found[-1]
    assert blank.tokens == []
    assert blank.probabilities == []
    for hypothesis in itertools.chain(*found[:-1]):
        tokens = hypothesis.tokens
        assert len(tokens) == len(hypothesis.probabilities)
        assert all(0 <= probability <= 1 for probability in hypothesis.probabilities)
        penalty = ((5 + len(tokens)) / 6) ** 0.6  # §6.1
        log_p = sum(map(math.log, hypothesis.probabilities))
        assert hypothesis.score == pytest.approx(log_p / penalty, abs=1e-3)
        text = translator.target_tokenizer.convert_tokens_to_string(tokens).replace("</s>", "")
        assert text.strip() == hypothesis.text.strip()


def test_greedy_and_forced_translations_have_probabilities_too(translator: Translator) -> None:
    def best(**settings: Any) -> Any:
        ((hypothesis, *_),) = translator.translate_nbest([CORPUS[0]], **settings)
        return hypothesis

    plain = best(num_beams=1, probabilities=True)
    forced = best(num_beams=1, probabilities=True, prefixes=["two"])
    assert plain.score is None
    assert forced.tokens[0].endswith("two")
    assert forced.probabilities[0] < plain.probabilities[0]
    without = best()
    assert without.tokens is None
    assert without.probabilities is None


def test_memory_limit_does_not_change_probabilities(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [translator.encode(line, 1) for line in CORPUS]
    targets = [[5 + i] * (1 + i) + [2] for i in range(len(CORPUS))]
    compute = partial(
        token_log_probabilities, [translator.model], translator.source_tokenizer, sources, targets
    )
    expected = compute()
    batches = []
    original = token_probabilities.decoder_inputs

    def seen_inputs(model: Any, ids: Any) -> Any:
        batches.append(len(ids))
        return original(model, ids)

    monkeypatch.setattr(token_probabilities, "_MAX_LOGITS", 2 * 5 * 300)
    monkeypatch.setattr(token_probabilities, "decoder_inputs", seen_inputs)
    found = compute()
    assert batches == [2, 2]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
