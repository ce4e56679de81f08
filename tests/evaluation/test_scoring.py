"""Given translations are as likely as their words, one sentence at a time."""

import pytest
import torch

from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation.scoring import score_translations_of
from hf_vanilla_transformer.evaluation.translating import Translator
from tests.model_helpers import START, tiny_model

PAIRS = [("two hundred", "zweihundert"), ("seven", ""), ("one million three", "eine Million drei"), ("", "leer")]


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair] * 5, 290)
    return Translator(tiny_model(vocab_size=len(tokenizer), label_smoothing=0.1), tokenizer)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_are_those_of_each_pair_alone(translator: Translator, batch_size: int) -> None:
    found = list(score_translations_of(translator, iter(PAIRS), batch_size))
    assert len(found) == len(PAIRS)
    for (source, target), scored in zip(PAIRS, found, strict=True):
        ids = translator.target_tokenizer(target)["input_ids"]
        with torch.no_grad():
            logits = translator.model(
                input_ids=torch.tensor([translator.source_tokenizer(source)["input_ids"]]),
                decoder_input_ids=torch.tensor([[START, *ids[:-1]]]),
            ).logits[0]
        expected = [float(row[word]) for row, word in zip(logits.double().log_softmax(dim=-1), ids, strict=True)]
        assert scored.log_probabilities == pytest.approx(expected, abs=1e-5)
        assert scored.log_probability == pytest.approx(sum(expected), abs=1e-4)
        assert scored.tokens == translator.target_tokenizer.convert_ids_to_tokens(ids)


def test_batch_size_is_checked(translator: Translator) -> None:
    with pytest.raises(UserError, match="batch_size"):
        list(score_translations_of(translator, PAIRS, 0))
