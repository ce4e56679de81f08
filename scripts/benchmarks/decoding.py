"""Translation speed and memory: this package, Marian in transformers and CTranslate2, with the same weights."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hf_vanilla_transformer.evaluation.metrics import score_translations
from hf_vanilla_transformer.text.side_tokens import AS_TEXT
from hf_vanilla_transformer.text.tokenizer_files import load_tokenizers
from hf_vanilla_transformer.utils.errors import UserError

from .decoding_engines import ENGINES, Ids
from .harness import Teams, Worker, check_choices, peak_memory_mib, requests, reset_peak_memory
from .report import Measurement


def compare(
    folder: str | Path,
    sentences: Sequence[str],
    engines: Sequence[str],
    batch_sizes: Sequence[int] = (1, 64),
    beams: Sequence[int] = (1, 4),
    rounds: int = 3,
    threads: int = 1,
    limit_single: int = 100,
    references: Sequence[str] | None = None,
    device: str = "cpu",
    shortlist: str | None = None,
    **bleu_settings: Any,
) -> Iterator[Measurement]:
    """Translate the same sentences with every engine in turn, `rounds` times after a warm-up round.

    An engine that fails is left out.

    Args:
        folder: a trained model with its tokenizer.
        sentences: source text. Batches have sentences of similar length, the longest first.
        engines: keys of `ENGINES`. The output of the first one is the reference for the output of the rest.
        batch_sizes, beams: every combination is measured, in this order. CTranslate2 gets all sentences and the batch
            size as its limit, because it sorts and batches them itself.
        threads: the number of threads of each engine.
        limit_single: number of sentences for batches of one, because they are slow.
        references: reference translations, for BLEU if all sentences are translated.
        device: the device of every engine.
        shortlist: a file of `vanilla-transformer shortlist`, for all engines.
        **bleu_settings: arguments of `score_translations`.

    Yields:
        Each measurement after its first round. Later rounds are added to it, so that an interrupted benchmark has the
        figures of all rounds until then.
    """
    check_choices(engines=(engines, list(ENGINES)))
    if not sentences:
        raise UserError("sentences: there are none to translate")
    if references is not None and len(references) != len(sentences):
        raise UserError(
            f"references: {len(references)} of them for {len(sentences)} sentences; give one for each"
        )
    source, target = load_tokenizers(folder)
    ids = source(list(sentences))["input_ids"]

    def bleu(outputs: Ids) -> dict[str, Any]:
        if references is None or len(outputs) < len(references):
            return {}
        texts = target.batch_decode(outputs, **AS_TEXT)
        scores = score_translations(texts, list(references), **bleu_settings)
        return {"BLEU": scores["bleu"], "bleu_signature": scores["bleu_signature"]}

    with tempfile.TemporaryDirectory() as work, Teams() as teams:
        for name in engines:
            made_from = str(folder), work, device, shortlist
            teams.add(name, [Worker(serve, name, *made_from, threads=threads)])
        for name in engines:
            teams.receive(name)
        for size, width in product(batch_sizes, beams):
            yield from _measure(
                teams, ids[:limit_single] if size == 1 else ids, size, width, rounds, bleu
            )


def _measure(
    teams: Teams,
    ids: Ids,
    size: int,
    beams: int,
    rounds: int,
    bleu: Callable[[Ids], dict[str, Any]],
) -> Iterator[Measurement]:
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
    ordered = [ids[index] for index in order]
    first_outputs = None
    measured = {
        name: Measurement(name, {"batch": size, "beams": beams}, {"sentences": len(ids)})
        for name in teams.engines()
    }
    for name, one in measured.items():
        caches = teams.ask(name, "cache_bytes", ordered[:size], beams) if size > 1 else []
        one.more["KV caches, MiB"] = caches[0] / 2**20 if caches and caches[0] else None
        teams.ask(name, "reset_peak_memory")
        teams.ask(name, "translate", ordered, size, beams)  # warm-up
    for number, (name, one) in product(range(rounds), measured.items()):
        answers = teams.ask(name, "translate", ordered, size, beams)
        if not answers:
            continue
        ((seconds, rows, peak),) = answers
        one.add(seconds, sum(map(len, rows)), peak)
        one.more["ms per sentence"] = 1000 * statistics.median(one.seconds) / len(ids)
        if number == 0:
            outputs = [row for _, row in sorted(zip(order, rows, strict=True))]
            first_outputs = first_outputs or outputs
            same = sum(a == b for a, b in zip(first_outputs, outputs, strict=True)) / len(ids)
            one.more |= {"same output": same, **bleu(outputs)}
            yield one


# Worker processes


def serve(
    pipe: Connection, name: str, folder: str, work: str, device: str, shortlist: str | None
) -> None:
    """Run an engine in a worker process."""
    engine = ENGINES[name](folder, work, device, shortlist)
    on_gpu = torch.device(device).type == "cuda"
    pipe.send("ready")
    for request, args in requests(pipe):
        pipe.send(answer(engine, on_gpu, request, *args))


def answer(engine: Any, on_gpu: bool, request: str, *args: Any) -> Any:
    """The answer of a worker: (seconds, translations, peak memory) to "translate"."""
    if request == "reset_peak_memory":
        return reset_peak_memory(on_gpu)
    if request == "cache_bytes":
        return None if on_gpu else engine.cache_bytes(*args)
    start = time.perf_counter()
    outputs = engine.translate(*args)
    return time.perf_counter() - start, outputs, peak_memory_mib(on_gpu)
