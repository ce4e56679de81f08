"""One side of a comparison, run by its path with the package of a checkout on PYTHONPATH: `python worker.py ROW`.

ROW is JSON, the fields of `tests.speed.commits.Row`. The process says that it is ready. For each line that it reads,
it repeats the row's work and answers with its target tokens, its seconds and its peak memory in MiB.
"""

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor

SENTENCES, BATCH, ONE_BY_ONE = 96, 64, 8
SEARCH = {"length_penalty": 1.0, "max_new_tokens": 32}


def random_sentences(vocab_size: int, eos_token_id: int) -> list[list[int]]:
    """Sentences of 9 to 26 tokens, longest first, as a translator sorts them."""
    generator = torch.Generator().manual_seed(1)

    def one() -> list[int]:
        length = int(torch.randint(8, 26, (1,), generator=generator))
        return torch.randint(4, vocab_size, (length,), generator=generator).tolist() + [
            eos_token_id
        ]

    return sorted((one() for _ in range(SENTENCES)), key=len, reverse=True)


def padded(sentences: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, S)."""
    longest = max(map(len, sentences))
    ids = torch.tensor(
        [each + [pad_token_id] * (longest - len(each)) for each in sentences]
    )  # (B, S)
    return ids, ids.ne(pad_token_id).long()


def translate(model: Any, row: dict[str, Any], sentences: list[list[int]]) -> int:
    """Translate in batches that are refilled, or one by one. Returns the number of target tokens."""
    pad, beams = model.config.pad_token_id, row["beams"]
    if row["work"] == "one by one":
        ids = [torch.tensor([each]) for each in sentences[:ONE_BY_ONE]]
        return sum(model.generate(each, num_beams=beams, **SEARCH).shape[1] - 1 for each in ids)
    rest = iter(sentences)

    def more(count: int) -> tuple[Tensor, Tensor] | None:
        some = list(islice(rest, count))
        return padded(some, pad) if some else None

    ids, mask = more(BATCH)
    output = model.generate(ids, attention_mask=mask, num_beams=beams, **SEARCH, next_batch=more)
    return int(output.ne(pad).sum())


def in_threads(workers: int, work: Callable[[int], int]) -> int:
    """The sum of `work(0)`, `work(1)`, …, each in a thread of its own with one thread of torch."""

    def run(number: int) -> int:
        torch.set_num_threads(1)
        return work(number)

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(run, range(workers)))


def update(model: Any, row: dict[str, Any], sentences: list[list[int]]) -> int:
    """Loss and gradients of a batch of sentences that are their own translations. Returns the number of tokens."""
    ids, mask = padded(sentences, model.config.pad_token_id)  # (B, T) each
    labels = ids.masked_fill(mask == 0, -100)
    tokens = int(mask.sum())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=row["dtype"] == "bfloat16"):
        loss = model(
            input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=tokens
        ).loss
    loss.backward()
    model.zero_grad()
    return tokens


def prepare(row: dict[str, Any]) -> Callable[[], int]:
    """The row's work: a function that returns target tokens."""
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    from hf_vanilla_transformer.inference import optimize_for_inference

    logging.disable_progress_bar()
    trains = row["work"] == "update"
    dtype = torch.float32 if trains else getattr(torch, row["dtype"])
    model = AutoModelForSeq2SeqLM.from_pretrained(row["model"], dtype=dtype).train(trains)
    sentences = random_sentences(model.config.vocab_size, model.config.eos_token_id)
    if trains:
        return lambda: update(model, row, sentences[:BATCH])
    optimize_for_inference(model, quantization=row["quantization"])
    workers = row["workers"]
    if workers == 1:
        return lambda: translate(model, row, sentences)
    return lambda: in_threads(
        workers, lambda number: translate(model, row, sentences[number::workers])
    )


def main() -> None:
    warnings.simplefilter("ignore")
    row = json.loads(sys.argv[1])
    torch.set_num_threads(row["threads"])
    work = prepare(row)
    with torch.set_grad_enabled(row["work"] == "update"):
        for _ in range(2):  # oneDNN's kernels are made
            work()
        print("ready", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            tokens = work()
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps([tokens, seconds, peak]), flush=True)


if __name__ == "__main__":
    main()
