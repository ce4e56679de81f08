"""Counts of a server in Prometheus's text format. They belong to one server, and only its event loop changes them."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Upper limits of the histogram's buckets, in seconds.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

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


class Metrics:
    """Requests by path and status, and the seconds of those that translate or predict."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.buckets: Counter[float] = Counter()
        self.seconds = 0.0
        self.durations = 0

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered after `seconds`."""
        path = next((known for known in _PATHS if path.rstrip("/").endswith(known)), "other")
        self.requests[path, status] += 1
        if path.endswith(("/translate", "/predict")):
            self.durations += 1
            self.seconds += seconds
            self.buckets.update(limit for limit in _BUCKETS if seconds <= limit)

    def text(self, sentences: Mapping[str, Mapping[str, float]]) -> str:
        """All counts in Prometheus's text format.

        Args:
            sentences: counts of the engines, by name and then by pair. Names of counters end in "_total".
        """
        lines = [f"# TYPE {_PREFIX}requests_total counter"]
        for (path, status), number in sorted(self.requests.items()):
            lines.append(f'{_PREFIX}requests_total{{path="{path}",status="{status}"}} {number}')
        name = f"{_PREFIX}translate_seconds"
        lines.append(f"# TYPE {name} histogram")
        lines += [f'{name}_bucket{{le="{limit}"}} {self.buckets[limit]}' for limit in _BUCKETS]
        lines += [f'{name}_bucket{{le="+Inf"}} {self.durations}', f"{name}_sum {self.seconds:.6f}"]
        lines.append(f"{name}_count {self.durations}")
        for name, numbers in sentences.items():
            lines.append(
                f"# TYPE {_PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}"
            )
            lines += [
                f'{_PREFIX}{name}{{pair="{pair}"}} {number}' for pair, number in numbers.items()
            ]
        return "\n".join(lines) + "\n"

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
                    self.count(scope["path"], status, time.perf_counter() - start)

        return counting
