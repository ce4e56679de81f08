"""Bodies of requests: read within limits, JSON or a form, checked; what is wrong is one sentence and a status."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_vanilla_transformer.serving.request_body import (
    BadRequest,
    check_key,
    parse_fields,
    read_body,
    translate_request,
)

GOOD = {"q": "seven", "source": "en", "target": "de"}


def read(chunks: list[bytes], declared: str | None, limit: int) -> tuple[bytes, int]:
    """The body, and how many chunks were asked for."""
    asked = []

    async def stream():
        for chunk in chunks:
            asked.append(chunk)
            yield chunk

    return asyncio.run(read_body(stream(), declared, limit)), len(asked)


def test_body_is_read_up_to_its_limit() -> None:
    assert read([b"abc", b"de"], "5", 5) == (b"abcde", 2)
    with pytest.raises(BadRequest, match="more than 4 bytes") as error:
        read([b"abc", b"de", b"f"], None, 4)
    assert error.value.status == 413


def test_body_that_declares_too_much_is_not_read() -> None:
    chunks = iter([b"x"])

    async def stream():
        for chunk in chunks:
            yield chunk

    with pytest.raises(BadRequest, match="100000000 bytes; at most 10"):
        asyncio.run(read_body(stream(), "100000000", 10))
    assert next(chunks) == b"x"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"q": "s\xc3\xbc\\u00df", "source": "en"}', "application/json; charset=utf-8"),
        (b"q=s%C3%BC%C3%9F&source=en", "application/x-www-form-urlencoded"),
    ],
)
def test_json_and_forms_are_parsed(body: bytes, content_type: str) -> None:
    assert parse_fields(body, content_type) == {"q": "süß", "source": "en"}


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"1" * 100_000, "application/json", 400),
        (b'{"q": "\xff"}', "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"q=%ff", "application/x-www-form-urlencoded", 400),
        (b"q=\xff", "application/x-www-form-urlencoded", 400),
        (b"&".join([b"q=1"] * 200), "application/x-www-form-urlencoded", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
    ],
)
def test_bodies_that_are_invalid_are_refused(body: bytes, content_type: str, status: int) -> None:
    with pytest.raises(BadRequest) as error:
        parse_fields(body, content_type)
    assert error.value.status == status and "\n" not in error.value.message


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_a_bad_request(body: bytes) -> None:
    for content_type in ("application/json", "application/x-www-form-urlencoded"):
        try:
            assert isinstance(parse_fields(body, content_type), dict)
        except BadRequest as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"q": None}, 400, "q: a string, or a list of strings"),
        ({"q": 7}, 400, "q: a string"),
        ({"q": ["seven", 7]}, 400, "q: a string"),
        ({"q": {"a": 1}}, 400, "q: a string"),
        ({"q": "\ud800"}, 400, "q: half of a surrogate pair"),
        ({"q": "x" * 101}, 413, "q: 101 characters; at most 100"),
        ({"q": ["x" * 60, "y" * 60]}, 413, "q: 120 characters"),
        ({"source": None}, 400, "source: a language code"),
        ({"target": 7}, 400, "target: a language code"),
        ({"target": "\ud800"}, 400, "target: half"),
        ({"format": "pdf"}, 400, "format: text or html"),
        ({"format": ["text"]}, 400, "format"),
        ({"alternatives": -1}, 400, "alternatives: a whole number"),
        ({"alternatives": 1.5}, 400, "alternatives"),
        ({"alternatives": True}, 400, "alternatives"),
        ({"alternatives": "²"}, 400, "alternatives"),
        ({"alternatives": "9" * 50}, 400, "alternatives"),
        ({"alternatives": 2**80}, 400, "alternatives"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        translate_request(GOOD | changed, 100)
    assert error.value.status == status


def test_fields_have_the_defaults_of_libretranslate() -> None:
    found = translate_request(GOOD | {"unknown": 1}, 100)
    assert (found.texts, found.is_list, found.html, found.alternatives) == (["seven"], False, False, 0)
    found = translate_request(GOOD | {"q": ["a", ""], "format": "html", "alternatives": "2"}, 100)
    assert (found.texts, found.is_list, found.html, found.alternatives) == (["a", ""], True, True, 2)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_json_value_is_a_request_or_a_bad_request(value: Any) -> None:
    value = json.loads(json.dumps(value))
    for name in ("q", "source", "target", "format", "alternatives"):
        try:
            translate_request(GOOD | {name: value}, 1000)
        except BadRequest as error:
            assert error.status in (400, 413)


@pytest.mark.parametrize(
    ("fields", "authorization", "passes"),
    [
        ({"api_key": "sesame"}, None, True),
        ({}, "Bearer sesame", True),
        ({}, "bearer sesame", True),
        ({}, None, False),
        ({"api_key": "sesam"}, None, False),
        ({"api_key": ""}, "Bearer sesame", False),
        ({"api_key": ["sesame"]}, None, False),
        ({"api_key": "\ud800"}, None, False),
        ({}, "Basic sesame", False),
    ],
)
def test_api_key_is_compared(fields: dict[str, Any], authorization: str | None, passes: bool) -> None:
    check_key(fields, authorization, None)
    if passes:
        check_key(fields, authorization, "sesame")
    else:
        with pytest.raises(BadRequest, match="api_key: missing or wrong") as error:
            check_key(fields, authorization, "sesame")
        assert error.value.status == 403


def test_api_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("secrets.compare_digest", lambda a, b: compared.append((a, b)) or True)
    check_key({"api_key": "guess"}, None, "sesame")
    assert compared == [(b"guess", b"sesame")]
