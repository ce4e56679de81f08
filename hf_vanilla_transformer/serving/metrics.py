"""Counts of a server for Prometheus."""

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, Histogram

from .engine import Engine

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PREFIX = "vanilla_transformer_"

#: All other paths count as "other", so that strangers cannot add lines.
_PATHS = (
    "/page/translate",
    "/translate",
    "/translate_file",
    "/predict",
    "/languages",
    "/detect",
)

#: Attributes of an engine, by the names of their metrics.
_OF_ENGINES = {
    "sentences_waiting": "waiting",
    "sentences_running": "running",
    "sentences_translated_total": "translated",
    "queue_capacity": "max_queue",
}


class ServerMetrics:
    """The requests of a server by path and status with their seconds, and the sentences of its engines.

    Args:
        engines: by the names of their models.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "Seconds of requests",
            ["path", "status"],
            registry=self.registry,
        )
        for metric, attribute in _OF_ENGINES.items():
            gauge = Gauge(_PREFIX + metric, metric, ["pair"], registry=self.registry)
            for name, engine in engines.items():
                gauge.labels(name).set_function(partial(getattr, engine, attribute))

    def counted(self, app: "ASGIApp") -> "ASGIApp":
        """Wrap an ASGI application to count its requests."""

        async def counting(scope: "Scope", receive: "Receive", send: "Send") -> None:
            start = time.perf_counter()
            status = 500  # after an exception

            async def watched(message: "Message") -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, watched)
            finally:
                if scope["type"] == "http":
                    path = scope["path"].rstrip("/")
                    known = next((known for known in _PATHS if path.endswith(known)), "other")
                    seconds = self._seconds.labels(known, status)
                    seconds.observe(time.perf_counter() - start)

        return counting
