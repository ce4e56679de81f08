"""Codes of languages, such as `en`, `pt-BR` and `zh_Hans`, and how well two of them fit."""

from typing import TypeAlias

CodePair: TypeAlias = tuple[str, str]  # the codes of source and target

SAME_LANGUAGE = 3


def base_language(code: str | None) -> str:
    """Return the language of a code such as "zh-Hans" or "pt_BR"."""
    return _parts(code)[0]


def language_match(requested: str, code: str | None) -> int:
    """How well a language code fits: `SAME_LANGUAGE`, 2 one is more specific (`en`, `en-GB`), 0 a different language.

    Upper and lower case, and "-" and "_" between the parts of a code, make no difference.
    """
    first = _parts(requested)
    second = _parts(code)
    if first == second:
        return SAME_LANGUAGE
    shorter = min(len(first), len(second))
    return 2 if first[:shorter] == second[:shorter] else 0


def _parts(code: str | None) -> list[str]:
    return (code or "").replace("_", "-").lower().split("-")
