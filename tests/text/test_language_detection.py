"""Languages are ranked among those that are given."""

from types import SimpleNamespace

import pytest

from hf_vanilla_transformer.text import language_detection
from hf_vanilla_transformer.text.language_detection import (
    detect_languages,
    is_known,
    likely_language,
)


@pytest.mark.parametrize(
    ("text", "languages", "expected"),
    [
        ("A man is riding a bike in the snow.", ["de", "en-GB", "xx"], "en-GB"),
        ("Ein Mann fährt mit dem Rad durch den Schnee.", ["en", "de_AT"], "de_AT"),
        ("一个男人在雪地里骑自行车", ["ja", "zh-Hans", "en"], "zh-Hans"),
        ("123", ["fr", "en"], "fr"),  # nothing tells them apart
    ],
)
def test_most_probable_language_is_the_first(
    text: str, languages: list[str], expected: str
) -> None:
    pytest.importorskip("py3langid", reason="needs the extra `detect`")
    found = detect_languages(text, languages)
    assert found[0][0] == expected and {code for code, _ in found} == {*languages}
    assert sum(share for _, share in found) == pytest.approx(1)


def test_language_without_a_model_is_named(caplog):
    """A code of NLLB would otherwise switch `clean --detect` off without a word."""
    pytest.importorskip("py3langid", reason="needs the extra `detect`")
    assert likely_language("Ein Mann fährt mit dem Rad durch den Schnee.", "eng_Latn")
    assert not caplog.records, "each process of `clean --workers` would warn"
    for _ in range(2):
        assert not is_known("eng_Latn") and is_known("en_GB")
    assert [record.args for record in caplog.records] == [("eng_Latn",)]


@pytest.mark.parametrize(
    ("best", "probability", "is_likely"),
    [
        ("de", 0.99, True),
        ("en", 0.949, True),
        ("en", 0.95, False),
        ("en", 0.99, False),
    ],
)
def test_another_language_is_nearly_certain_from_95_percent_on(
    best: str, probability: float, is_likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    identifier = SimpleNamespace(labels=["de", "en"], classify=lambda text: (best, probability))
    monkeypatch.setattr(language_detection, "_identifier", lambda: identifier)
    assert likely_language("Wort", "de_AT") is is_likely
    assert likely_language("Wort", "fr"), "it has no model"
