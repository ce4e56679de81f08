"""Requests are counted by path and status with their seconds."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from prometheus_client import generate_latest

from hf_vanilla_transformer.serving.metrics import ServerMetrics

REQUEST_SECONDS = "vanilla_transformer_request_seconds"


def metrics() -> ServerMetrics:
    engine = SimpleNamespace(waiting=3, running=2, translated=7, max_queue=9)
    return ServerMetrics({"en-de": engine})  # type: ignore[dict-item]


def value(made: ServerMetrics, line: str) -> float | None:
    lines = dict(
        each.rsplit(" ", 1) for each in generate_latest(made.registry).decode().splitlines()
    )
    return float(lines[line]) if line in lines else None


def count(made: ServerMetrics, path: str, status: int, of: str = "count") -> float | None:
    return value(made, f'{REQUEST_SECONDS}_{of}{{path="{path}",status="{status}"}}')


def send_request(made: ServerMetrics, path: str, *statuses: int, kind: str = "http") -> list[Any]:
    """Count a request whose answer has these statuses, and fails after them if there is none."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for status in statuses:
            await send({"type": "http.response.start", "status": status})
            await send({"type": "http.response.body"})
        if not statuses:
            raise ZeroDivisionError

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(made.counted(application)({"type": kind, "path": path}, None, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/translate", "/translate"),
        ("/translate/", "/translate"),
        ("/page/translate", "/page/translate"),
        ("/en-de/page/translate", "/page/translate"),
        ("/translate_file", "/translate_file"),
        ("/predict", "/predict"),
        ("/languages", "/languages"),
        ("/detect", "/detect"),
        ("/", "other"),
        ("/health", "other"),
        ("/translate/x", "other"),
    ],
)
def test_requests_are_counted_by_path_and_status(path: str, known: str) -> None:
    made = metrics()
    assert len(send_request(made, path, 200)) == 2
    send_request(made, path, 413)
    send_request(made, path, 413)
    assert count(made, known, 200) == 1
    assert count(made, known, 413) == 2


def test_exceptions_are_status_500() -> None:
    made = metrics()
    with pytest.raises(ZeroDivisionError):
        send_request(made, "/translate")
    assert count(made, "/translate", 500) == 1


def test_start_of_the_server_is_no_request() -> None:
    made = metrics()
    for kind in ("lifespan", "websocket", "a"):
        send_request(made, "/translate", 200, kind=kind)
    assert count(made, "/translate", 200) is None


def test_seconds_of_requests_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    made = metrics()
    times = iter([10.0, 12.5, 100.0, 100.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    send_request(made, "/detect", 200)
    send_request(made, "/detect", 200)
    assert count(made, "/detect", 200, "sum") == 2.75


def test_engines_are_gauges() -> None:
    made = metrics()
    gauges = {
        "sentences_waiting": 3,
        "sentences_running": 2,
        "sentences_translated_total": 7,
        "queue_capacity": 9,
    }
    for name, number in gauges.items():
        assert value(made, f'vanilla_transformer_{name}{{pair="en-de"}}') == number
