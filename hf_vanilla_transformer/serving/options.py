"""The options of a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    max_characters: int = 10_000  #: of all texts of a request
    timeout: float = 60.0  #: seconds until the body has arrived, and then until the answer
    #: key that translation requests must have. None lets everybody translate.
    api_key: str | None = None
    #: web sites that may call this server from their pages. "*" is all.
    cors_origins: tuple[str, ...] = ()
    #: Names under which the server is reached, such as behind a proxy. Others are refused if there are any, and on a
    #: loopback address.
    allowed_hosts: tuple[str, ...] = ()
    translate_files: bool = False  #: whether `POST /translate_file` takes documents


@dataclass(frozen=True)
class ServeOptions:
    """Options of `vanilla-transformer serve`."""

    models: Sequence[str]  #: see `model_folders`
    host: str = "127.0.0.1"
    port: int = 5000  #: 0 takes a free one
    device: str | None = None  #: device, dtype and workers: see `Translator.from_pretrained`
    dtype: str | None = "fastest"
    workers: int | None = None
    shortlist: str | None = None  #: of one model, see `Translator`
    split_sentences: bool = True  #: split a line into sentences
    #: language through which pairs without a model of their own are translated
    pivot: str | None = None
    limits: Limits = field(default_factory=Limits)
    engine: Mapping[str, Any] = field(default_factory=dict)  #: arguments of `Engine`
