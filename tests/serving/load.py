"""Many clients against one server, and the same sentences by `Translator`, from a file, with the same threads.

    python -m tests.serving.load MODEL SENTENCES [--clients 64] [--requests 10] [--rounds 3] [--threads 2] [--dtype D]

Prints sentences per second of both in alternating rounds, and their ratio; the same for seconds of processor time,
which other work on the machine disturbs less; the latencies; and how many answers differ.
"""

import argparse
import asyncio
import gzip
import os
import statistics
import tempfile
import time
from pathlib import Path


def measure(model: Path, lines: list[str], clients: int, rounds: int, threads: int, dtype: str) -> dict[str, float]:
    """The figures of a comparison. See the module."""
    import psutil
    import torch

    from hf_vanilla_transformer.inference.translator import Translator
    from tests.serving.running_server import ask_all, running_server

    torch.set_num_threads(threads)
    translator = Translator.from_pretrained(model, device="cpu", dtype=dtype)
    list(translator.translate(lines[: 2 * clients], protect=True))  # packs the weights
    by_file, by_server, processor, seconds, differing = [], [], [], [], 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(model, Path(folder), "--dtype", dtype, "--lines", threads=threads) as server,
    ):

        def processor_seconds() -> float:
            times = psutil.Process(server.process.pid).cpu_times()
            return times.user + times.system

        asyncio.run(ask_all(server.port, lines[: 2 * clients], clients))
        for _ in range(rounds):
            start, used = time.perf_counter(), time.process_time()
            expected = list(translator.translate(lines, protect=True))
            by_file.append(len(lines) / (time.perf_counter() - start))
            used_by_file = time.process_time() - used
            start, used = time.perf_counter(), processor_seconds()
            found, taken = asyncio.run(ask_all(server.port, lines, clients))
            by_server.append(len(lines) / (time.perf_counter() - start))
            processor.append(used_by_file / (processor_seconds() - used))
            seconds += taken
            differing += sum(a != b for a, b in zip(found, expected, strict=True))
    ratios = [server / file for server, file in zip(by_server, by_file, strict=True)]
    percentiles = statistics.quantiles(seconds, n=100)
    return {
        "file": statistics.median(by_file),
        "server": statistics.median(by_server),
        "ratio": statistics.median(ratios),
        "processor": statistics.median(processor),
        "p50": percentiles[49],
        "p95": percentiles[94],
        "differing": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sentences", type=Path)
    for name, default in (("clients", 64), ("requests", 10), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported
    opened = gzip.open if arguments.sentences.suffix == ".gz" else open
    with opened(arguments.sentences, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[: arguments.clients * arguments.requests]
    clients, rounds, threads, dtype = arguments.clients, arguments.rounds, arguments.threads, arguments.dtype
    found = measure(arguments.model, lines, clients, rounds, threads, dtype)
    print(f"{len(lines)} sentences, {arguments.clients} clients, {arguments.rounds} rounds")
    print(f"sentences per second: file {found['file']:.1f}, server {found['server']:.1f}, ratio {found['ratio']:.2f}")
    print(f"ratio of processor time: {found['processor']:.2f}")
    print(f"seconds of a request: p50 {found['p50']:.2f}, p95 {found['p95']:.2f}")
    print(f"answers that differ: {found['differing']:.0f}")


if __name__ == "__main__":
    main()
