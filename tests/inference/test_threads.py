"""Threads that share a model, in aligning, scoring and translating, do not notice each other."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import cross_attention
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.text import train_tokenizer
from tests.engine.model_changes import aligning_model
from tests.model_helpers import slow

WORDS = [
    "a",
    "small",
    "dog",
    "runs",
    "over",
    "two",
    "hundred",
    "green",
    "hills",
    "and",
    "sees",
    "one",
    "bird",
]
SETTINGS = {
    "num_beams": 2,
    "max_new_tokens": 4,
    "alignment": True,
    "probabilities": True,
}


def lines(count: int) -> list[str]:
    draw = random.Random(1)
    chosen = (draw.choices(WORDS, k=draw.randint(1, 9)) for _ in range(count))
    return list(map(" ".join, chosen))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(lines(50), 300)


def rounded(results):
    """Texts, links and probabilities, the last rounded, because a batch of another size rounds otherwise."""
    return [
        (one.text, one.alignment, one.tokens, [round(p, 4) for p in one.probabilities])
        for hypotheses in results
        for one in hypotheses
    ]


@pytest.mark.parametrize(
    "engine", ["modules", "ensemble", *slow("packed", "eager", "training mode")]
)
def test_user_threads_get_the_results_of_one_thread(tokenizer, engine):
    model = aligning_model(tokenizer)
    ensemble = [aligning_model(tokenizer, 1)] if engine == "ensemble" else []
    if engine == "packed":
        optimize_for_inference(model)
    elif engine == "eager":
        model.set_attn_implementation("eager")
    elif engine == "training mode":
        model.train()
    translator = Translator(model, tokenizer, ensemble=ensemble, workers=1)
    text = lines(8)
    alone = [rounded(translator.translate_nbest([line], **SETTINGS)) for line in text]

    def translate():
        return list(translator.translate(text, num_beams=2, max_new_tokens=4))

    def attend(line):
        *_, weights = cross_attention(model, tokenizer, None, line, line)
        return weights

    plain = translate()
    maps = list(map(attend, text))
    before = torch.get_num_threads()

    def call(number: int):
        index = number % len(text)
        line = text[index]
        kind = number % 3 if number % 5 else 0
        if kind == 0:
            return rounded(translator.translate_nbest([line], **SETTINGS)) == alone[index]
        if kind == 1:
            return translate() == plain
        return torch.equal(attend(line), maps[index])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(20)))
    assert model.training == (engine == "training mode")
    assert model.config._attn_implementation == ("eager" if engine == "eager" else "sdpa")
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.get_num_threads() == before
