"""The HTTP interface: LibreTranslate's `/translate` and `/languages`, `/predict`, the page, `/health`, `/metrics`."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from ..utils.errors import UserError
from ..web import CONTENT_TYPES, page_files
from . import schemas
from .engine import QueueFull
from .http_rules import HttpRules
from .interface import Server
from .options import Limits
from .request_body import check_key, is_multipart, parse_fields, read_body, validate
from .sequences import SequenceModel
from .service import LanguagePair, TooLong

_CONTENT_TYPES = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")

_RETRY_AFTER = "1"  # seconds, because a full queue moves on with every batch

#: A character needs at most 12 bytes, as two JSON escapes or percent-encoded.
_BYTES_PER_CHARACTER = 12
_OTHER_FIELDS = 4096
_MOST_FILE_BYTES = 10_000_000

# The page loads its files from this server alone, and no other page may frame it. index.html has a stricter policy.
# Browsers apply both.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}

Result = TypeVar("Result")


def create_app(server: Server) -> FastAPI:
    """The FastAPI application of a server. It closes the server at its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        await asyncio.to_thread(server.close)

    app = FastAPI(
        title="vanilla-transformer serve",
        description="The interface of a server with models of hf_vanilla_transformer.",
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(
            (StarletteHTTPException, ClientDisconnect, QueueFull, UserError, Exception), _failed
        ),
        responses=dict.fromkeys(("4XX", "5XX"), {"model": schemas.ErrorAnswer}),
        # Swagger's and ReDoc's pages load scripts from other hosts
        docs_url=None,
        redoc_url=None,
    )
    app.state.limits = server.limits
    match server.pairs:
        case [SequenceModel() as model]:
            predict = partial(server.predict, model)
            _add_work(app, "/predict", schemas.PredictRequest, predict, schemas.PredictAnswer)
        case _:
            _add_interface(app, server)
    _add_probes(app, server)
    for pair in server.pairs:
        _add_page(app, server, pair, f"/{pair.name}" if len(server.pairs) > 1 else "")
    if len(server.pairs) > 1:

        @app.get("/", include_in_schema=False)
        async def index() -> RedirectResponse:
            return RedirectResponse(f"{server.pairs[0].name}/")

    paths = {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(HttpRules, server.limits.allowed_hosts, server.limits.cors_origins, paths)
    if server.limits.cors_origins:
        origins = list(server.limits.cors_origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(server.metrics.counted)
    return app


def _add_interface(app: FastAPI, server: Server) -> None:
    """The endpoints, without the pages."""

    _add_work(
        app, "/translate", schemas.TranslateRequest, server.translate, schemas.TranslateAnswer
    )
    detected = list[schemas.DetectedLanguage]
    _add_work(app, "/detect", schemas.DetectRequest, server.detect, detected)
    if server.limits.translate_files:
        _add_files(app, server)
    for path, name in (("/suggest", "Suggestions"), ("/translate_file", "Files translation")):
        _add_disabled(app, path, f"{name} are disabled on this server.")

    @app.get("/frontend/settings", include_in_schema=False)
    async def settings() -> dict[str, object]:
        return server.settings()

    @app.get("/spec", include_in_schema=False)
    async def specification() -> dict[str, object]:
        openapi = app.openapi()
        # By which clients know the interface.
        return openapi | {"info": openapi["info"] | {"title": "LibreTranslate"}}

    @app.get("/languages")
    async def languages() -> list[schemas.Language]:
        """List the languages, and the targets of each."""
        return server.languages()


def _add_work(
    app: FastAPI,
    path: str,
    model: type[BaseModel],
    work: Callable[[Any], Coroutine[object, object, object]],
    answer: object = None,
) -> None:
    """Answer a path with the result of some work on the fields of a request, a `model`, within its time."""

    async def endpoint(request: Request, fields: _Fields) -> Any:
        return await _in_time(request, work(validate(model, fields)))

    app.post(
        path,
        response_model=answer,
        response_model_exclude_unset=True,
        openapi_extra=_body(model),
        description=model.__doc__,
    )(endpoint)


def _add_probes(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answer once the models are loaded."""
        return {"status": "ok"}

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """Answer unless a thread of an engine has ended: the process must be started again."""
        if not all(pair.engine.alive for pair in server.models):
            raise HTTPException(500, "a thread of an engine has ended")
        return {"status": "ok"}

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        """Answer unless the queue is full or the server is ending: other replicas should get the requests."""
        if not all(pair.engine.ready for pair in server.models):
            raise QueueFull
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Requests by status, their seconds, and inputs waiting, running and done, for Prometheus."""
        text = generate_latest(server.metrics.registry)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_disabled(app: FastAPI, path: str, message: str) -> None:
    """Answer a path as LibreTranslate does if it is off. A route that was added earlier replaces it."""

    @app.post(path, include_in_schema=False)
    async def disabled(fields: _Fields) -> Response:
        # Some clients fail if the answer precedes the end of their file.
        raise HTTPException(403, message)


def _add_files(app: FastAPI, server: Server) -> None:
    @app.post("/translate_file", include_in_schema=False)
    async def translate_file(request: Request, fields: _Fields) -> dict[str, Any]:
        work = server.translate_file(validate(schemas.FileRequest, fields))
        name, warnings = await _in_time(request, work)
        url = str(request.url_for("download_file", name=quote(name, safe="")))
        return {"translatedFileUrl": url} | ({"warnings": warnings} if warnings else {})

    @app.get("/download_file/{name}", include_in_schema=False)
    async def download_file(name: str) -> Response:
        if name not in server.files:
            raise HTTPException(404, "there is no such file, or no longer")
        original = quote(name.partition(".")[2])
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{original}"}
        return Response(server.files[name], headers=headers, media_type="application/octet-stream")


def _add_page(app: FastAPI, server: Server, pair: LanguagePair, prefix: str) -> None:
    pages = [
        {"source": other.source, "target": other.target, "path": f"../{other.name}/"}
        for other in server.pairs
    ]
    facts = {
        "key_required": server.limits.api_key is not None,
        "max_characters": server.limits.max_characters,
        "pages": pages if len(pages) > 1 else [],
        "search": {"num_beams": pair.engine.num_beams},
    }
    files = page_files({**pair.site, **facts})

    translation = partial(server.page_translation, pair)
    _add_work(app, f"{prefix}/page/translate", schemas.PageRequest, translation)

    def page_file(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2] or "index.html"
        kind = CONTENT_TYPES.get(name.rpartition(".")[2], "application/octet-stream")
        return Response(files[name], headers=_PAGE_HEADERS, media_type=kind)

    for name in ("", *files):
        app.add_route(f"{prefix}/{name}", page_file, include_in_schema=False)


async def _failed(_: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    match error:
        case StarletteHTTPException():
            status = error.status_code
            message = str(error.detail)
            headers = {**(error.headers or {})}
        case ClientDisconnect():
            status = 499
            message = "the client has disconnected"
        case QueueFull():
            status = 503
            message = "too many requests wait: try again in a second"
        case UserError():
            status = 413 if isinstance(error, TooLong) else 400
            message = str(error)
        case _:
            status = 500
            message = "the server has failed: see its log"
    if status == 503:
        headers["Retry-After"] = _RETRY_AFTER
    return JSONResponse({"error": message}, status, headers)


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """The description of the body of a request. FastAPI would read the body without a limit."""
    content = dict.fromkeys(_CONTENT_TYPES, {"schema": model.model_json_schema()})
    return {"requestBody": {"required": True, "content": content}}


async def _read_fields(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
) -> dict[str, object]:
    """The fields of a body within the limits, with the right key."""
    limits: Limits = request.app.state.limits
    most = limits.max_characters * _BYTES_PER_CHARACTER + _OTHER_FIELDS
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(415, f"Content-Encoding: {encoding}: send the body as it is")
    content_type = request.headers.get("content-type", "")
    if request.url.path.endswith("/translate_file") and is_multipart(content_type):
        most += _MOST_FILE_BYTES
    reading = read_body(request.stream(), request.headers.get("content-length"), most)
    try:
        body = await asyncio.wait_for(reading, limits.timeout)
    except asyncio.TimeoutError:
        raise HTTPException(
            408, f"the body did not arrive within {limits.timeout:g} seconds"
        ) from None
    fields = parse_fields(body, content_type, request.url.query)
    # The latter by LibreTranslate's client of npm.
    key = fields.get("api_key") or fields.get("apiKey")
    check_key(key or (bearer.credentials if bearer else None), limits.api_key)
    return fields


_Fields = Annotated[dict[str, object], Depends(_read_fields)]


async def _in_time(request: Request, work: Coroutine[object, object, Result]) -> Result:
    """Await the work. It ends when the time is up or the client has disconnected."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected())
    try:
        done, _ = await asyncio.wait(
            [working, leaving],
            timeout=request.app.state.limits.timeout,
            return_when="FIRST_COMPLETED",
        )
    finally:
        working.cancel()  # no effect on a task that is done
        leaving.cancel()
    if working in done:
        return working.result()
    if done:
        raise ClientDisconnect
    raise HTTPException(504, "no answer in time: try again later")
