"""Load the models of a server, and run it until SIGTERM or Ctrl-C."""

import asyncio
import gc
import logging
import math
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..documents.documents import sentence_splitter
from ..inference.translator import Translator
from ..text.token_kinds import tokenizer_task
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError, check_at_least_one
from ..utils.system_calls import encodable, open_files, raise_open_files
from ..web.page import page_facts
from .app import create_app
from .http_rules import LOOPBACK, host_name
from .interface import Server
from .languages import model_folders
from .options import Limits, ServeOptions
from .sequences import SequenceModel
from .service import LanguagePair

_HEAD_SECONDS = 10.0  # until a connection has sent the head of a request
_MAX_HEAD = 2**16  # bytes of the head of a request
_SPARE_FILES = 64  # file descriptors that are not connections
_OPEN_FILES = 10_240  # that the process asks for: macOS refuses more


def load_server(options: ServeOptions) -> Server:
    """Load every model, and start its engine."""
    check_at_least_one(max_characters=options.limits.max_characters)
    if not 0 < options.limits.timeout < math.inf:
        raise UserError(
            f"timeout: must be a finite number of seconds above 0, not {options.limits.timeout:g}"
        )
    if options.limits.api_key == "":
        raise UserError("api_key: is empty, so that anybody could guess it")
    if len((options.limits.api_key or "").splitlines()) > 1:
        raise UserError("api_key: has several lines; all clients send the same key, of one line")
    _check_sites(options.limits)
    if options.shortlist is not None and len(options.models) > 1:
        raise UserError(
            f"shortlist: {options.shortlist} is for one model, not for {len(options.models)}"
        )
    if (sequences := _sequence_folder(options.models)) is not None:
        _check_of_sequences(sequences[1], options)
        return Server([_sequence_model(*sequences, options)], _named_hosts(options))
    first: dict[Path, LanguagePair] = {}  # of each model
    pairs: list[LanguagePair] = []
    for (source, target), folder in model_folders(options.models).items():
        split = sentence_splitter(source) if options.split_sentences else None
        if folder in first:
            if first[folder].translator.directions.source is None:
                raise UserError(
                    f"--model: {source}-{target}={folder}: this model has one direction, and is named for "
                    f"{first[folder].name} already"
                )
            site = _site(folder, source, target, first[folder].translator)
            pairs.append(first[folder].directed(source, target, split, site))
            continue
        translator = _load_translator(folder, options)
        if translator.directions.source is not None:
            translator = translator.directed(source, target)
        site = _site(folder, source, target, translator)
        first[folder] = LanguagePair(source, target, translator, split, site, **options.engine)
        pairs.append(first[folder])
    if options.pivot is not None and options.pivot not in {pair.target for pair in pairs}:
        raise UserError(f"pivot: {options.pivot}: no model translates into it")
    return Server(pairs, _named_hosts(options), options.pivot)


def _check_sites(limits: Limits) -> None:
    """Refuse sites and hosts that no request can name, because a browser sends neither a path nor capitals."""
    for origin in {*limits.cors_origins} - {"*", "null"}:
        parts = urlsplit(origin)
        site = f"{parts.scheme}://{parts.netloc.lower()}"
        if origin != site or not parts.netloc:
            remedy = site if parts.netloc else "https://example.org"
            raise UserError(f"cors_origin: {origin}: give scheme and host alone, such as {remedy}")
    for host in limits.allowed_hosts:
        if host.lower() not in (host_name(host), host_name(f"[{host}]")):
            raise UserError(
                f"allowed_host: {host}: give a name alone, without scheme, port and path"
            )


def _check_of_sequences(folder: Path, options: ServeOptions) -> None:
    """Refuse options that are for languages."""
    of_languages = {
        "lines": not options.split_sentences,
        "pivot": options.pivot,
        "translate_files": options.limits.translate_files,
    }
    for name, value in of_languages.items():
        if value:
            raise UserError(f"{name}: it is for models of languages, and {folder} is of sequences")


def _sequence_folder(models: Sequence[str]) -> tuple[str, Path] | None:
    """The name and the folder of a model of sequences, which is served alone. None if the models are of languages.

    Args:
        models: `FOLDER`, whose name is that of the model, or `NAME=FOLDER`.
    """
    for model in models:
        name, _, rest = model.partition("=")
        folder = Path(model)
        if folder.is_dir() or not rest:
            name = folder.resolve().name
        else:
            folder = Path(rest)
        if not folder.is_dir() or tokenizer_task(*load_tokenizers(folder)) == "language":
            continue
        if len(models) > 1:
            raise UserError(
                f"--model: {model} is of sequences: serve it alone, at a port of its own"
            )
        return name, folder
    return None


def _named_hosts(options: ServeOptions) -> Limits:
    """The limits, with the names of this machine if only some names are allowed."""
    limits = options.limits
    if options.host not in LOOPBACK and not limits.allowed_hosts:
        return limits
    return replace(limits, allowed_hosts=(*LOOPBACK, *map(str.lower, limits.allowed_hosts)))


def _load_translator(folder: Path, options: ServeOptions) -> Translator:
    return Translator.from_pretrained(
        folder,
        options.device,
        options.dtype,
        workers=options.workers,
        shortlist=options.shortlist,
    )


def _sequence_model(name: str, folder: Path, options: ServeOptions) -> SequenceModel:
    translator = _load_translator(folder, options)
    site = _site(folder, None, None, translator)
    return SequenceModel(name, translator, site, **options.engine)


def _site(
    folder: Path, source: str | None, target: str | None, translator: Translator
) -> dict[str, object]:
    """`site.json` of the page, as web/README.md describes it."""
    return {
        "engine": "server",
        **page_facts(translator.model, folder, source, target, translator.task),
        "dtype": translator.describe()["dtype"],
        "bytes": translator.model.get_memory_footprint(),
    }


def run(options: ServeOptions) -> None:
    """Load the models and serve them. See `serving.serve`."""
    with _bound_socket(options.host, options.port) as listening:
        server = load_server(options)
        if options.limits.translate_files:
            server.documents.start()
        gc.collect()
        gc.freeze()  # a collection looks at all loaded modules otherwise, and stops every thread for a second
        host, port = listening.getsockname()[:2]
        pairs = ", ".join(pair.name for pair in server.pairs)
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        print(encodable(f"serving {pairs} on {address} (Ctrl-C ends it)"), flush=True)
        for pair in server.models:
            dtype = pair.translator.describe()["dtype"]
            print(encodable(f"{pair.name} computes in {dtype} (--dtype changes it)"), flush=True)
        if options.host not in LOOPBACK and options.limits.api_key is None:
            print(
                "anyone who reaches this address can use the models; --api_key_file restricts that",
                flush=True,
            )
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            create_app(server),
            http=_protocol(_connection_limit()),
            h11_max_incomplete_event_size=_MAX_HEAD,
            ws="none",
            lifespan="on",
            access_log=False,  # texts are private, and so is who translates when
            log_level="error",  # strangers cause warnings, which would fill the log
            server_header=False,
            headers=[("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")],
            timeout_graceful_shutdown=int(options.limits.timeout) + 5,
        )
        # uvicorn handles SIGTERM and raises it again at its end, when it must not kill the process
        previous = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            _HttpServer(config, server).run([listening])
        finally:
            signal.signal(signal.SIGTERM, previous)
            server.close()


class _HttpServer(uvicorn.Server):
    """A server that ends the work on documents soon after a signal. Other requests have the time of a request."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._server.documents.end_soon()
        await super().shutdown(sockets)


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bind before the models are loaded, so that an address in use is reported at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error


def _connection_limit() -> int:
    """The number of files that the process may open for connections, after raising its limit."""
    limit = raise_open_files(_OPEN_FILES)
    return max(16, limit - open_files() - _SPARE_FILES)


def _protocol(max_connections: int) -> Any:
    """uvicorn's HTTP protocol by h11, which limits the head of a request, extended to close silent connections."""

    class Protocol(H11Protocol):
        head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                others: Any = self.connections - {self}
                silent = (each for each in others if each.cycle is None)
                next(silent, self).transport.abort()
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # After an early answer the rest of the body is read and dropped: a connection that is closed while the
            # client still sends is reset, and the client may lose the answer.
            self._await_head()

        def _await_head(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
            self.head_timer = self.loop.call_later(
                _HEAD_SECONDS, self._close_without_head, self.cycle
            )

        def _close_without_head(self, previous: object) -> None:
            if self.cycle is previous and not self.transport.is_closing():
                self.shutdown()

    return Protocol
