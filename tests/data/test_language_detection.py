"""Languages are ranked among those that are given."""

import sys

import pytest

from hf_vanilla_transformer.data.language_detection import _identifier, detect_languages
from hf_vanilla_transformer.errors import UserError


@pytest.mark.parametrize(
    ("text", "languages", "expected"),
    [
        ("A man is riding a bike in the snow.", ["de", "en-GB", "xx"], "en-GB"),
        ("Ein Mann fährt mit dem Rad durch den Schnee.", ["en", "de_AT"], "de_AT"),
        ("一个男人在雪地里骑自行车", ["ja", "zh-Hans", "en"], "zh-Hans"),
        ("123", ["fr", "en"], "fr"),  # nothing tells them apart
    ],
)
def test_most_probable_language_is_the_first(text: str, languages: list[str], expected: str) -> None:
    pytest.importorskip("py3langid", reason="needs the extra `detect`")
    found = detect_languages(text, languages)
    assert found[0][0] == expected and {code for code, _ in found} == {*languages}
    assert sum(share for _, share in found) == pytest.approx(1)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(UserError, match=r"\[detect\]"):
        detect_languages("one", ["en", "de"])
