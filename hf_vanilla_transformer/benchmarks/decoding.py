"""How fast sentences are translated: this package, Marian in transformers and CTranslate2, with the same weights.

All engines get the same sentences in turn, each in a process of its own (`side_by_side`).
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..data.tokenizer_training import load_tokenizers
from ..errors import UserError
from ..evaluation.metrics import score_translations
from .decoding_engines import ENGINES, Ids
from .harness import Worker, forget_peak, peak_mib, requests

ORDERS = ("sorted", "file")


@dataclass
class Measurement:
    """One engine under one setting; seconds are one figure a round."""

    engine: str
    order: str
    batch_size: int
    num_beams: int
    sentences: int
    target_tokens: int
    seconds: list[float]
    peak_mib: float | None  # the model included, while it worked under this setting: of the process, or on the GPU
    same_output: float  # share of sentences with the tokens of the first engine
    bleu: float | None = None
    bleu_signature: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of the median round; the end of a sentence is a token."""
        return self.target_tokens / statistics.median(self.seconds)

    @property
    def seconds_per_batch(self) -> float:
        """Of the median round, and the mean batch."""
        return statistics.median(self.seconds) * self.batch_size / self.sentences

    @property
    def setting(self) -> tuple[str, int, int]:
        """What the engines of one row of bars have in common."""
        return self.order, self.batch_size, self.num_beams


def compare(
    folder: str | Path,
    sentences: Sequence[str],
    engines: Sequence[str],
    batch_sizes: Sequence[int] = (1, 64),
    beams: Sequence[int] = (1, 4),
    rounds: int = 3,
    threads: int = 1,
    limit_single: int = 100,
    orders: Sequence[str] = ("sorted",),
    references: Sequence[str] | None = None,
    device: str = "cpu",
    **bleu_settings: Any,
) -> list[Measurement]:
    """Translate the same sentences with every engine, `rounds` times in turn, after one round that does not count.

    Args:
        folder: a trained model with its tokenizer.
        sentences: source text.
        engines: keys of `ENGINES`; the first is the one whose output the others are compared with.
        batch_sizes, beams: every pair of them is measured. CTranslate2 gets all sentences at once and the batch size
            as its limit, because it sorts and cuts them itself; the others get batch by batch.
        threads: of each engine.
        limit_single: sentences in a row with batches of one, which take long.
        orders: "sorted" gives sentences of like length together, the longest first; "file" as they come. (Batches of
            one are measured once.)
        references: the right translations, for BLEU where all sentences are translated; `bleu_settings` are those of
            `score_translations`.
        device: of every engine.

    Raises:
        UserError: no such engine or order, one whose library is missing, or references of another number.
    """
    _check(sentences, engines, orders, references)
    settings = [
        (order, size, width)
        for order in dict.fromkeys(orders)
        for size in batch_sizes
        for width in beams
        if size > 1 or order == orders[0]
    ]
    ids, decode = _tokenizers(folder, sentences)
    found = []
    with _workers(folder, engines, threads, device) as workers:
        for order, size, width in settings:
            chosen = ids[:limit_single] if size == 1 else ids
            measured, outputs = _measure(workers, chosen, (order, size, width), rounds)
            if references is not None and len(chosen) == len(ids):
                for one in measured:
                    scores = score_translations(decode(outputs[one.engine]), list(references), **bleu_settings)
                    one.bleu, one.bleu_signature = scores["bleu"], scores["bleu_signature"]
            found += measured
    return found


def cache_bytes(
    folder: str | Path,
    sentences: Sequence[str],
    engines: Sequence[str],
    beams: int = 8,
    threads: int = 1,
    device: str = "cpu",
) -> dict[str, int]:
    """The most that each engine's caches of keys and values hold while it translates the sentences as one batch.

    Counted from the tensors, of source and target; copies that live for a moment are left out on all sides.
    CTranslate2 does not tell, so it is not there.
    """
    _check(sentences, engines, ORDERS, None)
    ids, _ = _tokenizers(folder, sentences)
    with _workers(folder, engines, threads, device) as workers:
        answers = {name: worker.ask("cache_bytes", ids, beams) for name, worker in workers.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def _check(
    sentences: Sequence[str], engines: Sequence[str], orders: Sequence[str], references: Sequence[str] | None
) -> None:
    for name, given, known in (("engines", engines, ENGINES), ("order", orders, ORDERS)):
        if unknown := set(given) - set(known):
            raise UserError(f"{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if not sentences:
        raise UserError("sentences: there are none to translate")
    if references is not None and len(references) != len(sentences):
        raise UserError(f"references: {len(references)} of them for {len(sentences)} sentences; each needs its own")


def _tokenizers(folder: str | Path, sentences: Sequence[str]) -> tuple[Ids, Any]:
    """Source ids, and what makes text of target ids."""
    source, target = load_tokenizers(folder)
    return source(list(sentences))["input_ids"], lambda rows: target.batch_decode(rows, skip_special_tokens=True)


def _measure(
    workers: dict[str, Worker], ids: Ids, setting: tuple[str, int, int], rounds: int
) -> tuple[list[Measurement], dict[str, Ids]]:
    """Measurements, and each engine's output in the order of the file."""
    order, size, beams = setting
    places = list(range(len(ids)))
    if order == "sorted":
        places.sort(key=lambda place: len(ids[place]), reverse=True)
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    outputs: dict[str, Ids] = {}
    for worker in workers.values():
        worker.ask("forget_peak")
    for number in range(rounds + 1):
        for name, worker in workers.items():
            taken, rows = worker.ask("translate", [ids[place] for place in places], size, beams)
            outputs[name] = [row for _, row in sorted(zip(places, rows, strict=True))]
            if number:
                seconds[name].append(taken)
    first = outputs[next(iter(workers))]
    measured = [
        Measurement(
            engine=name,
            order=order,
            batch_size=size,
            num_beams=beams,
            sentences=len(ids),
            target_tokens=sum(map(len, outputs[name])),
            seconds=seconds[name],
            peak_mib=worker.ask("peak_mib"),
            same_output=sum(a == b for a, b in zip(first, outputs[name], strict=True)) / len(first),
        )
        for name, worker in workers.items()
    ]
    return measured, outputs


# Processes


@contextmanager
def _workers(folder: str | Path, engines: Sequence[str], threads: int, device: str) -> Iterator[dict[str, Worker]]:
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as work:
        try:
            for name in engines:
                workers[name] = Worker(_serve, name, str(folder), work, device, threads=threads)
            yield workers
        finally:
            for worker in workers.values():
                worker.stop()


class _Server:
    """What a process can be asked for."""

    def __init__(self, engine: str, folder: str, work: str, device: str):
        self.engine = ENGINES[engine](folder, work, device)
        self.on_gpu = torch.device(device).type == "cuda"

    def translate(self, sentences: Ids, size: int, beams: int) -> tuple[float, Ids]:
        """Seconds, and the translations."""
        start = time.perf_counter()
        outputs = self.engine.translate(sentences, size, beams)
        return time.perf_counter() - start, outputs

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        return self.engine.cache_bytes(batch, beams)

    def forget_peak(self) -> None:
        forget_peak(self.on_gpu)

    def peak_mib(self) -> float | None:
        return peak_mib(self.on_gpu)


def _serve(pipe: Connection, engine: str, folder: str, work: str, device: str) -> None:
    server = _Server(engine, folder, work, device)
    pipe.send("ready")
    for what, args in requests(pipe):
        try:
            answer = getattr(server, what)(*args)
        except UserError as error:
            answer = error
        pipe.send(answer)
