"""The probability of each token of a translation: those that the search multiplied, for any batch and ensemble."""

import math

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
    assert found[-1][0].tokens == found[-1][0].probabilities == []
    for hypothesis in (each for hypotheses in found[:-1] for each in hypotheses):
        assert hypothesis.probabilities is not None and hypothesis.tokens is not None
        assert len(hypothesis.tokens) == len(hypothesis.probabilities)
        assert all(0 <= probability <= 1 for probability in hypothesis.probabilities)
        penalty = ((5 + len(hypothesis.tokens)) / 6) ** 0.6  # §6.1
        log_p = sum(math.log(probability) for probability in hypothesis.probabilities)
        assert hypothesis.score == pytest.approx(log_p / penalty, abs=1e-3)
        text = translator.target_tokenizer.convert_tokens_to_string(hypothesis.tokens).replace("</s>", "")
        assert text.strip() == hypothesis.text.strip()


def test_greedy_and_forced_translations_have_probabilities_too(translator: Translator) -> None:
    (plain,) = translator.translate_nbest([CORPUS[0]], num_beams=1, probabilities=True)
    (forced,) = translator.translate_nbest([CORPUS[0]], num_beams=1, probabilities=True, prefixes=["two"])
    assert plain[0].score is None and plain[0].probabilities is not None and forced[0].probabilities is not None
    assert forced[0].tokens is not None and forced[0].tokens[0].endswith("two")
    assert forced[0].probabilities[0] < plain[0].probabilities[0]
    (without,) = translator.translate_nbest([CORPUS[0]])
    assert without[0].tokens is without[0].probabilities is None


def test_memory_limit_does_not_change_probabilities(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [translator.encode(line, 1) for line in CORPUS]
    targets = [[5 + i] * (1 + i) + [2] for i in range(len(CORPUS))]
    expected = token_log_probabilities([translator.model], translator.source_tokenizer, sources, targets)
    batches = []
    original = token_probabilities.decoder_inputs
    monkeypatch.setattr(token_probabilities, "_MAX_LOGITS", 2 * 5 * 300)
    monkeypatch.setattr(
        token_probabilities, "decoder_inputs", lambda model, ids: batches.append(len(ids)) or original(model, ids)
    )
    found = token_log_probabilities([translator.model], translator.source_tokenizer, sources, targets)
    assert batches == [2, 2] and [len(row) for row in found] == [len(target) for target in targets]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
