"""The names of the package's scores, and how they compare texts, without the libraries that compute them."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

from ..utils.normalization import Normalizer

#: name on the command line and in results -> title in tables
TITLES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "chrf++": "chrF++",
    "ter": "TER",
    "exact_match": "exact match",
    "top_k": "top k",
    "token_error_rate": "token error rate",
    "character_error_rate": "character error rate",
    "sequence_error_rate": "sequence error rate",
}
#: scores with a signature of sacreBLEU
SIGNED = "bleu", "chrf", "chrf++", "ter"
#: scores of which less is better
LOWER_IS_BETTER = (
    "ter",
    "token_error_rate",
    "character_error_rate",
    "sequence_error_rate",
    "invalid",
    "loss",
    "perplexity",
    "wer",  # these two of `evaluate.load`
    "cer",
)
#: scores of text in a language
DEFAULT = "bleu", "chrf"
#: scores of other sequences
OF_SEQUENCES = "exact_match", "character_error_rate"
#: scores of sequences of words, or of the matches of a regular expression
OF_TOKENS = "exact_match", "token_error_rate"
#: A function from a text to its tokens (`text.token_kinds.token_splitter`).
Splitter: TypeAlias = Callable[[str], Sequence[str]]
#: k of the scores top_1, top_3 … of `top_k`
TOP = 1, 3, 5, 10, 50


class ScoreOptions(TypedDict, total=False):
    """Arguments of `score_translations` that a run chooses."""

    metrics: Sequence[str]
    tokenize: str | None
    lowercase: bool
    normalize: Normalizer | None
    split: Splitter | None


def default_metrics(task: str, split: Splitter | None) -> Sequence[str]:
    """The scores of a model of this task, whose target tokens `split` gives."""
    if task == "language":
        return DEFAULT
    return OF_SEQUENCES if split is None else OF_TOKENS


def lower_is_better(name: str) -> bool | None:
    """Return whether less of a score is better, or None for a score of the user's."""
    if name in LOWER_IS_BETTER:
        return True
    return False if name in TITLES or name in {f"top_{k}" for k in TOP} else None


def title_of(name: str) -> str:
    """The title of a score, such as "top 5" of `top_5`."""
    return TITLES.get(name) or (name.replace("_", " ") if name.startswith("top_") else name)
