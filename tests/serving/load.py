"""Many clients against one server, and the same sentences by `Translator`, from a file, with the same threads.

    python -m tests.serving.load MODEL SENTENCES [--clients 64] [--requests 10] [--rounds 3] [--threads 2]

Prints sentences per second of both in alternating rounds, their ratio, the latencies, and how many answers differ.
"""

import argparse
import asyncio
import gzip
import os
import statistics
import tempfile
import time
from pathlib import Path


def measure(model: Path, lines: list[str], clients: int, rounds: int, threads: int) -> dict[str, float]:
    """The figures of a comparison; see the module."""
    import torch

    from hf_vanilla_transformer.inference.translator import Translator
    from tests.serving.running_server import ask_all, running_server

    torch.set_num_threads(threads)
    translator = Translator.from_pretrained(model, device="cpu", dtype="float32")
    expected = list(translator.translate(lines))  # packs the weights
    by_file, by_server, seconds, differing = [], [], [], 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(model, Path(folder), "--dtype", "float32", "--lines", threads=threads) as server,
    ):
        asyncio.run(ask_all(server.port, lines[: 2 * clients], clients))
        for _ in range(rounds):
            start = time.perf_counter()
            list(translator.translate(lines))
            by_file.append(len(lines) / (time.perf_counter() - start))
            start = time.perf_counter()
            found, taken = asyncio.run(ask_all(server.port, lines, clients))
            by_server.append(len(lines) / (time.perf_counter() - start))
            seconds += taken
            differing += sum(a != b for a, b in zip(found, expected, strict=True))
    ratios = [server / file for server, file in zip(by_server, by_file, strict=True)]
    percentiles = statistics.quantiles(seconds, n=100)
    return {
        "file": statistics.median(by_file), "server": statistics.median(by_server),
        "ratio": statistics.median(ratios), "p50": percentiles[49], "p95": percentiles[94], "differing": differing,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sentences", type=Path)
    for name, default in (("clients", 64), ("requests", 10), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported
    opened = gzip.open if arguments.sentences.suffix == ".gz" else open
    with opened(arguments.sentences, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[: arguments.clients * arguments.requests]
    found = measure(arguments.model, lines, arguments.clients, arguments.rounds, arguments.threads)
    print(
        f"{len(lines)} sentences, {arguments.clients} clients: file {found['file']:.0f}/s, server "
        f"{found['server']:.0f}/s, ratio {found['ratio']:.2f}; p50 {found['p50']:.2f} s, p95 {found['p95']:.2f} s; "
        f"{found['differing']:.0f} answers differ in {arguments.rounds} rounds"
    )


if __name__ == "__main__":
    main()
