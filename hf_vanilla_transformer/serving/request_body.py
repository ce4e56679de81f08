"""The body of a request: read within limits, parsed as JSON or a form, and checked."""

import secrets
from collections.abc import AsyncIterator
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

Model = TypeVar("Model", bound=BaseModel)


async def read_body(stream: AsyncIterator[bytes], declared: str | None, limit: int) -> bytes:
    """Read the whole body, never more than `limit` bytes.

    Args:
        stream: chunks of the body. declared: the header Content-Length.
    """
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise HTTPException(413, f"the body has {declared} bytes, but the limit is {limit}")
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes, the limit")
    return bytes(body)


def parse_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """Parse JSON, or a form as LibreTranslate's client sends it. Fields that are null are left out."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "application/x-www-form-urlencoded":
            return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100))
        if kind != "application/json":
            raise HTTPException(415, "Content-Type: must be application/json or application/x-www-form-urlencoded")
        fields = from_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid {kind}: {error}") from None
    if not isinstance(fields, dict):
        raise HTTPException(400, 'the body must be a JSON object, such as {"q": "Hello", "source": "en"}')
    return {name: value for name, value in fields.items() if value is not None}


def check_key(key: Any, expected: str | None) -> None:
    """Compare the API key of a request in constant time."""
    key = key if isinstance(key, str) else ""
    if expected is not None and not secrets.compare_digest(key.encode("utf-8", "replace"), expected.encode()):
        raise HTTPException(403, "api_key: missing or wrong")


def validate(model: type[Model], fields: dict[str, Any]) -> Model:
    """The fields as a model, or status 400 with the first wrong field, its problem and its description."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    name, problem = str(first["loc"][0]), first["msg"][0].lower() + first["msg"][1:]
    raise HTTPException(400, f"{name}: {problem} ({model.model_fields[name].description})")
