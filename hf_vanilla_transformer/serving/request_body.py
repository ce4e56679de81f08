"""The body of a request: read within limits, parsed as JSON or a form, and checked."""

import secrets
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from python_multipart import parse_form
from python_multipart.multipart import File

from ..utils.errors import shown

Model = TypeVar("Model", bound=BaseModel)

_MOST_FIELDS = 100
_MULTIPART = "multipart/form-data"


@dataclass(frozen=True)
class UploadedFile:
    """A file of a form."""

    name: str
    content: bytes


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


def parse_fields(body: bytes, content_type: str, query: str = "") -> dict[str, Any]:
    """Parse JSON, or a form as LibreTranslate's clients send it, and the query string.

    If a field is repeated, the first one counts, and the query before a form. JSON replaces fields of the query. An
    uploaded file is an `UploadedFile`.
    """
    kind = _kind(content_type)
    reading = "query string"
    try:
        fields = _form(query)
        reading = kind
        if kind == "application/json" or kind.endswith("+json"):
            parsed = from_json(body.removeprefix(BOM_UTF8))
            if not isinstance(parsed, dict):
                raise HTTPException(
                    400, 'the body must be a JSON object, such as {"q": "Hello", "source": "en"}'
                )
            return fields | parsed
        if kind == _MULTIPART:
            return _multipart(body, content_type) | fields
        if kind == "application/x-www-form-urlencoded":
            if body.lstrip().startswith(b"{"):
                reason = (
                    "the body is JSON, but no form: send the header Content-Type: application/json"
                )
                raise HTTPException(400, reason)
            return _form(body.decode("utf-8")) | fields
    except ValueError as error:
        raise HTTPException(400, f"the request is not valid {reading}: {error}") from None
    if body:
        raise HTTPException(
            415, "Content-Type: must be application/json, a form, or multipart/form-data"
        )
    return fields


def is_multipart(content_type: str) -> bool:
    """Return whether a body is a form that can have files."""
    return _kind(content_type) == _MULTIPART


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _form(text: str) -> dict[str, str]:
    return _first(
        parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    )


def _multipart(body: bytes, content_type: str) -> dict[str, object]:
    fields: list[tuple[str, Any]] = []

    def add(name: bytes | None, value: str | UploadedFile) -> None:
        fields.append(((name or b"").decode("utf-8"), value))
        if len(fields) > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS} fields")

    def add_file(file: File) -> None:
        file.file_object.seek(0)
        name = (file.file_name or b"").decode("utf-8", "replace")
        add(file.field_name, UploadedFile(name, file.file_object.read()))

    parse_form(
        {"Content-Type": content_type.encode()},
        BytesIO(body),
        lambda field: add(field.field_name, (field.value or b"").decode("utf-8")),
        add_file,
    )
    return _first(fields)


def _first(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    first: dict[str, Any] = {}
    for name, value in fields:
        first.setdefault(name, value)
    return first


def check_key(key: object, expected: str | None) -> None:
    """Compare the API key of a request in constant time. The errors are LibreTranslate's."""
    key = key if isinstance(key, str) else ""
    if expected is not None and not secrets.compare_digest(
        key.encode("utf-8", "replace"), expected.encode()
    ):
        missing = "Please contact the server operator to obtain an API key"
        raise HTTPException(403, "Invalid API key" if key else missing)


def validate(model: type[Model], fields: dict[str, object]) -> Model:
    """The fields as a model, or status 400 with the first wrong field, its problem and its description.

    A field that is null counts as missing, and so does an empty one, except for a text.
    """
    texts = ("q", "text")
    fields = {
        name: value
        for name, value in fields.items()
        if value is not None and (value != "" or name in texts)
    }
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    first = found[0]
    name = str(first["loc"][0])
    rows = [f" (item {each['loc'][-1]})" for each in found if isinstance(each["loc"][-1], int)]
    if first["type"] == "missing":
        problem = f"Invalid request: missing {name} parameter"
    elif name == "format":
        problem = f"{name}: {shown(fields[name])} format is not supported"
    else:
        problem = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}{''.join(rows[:1])}"
    raise HTTPException(400, f"{problem} ({model.model_fields[name].description})")
