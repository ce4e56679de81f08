"""The engines that the benchmark compares: this package, Marian in transformers, and CTranslate2, all in one way."""

import threading
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .. import generation_vanilla_transformer
from ..errors import UserError
from ..generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE, paper_generation_config
from ..inference.loading import INT8, load_model
from ..inference.workers import map_in_threads, shard_evenly

LENGTH_PENALTY = 1.0  # log P / length, which all three engines have

Ids = list[list[int]]


class Engine(Protocol):
    """What the benchmark asks of an engine."""

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        """Target ids, their ends included, in the order of the sentences, of which `size` form a batch."""

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        """The most that the decoder's caches hold while they translate a batch; None where nobody can tell."""


def longest_translation(sentences: Ids) -> int:
    """Tokens that each of them may have, the same for all engines however they form batches."""
    return max(map(len, sentences)) + MAX_LENGTH_OVER_SOURCE


class GenerateEngine:
    """A model with transformers' interface: `generate` on so many sentences at a time, as they come."""

    def __init__(self, model: Any):
        self.model = model.eval()

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        batches = [sentences[start : start + size] for start in range(0, len(sentences), size)]
        limit = longest_translation(sentences)
        return [row for batch in batches for row in self._generate(batch, beams, max_new_tokens=limit)]

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        # in transformers' loop nothing leaves a cache, so that it is largest at the end
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._generate(batch, beams, past_key_values=cache, max_new_tokens=longest_translation(batch))
        both = cache.self_attention_cache.layers + cache.cross_attention_cache.layers
        return storage_bytes(states for layer in both for states in (layer.keys, layer.values))

    def _generate(self, batch: Ids, beams: int, **settings: Any) -> Ids:
        eos = self.model.config.eos_token_id
        rows, mask = self._padded(batch)
        words = self.model.generate(
            rows,
            attention_mask=mask,
            num_beams=beams,
            length_penalty=LENGTH_PENALTY,
            **settings,
        )
        return [row[: row.index(eos) + 1] if eos in row else row for row in words[:, 1:].tolist()]

    def _padded(self, batch: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (B, S) and their mask."""
        longest, pad = max(map(len, batch)), self.model.config.pad_token_id
        rows = torch.tensor([row + [pad] * (longest - len(row)) for row in batch])
        mask = (torch.arange(longest) < torch.tensor([[len(row)] for row in batch])).long()
        return rows.to(self.model.device), mask.to(self.model.device)


class OurEngine(GenerateEngine):
    """This package's search: the sentences by length, `size` at a time, others in the room of those that are done."""

    def __init__(self, model: Any, workers: int = 1, compiled: bool = False):
        super().__init__(model)
        self.workers = workers  # searches beside each other, `size` sentences each
        # the peers know nothing of what the checkpoint's own has to say
        own, self.model.generation_config = model.generation_config, paper_generation_config(model.config)
        self.model.generation_config.decoder_weights = getattr(own, "decoder_weights", None)
        self.model.generation_config.compiled = compiled

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        if size == 1:
            return super().translate(sentences, size, beams)
        limit = longest_translation(sentences)
        parts = shard_evenly(sorted(range(len(sentences)), key=lambda index: -len(sentences[index])), self.workers)

        def search(part: list[int]) -> Ids:
            waiting = iter([sentences[index] for index in part])

            def more(room: int) -> tuple[torch.Tensor, torch.Tensor] | None:
                some = list(islice(waiting, room))
                return self._padded(some) if some else None

            return self._generate(list(islice(waiting, size)), beams, more=more, max_new_tokens=limit)

        found: dict[int, list[int]] = {}
        for part, rows in zip(parts, map_in_threads(search, parts, self.workers, threading.Event()), strict=True):
            found |= zip(part, rows, strict=True)
        return [found[index] for index in range(len(sentences))]

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        largest, original = 0, generation_vanilla_transformer.reader_for

        def watched(*args: Any) -> Any:
            reader = original(*args)
            read = reader.read

            def read_and_look(*args: Any) -> torch.Tensor:
                nonlocal largest
                logits = read(*args)
                largest = max(largest, storage_bytes(_entries(reader)))
                return logits

            setattr(reader, "read", read_and_look)  # noqa: B010  (mypy wants no method replaced)
            return reader

        with mock.patch.object(generation_vanilla_transformer, "reader_for", watched):
            self._generate(batch, beams, max_new_tokens=longest_translation(batch))
        if not largest:
            raise UserError("cache_bytes: the search of this package has not run; its caches cannot be counted")
        return largest


class CTranslate2Engine:
    """All sentences at once: CTranslate2 sorts them by length and cuts the batches itself."""

    def __init__(self, folder: str, work: str, device: str, quantization: str, workers: int = 1):
        from ..data.tokenizer_training import load_tokenizers
        from ..interop.ctranslate2 import convert

        output = Path(work) / f"{quantization}_{workers}"  # engines of one kind share the folder
        convert(folder, output, quantization)
        import ctranslate2

        self.source, self.target = load_tokenizers(folder)
        where = torch.device(device)
        self.translator = ctranslate2.Translator(
            str(output),
            where.type,
            device_index=where.index or 0,
            inter_threads=workers,
            intra_threads=max(1, torch.get_num_threads() // workers),
            compute_type=quantization,
        )

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        results = self.translator.translate_batch(
            [self.source.convert_ids_to_tokens(row) for row in sentences],
            max_batch_size=size,
            batch_type="examples",
            beam_size=beams,
            length_penalty=LENGTH_PENALTY,
            min_decoding_length=0,  # its default forbids a translation that ends at once
            max_decoding_length=longest_translation(sentences),
            return_end_token=True,
        )
        return [self.target.convert_tokens_to_ids(result.hypotheses[0]) for result in results]

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        return None


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What these tensors keep in memory, each storage counted once and whole."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    return sum(storages.values())


def _entries(reader: Any) -> list[torch.Tensor]:
    """The keys and values that a reader of `decoding_vanilla_transformer` holds, of source and target."""
    if hasattr(reader, "own"):  # a StepReader
        return [*reader.source, *reader.own]
    cache = reader.cache
    own = [buffer for layer in cache.self_attention_cache.layers for buffer in layer.buffers]
    return own + [states for layer in cache.cross_attention_cache.layers for states in (layer.keys, layer.values)]


def _ours(folder: str, device: str, dtype: str | torch.dtype, workers: int = 1, compiled: bool = False) -> OurEngine:
    return OurEngine(load_model(folder, device, dtype), workers, compiled)


def _marian(folder: str, device: str, dtype: torch.dtype) -> GenerateEngine:
    from ..interop.marian import to_marian

    return GenerateEngine(to_marian(load_model(folder, device, torch.float32)).to(dtype))


#: engine → how to make it, from the model's folder, a folder for its own files, and the device. Those with `workers`
#: run as many searches beside each other as they have threads.
ENGINES: dict[str, Callable[[str, str, str], Engine]] = {
    "ours_fp32": lambda folder, work, device: _ours(folder, device, torch.float32),
    "ours_bf16": lambda folder, work, device: _ours(folder, device, torch.bfloat16),
    "ours_int8": lambda folder, work, device: _ours(folder, device, INT8),
    "ours_compiled_bf16": lambda folder, work, device: _ours(folder, device, torch.bfloat16, compiled=True),
    "ours_compiled_int8": lambda folder, work, device: _ours(folder, device, INT8, compiled=True),
    "marian_fp32": lambda folder, work, device: _marian(folder, device, torch.float32),
    "marian_bf16": lambda folder, work, device: _marian(folder, device, torch.bfloat16),
    "ctranslate2_fp32": lambda folder, work, device: CTranslate2Engine(folder, work, device, "float32"),
    "ctranslate2_int8": lambda folder, work, device: CTranslate2Engine(folder, work, device, "int8"),
    "ours_workers_fp32": lambda folder, work, device: _ours(folder, device, torch.float32, torch.get_num_threads()),
    "ours_workers_bf16": lambda folder, work, device: _ours(folder, device, torch.bfloat16, torch.get_num_threads()),
    "ours_workers_int8": lambda folder, work, device: _ours(folder, device, INT8, torch.get_num_threads()),
    "ctranslate2_workers_fp32": lambda folder, work, device: CTranslate2Engine(
        folder, work, device, "float32", torch.get_num_threads()
    ),
    "ctranslate2_workers_int8": lambda folder, work, device: CTranslate2Engine(
        folder, work, device, "int8", torch.get_num_threads()
    ),
    "ctranslate2_bf16": lambda folder, work, device: CTranslate2Engine(folder, work, device, "bfloat16"),
}
