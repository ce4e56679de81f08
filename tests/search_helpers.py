"""Shared by the tests of decoding: models whose translations vary, and the searches that ours is compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import EOS, PAD, START, padded, sentences, tiny_model

Model = VanillaTransformerForConditionalGeneration

AS_DICT = {"return_dict_in_generate": True}
ENDS = {0: 1.0, 1: 2.0, 2: 1.0}  # seed: bias of the end token, with which some hypotheses end
LENGTHS = [6, 1, 8, 3, 5]  # of the sources, in tokens


def varied_model(seed: int = 2, end: float | None = None, **fields: Any) -> Model:
    """A model whose translations differ from each other, and end at different lengths.

    Args:
        end: bias of the end token in place of `ENDS`. fields: of the configuration.
    """
    untied = {
        "tie_word_embeddings": False,
        "lm_head_bias": True,
        "vocab_size": 24,
    }
    model = tiny_model(seed, **untied | fields)
    with torch.no_grad():
        for name, parameter in model.model.decoder.named_parameters():
            if name.endswith("proj.weight") or ".fc" in name:
                parameter *= 2
        model.lm_head.bias[EOS] += ENDS[seed] if end is None else end
        model.lm_head.bias[[PAD, START]] = -1e4
    return model


def source(lengths: list[int], left: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Random sentences as arguments of `generate`."""
    ids = padded(sentences(lengths, 24, seed), left=left)
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


def by_transformers(model: Model, **kwargs: Any) -> Any:
    """transformers' own `generate`. It knows neither our search nor our decoders."""
    return GenerationMixin.generate(model, **kwargs)


def batches(
    lengths: list[int], asked: list[int], seed: int = 9, most: int = 100
) -> Callable[[int], Any]:
    """A `next_batch`: sentences of these lengths, at most `most` at a time. `asked` receives the numbers asked for."""
    waiting = sentences(lengths, 24, seed)

    def next_batch(count: int) -> tuple[Tensor, Tensor] | None:
        asked.append(count)
        count = min(count, most)
        some = waiting[:count]
        del waiting[:count]
        if not some:
            return None
        ids = padded(some)
        return ids, ids.ne(PAD).long()

    return next_batch


@torch.no_grad()
def naive_search(
    models: list[Model],
    source_ids: list[int] | None,
    beams: int,
    alpha: float,
    longest: int,
    prefix: Sequence[int] = (START,),
) -> list[tuple[float, list[int]]]:
    """§6.1 in plain Python: no cache, no padding, and no end before the greatest length.

    Of several models a token's probability is the mean. Without a source they are decoders alone.

    Returns:
        All hypotheses that ended among the K best of their step, the best first, with their scores.
    """
    running = [(0.0, list(prefix))]
    ended = []
    for length in range(1, longest + 1):
        if not running:
            break
        continuations = []
        hypotheses = [hypothesis for _, hypothesis in running]
        log_probs = _mean_probabilities(models, source_ids, hypotheses).log().tolist()
        for (log_p, hypothesis), row in zip(running, log_probs, strict=True):
            for token, log_prob in enumerate(row):
                continuations.append((log_p + log_prob, [*hypothesis, token]))
        continuations.sort(key=lambda pair: -pair[0])
        penalty = ((5 + length) / 6) ** alpha  # Wu et al. 2016, Eq. 14
        for log_p, hypothesis in continuations[:beams]:
            if hypothesis[-1] == EOS or length == longest:
                ended.append((log_p / penalty, hypothesis))
        running = [pair for pair in continuations if pair[1][-1] != EOS][:beams]
    return sorted(ended, key=lambda pair: -pair[0])


@torch.no_grad()
def naive_greedy_search(
    models: list[Model],
    source_ids: list[int] | None,
    longest: int,
    prefix: Sequence[int] = (START,),
) -> list[int]:
    """The most probable token, again and again."""
    hypothesis = list(prefix)
    for _ in range(longest):
        probabilities = _mean_probabilities(models, source_ids, [hypothesis])
        hypothesis.append(int(probabilities.argmax()))
        if hypothesis[-1] == EOS:
            break
    return hypothesis


def _mean_probabilities(
    models: list[Model], source_ids: list[int] | None, hypotheses: list[list[int]]
) -> Tensor:
    """The probabilities (K, V) of the token after each of the hypotheses, all of one length."""
    inputs = {"input_ids": torch.tensor(hypotheses)}
    if source_ids is not None:
        source = torch.tensor([source_ids] * len(hypotheses))
        inputs = {"input_ids": source, "decoder_input_ids": inputs["input_ids"]}
    outputs = [model(**inputs, use_cache=False) for model in models]
    logits = torch.stack([output.logits[:, -1] for output in outputs])
    return logits.double().softmax(dim=-1).mean(dim=0)
