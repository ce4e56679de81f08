"""How fast sentences are translated: this package, Marian in transformers and CTranslate2, with the same weights.

Each engine lives in a process of its own, so that its memory is its own, and all of them get the same batches in
turn (A B C A B C …), so that a noisy machine is noisy for all.
"""

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE

LENGTH_PENALTY = 1.0  # log P / length, which all three engines have

Ids = list[list[int]]
Translate = Callable[[Ids, int], Ids]


@dataclass
class Measurement:
    """One engine under one setting; seconds are one figure a round."""

    engine: str
    batch_size: int
    num_beams: int
    sentences: int
    target_tokens: int
    seconds: list[float]
    peak_mib: float
    same_output: float  # share of sentences with the tokens of the first engine

    @property
    def tokens_per_second(self) -> float:
        """Of the median round; the end of a sentence is a token."""
        return self.target_tokens / statistics.median(self.seconds)


def compare(
    folder: str | Path,
    sentences: Sequence[str],
    engines: Sequence[str],
    batch_sizes: Sequence[int] = (1, 64),
    beams: Sequence[int] = (1, 4),
    rounds: int = 3,
    threads: int = 1,
    limit_single: int = 100,
) -> list[Measurement]:
    """Translate the same sentences with every engine, `rounds` times in turn, after one round that does not count.

    Args:
        folder: a trained model with its tokenizer.
        sentences: source text.
        engines: keys of `ENGINES`; the first is the one whose output the others are compared with.
        batch_sizes, beams: every pair of them is measured.
        threads: of each engine.
        limit_single: sentences in a row with batches of one, which take long.

    Raises:
        UserError: no such engine, or one whose library is missing.
    """
    from ..data.tokenizer_training import load_tokenizers

    unknown = set(engines) - ENGINES.keys()
    if unknown:
        raise UserError(f"engines: {', '.join(sorted(unknown))} is none of {', '.join(ENGINES)}")
    tokenizer, _ = load_tokenizers(folder)
    ids = tokenizer(list(sentences))["input_ids"]
    with tempfile.TemporaryDirectory() as work:
        workers = {name: _Worker(name, str(folder), work, threads) for name in engines}
        try:
            return [
                measurement
                for size in batch_sizes
                for width in beams
                for measurement in _setting(workers, _batches(ids, size, limit_single), size, width, rounds)
            ]
        finally:
            for worker in workers.values():
                worker.stop()


def _batches(ids: Ids, size: int, limit_single: int) -> list[Ids]:
    """Sentences of like length together, the longest first."""
    chosen = ids[:limit_single] if size == 1 else ids
    ordered = sorted(chosen, key=len, reverse=True)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _setting(
    workers: dict[str, "_Worker"], batches: list[Ids], size: int, beams: int, rounds: int
) -> list[Measurement]:
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    outputs: dict[str, Ids] = {}
    for number in range(rounds + 1):
        for name, worker in workers.items():
            taken, outputs[name] = worker.translate(batches, beams)
            if number:
                seconds[name].append(taken)
    first = outputs[next(iter(workers))]
    return [
        Measurement(
            engine=name,
            batch_size=size,
            num_beams=beams,
            sentences=len(first),
            target_tokens=sum(map(len, outputs[name])),
            seconds=seconds[name],
            peak_mib=worker.peak_mib(),
            same_output=sum(a == b for a, b in zip(first, outputs[name], strict=True)) / len(first),
        )
        for name, worker in workers.items()
    ]


# Engines


def _ours(folder: str, work: str, dtype: torch.dtype) -> Translate:
    from transformers import AutoModelForSeq2SeqLM

    return _generate(AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).eval())


def _marian(folder: str, work: str, dtype: torch.dtype) -> Translate:
    from transformers import AutoModelForSeq2SeqLM

    from ..interop.marian import to_marian

    return _generate(to_marian(AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)).to(dtype))


def _generate(model: Any) -> Translate:
    """transformers' interface, and ours."""
    pad, eos = model.config.pad_token_id, model.config.eos_token_id

    def translate(batch: Ids, beams: int) -> Ids:
        longest = max(map(len, batch))
        rows = torch.tensor([row + [pad] * (longest - len(row)) for row in batch])
        mask = (torch.arange(longest) < torch.tensor([[len(row)] for row in batch])).long()
        words = model.generate(
            rows,
            attention_mask=mask,
            num_beams=beams,
            length_penalty=LENGTH_PENALTY,
            max_new_tokens=longest + MAX_LENGTH_OVER_SOURCE,
        )
        return [row[: row.index(eos) + 1] if eos in row else row for row in words[:, 1:].tolist()]

    return translate


def _ctranslate2(folder: str, work: str, quantization: str) -> Translate:
    from ..data.tokenizer_training import load_tokenizers
    from ..interop.ctranslate2 import convert

    output = Path(work) / quantization
    convert(folder, output, quantization)
    import ctranslate2

    source, target = load_tokenizers(folder)
    engine = ctranslate2.Translator(
        str(output), "cpu", inter_threads=1, intra_threads=torch.get_num_threads(), compute_type=quantization
    )

    def translate(batch: Ids, beams: int) -> Ids:
        results = engine.translate_batch(
            [source.convert_ids_to_tokens(row) for row in batch],
            beam_size=beams,
            length_penalty=LENGTH_PENALTY,
            max_decoding_length=max(map(len, batch)) + MAX_LENGTH_OVER_SOURCE,
            return_end_token=True,
        )
        return [target.convert_tokens_to_ids(result.hypotheses[0]) for result in results]

    return translate


#: engine → how to make it, from the model's folder and a folder for its own files
ENGINES: dict[str, Callable[[str, str], Translate]] = {
    "ours_fp32": lambda folder, work: _ours(folder, work, torch.float32),
    "ours_bf16": lambda folder, work: _ours(folder, work, torch.bfloat16),
    "marian_fp32": lambda folder, work: _marian(folder, work, torch.float32),
    "marian_bf16": lambda folder, work: _marian(folder, work, torch.bfloat16),
    "ctranslate2_fp32": lambda folder, work: _ctranslate2(folder, work, "float32"),
    "ctranslate2_int8": lambda folder, work: _ctranslate2(folder, work, "int8"),
    "ctranslate2_bf16": lambda folder, work: _ctranslate2(folder, work, "bfloat16"),
}


# Processes


class _Worker:
    """An engine in a process of its own, which waits while others work."""

    def __init__(self, engine: str, folder: str, work: str, threads: int):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, engine, folder, work, threads), daemon=True)
        self.process.start()
        self._receive()

    def translate(self, batches: list[Ids], beams: int) -> tuple[float, Ids]:
        """Seconds, and the translations in the order of the batches."""
        self.pipe.send((batches, beams))
        return self._receive()

    def peak_mib(self) -> float:
        self.pipe.send("memory")
        return self._receive()

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()

    def _receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError as error:
            raise UserError("engines: one of them ended without a word; its message stands above") from error
        if isinstance(answer, UserError):
            raise answer
        return answer


def _serve(pipe: Connection, engine: str, folder: str, work: str, threads: int) -> None:
    import hf_vanilla_transformer  # noqa: F401  (registers the model)

    torch.set_num_threads(threads)
    try:
        translate = ENGINES[engine](folder, work)
    except UserError as error:
        pipe.send(error)
        return
    pipe.send("ready")
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        if request == "memory":
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # KiB on Linux
            continue
        batches, beams = request
        start = time.perf_counter()
        outputs = [row for batch in batches for row in translate(batch, beams)]
        pipe.send((time.perf_counter() - start, outputs))
