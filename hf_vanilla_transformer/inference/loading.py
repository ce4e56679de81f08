"""Load a model folder on a device and in a precision, and refuse incomplete weights."""

import copy
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from .. import modeling_vanilla_transformer
from ..cpu_time import on_fitting_threads
from ..errors import UserError
from ..untrusted import one_line
from .kernels import has_fast_bfloat16
from .linear import INT8
from .optimize import optimize_for_inference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: float32 or bfloat16, whichever translates faster on this machine (transformers' "auto" is the checkpoint's)
FASTEST = "fastest"

_TRIAL_SENTENCES, _TRIAL_TOKENS, _TRIALS = 16, 16, 3


def load_model(
    directory: str | os.PathLike, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> PreTrainedModel:
    """Load a sequence-to-sequence model from a folder that `save_pretrained` or a training run has written.

    Args:
        directory: the folder.
        device: such as "cpu" or "cuda:1". None is the machine's accelerator if it has one.
        dtype: "float32", "bfloat16", "float16" or a torch dtype; "int8" computes the decoder's matrices in int8
            on a CPU, and the rest in bfloat16 or float32; "fastest" is float32 or bfloat16, whichever is faster in a
            few trial translations. None is the checkpoint's.

    Raises:
        UserError: no such folder, no complete model in it, a device that does not exist, an unknown dtype.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give the folder of a trained model "
            "(one on the Hub is fetched by: hf download NAME --local-dir FOLDER)"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: this folder has no config.json, so it contains no model; give a run's output_dir")
    target_device, target_dtype = _device(device), _dtype(dtype)
    model = _from_folder(folder, target_dtype).to(target_device)
    if dtype == INT8:
        try:
            optimize_for_inference(model.eval(), quantization=INT8)
        except ValueError as error:
            raise UserError(f"dtype: {INT8!r} is not available here ({error}); take bfloat16") from error
    return model.to(faster_dtype(model)) if dtype == FASTEST else model


def faster_dtype(model: PreTrainedModel) -> torch.dtype:
    """Float32 or bfloat16: the one in which a few short translations take less time.

    Measured, because the processor does not decide it: a small model loses more by conversions than it gains. `model`
    is in float32. It is copied for the trial.
    """
    tokens = torch.arange(_TRIAL_SENTENCES * _TRIAL_TOKENS, device=model.device) % max(4, model.config.vocab_size - 1)
    tokens = tokens.view(_TRIAL_SENTENCES, _TRIAL_TOKENS)  # (B, S)
    models = {torch.float32: model, torch.bfloat16: copy.deepcopy(model).to(torch.bfloat16)}
    with on_fitting_threads():
        trials = [{dtype: _seconds(one, tokens) for dtype, one in models.items()} for _ in range(1 + _TRIALS)]
    # the first trial warms up. The fastest of the rest is the least disturbed
    return min(models, key=lambda dtype: min(seconds[dtype] for seconds in trials[1:]))


@torch.inference_mode()
def _seconds(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    length = {"min_new_tokens": _TRIAL_TOKENS, "max_new_tokens": _TRIAL_TOKENS}
    output = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **length)
    output[0, 0].item()  # synchronises the device
    return time.perf_counter() - start


def _from_folder(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    try:
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    # raised by damaged files, a different model type or weights of other shapes. Other errors keep their traceback
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"{folder}: cannot load the model ({one_line(error)})") from error
    check_weights(folder, info)
    check_architecture(folder, model)
    return model


def check_weights(folder: Path, info: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would fill with random numbers or leave out with a warning.

    `info` is the loading information of `from_pretrained(…, output_loading_info=True)`.
    """
    remedies = {
        "missing_keys": "the weights lack {count} tensors, such as {name}; save the model again",
        "unexpected_keys": "the weights have {count} tensors that the model lacks, such as {name}; "
        "load a subclass with its own class",
        "mismatched_keys": "{count} tensors have other shapes than config.json says, such as {name}; "
        "save the model again",
    }
    for kind, remedy in remedies.items():
        if keys := sorted(key if isinstance(key, str) else key[0] for key in info[kind]):
            raise UserError(f"{folder}: {remedy.format(count=len(keys), name=keys[0])}")


def check_architecture(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a folder of a subclass that kept this package's model type: it would decode as its base class."""
    if not isinstance(model, modeling_vanilla_transformer.VanillaTransformerPreTrainedModel):
        return
    for name in model.config.architectures or ():
        # FSDP2 saves under a class with this prefix.
        if name.removeprefix("FSDP") not in (*modeling_vanilla_transformer.__all__, type(model).__name__):
            raise UserError(
                f"{folder}: architectures={name} in config.json is not a class of this package, and would be loaded "
                f"as {type(model).__name__}; give it a model_type of its own, or load it with its class: "
                "Translator(CLASS.from_pretrained(FOLDER), TOKENIZER)"
            )


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
    if dtype == FASTEST:
        return torch.float32
    if dtype == INT8:
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}, {INT8}, {FASTEST}")
    return DTYPES[dtype]
