"""Forms of texts: of hypotheses, of references, and the places of a list."""

import pytest

from hf_vanilla_transformer.utils.normalization import (
    INVALID,
    check_normalizer,
    n_best_places,
    normal_form,
    normalized_hypotheses,
    normalized_references,
)
from tests.model_helpers import error_of


def form(text: str) -> str | None:
    """Lower case. Some texts are invalid in one way or the other."""
    if text.endswith("!"):
        raise KeyError(text)
    return None if text.endswith("?") else text.lower()


TEXTS = ["A", "b!", "a", "B", "c?", "b!"]


def test_invalid_texts_are_counted_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    assert normalized_hypotheses(iter(TEXTS), None) == (TEXTS, 0)
    assert normalized_hypotheses(TEXTS, form) == (["a", INVALID, "a", "b", INVALID, INVALID], 3)
    assert normalized_references([TEXTS, ["C"]], None) == [TEXTS, ["C"]]
    assert normalized_references([["A"], ["b"]], form) == [["a"], ["b"]]
    assert not caplog.messages
    assert normalized_references([TEXTS, ["C"]], form) == [["a", "b!", "a", "b", "c?", "b!"], ["c"]]
    assert caplog.messages == ["normalize: 3 references are invalid and stay as they are"]
    assert normalized_references([["b!"], ["C"]], form) == [["b!"], ["c"]], "one list may be bad"


def test_equal_forms_are_one_place() -> None:
    assert list(n_best_places(TEXTS, form).items()) == [
        (("a", True), [0, 2]),
        (("b!", False), [1, 5]),
        (("b", True), [3]),
        (("c?", False), [4]),
    ]
    assert list(n_best_places(["A", "a", "A"], None).items()) == [
        (("A", None), [0, 2]),
        (("a", None), [1]),
    ]


def test_normaliser_of_no_use_is_refused_with_the_reason() -> None:
    references = ["a?", "b!"]
    for reason in ("None for 'a?'", "KeyError: 'b!'"):
        expected = f"normalize: all 2 references are invalid; {reason}"
        assert error_of(check_normalizer, references, form) == expected
        assert error_of(normalized_references, [references], form) == expected
        references.reverse()
    for references in ([], ["a", "b!"]):
        check_normalizer(references, form)
    check_normalizer(["a?"], None)
    assert error_of(normal_form, "a", len).startswith(
        "normalize: it returned 1, neither a text nor None"
    )
