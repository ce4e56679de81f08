"""The engines of the decoding benchmark: this package, Marian in transformers, and CTranslate2."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_vanilla_transformer.attention_vanilla_transformer import attention_kernels
from hf_vanilla_transformer.engine.continuous import ContinuousSearch
from hf_vanilla_transformer.engine.optimize import optimize_for_inference
from hf_vanilla_transformer.engine.shortlist import with_shortlist
from hf_vanilla_transformer.generation_vanilla_transformer import (
    MAX_LENGTH_OVER_SOURCE,
    paper_generation_config,
)
from hf_vanilla_transformer.inference.dtypes import INT8
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.inference.shortlist_files import read_shortlist
from hf_vanilla_transformer.inference.translator import Translator
from hf_vanilla_transformer.inference.workers import map_in_threads, shard_evenly
from hf_vanilla_transformer.text.tokenizer_files import load_tokenizers
from hf_vanilla_transformer.utils.errors import UserError

LENGTH_PENALTY = 1.0  # log P / length, the only formula of all three engines

Ids = list[list[int]]


def max_target_tokens(sentences: Ids) -> int:
    """The maximum length of a translation, the same for all engines."""
    return max(map(len, sentences)) + MAX_LENGTH_OVER_SOURCE


class GenerateEngine:
    """A model with transformers' interface: `generate` on one batch after another, in the given order.

    On a GPU without cuDNN's attention: the plans for the shapes of all steps would take minutes.
    """

    def __init__(self, model: Any):
        self.model = model.eval()

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        """Target ids with end-of-sentence tokens, in the order of the sentences, from batches of `size`."""
        batches = [sentences[start : start + size] for start in range(0, len(sentences), size)]
        limit = max_target_tokens(sentences)
        return [
            row for batch in batches for row in self._generate(batch, beams, max_new_tokens=limit)
        ]

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        """Peak size of the KV caches while a batch is translated, or None."""
        # transformers' loop removes no row, so the caches are largest at the end
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._generate(batch, beams, past_key_values=cache, max_new_tokens=max_target_tokens(batch))
        layers = cache.self_attention_cache.layers + cache.cross_attention_cache.layers
        storages = [
            states.untyped_storage() for layer in layers for states in (layer.keys, layer.values)
        ]
        # Each once.
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _generate(self, batch: Ids, beams: int, **settings: Any) -> Ids:
        eos = self.model.config.eos_token_id
        input_ids, mask = self._padded(batch)
        settings |= {"num_beams": beams, "length_penalty": LENGTH_PENALTY}
        with attention_kernels("auto", self.model.device):
            sequences = self.model.generate(input_ids, attention_mask=mask, **settings)
        return [
            row[: row.index(eos) + 1] if eos in row else row for row in sequences[:, 1:].tolist()
        ]

    def _padded(self, batch: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Source ids (B, S) and their mask."""
        longest = max(map(len, batch))
        pad = self.model.config.pad_token_id
        rows = torch.tensor([row + [pad] * (longest - len(row)) for row in batch])
        mask = (torch.arange(longest) < torch.tensor([[len(row)] for row in batch])).long()
        return rows.to(self.model.device), mask.to(self.model.device)


class OurEngine(GenerateEngine):
    """This package's search: sentences by length, `size` at a time, with refill (continuous batching)."""

    def __init__(self, model: Any, workers: bool = False):
        super().__init__(model)
        # Parallel searches of `size` sentences each.
        self.workers = torch.get_num_threads() if workers else 1
        # the paper's settings, because the peers do not read the checkpoint's
        self.model.generation_config = paper_generation_config(model.config)
        engine = model.inference_engine  # `load_model` sets one for int8
        optimize_for_inference(model, engine.quantization if engine else None)

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        if size == 1:
            return super().translate(sentences, size, beams)
        limit = max_target_tokens(sentences)
        shards = shard_evenly(
            sorted(range(len(sentences)), key=lambda i: -len(sentences[i])), self.workers
        )

        def search(shard: list[int]) -> Ids:
            pending = iter([sentences[index] for index in shard])

            def next_batch(count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
                batch = list(islice(pending, count))
                return self._padded(batch) if batch else None

            return self._generate(
                list(islice(pending, size)), beams, next_batch=next_batch, max_new_tokens=limit
            )

        translations: dict[int, list[int]] = {}
        for shard, rows in zip(
            shards, map_in_threads(search, shards, self.workers, threading.Event()), strict=True
        ):
            translations |= zip(shard, rows, strict=True)
        return [translations[index] for index in range(len(sentences))]

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        limits: dict[str, Any] = {
            "length_penalty": LENGTH_PENALTY,
            "max_new_tokens": max_target_tokens(batch),
        }
        search = ContinuousSearch(self.model, len(batch), num_beams=beams, **limits)
        largest = 0
        search.join([(index, row, 1, []) for index, row in enumerate(batch)])
        while search:
            decoder: Any = search.search.decoder
            decoder = getattr(decoder, "decoder", decoder)  # inside that of a shortlist
            largest = max(largest, sum(kv.nbytes for kv in (*decoder.self_kv, *decoder.cross_kv)))
            search.step()
        return largest


class CTranslate2Engine:
    """All sentences at once: CTranslate2 sorts them by length and forms the batches itself."""

    def __init__(
        self,
        folder: str,
        work: str,
        device: str,
        shortlist: str | None,
        quantization: str,
        workers: bool = False,
    ):
        from hf_vanilla_transformer.interop.ctranslate2 import write_ctranslate2

        threads = torch.get_num_threads()
        parallel = threads if workers else 1
        output = Path(mkdtemp(dir=work)) / "model"
        write_ctranslate2(folder, output, quantization, shortlist)
        self.shortlist = shortlist
        import ctranslate2

        self.source, self.target = load_tokenizers(folder)
        target = torch.device(device)
        self.translator = ctranslate2.Translator(
            str(output),
            target.type,
            device_index=target.index or 0,
            inter_threads=parallel,
            intra_threads=threads // parallel,
            compute_type=quantization,
        )

    def translate(self, sentences: Ids, size: int, beams: int) -> Ids:
        results = self.translator.translate_batch(
            [self.source.convert_ids_to_tokens(row) for row in sentences],
            max_batch_size=size,
            batch_type="examples",
            beam_size=beams,
            length_penalty=LENGTH_PENALTY,
            use_vmap=self.shortlist is not None,
            min_decoding_length=0,  # the default forbids an empty translation
            max_decoding_length=max_target_tokens(sentences),
            return_end_token=True,
        )
        return [self.target.convert_tokens_to_ids(result.hypotheses[0]) for result in results]

    def cache_bytes(self, batch: Ids, beams: int) -> int | None:
        return None


def _ours(
    folder: str,
    work: str,
    device: str,
    shortlist: str | None,
    dtype: str | torch.dtype,
    workers: bool = False,
) -> Any:
    engine = OurEngine(load_model(folder, device, dtype), workers)
    if shortlist is not None:
        translator = Translator(engine.model, *load_tokenizers(folder))
        engine.model = with_shortlist(engine.model, read_shortlist(shortlist, translator))
    return engine


def _marian(folder: str, work: str, device: str, shortlist: str | None, dtype: torch.dtype) -> Any:
    from hf_vanilla_transformer.interop.marian import to_marian

    if shortlist is not None:
        raise UserError(
            f"shortlist: {shortlist}: transformers' Marian takes none; leave out its engines"
        )
    return GenerateEngine(to_marian(load_model(folder, device, torch.float32)).to(dtype))


_DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": INT8,
}
_QUANTIZATIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}

#: Engine by name, made from the model folder, a folder for converted models, the device and a shortlist or None. With
#: `workers` an engine runs one search per thread in parallel.
ENGINES: dict[str, Callable[[str, str, str, str | None], Any]] = {
    **{f"ours_{name}": partial(_ours, dtype=dtype) for name, dtype in _DTYPES.items()},
    **{
        f"ours_workers_{name}": partial(_ours, dtype=dtype, workers=True)
        for name, dtype in _DTYPES.items()
    },
    **{
        f"marian_{name}": partial(_marian, dtype=_DTYPES[name]) for name in ("fp32", "bf16", "fp16")
    },
    **{
        f"ctranslate2_{name}": partial(CTranslate2Engine, quantization=q)
        for name, q in _QUANTIZATIONS.items()
    },
    **{
        f"ctranslate2_workers_{name}": partial(
            CTranslate2Engine, quantization=_QUANTIZATIONS[name], workers=True
        )
        for name in ("fp32", "int8")
    },
}
