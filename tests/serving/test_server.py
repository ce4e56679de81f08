"""A server in a process of its own, over sockets: many clients, abuse, SIGTERM, and wrong options."""

import asyncio
import math
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("psutil", reason="measures the memory of the server with it")

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.serving import Limits, ServeOptions, serve
from hf_vanilla_transformer.serving.engine import Engine
from hf_vanilla_transformer.serving.server import _connection_limit
from hf_vanilla_transformer.utils.errors import UserError
from tests.serving.running_server import (
    RunningServer,
    ask,
    ask_all,
    post,
    read_answer,
    running_server,
)
from tests.serving_helpers import CORPUS, echo_folder
from vanilla_transformer_cli import serve as serve_command
from vanilla_transformer_cli.main import parse_arguments

GOOD = {"q": CORPUS[0], "source": "en", "target": "de"}
LINES = [f"{CORPUS[i % 4].split('.')[0]} {CORPUS[i % 3]} {i}" for i in range(640)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return echo_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    return list(Translator.from_pretrained(folder, device="cpu", dtype="float32").translate(LINES))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server that all abuse is tried on, and that must stay healthy and silent."""
    with running_server(folder, tmp_path_factory.mktemp("server"), "--lines") as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert server.errors.read_text() == ""


def test_limits_are_those_of_the_readme(repository: Path) -> None:
    text = (repository / "hf_vanilla_transformer" / "serving" / "README.md").read_text(
        encoding="utf-8"
    )
    rows = re.findall(r"^\| `--(\w+)`[^|]*\| ([\d,]+)", text, re.MULTILINE)
    documented = {name: int(number.replace(",", "")) for name, number in rows}
    assert documented.keys() == {"max_characters", "max_queue", "timeout"}
    of_command = vars(parse_arguments(serve_command, ["--model", "en_de"], "serve"))
    of_python = vars(Limits()) | {"max_queue": signature(Engine).parameters["max_queue"].default}
    for name, limit in documented.items():
        assert of_command[name] == of_python[name] == limit


def assert_healthy(server: RunningServer, expected: list[str]) -> None:
    found, _ = asyncio.run(ask_all(server.port, LINES[:5], clients=2))
    assert found == expected[:5]


@pytest.mark.slow
def test_many_clients_get_the_translations_of_translate(
    server: RunningServer, expected: list[str]
) -> None:
    found, seconds = asyncio.run(ask_all(server.port, LINES, clients=64))
    assert found == expected
    assert len(set(found)) > 100
    assert max(seconds) < 60


@pytest.mark.slow
def test_answers_have_security_headers(server: RunningServer) -> None:
    for request in (
        post(GOOD),
        post({}),
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ):
        headers = asyncio.run(ask(server.port, request))[1]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.slow
def test_large_bodies_are_refused_in_bounded_memory(
    server: RunningServer, expected: list[str]
) -> None:
    before = server.megabytes()
    chunk = b" " * 2**20

    async def send(head: str, chunked: bool) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def send_body() -> (
            None
        ):  # to its end, or until the server, which has answered, closes the connection
            with suppress(ConnectionError):
                for _ in range(100):
                    writer.write(b"100000\r\n" + chunk + b"\r\n" if chunked else chunk)
                    await writer.drain()

        writer.write(head.encode())
        sending = asyncio.ensure_future(send_body())
        status, _, answer = await read_answer(reader)
        await sending
        writer.close()
        assert "limit" in answer["error"]
        return status

    async def send_all() -> list[int]:
        head = "POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        declared = [send(head + f"Content-Length: {100 * 2**20}\r\n\r\n", False) for _ in range(4)]
        streamed = [send(head + "Transfer-Encoding: chunked\r\n\r\n", True) for _ in range(4)]
        return await asyncio.gather(*declared, *streamed)

    assert asyncio.run(send_all()) == [413] * 8
    assert server.megabytes() < before + 50
    assert_healthy(server, expected)


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_early_answer_does_not_end_the_connection(
    server: RunningServer, expected: list[str], chunked: bool
) -> None:
    """The client reads its answer after it has sent the whole body, and asks again."""

    async def ask_twice() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {20 * 2**20}"
        head = "POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}{length}\r\n\r\n".encode())
        for _ in range(20):
            chunk = b" " * 2**20
            writer.write(b"100000\r\n" + chunk + b"\r\n" if chunked else chunk)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        assert (await read_answer(reader))[0] == 413
        for _ in range(2):
            writer.write(post({"q": LINES[0], "source": "en", "target": "de"}))
            status, _, answer = await read_answer(reader)
            assert (status, answer["translatedText"]) == (200, expected[0])
        writer.close()

    asyncio.run(ask_twice())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post([GOOD]), 400),
        (post(GOOD).replace(b"application/json", b"text/plain"), 415),
        (post(GOOD)[:-1], 408),
        (post(GOOD).replace(b"application/json", b"multipart/form-data"), 400),
        (b"GET http://127.0.0.1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 200),
        (
            b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            200,
        ),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404),
        (b"GET /%2e%2e/page.py HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 400),
    ],
)
def test_wrong_requests_have_their_status(folder, server, tmp_path, request_, status):
    if status == 408:  # after the time limit, so on a server with a short one
        with running_server(folder, tmp_path, "--timeout", "1") as impatient:
            assert asyncio.run(ask(impatient.port, request_))[0] == status
        return

    async def first_line() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_)
        line = await reader.readline()
        writer.close()
        return line

    assert asyncio.run(asyncio.wait_for(first_line(), 30)).split()[1] == str(status).encode()


@pytest.mark.slow
def test_silent_connections_are_closed_and_others_answered(
    server: RunningServer, expected: list[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, hard - 500)
    before = server.megabytes()
    silent: list[socket.socket] = []
    try:
        for number in range(count):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            if number % 2:
                connection.sendall(b"POST /translate HTTP/1.1\r\nHo")  # and no more
            silent.append(connection)
            if number % 2_500 == 0:
                assert_healthy(server, expected)
        assert server.megabytes() < before + 400
        assert_healthy(server, expected)
        closed = 0
        end = time.monotonic() + 40
        while silent and time.monotonic() < end:
            connection = silent.pop()
            connection.settimeout(max(0.1, end - time.monotonic()))
            try:
                closed += connection.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            connection.close()
        assert closed == count
    finally:
        for connection in silent:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_healthy(server, expected)


@pytest.mark.slow
def test_clients_that_leave_give_their_sentences_up(
    server: RunningServer, expected: list[str]
) -> None:
    async def leave() -> None:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(GOOD | {"q": LINES[:100]}))
            await writer.drain()
            writer.transport.abort()

    asyncio.run(leave())
    assert_healthy(server, expected)
    metrics = asyncio.run(ask(server.port, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))[2]
    assert 'vanilla_transformer_sentences_waiting{pair="en-de"} 0.0\n' in metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_ends_the_server_after_what_it_has_taken(folder, expected, tmp_path, name):
    with running_server(folder, tmp_path, "--lines", "--batch_size", "4") as server:

        async def interrupted() -> tuple[list[list[str]], bool]:
            asked = []
            for start in range(0, 400, 40):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(post(GOOD | {"q": LINES[start : start + 40]}))
                asked.append((reader, writer))
            while True:  # until all are taken and some are being translated
                _, _, metrics = await ask(
                    server.port,
                    b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
                )
                counts = dict(re.findall(r'sentences_(\w+){pair="en-de"} (\S+)', metrics))
                if sum(map(float, counts.values())) >= 390:
                    break
            server.process.send_signal(getattr(signal, name))
            answers = [await read_answer(reader) for reader, _ in asked]
            assert [status for status, _, _ in answers] == [200] * len(asked)
            return [answer["translatedText"] for _, _, answer in answers], float(
                counts["waiting"]
            ) > 0

        found, was_busy = asyncio.run(interrupted())
        assert server.process.wait(timeout=60) == (0 if name == "SIGTERM" else 130)
        assert [text for texts in found for text in texts] == expected[:400]
        assert was_busy, "the signal came in the middle"
        assert "Traceback" not in server.errors.read_text()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"port": 99_999}, "--port 99999"),
        ({"host": "256.0.0.1"}, "--host 256.0.0.1"),
        ({"models": ["en-de=missing"]}, "missing: "),
        ({"engine": {"max_queue": 0}}, "max_queue"),
        *[
            ({"limits": Limits(timeout=seconds)}, "timeout")
            for seconds in (math.inf, math.nan, 0.0, -1.0)
        ],
    ],
)
def test_wrong_options_are_refused_in_one_line(folder: Path, changed: dict, message: str) -> None:
    options = {"models": [f"en-de={folder}"], "port": 0, "dtype": "float32"}
    with pytest.raises(UserError, match=message) as error:
        serve(ServeOptions(**options | changed))
    assert "\n" not in str(error.value)


def test_limit_of_open_files_may_be_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by macOS, where the hard limit is infinite, but more than 10,240 are refused."""
    resource = pytest.importorskip("resource")

    def setrlimit(_: int, limits: tuple[int, int]) -> None:
        if not 0 <= limits[0] <= 10240:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert 1000 < _connection_limit() <= 10240


def test_port_that_is_taken_is_refused_before_models_are_loaded(
    folder: Path,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match="--port"),
    ):
        serve(ServeOptions(models=["en-de=missing"], port=taken.getsockname()[1]))


@pytest.mark.slow
def test_head_may_come_in_pieces_and_end_in_a_large_body(server):
    async def answer(pieces: list[bytes]) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        line = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        return line.split()[1]

    head, _, body = post(GOOD).partition(b"\r\n\r\n")
    size = len(body) + 80_000
    large = (
        re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % size, head)
        + b"\r\n\r\n"
        + body
        + b" " * 80_000
    )
    start = large.index(b"\r\n\r\n")
    assert asyncio.run(answer([head, b"\r\n\r", b"\n", body])) == b"200"
    pieces = [large[: start + 2], large[start + 2 : start + 3], large[start + 3 :]]
    assert asyncio.run(answer(pieces)) == b"200"
    assert asyncio.run(answer([head, *[b"\r\nX: " + b"a" * 30_000] * 3])) == b"400"
