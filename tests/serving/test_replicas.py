"""Several servers with the same model: one is killed under load, and the others answer."""

import asyncio
import time
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("psutil", reason="of the helpers")

from hf_vanilla_transformer import Translator
from tests.serving.running_server import ask, post, running_server
from tests.serving_helpers import CORPUS, echo_folder

LINES = [f"{CORPUS[i % 4].split('.')[0]} {CORPUS[i % 3]} {i}" for i in range(400)]
CLIENTS = 8


@pytest.mark.slow
def test_killed_replica_fails_only_the_requests_in_flight(tmp_path: Path) -> None:
    folder = echo_folder(tmp_path / "model")
    expected = list(
        Translator.from_pretrained(folder, device="cpu", dtype="float32").translate(LINES)
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    answers: dict[int, str] = {}
    lost = list[int]()
    refused = list[int]()
    with (
        running_server(folder, tmp_path / "a", "--lines") as a,
        running_server(folder, tmp_path / "b", "--lines") as b,
    ):
        turn = count()
        killed = 0.0
        in_flight = dict[int, tuple[int, float]]()

        async def request(line: int) -> None:
            """Round robin. An address that refuses connections is left out, as a load balancer does after a probe."""
            for server in (a, b) if next(turn) % 2 else (b, a):
                in_flight[line] = server.port, time.monotonic()
                try:
                    status, _, answer = await ask(
                        server.port,
                        post({"q": LINES[line], "source": "en", "target": "de"}),
                    )
                except ConnectionRefusedError:
                    assert server is a
                    assert killed
                    refused.append(line)
                    continue
                except (ConnectionError, asyncio.IncompleteReadError):
                    assert server is a and in_flight[line][1] <= killed, (
                        "only of the killed replica, in flight"
                    )
                    lost.append(line)
                    return
                assert status == 200
                answers[line] = answer["translatedText"]
                return

        async def client(first: int) -> None:
            nonlocal killed
            for line in range(first, len(LINES), CLIENTS):
                if not killed and len(answers) > len(LINES) // 3:
                    a.process.kill()
                    a.process.wait()
                    killed = time.monotonic()
                await request(line)

        async def load() -> None:
            await asyncio.gather(*map(client, range(CLIENTS)))

        asyncio.run(load())
    assert len(lost) <= CLIENTS
    assert refused
    assert sorted([*answers, *lost]) == list(range(len(LINES)))
    assert {line: expected[line] for line in answers} == answers
    print(
        f"\n{len(answers)} right answers, {len(lost)} connections lost, {len(refused)} sent to the other replica"
    )
