"""Scores of given translations are the sums of their tokens' log-probabilities, sentence by sentence."""

import numpy as np
import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.scoring import score_translations_of
from hf_vanilla_transformer.text import train_tokenizer
from tests.model_helpers import START, tiny_model

PAIRS = [
    ("two hundred", "zweihundert"),
    ("seven", ""),
    ("one million three", "eine Million drei"),
    ("", "leer"),
]


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair] * 5, 290)
    return Translator(tiny_model(vocab_size=len(tokenizer), label_smoothing=0.1), tokenizer)


@pytest.mark.parametrize(
    ("batch_size", "max_tokens"),
    [
        (1, 100),
        (3, 100),
        (64, 4096),
        (64, 1),
        (64, 12),
    ],
)
def test_scores_do_not_depend_on_the_batch(
    translator: Translator,
    batch_size: int,
    max_tokens: int,
) -> None:
    found = list(score_translations_of(translator, iter(PAIRS), batch_size, max_tokens))
    assert len(found) == len(PAIRS)
    for (source, target), scored in zip(PAIRS, found, strict=True):
        ids = translator.target_tokenizer(target)["input_ids"]
        source_ids = translator.source_tokenizer(source)["input_ids"]
        with torch.no_grad():
            logits = translator.model(
                input_ids=torch.tensor([source_ids]),
                decoder_input_ids=torch.tensor([[START, *ids[:-1]]]),
            ).logits[0]
        log_probs = logits.double().log_softmax(dim=-1)
        expected = log_probs[torch.arange(len(ids)), ids].tolist()
        assert scored.log_probabilities == pytest.approx(expected, abs=1e-5)
        assert scored.log_probability == pytest.approx(sum(expected), abs=1e-4)
        assert scored.tokens == translator.target_tokenizer.convert_ids_to_tokens(ids)


def test_ensemble_scores_with_the_mean_probability(translator: Translator) -> None:
    other = tiny_model(1, vocab_size=translator.model.config.vocab_size, d_model=16)
    tokenizer = translator.source_tokenizer
    both = Translator(translator.model, tokenizer, ensemble=[other])
    alone = [score_translations_of(Translator(model, tokenizer), PAIRS) for model in both.models]
    for scored, *each in zip(score_translations_of(both, PAIRS), *alone, strict=True):
        probabilities = np.exp([one.log_probabilities for one in each]).mean(axis=0)
        assert scored.log_probabilities == pytest.approx(np.log(probabilities).tolist(), abs=1e-5)
