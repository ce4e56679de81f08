"""Translations without a model, for the tests of documents."""

from collections.abc import Callable

from hf_vanilla_transformer.inference.placement import TranslatedPart

Translate = Callable[[list[str]], list[list[TranslatedPart]]]


def translator_by(function: Callable[[str], str], seen: list[str] | None = None) -> Translate:
    """Each text by a function, without an alignment of words. `seen` receives the texts."""

    def translate(texts: list[str]) -> list[list[TranslatedPart]]:
        if seen is not None:
            seen.extend(texts)
        return [[TranslatedPart(text, function(text))] for text in texts]

    return translate


upper = translator_by(str.upper)


def backwards(texts: list[str]) -> list[list[TranslatedPart]]:
    """Upper-cased words in reversed order, with their alignment, and the white space around them."""
    translations = []
    for text in texts:
        words = text.split()
        links = [(place, len(words) - 1 - place) for place in range(len(words))]
        reverse = text.replace(text.strip(), " ".join(words[::-1]).upper())
        translations.append([TranslatedPart(text, reverse, links)])
    return translations
