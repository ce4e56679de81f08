"""The HTTP interface: LibreTranslate's `/translate` and `/languages`, the page, `/health`, `/metrics` and `/docs`."""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import asynccontextmanager
from html import escape
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from ..errors import UserError
from ..inference.languages import NAMES
from ..web import CONTENT_TYPES, page_files
from .api_page import api_page
from .engine import QueueFull
from .metrics import Metrics
from .options import Limits
from .request_body import check_key, parse_fields, read_body, validate
from .schemas import ErrorAnswer, Language, PageRequest, TranslateAnswer, TranslateRequest
from .service import LanguagePair, TooLong

_RETRY_AFTER = "1"  # seconds, because a full queue moves on with every batch

#: A character needs at most 12 bytes, as two JSON escapes or percent-encoded.
_BYTES_PER_CHARACTER, _OTHER_FIELDS = 12, 4096

# The page loads its files from this server alone, and no other page may frame it. index.html has a stricter policy.
# Browsers apply both.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}

Result = TypeVar("Result")


class Server:
    """The language pairs of a server, and their answers."""

    def __init__(self, pairs: Iterable[LanguagePair], limits: Limits):
        self.pairs = list(pairs)
        self.limits = limits
        self.metrics = Metrics()

    def close(self) -> None:
        """Translate the sentences in the queues, then end the threads."""
        for pair in self.pairs:
            pair.close()

    def pair(self, source: str, target: str) -> LanguagePair:
        """The pair for these codes. "auto" is the only source language with a model into `target`."""
        pairs = [pair for pair in self.pairs if pair.target == target and source in (pair.source, "auto")]
        if len(pairs) == 1:
            return pairs[0]
        if pairs:
            raise HTTPException(400, "source: languages are not detected: name one of GET /languages")
        raise HTTPException(400, f"{source}-{target}: there is no model for this pair (GET /languages lists all)")

    def check_characters(self, name: str, count: int) -> None:
        if count > self.limits.max_characters:
            raise HTTPException(413, f"{name}: {count} characters, but the limit is {self.limits.max_characters}")

    async def translate(self, request: TranslateRequest) -> TranslateAnswer:
        texts = [request.q] if isinstance(request.q, str) else request.q
        self.check_characters("q", sum(map(len, texts)))
        pair = self.pair(request.source, request.target)
        n_best = 1 + request.alternatives
        if n_best > pair.engine.num_beams:
            raise HTTPException(400, f"alternatives: at most {pair.engine.num_beams - 1} with this server's beams")
        translations = await pair.translate(texts, html=request.format == "html", n_best=n_best)
        best: Any = [of_text[0] for of_text in translations]
        others: Any = [of_text[1:] for of_text in translations]
        if isinstance(request.q, str):
            best, others = best[0], others[0]
        return TranslateAnswer(translatedText=best, alternatives=others if request.alternatives else None)

    async def page_translation(self, pair: LanguagePair, request: PageRequest) -> dict[str, Any]:
        self.check_characters("text", len(request.text))
        most = max(16, pair.engine.num_beams)
        if request.num_beams is not None and request.num_beams > most:
            raise HTTPException(400, f"num_beams: at most {most}")
        return await pair.inspector.run(
            pair.inspector.page_translation, request.text, request.num_beams, request.alternatives, request.prefix
        )

    def languages(self) -> list[Language]:
        targets: dict[str, list[str]] = {}
        for pair in self.pairs:
            targets.setdefault(pair.source, []).append(pair.target)
            targets.setdefault(pair.target, [])
        return [Language(code=code, name=NAMES.get(code, code), targets=into) for code, into in targets.items()]

    def metrics_text(self) -> str:
        return self.metrics.text(
            {
                "sentences_waiting": {pair.name: pair.engine.waiting for pair in self.pairs},
                "sentences_running": {pair.name: pair.engine.running for pair in self.pairs},
                "sentences_translated_total": {pair.name: pair.engine.translated for pair in self.pairs},
            }
        )

    def index(self) -> str:
        """A list of the pages, if there are several pairs."""
        entries = "".join(
            f'<li><a href="{escape(pair.name)}/">{escape(NAMES.get(pair.source, pair.source))} – '
            f"{escape(NAMES.get(pair.target, pair.target))}</a></li>"
            for pair in self.pairs
        )
        head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Translate</title>'
        return f"{head}<ul>{entries}</ul></html>"


def create_app(server: Server) -> FastAPI:
    """The FastAPI application of a server. It closes the server at its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        await asyncio.to_thread(server.close)

    app = FastAPI(
        title="vanilla-transformer serve",
        description="Translates like LibreTranslate, with models of hf_vanilla_transformer.",
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(
            (StarletteHTTPException, ClientDisconnect, QueueFull, UserError, Exception), _failed
        ),
        # Swagger's and ReDoc's pages load scripts from other hosts
        docs_url=None,
        redoc_url=None,
    )
    app.state.limits = server.limits
    if server.limits.cors_origins:
        origins = list(server.limits.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(server.metrics.counted)
    _add_interface(app, server)
    for pair in server.pairs:
        _add_page(app, server, pair, f"/{pair.name}" if len(server.pairs) > 1 else "")
    return app


def _add_interface(app: FastAPI, server: Server) -> None:
    """The endpoints, without the pages."""

    @app.post("/translate", **_documented(TranslateRequest), response_model_exclude_none=True)
    async def translate(request: Request, fields: _Fields) -> TranslateAnswer:
        """Translate a text, or a list of texts."""
        work = server.translate(validate(TranslateRequest, fields))
        return await _in_time(request, work, server.limits.timeout)

    @app.get("/languages")
    async def languages() -> list[Language]:
        """List the languages, and the targets of each."""
        return server.languages()

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answer once the models are loaded."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Requests by status, their seconds, and sentences waiting, running and translated, for Prometheus."""
        return PlainTextResponse(server.metrics_text(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        files = f"{server.pairs[0].name}/" if len(server.pairs) > 1 else ""
        return HTMLResponse(api_page(app.openapi(), files), headers=_PAGE_HEADERS)

    if len(server.pairs) > 1:

        @app.get("/", include_in_schema=False)
        async def index() -> Response:
            return HTMLResponse(server.index(), headers=_PAGE_HEADERS)


def _add_page(app: FastAPI, server: Server, pair: LanguagePair, prefix: str) -> None:
    files = page_files(pair.site)

    @app.post(f"{prefix}/page/translate", **_documented(PageRequest))
    async def page_translate(request: Request, fields: _Fields) -> dict[str, Any]:
        """Translate a sentence, with its attention, probabilities and hypotheses: a Translation of web/README.md."""
        work = server.page_translation(pair, validate(PageRequest, fields))
        return await _in_time(request, work, server.limits.timeout)

    @app.get(f"{prefix}/", include_in_schema=False)
    @app.get(f"{prefix}/{{name}}", include_in_schema=False)
    async def page_file(name: str = "index.html") -> Response:
        if name not in files:
            raise HTTPException(404, "Not Found")
        kind = CONTENT_TYPES.get(name.rpartition(".")[2], "application/octet-stream")
        return Response(files[name], headers=_PAGE_HEADERS, media_type=kind)


async def _failed(_: Request, error: Exception) -> Response:
    match error:
        case StarletteHTTPException():
            status, message = error.status_code, str(error.detail)
        case ClientDisconnect():
            status, message = 499, "the client has disconnected"
        case QueueFull():
            status, message = 503, "too many requests wait: try again in a second"
        case UserError():
            status, message = 413 if isinstance(error, TooLong) else 400, str(error)
        case _:
            status, message = 500, "the translation failed: see the log of the server"
    return JSONResponse({"error": message}, status, {"Retry-After": _RETRY_AFTER} if status == 503 else {})


def _documented(model: type[BaseModel]) -> dict[str, Any]:
    """Arguments of a route that describe its body and its errors. FastAPI would read the body without a limit."""
    schema = {"schema": model.model_json_schema()}
    content = dict.fromkeys(("application/json", "application/x-www-form-urlencoded"), schema)
    return {"responses": _ERRORS, "openapi_extra": {"requestBody": {"required": True, "content": content}}}


async def _read_fields(
    request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> dict[str, Any]:
    """The fields of a body within the limits, with the right key."""
    limits: Limits = request.app.state.limits
    most = limits.max_characters * _BYTES_PER_CHARACTER + _OTHER_FIELDS
    reading = read_body(request.stream(), request.headers.get("content-length"), most)
    try:
        body = await asyncio.wait_for(reading, limits.timeout)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {limits.timeout:g} seconds") from None
    fields = parse_fields(body, request.headers.get("content-type", ""))
    check_key(fields.get("api_key", bearer.credentials if bearer else None), limits.api_key)
    return fields


_Fields = Annotated[dict[str, Any], Depends(_read_fields)]


async def _in_time(request: Request, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """Await the work. It ends when the time is up or the client has disconnected."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        done, _ = await asyncio.wait([working, leaving], timeout=seconds, return_when="FIRST_COMPLETED")
    finally:
        working.cancel()  # no effect on a task that is done
        leaving.cancel()
    if working in done:
        return working.result()
    if done:
        raise ClientDisconnect
    raise HTTPException(504, "no translation in time: try again later")
