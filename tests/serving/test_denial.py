"""Requests that are allowed and costly leave the server to others. `pytest -m slow -s` prints the figures.

On an idle machine `/health` and a short text are at most 0.3 s slower beside them. The tests allow for a busy one: its
load per processor multiplies the seconds.
"""

import asyncio
import io
import json
import signal
import time
import zipfile
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hf_vanilla_transformer.serving import Limits
from tests.serving.running_server import RunningServer, ask, post, running_server
from tests.serving_helpers import echo_folder

MOST_SECONDS = 3.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
PAIR = {"source": "en", "target": "de"}

MOST_MEGABYTES = 1000.0  # above those of an idle server
SECONDS_TO_END = 5.0
WORD = b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>%s</w:body></w:document>'

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


def busy() -> float:
    """The load of the machine per processor, at least 1."""
    return max(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1))


async def slowest(
    port: int, request: bytes, working: "asyncio.Future | None" = None
) -> tuple[float, set[int]]:
    """The longest of 20 answers, or of those until the work is done, and their statuses."""
    seconds = 0.0
    statuses = set()
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
    others = {
        "health": HEALTH,
        "text": post(PAIR | {"q": "seven"}),
        "html": post(PAIR | {"q": "x", "format": "html"}),
    }

    async def measure() -> dict[str, tuple[float, float]]:
        alone = {name: (await slowest(server.port, request))[0] for name, request in others.items()}
        working = asyncio.gather(*(ask(server.port, costly) for _ in range(number)))
        beside = await asyncio.gather(
            *(slowest(server.port, request, working) for request in others.values())
        )
        assert {status for status, *_ in await working} <= {200, 413, 503}
        assert all(statuses <= {200, 503} for _, statuses in beside)
        return {
            name: (alone[name], seconds) for name, (seconds, _) in zip(others, beside, strict=True)
        }

    figures = asyncio.run(measure())
    print(
        f"\n{case}: "
        + json.dumps({name: [round(value, 3) for value in pair] for name, pair in figures.items()})
    )
    assert figures["health"][1] - figures["health"][0] < MOST_SECONDS


def docx(part: bytes, parts: int = 1) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(parts):
            archive.writestr(f"word/{number}.xml", part)
    return data.getvalue()


def paragraph(text: bytes) -> bytes:
    return WORD % (b'<w:p><w:r><w:t xml:space="preserve">' + text + b"</w:t></w:r></w:p>")


#: suffix, document
DOCUMENTS = {
    "250 MB of spaces": (".docx", lambda: docx(paragraph(b" " * 250_000_000))),
    "10 MB of spaces": (".docx", lambda: docx(paragraph(b"a" + b" " * 9_900_000 + b"b"))),
    "40 parts of zeros": (".docx", lambda: docx(bytes(50_000_000), 40)),
    "empty paragraphs": (".docx", lambda: docx(WORD % (b"<w:p/>" * 4_800_000))),
    "nested elements": (".html", lambda: b"<b>" * 3_300_000),
    "subtitle of spaces": (
        ".srt",
        lambda: b"1\n00:00:01,000 --> 00:00:02,000\na" + b" " * 9_900_000 + b"b\n",
    ),
}


def upload(suffix: str, content: bytes) -> bytes:
    """A request with a form of a document and its languages."""
    fields = {f'name="{name}"': value.encode() for name, value in PAIR.items()}
    fields[f'name="file"; filename="a{suffix}"'] = content
    parts = [
        b"--limit\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (name.encode(), value)
        for name, value in fields.items()
    ]
    body = b"".join(parts) + b"--limit--\r\n"
    head = "POST /translate_file HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=limit\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def megabytes_of_all(server: RunningServer) -> float:
    """The memory of the server and its processes. They share some of it."""
    process = psutil.Process(server.process.pid)
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().pss / 2**20
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.mark.slow
@pytest.mark.skipif(not psutil.LINUX, reason="other systems do not limit the memory of a process")
def test_documents_leave_the_server_to_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    requests = {name: upload(suffix, content()) for name, (suffix, content) in DOCUMENTS.items()}

    async def measure(
        server: RunningServer, together: list[bytes]
    ) -> tuple[float, float, set[int]]:
        idle = most = megabytes_of_all(server)
        working = asyncio.gather(*(ask(server.port, request) for request in together))
        seconds = 0.0
        while not working.done():
            seconds = max(seconds, (await slowest(server.port, HEALTH))[0])
            most = max(most, await asyncio.to_thread(megabytes_of_all, server))
        return most - idle, seconds, {status for status, *_ in await working}

    async def end(server: RunningServer) -> float:
        working = [
            asyncio.ensure_future(ask(server.port, requests["nested elements"])) for _ in range(3)
        ]
        await asyncio.sleep(3)
        start = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        assert [status for status, *_ in await asyncio.gather(*working)] == [503] * 3
        await asyncio.to_thread(server.process.wait)
        return time.perf_counter() - start

    options = ("--translate_files", "--timeout", "10")
    with running_server(echo_folder(folder / "model"), folder, *options) as server:
        asyncio.run(
            ask(server.port, upload(".html", b"<p>seven</p>"))
        )  # the first one starts what is needed
        cases = {name: [request] for name, request in requests.items()}
        cases["all at once"] = list(requests.values())
        for name, together in cases.items():
            memory, seconds, statuses = asyncio.run(measure(server, together))
            print(f"\n{name}: {statuses}, {memory:.0f} MB, /health {seconds:.3f} s")
            assert statuses <= {200, 400, 503, 504}
            assert memory < MOST_MEGABYTES
            assert seconds < MOST_SECONDS
        ended = asyncio.run(end(server))
        print(f"SIGTERM: {ended:.1f} s, load per processor {busy():.1f}")
        assert ended < SECONDS_TO_END * busy()
