"""The HTTP interface: LibreTranslate's `/translate` and `/languages`, the page, `/health` and `/metrics`."""

import asyncio
import html
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..web import CONTENT_TYPES, page_files
from .engine import QueueFull
from .languages import NAMES
from .metrics import Metrics
from .request_body import BadRequest, check_key, check_text, integer, parse_fields, read_body, translate_request
from .service import LanguagePair, TooLong

logger = logging.getLogger(__name__)

_RETRY_AFTER = "1"  # seconds; a full queue moves on with every batch

#: A character needs 12 bytes at most: as two JSON escapes, or percent-encoded.
_BYTES_PER_CHARACTER, _OTHER_FIELDS = 12, 4096

_SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

# The page brings its scripts and styles, and talks to this server alone; no other page may frame it. It has a stricter
# policy in index.html; browsers apply both.
_PAGE_POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        max_characters: of a request. timeout: seconds until its answer.
        api_key: which requests must have; None lets everybody translate.
        cors_origins: web sites whose pages may call this server; "*" is all.
    """

    max_characters: int = 10_000
    timeout: float = 60.0
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()


class Server:
    """The answers of a server, without HTTP.

    Args:
        pairs: (source, target) -> what translates them.
        sites: (source, target) -> `site.json` of the page.
    """

    def __init__(
        self,
        pairs: Mapping[tuple[str, str], LanguagePair],
        sites: Mapping[tuple[str, str], dict[str, Any]],
        limits: Limits,
    ):
        self.pairs, self.sites, self.limits, self.metrics = dict(pairs), sites, limits, Metrics()

    def close(self) -> None:
        """Translate what has been taken, and end the threads."""
        for pair in self.pairs.values():
            pair.close()

    def pair(self, source: str, target: str) -> LanguagePair:
        """That for these codes; "auto" is the only language from which there is a model into the target."""
        found = [pair for (s, t), pair in self.pairs.items() if t == target and source in (s, "auto")]
        if len(found) == 1:
            return found[0]
        if found:
            raise BadRequest(400, "source: languages are not detected; name one of those in GET /languages")
        raise BadRequest(400, f"{source}-{target}: there is no model for it; GET /languages lists what there is")

    async def translate(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer of `POST /translate`."""
        asked = translate_request(fields, self.limits.max_characters)
        pair = self.pair(asked.source, asked.target)
        n_best = 1 + asked.alternatives
        if n_best > pair.engine.num_beams:
            raise BadRequest(400, f"alternatives: at most {pair.engine.num_beams - 1}, with the beams of this server")
        found = await pair.translate(asked.texts, html=asked.html, n_best=n_best)
        best: Any = [each[0] for each in found]
        others: Any = [each[1:] for each in found]
        if not asked.is_list:
            best, others = best[0], others[0]
        return {"translatedText": best} | ({"alternatives": others} if asked.alternatives else {})

    async def page_translation(self, pair: LanguagePair, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer of `POST page/translate`."""
        text: Any = fields.get("text")
        prefix = fields.get("prefix") or []
        check_text("text", text)
        if not isinstance(prefix, list) or not all(isinstance(token, int) for token in prefix):
            raise BadRequest(400, "prefix: a list of token ids is needed")
        if len(text) > self.limits.max_characters:
            raise BadRequest(413, f"text: {len(text)} characters; at most {self.limits.max_characters} are taken")
        beams, alternatives = integer(fields, "num_beams", None, 1), integer(fields, "alternatives", 5, 1)
        if beams is not None and beams > max(16, pair.engine.num_beams):
            raise BadRequest(400, f"num_beams: at most {max(16, pair.engine.num_beams)}")
        return await pair.inspector.run(pair.inspector.page_translation, text, beams, alternatives, prefix)

    def languages(self) -> list[dict[str, Any]]:
        """The answer of `GET /languages`."""
        targets: dict[str, list[str]] = {}
        for source, target in self.pairs:
            targets.setdefault(source, []).append(target)
            targets.setdefault(target, [])
        return [{"code": code, "name": NAMES.get(code, code), "targets": found} for code, found in targets.items()]

    def metrics_text(self) -> str:
        """The answer of `GET /metrics`."""
        engines = {f"{source}-{target}": pair.engine for (source, target), pair in self.pairs.items()}
        kinds = {"waiting": "gauge", "running": "gauge", "translated": "counter"}
        gauges = [
            (f"sentences_{name}" + "_total" * (kind == "counter"), kind, label, getattr(engine, name))
            for name, kind in kinds.items()
            for label, engine in engines.items()
        ]
        return self.metrics.text(gauges)

    def index(self) -> str:
        """A list of the pages, where there are several."""
        entries = "".join(
            f'<li><a href="{html.escape(f"{source}-{target}")}/">'
            f"{html.escape(NAMES.get(source, source))} – {html.escape(NAMES.get(target, target))}</a></li>"
            for source, target in self.pairs
        )
        head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Translate</title>'
        return f"{head}<ul>{entries}</ul></html>"


def create_app(server: Server) -> Any:
    """The FastAPI application of a server, which closes it at its end."""
    from fastapi import FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        await asyncio.to_thread(server.close)

    # without OpenAPI's pages, which load scripts from other servers
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if server.limits.cors_origins:
        origins = list(server.limits.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    def failed(status: int, message: str) -> Response:
        headers = _SECURITY_HEADERS | ({"Retry-After": _RETRY_AFTER} if status == 503 else {})
        return JSONResponse({"error": message}, status, headers)

    async def answer(request: Request, path: str, work: Callable[[dict[str, Any]], Awaitable[Any]]) -> Response:
        """Read the body, do the work in time, and count the request."""
        start = time.perf_counter()
        try:
            status, content = await _within_limits(request, server.limits, work)
        except BadRequest as error:
            status, content = error.status, {"error": error.message}
        except Exception:
            logger.exception("%s failed", path)
            status, content = 500, {"error": "the translation failed; the log of the server says why"}
        server.metrics.count(path, status, time.perf_counter() - start)
        return failed(status, content["error"]) if status != 200 else JSONResponse(content, headers=_SECURITY_HEADERS)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        server.metrics.count("other", error.status_code)
        return failed(error.status_code, str(error.detail))

    @app.post("/translate")
    async def translate(request: Request) -> Response:
        return await answer(request, "/translate", server.translate)

    @app.get("/languages")
    async def languages() -> Response:
        server.metrics.count("/languages", 200)
        return JSONResponse(server.languages(), headers=_SECURITY_HEADERS)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}, headers=_SECURITY_HEADERS)

    @app.get("/metrics")
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4"  # of Prometheus's text format
        return PlainTextResponse(server.metrics_text(), headers=_SECURITY_HEADERS, media_type=kind)

    def add_page(prefix: str, pair: LanguagePair, site: dict[str, Any]) -> None:
        files = page_files(site)

        @app.post(f"{prefix}/page/translate")
        async def page_translate(request: Request) -> Response:
            return await answer(request, "/page/translate", lambda fields: server.page_translation(pair, fields))

        @app.get(f"{prefix}/")
        @app.get(f"{prefix}/{{name}}")
        async def page_file(name: str = "index.html") -> Response:
            if name not in files:
                raise HTTPException(404, "Not Found")
            kind = CONTENT_TYPES.get(name.rpartition(".")[2], "application/octet-stream")
            headers = _SECURITY_HEADERS | {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"}
            return Response(files[name], headers=headers, media_type=kind)

    if len(server.pairs) > 1:

        @app.get("/")
        async def index() -> Response:
            return HTMLResponse(server.index(), headers=_SECURITY_HEADERS | {"Content-Security-Policy": _PAGE_POLICY})

    for (source, target), pair in server.pairs.items():
        add_page(f"/{source}-{target}" if len(server.pairs) > 1 else "", pair, dict(server.sites[source, target]))
    return app


async def _within_limits(
    request: Any, limits: Limits, work: Callable[[dict[str, Any]], Awaitable[Any]]
) -> tuple[int, Any]:
    """Status and content of an answer; the work ends when the time is up, or when the client has left."""
    end = time.monotonic() + limits.timeout
    most = limits.max_characters * _BYTES_PER_CHARACTER + _OTHER_FIELDS
    try:
        reading = read_body(request.stream(), request.headers.get("content-length"), most)
        body = await asyncio.wait_for(reading, limits.timeout)
    except asyncio.TimeoutError:
        raise BadRequest(408, f"the body did not arrive within {limits.timeout:g} seconds") from None
    except Exception as error:
        if type(error).__name__ != "ClientDisconnect":
            raise
        raise BadRequest(499, "the client has left") from None
    fields = parse_fields(body, request.headers.get("content-type", ""))
    check_key(fields, request.headers.get("authorization"), limits.api_key)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work(fields)), asyncio.ensure_future(gone())]
    try:
        done, _ = await asyncio.wait(tasks, timeout=max(0.0, end - time.monotonic()), return_when="FIRST_COMPLETED")
    finally:
        for task in tasks:
            task.cancel()  # without effect on one that is done
    if tasks[0] not in done:
        status, message = (499, "the client has left") if done else (504, "no translation in time; try again later")
        raise BadRequest(status, message)
    try:
        return 200, tasks[0].result()
    except QueueFull:
        raise BadRequest(503, "too many requests wait; try again in a second") from None
    except TooLong as error:
        raise BadRequest(413, str(error)) from None
    except UserError as error:
        raise BadRequest(400, str(error)) from None
