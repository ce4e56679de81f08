"""Rules for every HTTP request: who may send it, HEAD, and slashes."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A client of a proxy sends the whole address of a page.
_NOT_OF_PATH = re.compile("^https?://[^/]*/|/{2,}")


class HttpRules:
    """An ASGI middleware that refuses requests which a foreign page makes a browser send.

    A page can send a form to any address that its reader's browser reaches, and by DNS rebinding it can also read the
    answer. The former has a foreign `Origin`, and the latter a foreign `Host`.

    Args:
        hosts: names under which the server is reached. Without any, every `Host` is accepted.
        origins: web sites that may call the server. "*" is all.
        paths: of the endpoints. They are found with a trailing slash, too.
    """

    def __init__(
        self,
        app: "ASGIApp",
        hosts: Collection[str],
        origins: Collection[str],
        paths: Collection[str],
    ):
        self.app = app
        self.hosts = hosts
        self.origins = origins
        self.paths = paths

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refused = self._refusal(scope["method"], Headers(scope=scope))
        if refused is not None:
            return await JSONResponse({"error": refused}, 403)(scope, receive, send)
        path = _NOT_OF_PATH.sub("/", scope["path"])
        scope = {**scope, "path": path.rstrip("/") if path.rstrip("/") in self.paths else path}
        if scope["method"] == "HEAD":  # a server sends no body after it
            scope["method"] = "GET"
        await self.app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> str | None:
        """The reason why a request is refused."""
        host = headers.get("host", "")
        if self.hosts and host and host_name(host) not in self.hosts:
            return (
                f"Host {host}: this server is not known under this name (--allowed_host permits it)"
            )
        origin = headers.get("origin")
        if (
            origin is None
            or method in ("GET", "HEAD", "OPTIONS")
            or {origin, "*"} & {*self.origins}
        ):
            return None
        # the origins of extensions and apps have schemes of their own, which no page can have
        if origin != "null" and urlsplit(origin).scheme not in ("http", "https"):
            return None
        netloc = urlsplit(origin).netloc
        if netloc and (netloc == host or host_name(netloc) in {*self.hosts} - {*LOOPBACK}):
            return None
        return f"Origin {origin}: pages of this site may not call this server (--cors_origin permits it)"


def host_name(host: str) -> str | None:
    """The name in a `Host`, in lower case and without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
