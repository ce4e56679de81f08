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
from pydantic import ValidationError

from hf_vanilla_transformer.serving.request_body import (
    UploadedFile,
    check_key,
    is_multipart,
    parse_fields,
    read_body,
    validate,
)
from hf_vanilla_transformer.serving.schemas import (
    FileRequest,
    PageRequest,
    PredictRequest,
    TranslateRequest,
)

GOOD = {"q": "seven", "source": "en", "target": "de"}
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"
A_FILE = (
    b'--x\r\nContent-Disposition: form-data; name="q"; filename="a.txt"\r\n\r\nseven\r\n--x--\r\n'
)


def multipart(*fields: tuple[str, str]) -> bytes:
    """As a browser sends it."""
    parts = (
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields
    )
    return ("".join(parts) + "--x--\r\n").encode()


@pytest.mark.parametrize(
    ("declared", "chunks", "message"),
    [
        ("11", None, "the body has 11 bytes, but the limit is 10"),
        ("10", [b"x" * 10], None),
        (None, [b"xxxx", b"xxxxxx"], None),
        (None, [b"xxxxxx", b"xxxxx", None], "the body has more than 10 bytes, the limit"),
        ("many", [b"x" * 11, None], "the body has more than 10 bytes, the limit"),
        ("²", [b"x"], None),
    ],
)
def test_body_is_read_up_to_its_limit(
    declared: str | None, chunks: list[bytes] | None, message: str | None
) -> None:
    """None stands for what must not be read."""

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks or [None]:
            assert chunk is not None, "the rest is read"
            yield chunk

    if message is None:
        assert asyncio.run(read_body(stream(), declared, 10)) == b"".join(chunks or [])
        return
    with pytest.raises(HTTPException, match=f"^413: {message}$"):
        asyncio.run(read_body(stream(), declared, 10))


FIELDS = [("q", "süß\r\n a&b"), ("q", "second"), ("source", "en"), ("format", "")]


@pytest.mark.parametrize(
    ("body", "content_type", "query"),
    [
        (
            b'{"q": "s\xc3\xbc\\u00df\\r\\n a&b", "source": "en", "format": ""}',
            f"{JSON}; charset=utf-8",
            "",
        ),
        (
            b'{"q": "s\xc3\xbc\\u00df\\r\\n a&b", "source": "en"}',
            "application/vnd.api+json",
            "q=x&format=",
        ),
        (urlencode(FIELDS).encode(), FORM, ""),
        (
            "q=süß%0D%0A+a%26b&q=second&source=en&format=".encode(),
            f"{FORM}; charset=UTF-8",
            "",
        ),  # raw UTF-8
        (multipart(*FIELDS), MULTIPART, ""),
        (b"", "", urlencode(FIELDS)),
        (b"q=x", f" {FORM.upper()} ", urlencode(FIELDS)),
        (multipart(("q", "x")), MULTIPART, urlencode(FIELDS)),
    ],
)
def test_json_forms_and_queries_are_parsed(body: bytes, content_type: str, query: str) -> None:
    expected = {"q": "süß\r\n a&b", "source": "en", "format": ""}
    assert parse_fields(body, content_type, query) == expected


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
        (b'{"q": "seven"}', FORM, 400),  # curl -d without a header
        (multipart(("q", "x")), "multipart/form-data", 400),  # without a boundary
        (multipart(("q", "x")).replace(b"x\r\n--", b"\xff\r\n--"), MULTIPART, 400),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
    ],
)
def test_invalid_bodies_are_refused(body: bytes, content_type: str, status: int) -> None:
    with pytest.raises(HTTPException) as error:
        parse_fields(body, content_type)
    assert error.value.status_code == status


@pytest.mark.parametrize("content_type", ["", JSON, FORM])
def test_a_bad_query_string_is_named(content_type: str) -> None:
    with pytest.raises(HTTPException, match="^400: the request is not valid query string: 'utf-8'"):
        parse_fields(b"", content_type, "q=%ff")


def test_a_form_has_at_most_a_hundred_fields() -> None:
    for count in (100, 101):
        fields = [(f"field{number}", "1") for number in range(count)]
        for body, content_type, query in (
            (urlencode(fields).encode(), FORM, ""),
            (multipart(*fields), MULTIPART, ""),
            (b"", "", urlencode(fields)),
        ):
            if count == 100:
                assert parse_fields(body, content_type, query) == dict(fields)
                continue
            with pytest.raises(HTTPException, match="^400: the request is not valid"):
                parse_fields(body, content_type, query)


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_a_bad_request(body: bytes) -> None:
    for content_type in (JSON, FORM, MULTIPART):
        try:
            assert isinstance(parse_fields(body, content_type), dict)
        except HTTPException as error:
            assert error.status_code == 400


def test_forms_with_files_are_told_apart() -> None:
    assert is_multipart(MULTIPART)
    assert is_multipart("Multipart/Form-Data;boundary=y")
    assert not any(map(is_multipart, ("", JSON, FORM, "text/plain", "multipart/mixed")))


def test_byte_order_mark_and_uploaded_texts() -> None:
    assert parse_fields(b'\xef\xbb\xbf{"q": "seven"}', JSON) == {"q": "seven"}
    fields = parse_fields(A_FILE, MULTIPART)
    assert fields == {"q": UploadedFile("a.txt", b"seven")}
    with pytest.raises(HTTPException, match="q"):  # and not a list of the file's name and content
        validate(TranslateRequest, GOOD | fields)


def test_fields_have_the_defaults_of_libretranslate() -> None:
    for unset in (None, ""):
        request = validate(
            TranslateRequest,
            GOOD | {"unknown": 1, "format": unset, "alternatives": unset},
        )
        assert (request.q, request.format, request.alternatives) == ("seven", "text", 0)
    request = validate(
        TranslateRequest,
        GOOD | {"q": ["a", "", None], "format": "html", "alternatives": "2"},
    )
    assert (request.q, request.format, request.alternatives) == (
        ["a", "", ""],
        "html",
        2,
    )
    assert validate(TranslateRequest, GOOD | {"q": ""}).q == ""
    page = validate(PageRequest, {"text": ""})
    assert page.model_dump() == {
        "api_key": None,
        "text": "",
        "caret": None,
        "num_beams": None,
        "alternatives": 5,
        "prefix": [],
        "inside": False,
    }
    assert validate(PredictRequest, {"q": "a"}).n_best == 1


@pytest.mark.parametrize(
    ("model", "field", "least"),
    [
        (TranslateRequest, "alternatives", 0),
        (PredictRequest, "n_best", 1),
        (PageRequest, "caret", 0),
        (PageRequest, "num_beams", 1),
        (PageRequest, "alternatives", 1),
        (TranslateRequest, "source", "x"),
        (TranslateRequest, "target", "x"),
        (FileRequest, "source", "x"),
        (FileRequest, "target", "x"),
    ],
)
def test_least_values_of_fields(model: Any, field: str, least: Any) -> None:
    good = GOOD | {"text": "seven", "file": None}
    assert getattr(model(**good | {field: least}), field) == least
    less = "" if isinstance(least, str) else least - 1
    with pytest.raises(ValidationError, match=field):
        model(**good | {field: less})


TEXTS = "(a text, or in JSON a list of texts)"
ALTERNATIVES = "(most further translations. The server's beams may give fewer)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q": None}, f"Invalid request: missing q parameter {TEXTS}"),
        (
            {"target": ""},
            "Invalid request: missing target parameter (a language code of GET /languages)",
        ),
        (
            {"format": "pdf"},
            "format: pdf format is not supported (text or html; HTML keeps its tags)",
        ),
        ({"q": 7}, f"q: input should be a valid string {TEXTS}"),
        ({"q": ["a", {}, "b", {}]}, f"q: input should be a valid string (item 1) {TEXTS}"),
        (
            {"alternatives": -1},
            f"alternatives: input should be greater than or equal to 0 {ALTERNATIVES}",
        ),
    ],
)
def test_first_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HTTPException) as error:
        validate(TranslateRequest, GOOD | fields)
    assert (error.value.status_code, error.value.detail) == (400, message)


@settings(max_examples=30)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
@pytest.mark.slow
def test_any_json_value_is_a_request_or_a_bad_request(value: Any) -> None:
    value = json.loads(json.dumps(value))
    for name in TranslateRequest.model_fields:
        try:
            validate(TranslateRequest, GOOD | {name: value})
        except HTTPException as error:
            assert error.status_code == 400


MISSING = "Please contact the server operator to obtain an API key"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("sesame", None),
        (None, MISSING),
        ("sesam", "Invalid API key"),
        ("", MISSING),
        (["sesame"], MISSING),
        ("\ud800", "Invalid API key"),
    ],
)
def test_api_key_is_compared(key: Any, message: str | None) -> None:
    check_key(key, None)
    if message is None:
        check_key(key, "sesame")
        return
    with pytest.raises(HTTPException, match=f"^403: {message}$"):
        check_key(key, "sesame")


def test_api_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("secrets.compare_digest", lambda a, b: compared.append((a, b)) or True)
    check_key("guess", "sesame")
    assert compared == [(b"guess", b"sesame")]
