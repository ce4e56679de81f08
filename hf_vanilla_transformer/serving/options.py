"""The options of a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        max_characters: of all texts of a request.
        timeout: seconds until the body has arrived, and then until the answer.
        api_key: key that translation requests must have. None lets everybody translate.
        cors_origins: web sites that may call this server from their pages. "*" is all.
    """

    max_characters: int = 10_000
    timeout: float = 60.0
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeOptions:
    """Options of `vanilla-transformer serve`.

    Attributes:
        models: see `model_folders`. device, dtype, workers: of `Translator.from_pretrained`.
        split_sentences: split a line into sentences.
        engine: arguments of `Engine`. port: 0 takes a free one.
    """

    models: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 5000
    device: str | None = None
    dtype: str | None = None
    workers: int | None = None
    split_sentences: bool = True
    limits: Limits = field(default_factory=Limits)
    engine: Mapping[str, Any] = field(default_factory=dict)
