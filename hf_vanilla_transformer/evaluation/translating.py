"""Translate lines of text with a trained model, in their order, in batches of similar length."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenizer_training import load_tokenizers
from ..errors import UserError
from ..generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE

#: "We set the maximum output length during inference to input length + 50" (§6.1).
EXTRA_TOKENS = MAX_LENGTH_OVER_SOURCE

#: How many batches are read ahead, to be sorted by length: enough to waste little padding, few enough for a stream.
BATCHES_AHEAD = 16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Translator:
    """A model with its tokenizers, ready to translate text.

    Args:
        model: a sequence-to-sequence model that can `generate`; it stays on its device.
        source_tokenizer: for the text that comes in.
        target_tokenizer: for the text that goes out; None means that one tokenizer serves both languages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model = model
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer or source_tokenizer

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> "Translator":
        """Load a model folder: the model, its generation settings and its tokenizers.

        Args:
            directory: a folder that `save_pretrained` or a training run has written.
            device: such as "cpu" or "cuda:1"; None is the machine's accelerator if it has one.
            dtype: "float32", "bfloat16", "float16" or a torch dtype; None is the checkpoint's own.

        Raises:
            UserError: no such folder, no whole model in it, a device that is not there, an unknown dtype.
        """
        folder = _model_folder(directory)
        target_device, target_dtype = _device(device), _dtype(dtype)
        model = _load_model(folder, target_dtype).to(target_device)
        try:
            return cls(model, *load_tokenizers(folder))
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: cannot load the tokenizer ({_one_line(error)})") from error

    def translate(
        self,
        sentences: Iterable[str],
        *,
        batch_size: int = 64,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
        length_penalty: float | None = None,
        **generate_kwargs: Any,
    ) -> Iterator[str]:
        """Translate sentences one by one or from an endless stream.

        Args:
            sentences: text, one sentence each; an empty or blank one comes out empty, unseen by the model.
            batch_size: sentences per batch. `BATCHES_AHEAD` times as many are read ahead; 1 reads none ahead.
            num_beams: None, here and below, is what the checkpoint's `generation_config.json` says.
            max_new_tokens: if the checkpoint says nothing either, it is the longest source of the batch + 50 (§6.1).
            length_penalty: Hugging Face's, log P / length^length_penalty, instead of the checkpoint's.
            **generate_kwargs: anything else for `model.generate`.

        Returns:
            An iterator of as many translations, in the same order.

        Raises:
            UserError: at once for an argument out of range; later for an item that is no string, or one that is
                longer than the learned positions of the model.
        """
        if isinstance(sentences, str):
            raise UserError("sentences: an iterable of strings is needed, not one string; put it in a list")
        for name, value in (("batch_size", batch_size), ("num_beams", num_beams), ("max_new_tokens", max_new_tokens)):
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, not {value}")
        settings = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "length_penalty": length_penalty}
        settings = {name: value for name, value in settings.items() if value is not None} | generate_kwargs
        return self._stream(sentences, batch_size, settings)

    def describe(
        self,
        *,
        batch_size: int = 64,
        num_beams: int | None = None,
        max_new_tokens: int | None = None,
        length_penalty: float | None = None,
    ) -> dict[str, Any]:
        """What `translate` does with these arguments, defaults filled in, to stand beside a score."""
        defaults = self.model.generation_config
        return {
            "batch_size": batch_size,
            "num_beams": num_beams or defaults.num_beams or 1,
            "max_new_tokens": max_new_tokens or defaults.max_new_tokens or f"source + {EXTRA_TOKENS}",
            "length_penalty": self._length_penalty(length_penalty),
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def _length_penalty(self, given: float | None) -> float | str:
        """What a hypothesis' log-probability is divided by: length^penalty, or the paper's formula (§6.1)."""
        defaults = self.model.generation_config
        alpha = getattr(defaults, "paper_length_penalty", None)
        for penalty in (given, defaults.length_penalty):
            if penalty is not None:
                return penalty
        return 1.0 if alpha is None else f"((5 + length) / 6)^{alpha}"

    def _stream(self, sentences: Iterable[str], batch_size: int, settings: dict[str, Any]) -> Iterator[str]:
        lines, done = iter(sentences), 0
        while window := list(islice(lines, batch_size * BATCHES_AHEAD if batch_size > 1 else 1)):
            yield from self._translate_window(window, done, batch_size, settings)
            done += len(window)

    def _translate_window(self, window: list[str], done: int, batch_size: int, settings: dict[str, Any]) -> list[str]:
        ids = {index: self.encode(line, done + index + 1) for index, line in enumerate(window) if not _blank(line)}
        # longest first: a batch that does not fit into memory fails at the start
        order = sorted(ids, key=lambda index: len(ids[index]), reverse=True)
        translations = [""] * len(window)
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                texts = self._translate_batch([ids[index] for index in batch], settings)
                for index, text in zip(batch, texts, strict=True):
                    translations[index] = text
        finally:
            self.model.train(was_training)
        return translations

    def encode(self, line: str, number: int) -> list[int]:
        """The ids of a source text; `number` names its line where it is too long for learned positions."""
        ids = self.source_tokenizer(line)["input_ids"]
        limit = _position_limit(self.model)
        if limit is not None and len(ids) > limit:
            raise UserError(
                f"line {number}: {len(ids)} tokens, but the model has positions for {limit} only; split the line"
            )
        return ids

    @torch.inference_mode()
    def _translate_batch(self, ids: list[list[int]], settings: dict[str, Any]) -> list[str]:
        batch = self.source_tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self.model.device)
        length = _maximum_length(self.model, batch["input_ids"].shape[1])
        output = self.model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **(length | settings)
        )  # (B, T)
        if not isinstance(output, torch.Tensor) or len(output) != len(ids):
            raise UserError(
                "generate: one translation per sentence is needed; drop num_return_sequences and return_dict"
            )
        return self.target_tokenizer.batch_decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _blank(line: str) -> bool:
    if not isinstance(line, str):
        raise UserError(f"sentences: strings are needed, not {line!r}")
    return not line.strip()


def _maximum_length(model: PreTrainedModel, source_length: int) -> dict[str, int]:
    """The paper's maximum where positions end, so that decoding does; elsewhere our model's `generate` sees to it."""
    limit = _position_limit(model)
    if limit is None or model.generation_config.max_new_tokens:
        return {}
    # the first word read is the start token, the last one written is read no more
    return {"max_new_tokens": min(source_length + EXTRA_TOKENS, limit)}


def _position_limit(model: PreTrainedModel) -> int | None:
    """How many positions the model knows; sinusoids have no end (§3.5)."""
    if str(getattr(model.config, "position_encoding_type", "")).startswith("sinusoidal"):
        return None
    return getattr(model.config, "max_position_embeddings", None)


def _model_folder(directory: str | os.PathLike) -> Path:
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give the folder of a trained model "
            "(one on the Hub is fetched by: hf download NAME --local-dir FOLDER)"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: this folder has no config.json, so it holds no model; give a run's output_dir")
    return folder


def _load_model(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    try:
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    # what damaged files, another kind of model or weights of another shape raise; our own faults keep their traceback
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"{folder}: cannot load the model ({_one_line(error)})") from error
    if missing := sorted(info["missing_keys"]):
        # transformers would fill them with random numbers and only warn
        raise UserError(
            f"{folder}: the weights lack {len(missing)} tensors, such as {missing[0]}; save the model again"
        )
    return model


def _device(device: str | torch.device | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        chosen = torch.device(device or accelerator or "cpu")
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ["cpu"]
        if accelerator:
            known += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
        raise UserError(f"device: {str(device)!r} cannot be used here; there is {', '.join(known)}") from error
    return chosen


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or "auto"
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " …"
