"""Bodies of requests: read within limits, parsed as JSON or a form, checked. An error is one line with a status."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from fastapi import HTTPException
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.serving.request_body import check_key, parse_fields, read_body, validate
from hf_vanilla_transformer.serving.schemas import TranslateRequest

GOOD = {"q": "seven", "source": "en", "target": "de"}
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"


def multipart(*fields: tuple[str, str]) -> bytes:
    """As a browser sends it."""
    parts = (f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields)
    return ("".join(parts) + "--x--\r\n").encode()


def test_body_that_declares_too_many_bytes_is_not_read() -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body is read")
        yield b""

    with pytest.raises(HTTPException, match="the body has 12 bytes, but the limit is 10"):
        asyncio.run(read_body(unread(), "12", 10))


FIELDS = [("q", "süß\r\n a&b"), ("q", "second"), ("source", "en"), ("format", "")]


@pytest.mark.parametrize(
    ("body", "content_type", "query"),
    [
        (b'{"q": "s\xc3\xbc\\u00df\\r\\n a&b", "source": "en", "format": null}', f"{JSON}; charset=utf-8", ""),
        (b'{"q": "s\xc3\xbc\\u00df\\r\\n a&b", "source": "en"}', "application/vnd.api+json", "q=x"),
        (urlencode(FIELDS).encode(), FORM, ""),
        ("q=süß%0D%0A+a%26b&q=second&source=en&format=".encode(), f"{FORM}; charset=UTF-8", ""),  # raw UTF-8
        (multipart(*FIELDS), MULTIPART, ""),
        (b"", "", urlencode(FIELDS)),
        (b"q=x", FORM, urlencode(FIELDS)),
        (multipart(("q", "x")), MULTIPART, urlencode(FIELDS)),
    ],
)
def test_json_forms_and_queries_are_parsed(body: bytes, content_type: str, query: str) -> None:
    fields = parse_fields(body, content_type, query)
    assert {name: value for name, value in fields.items() if value} == {"q": "süß\r\n a&b", "source": "en"}


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", JSON, 400),
        (b"", JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"1" * 100_000, JSON, 400),
        (b'{"q": "\xff"}', JSON, 400),
        (b'{"q": "\\ud800"}', JSON, 400),  # half of a surrogate pair
        (b"[1]", JSON, 400),
        (b"q=%ff", FORM, 400),
        (b"q=\xff", FORM, 400),
        (b"&".join([b"q=1"] * 200), FORM, 400),
        (b'{"q": "seven"}', FORM, 400),  # curl -d without a header
        (multipart(("q", "x")), "multipart/form-data", 400),  # without a boundary
        (multipart(*[("q", "x")] * 200), MULTIPART, 400),
        (multipart(("q", "x")).replace(b"x\r\n--", b"\xff\r\n--"), MULTIPART, 400),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
    ],
)
def test_invalid_bodies_are_refused(body: bytes, content_type: str, status: int) -> None:
    with pytest.raises(HTTPException) as error:
        parse_fields(body, content_type)
    assert error.value.status_code == status


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_a_bad_request(body: bytes) -> None:
    for content_type in (JSON, FORM, MULTIPART):
        try:
            assert isinstance(parse_fields(body, content_type), dict)
        except HTTPException as error:
            assert error.status_code == 400


def test_byte_order_mark_and_uploaded_texts() -> None:
    assert parse_fields(b'\xef\xbb\xbf{"q": "seven"}', JSON) == {"q": "seven"}
    file = b'--x\r\nContent-Disposition: form-data; name="q"; filename="a.txt"\r\n\r\nseven\r\n--x--\r\n'
    with pytest.raises(HTTPException, match="q"):  # and not a list of the file's name and content
        validate(TranslateRequest, GOOD | parse_fields(file, "multipart/form-data; boundary=x"))


def test_fields_have_the_defaults_of_libretranslate() -> None:
    for unset in (None, ""):
        request = validate(TranslateRequest, GOOD | {"unknown": 1, "format": unset, "alternatives": unset})
    assert (request.q, request.format, request.alternatives) == ("seven", "text", 0)
    request = validate(TranslateRequest, GOOD | {"q": ["a", ""], "format": "html", "alternatives": "2"})
    assert (request.q, request.format, request.alternatives) == (["a", ""], "html", 2)


@settings(max_examples=30)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_json_value_is_a_request_or_a_bad_request(value: Any) -> None:
    value = json.loads(json.dumps(value))
    for name in TranslateRequest.model_fields:
        try:
            validate(TranslateRequest, GOOD | {name: value})
        except HTTPException as error:
            assert error.status_code == 400


@pytest.mark.parametrize(
    ("key", "passes"),
    [("sesame", True), (None, False), ("sesam", False), ("", False), (["sesame"], False), ("\ud800", False)],
)
def test_api_key_is_compared(key: Any, passes: bool) -> None:
    check_key(key, None)
    if passes:
        check_key(key, "sesame")
        return
    with pytest.raises(HTTPException, match="API key") as error:
        check_key(key, "sesame")
    assert error.value.status_code == 403


def test_api_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("secrets.compare_digest", lambda a, b: compared.append((a, b)) or True)
    check_key("guess", "sesame")
    assert compared == [(b"guess", b"sesame")]
