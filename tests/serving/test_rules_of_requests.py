"""Small rules of a server: the sentence at a position, the documents that are kept, the pairs of a route."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from fastapi import HTTPException

from hf_vanilla_transformer.documents.documents import Part
from hf_vanilla_transformer.serving import interface
from hf_vanilla_transformer.serving.interface import Server
from hf_vanilla_transformer.serving.options import Limits
from hf_vanilla_transformer.serving.service import _sentence_at


def test_sentence_at_a_position_is_the_last_that_starts_before_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        parts = [Part("x" * int(rng.integers(1, 4)), bool(rng.integers(2))) for _ in range(rng.integers(0, 6))]
        starts = [sum(len(part.text) for part in parts[:place]) for place in range(len(parts))]
        starts = [start for start, part in zip(starts, parts, strict=True) if part.is_sentence]
        for caret in (None, *range(20)):
            before = [place for place, start in enumerate(starts) if caret is None or start <= caret]
            expected = max([0, *before]) if starts else None
            assert _sentence_at(parts, caret) == expected


def server(*pairs: str, pivot: str | None = None, **limits: Any) -> Server:
    names = [SimpleNamespace(source=name[:2], target=name[3:], name=name, engine=name) for name in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "ServerMetrics", lambda engines: None)
        return Server(names, Limits(**limits), pivot)  # type: ignore[arg-type]


def test_pairs_are_joined_at_the_pivot_alone() -> None:
    made = server("de-en", "en-fr", "fr-de", "en-de", "de-fr", pivot="en")
    routes = {codes: [pair.name for pair in route] for codes, route in made.routes.items()}
    assert routes == {(name[:2], name[3:]): [name] for name in ("de-en", "en-fr", "fr-de", "en-de", "de-fr")}
    made = server("de-en", "en-fr", "en-de", "fr-it", pivot="en")
    routes = {codes: [pair.name for pair in route] for codes, route in made.routes.items()}
    assert routes.pop(("de", "fr")) == ["de-en", "en-fr"]
    assert len(routes) == 4 and made.codes == ["de", "en", "fr", "it"]
    assert {one.code: one.targets for one in made.languages()} == {
        **{"de": ["en", "fr"], "en": ["fr", "de"], "fr": ["it"], "it": []}
    }
    assert [pair.name for pair in made._route("de-AT", "fr")] == ["de-en", "en-fr"]
    assert made._route("it", "it") == []
    for source, target, message in (
        ("it", "de", r"German \(de\) is not available as a target language from Italian \(it\)"),
        ("xx", "de", "xx is not supported"),
    ):
        with pytest.raises(HTTPException, match=message) as refused:
            made._route(source, target)
        assert refused.value.status_code == 400
    assert len(server("de-en", "en-fr").routes) == 2


def test_newest_documents_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_KEPT_FILES", 3)
    monkeypatch.setattr(interface, "_KEPT_BYTES", 10)
    made = server("de-en")

    def kept(*sizes: int) -> list[int]:
        made.files.clear()
        names = [made._keep("x.txt", b"x" * size) for size in sizes]
        assert list(made.files) == names[-len(made.files) :] and names[-1].endswith(".x.txt")
        return [len(content) for content in made.files.values()]

    assert kept(1, 2, 3) == [1, 2, 3]
    assert kept(1, 2, 3, 4) == [2, 3, 4]
    assert kept(5, 5) == [5, 5]
    assert kept(5, 6) == [6]
    assert kept(2, 9, 11) == [11]


def test_texts_have_as_many_characters_as_the_limit() -> None:
    made = server("de-en", max_characters=10)
    made._check_characters("q", 10)
    with pytest.raises(HTTPException, match=r"^400: q: request \(11\) exceeds text limit \(10\)$"):
        made._check_characters("q", 11)
