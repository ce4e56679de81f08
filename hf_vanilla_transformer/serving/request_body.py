"""The body of a request: read within limits, parsed, checked. What is wrong with it is a `BadRequest`."""

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl


class BadRequest(Exception):
    """A request that is not answered with a translation: an HTTP status and a sentence for the user."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(frozen=True)
class TranslateRequest:
    """The fields of `POST /translate`, as LibreTranslate has them."""

    texts: list[str]
    is_list: bool  # whether `q` was a list, as the answer then is
    source: str
    target: str
    html: bool
    alternatives: int


async def read_body(stream: AsyncIterator[bytes], declared: str | None, limit: int) -> bytes:
    """The whole body, of which no more than `limit` bytes are ever held.

    Args:
        stream: of its bytes. declared: the header Content-Length.
    """
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise BadRequest(413, f"the body has {declared} bytes; at most {limit} are taken")
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > limit:
            raise BadRequest(413, f"the body has more than {limit} bytes, which is the limit")
    return bytes(body)


def parse_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a body: JSON, or a form as LibreTranslate's own client sends it."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "application/x-www-form-urlencoded":
            pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
            return dict(pairs)
        if kind != "application/json":
            raise BadRequest(415, "Content-Type: application/json or application/x-www-form-urlencoded is needed")
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):  # whose messages are about positions in Python's parsers
        raise BadRequest(400, f"the body is not valid {'JSON' if 'json' in kind else 'form data'} in UTF-8") from None
    if not isinstance(fields, dict):
        raise BadRequest(400, 'the body must be a JSON object, such as {"q": "Hello", "source": "en"}')
    return fields


def check_key(fields: dict[str, Any], authorization: str | None, expected: str | None) -> None:
    """Compare the API key, `api_key` of the body or a bearer token, in constant time."""
    if expected is None:
        return
    given = fields.get("api_key")
    if given is None and authorization is not None and authorization.lower().startswith("bearer "):
        given = authorization[len("bearer ") :]
    given = given if isinstance(given, str) else ""
    if not secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8")):
        raise BadRequest(403, "api_key: missing or wrong")


def translate_request(fields: dict[str, Any], max_characters: int) -> TranslateRequest:
    """Check the fields of `POST /translate`; those that are not known are ignored, as LibreTranslate ignores them."""
    q = fields.get("q")
    texts: list[Any] = q if isinstance(q, list) else [q]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest(400, "q: a string, or a list of strings, is needed")
    for text in texts:
        check_text("q", text)
    characters = sum(map(len, texts))
    if characters > max_characters:
        raise BadRequest(413, f"q: {characters} characters; at most {max_characters} are taken")
    form = fields.get("format", "text")
    if form not in ("text", "html"):
        raise BadRequest(400, "format: text or html")
    return TranslateRequest(
        texts=texts,
        is_list=isinstance(q, list),
        source=_code(fields, "source"),
        target=_code(fields, "target"),
        html=form == "html",
        alternatives=integer(fields, "alternatives", 0, 0),
    )


def check_text(name: str, text: Any) -> None:
    """Refuse what is no text: also half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    if not isinstance(text, str):
        raise BadRequest(400, f"{name}: a string is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest(400, f"{name}: half of a surrogate pair is no character") from None


def integer(fields: dict[str, Any], name: str, default: Any, least: int) -> Any:
    """A whole number, also as a string, which is what forms have."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise BadRequest(400, f"{name}: a whole number of at least {least} is needed")
    return value


def _code(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(400, f"{name}: a language code, such as en, is needed; GET /languages lists them")
    check_text(name, value)
    return value
