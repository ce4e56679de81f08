"""Requests that are allowed and costly leave the server to others. `pytest -m slow -s` prints the figures.

On an idle machine `/health` and a short text are at most 0.3 s slower beside them. The test allows for a busy one.
"""

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hf_vanilla_transformer.serving import Limits
from tests.serving.running_server import RunningServer, ask, post, running_server
from tests.serving_helpers import echo_folder

MOST_SECONDS = 3.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
PAIR = {"source": "en", "target": "de"}

#: requests at a time, text, format
CASES = {
    "unclosed tags": (20, "<a " * 3333, "html"),
    "unclosed attributes": (20, "<a b='" * 1600, "html"),
    "nested elements": (20, "<b>" * 3000, "html"),
    "lines": (5, "seven\n" * 1000, "text"),
    "quotation marks": (5, "“. " * 3333, "text"),
    "placeholders": (5, "{x} " * 2500, "text"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("denial")
    with running_server(echo_folder(folder / "model"), folder) as server:
        yield server


async def slowest(port: int, request: bytes, working: "asyncio.Future | None" = None) -> tuple[float, set[int]]:
    """The longest of 20 answers, or of those until the work is done, and their statuses."""
    seconds, statuses = 0.0, set()
    for number in range(1000):
        if (working.done() if working else number == 20) and number:
            break
        start = time.perf_counter()
        statuses.add((await ask(port, request))[0])
        seconds = max(seconds, time.perf_counter() - start)
        await asyncio.sleep(0.01)
    return seconds, statuses


def test_costly_requests_are_allowed() -> None:
    assert all(len(text) <= Limits().max_characters for _, text, _ in CASES.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_costly_requests_leave_the_server_to_others(server: RunningServer, case: str) -> None:
    number, text, form = CASES[case]
    costly = post(PAIR | {"q": text, "format": form})
    others = {"health": HEALTH, "text": post(PAIR | {"q": "seven"}), "html": post(PAIR | {"q": "x", "format": "html"})}

    async def measure() -> dict[str, tuple[float, float]]:
        alone = {name: (await slowest(server.port, request))[0] for name, request in others.items()}
        working = asyncio.gather(*(ask(server.port, costly) for _ in range(number)))
        beside = await asyncio.gather(*(slowest(server.port, request, working) for request in others.values()))
        assert {status for status, *_ in await working} <= {200, 413, 503}
        assert all(statuses <= {200, 503} for _, statuses in beside)
        return {name: (alone[name], seconds) for name, (seconds, _) in zip(others, beside, strict=True)}

    figures = asyncio.run(measure())
    print(f"\n{case}: " + json.dumps({name: [round(value, 3) for value in pair] for name, pair in figures.items()}))
    assert figures["health"][1] - figures["health"][0] < MOST_SECONDS
