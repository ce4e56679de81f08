"""A server in a process of its own, and clients that speak HTTP over sockets."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


@dataclass
class RunningServer:
    """The process of a server, its address, and the file of its standard error."""

    process: subprocess.Popen
    port: int
    errors: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def megabytes(self) -> float:
        """The memory that the process holds."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


@contextmanager
def running_server(
    model: Path, folder: Path, *arguments: str, threads: int = 1
) -> Iterator[RunningServer]:
    """Start `vanilla-transformer serve` on a free port. Kill it at the end if it still runs.

    Args:
        folder: for its output. threads: of torch.
    """
    command = [
        sys.executable,
        "-m",
        "vanilla_transformer_cli",
        "serve",
        "--model",
        f"en-de={model}",
        "--port",
        "0",
    ]
    command += ["--device", "cpu", "--dtype", "float32"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
    }
    errors = folder / "server_errors.txt"
    with open(errors, "wb") as file:
        process = subprocess.Popen(
            [*command, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving en-de on http://127.0.0.1:"), line + errors.read_text()
        assert process.stdout.readline().startswith("en-de computes in "), "the dtype is in the log"
        yield RunningServer(process, int(line.split("/ (")[0].rpartition(":")[2]), errors)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def post(fields: Any, path: str = "/translate") -> bytes:
    """A request with a JSON body, as bytes."""
    body = json.dumps(fields).encode()
    headers = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": len(body),
    }
    lines = [
        f"POST {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and parsed body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers["content-length"]))
    return (
        int(head[0].split()[1]),
        headers,
        json.loads(body) if "json" in headers["content-type"] else body.decode(),
    )


async def ask(port: int, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Send one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        return await read_answer(reader)
    finally:
        writer.close()


async def ask_all(port: int, lines: list[str], clients: int) -> tuple[list[str], list[float]]:
    """Translate lines by clients that each wait for an answer before they ask again.

    Returns:
        The translations in the order of the lines, and the seconds that each took.
    """
    found = [""] * len(lines)
    seconds = [0.0] * len(lines)

    async def client(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i in range(first, len(lines), clients):
            start = time.perf_counter()
            writer.write(post({"q": lines[i], "source": "en", "target": "de"}))
            status, _, answer = await read_answer(reader)
            assert status == 200, answer
            found[i], seconds[i] = answer["translatedText"], time.perf_counter() - start
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    return found, seconds
