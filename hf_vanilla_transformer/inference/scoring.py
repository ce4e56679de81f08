"""Log-probabilities that a model gives to existing translations."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..text.side_tokens import readable_tokens
from ..text.token_kinds import without_margins
from ..utils.errors import check_at_least_one
from .batching import BATCHES_AHEAD, MAX_TOKENS, length_batches
from .directions import Codes, next_places
from .line_warnings import LineWarnings
from .token_probabilities import token_log_probabilities
from .translator import TOKENIZER_LOCK, Translator


@dataclass
class ScoredTranslation:
    """The tokens of a target, end-of-sentence token included, and the natural log-probability of each."""

    tokens: list[str]
    log_probabilities: list[float]

    @property
    def log_probability(self) -> float:
        """The sum over the whole sequence."""
        return sum(self.log_probabilities)


def score_translations_of(
    translator: Translator,
    pairs: Iterable[tuple[str, str]],
    batch_size: int = 64,
    max_tokens_per_batch: int = MAX_TOKENS,
    source_lang: Codes = None,
    target_lang: Codes = None,
    first_line: int = 1,
) -> Iterator[ScoredTranslation]:
    """Score given translations, in their order.

    Args:
        translator: a model with its tokenizers. An ensemble averages the token probabilities of its models.
        pairs: source and target text.
        batch_size: pairs per batch, at most. `BATCHES_AHEAD` batches are read ahead and sorted by length.
        max_tokens_per_batch: tokens per batch on its longer side, padding included, at most. A longer pair goes alone.
        source_lang, target_lang: for a model of many languages, as of `Translator.translate_nbest`.
        first_line: the number of the first pair in errors and warnings.

    Raises:
        UserError: a limit below 1, a language that the model does not have, or a source longer than its learned
            positions.
    """
    check_at_least_one(batch_size=batch_size, max_tokens_per_batch=max_tokens_per_batch)
    places = enumerate(translator.directions.each(source_lang, target_lang), start=first_line)
    pairs = iter(pairs)
    directions = translator.directions
    tokenizer = translator.target_tokenizer
    warnings = LineWarnings()
    try:
        while window := list(islice(pairs, batch_size * BATCHES_AHEAD)):
            placed = next_places(places, len(window))
            with TOKENIZER_LOCK:
                texts = [without_margins(tokenizer, target) for _, target in window]
                targets = directions.encode_targets(
                    tokenizer, texts, [direction for _, direction in placed]
                )
            sources = [
                translator.encode(source, *place, warnings=warnings)
                for (source, _), place in zip(window, placed, strict=True)
            ]
            for i, text in enumerate(texts):
                warnings.check("target", tokenizer, text, targets[i], placed[i][0])
            lengths = {i: max(len(targets[i]), len(sources[i])) for i in range(len(window))}
            scored: dict[int, ScoredTranslation] = {}
            for batch in length_batches(lengths, batch_size, max_tokens_per_batch):
                ids = [sources[i] for i in batch], [targets[i] for i in batch]
                rows = token_log_probabilities(translator.models, translator.source_tokenizer, *ids)
                for i, row in zip(batch, rows, strict=True):
                    tokens = readable_tokens(tokenizer, targets[i])
                    mark = directions.prefix_length
                    scored[i] = ScoredTranslation(tokens[mark:], row[mark:])
            yield from (scored[i] for i in range(len(window)))
    finally:  # also of a stream that is not read to its end
        translator.report(warnings)
