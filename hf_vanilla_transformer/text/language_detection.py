"""Detect the language of a text, offline, by py3langid (extra `detect`): 139 languages in 5 MB."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from ..utils.errors import naming_extras
from .language_codes import base_language

_CERTAIN = 0.95


def detect_languages(text: str, languages: Sequence[str]) -> list[tuple[str, float]]:
    """Rank languages by their probability, given that the text is in one of them, the most probable first.

    Variants of a language are not told apart. One that py3langid does not know has probability 0.
    """
    probabilities: Counter[str] = Counter()
    for code, probability in _identifier().rank(text):
        probabilities[code] += probability  # one language may have a model for each of its scripts
    of_languages = [probabilities[base_language(code)] * is_known(code) for code in languages]
    total = sum(of_languages) or 1.0
    shares = [probability / total for probability in of_languages]
    return sorted(zip(languages, shares, strict=True), key=lambda language: -language[1])


def likely_language(text: str, language: str) -> bool:
    """Return whether a text may be in a language: no other is nearly certain, or py3langid does not know it.

    It gives no warning, because many processes may ask it. `is_known` does.
    """
    if not _has_model(language):
        return True
    best, probability = _identifier().classify(text)
    return best == base_language(language) or probability < _CERTAIN


@cache
def is_known(language: str) -> bool:
    """Return whether py3langid knows a language. Warns once if it does not."""
    if _has_model(language):
        return True
    logging.getLogger(__name__).warning(
        "py3langid has no language %s, which is not detected: most have a code of two letters there",
        language,
    )
    return False


def _has_model(language: str) -> bool:
    return base_language(language) in _identifier().labels


@cache
def _identifier() -> Any:
    with naming_extras():
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
