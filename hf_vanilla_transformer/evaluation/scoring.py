"""How likely a model finds translations that somebody else made."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from ..errors import UserError
from .translating import BATCHES_AHEAD, Translator


@dataclass
class ScoredTranslation:
    """Natural logarithms of probabilities, of each word of a target (its end is the last) and of all of them."""

    tokens: list[str]
    log_probabilities: list[float]

    @property
    def log_probability(self) -> float:
        """Of the whole sentence."""
        return sum(self.log_probabilities)


def score_translations_of(
    translator: Translator, pairs: Iterable[tuple[str, str]], batch_size: int = 64
) -> Iterator[ScoredTranslation]:
    """Score given translations, in their order.

    Args:
        translator: a model with its tokenizers.
        pairs: source and target text.
        batch_size: pairs per batch; `BATCHES_AHEAD` times as many are read ahead and sorted by length.

    Raises:
        UserError: a batch size below 1; a source longer than learned positions.
    """
    if batch_size < 1:
        raise UserError(f"batch_size: must be at least 1, not {batch_size}")
    pairs, done = iter(pairs), 0
    while window := list(islice(pairs, batch_size * BATCHES_AHEAD)):
        yield from _score_window(translator, window, done, batch_size)
        done += len(window)


def _score_window(
    translator: Translator, window: list[tuple[str, str]], done: int, batch_size: int
) -> list[ScoredTranslation]:
    targets = translator.target_tokenizer(text_target=[target for _, target in window])["input_ids"]
    # an empty target is its end alone
    sources = [translator.encode(source, done + i + 1) for i, (source, _) in enumerate(window)]
    order = sorted(range(len(window)), key=lambda i: (len(targets[i]), len(sources[i])), reverse=True)
    scored: dict[int, ScoredTranslation] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        rows = _log_probabilities(translator, [sources[i] for i in batch], [targets[i] for i in batch])
        for i, row in zip(batch, rows, strict=True):
            scored[i] = ScoredTranslation(translator.target_tokenizer.convert_ids_to_tokens(targets[i]), row)
    return [scored[i] for i in range(len(window))]


@torch.inference_mode()
def _log_probabilities(
    translator: Translator, sources: list[list[int]], targets: list[list[int]]
) -> list[list[float]]:
    model = translator.model.eval()
    source = translator.source_tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(model.device)
    longest = max(map(len, targets))
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in targets], device=model.device)  # (B, T)
    logits = model(**source, labels=labels).logits  # (B, T, V)
    words = labels.clamp(min=0)[..., None]
    chosen = logits.float().log_softmax(dim=-1).gather(2, words).squeeze(2)  # (B, T)
    return [row[: len(target)] for row, target in zip(chosen.tolist(), targets, strict=True)]
