"""Load a model folder on a device and in a precision, and refuse incomplete weights."""

import copy
import inspect
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from .. import modeling_vanilla_transformer
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..engine.int8_kernels import library
from ..engine.kernels import has_fast_bfloat16
from ..engine.linear import INT8, int8_error
from ..engine.optimize import not_optimizable, optimize_for_inference, optimize_if_possible
from ..utils.cpu_time import measured_cpu_time, on_fitting_threads
from ..utils.errors import UserError
from ..utils.system_info import describe_hardware, versions
from ..utils.untrusted import one_line, read_json_object, reading_weights
from ..utils.user_code import import_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: float32, bfloat16 or int8, whichever translates fastest on this machine (transformers' "auto" is the checkpoint's)
FASTEST = "fastest"

logger = logging.get_logger(__name__)

_TRIAL_SENTENCES, _TRIAL_TOKENS, _TRIAL_SECONDS = 32, 8, 1.5
_MAX_ERROR = 0.05  # of a token's log-probability. 0.01 is usual in int8
_OF_MODEL = {".json", ".safetensors", ".bin"}


def load_model(
    directory: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    model_class: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Load a sequence-to-sequence model from a folder that `save_pretrained` or a training run has written.

    Args:
        directory: the folder.
        device: such as "cpu" or "cuda:1". None is the machine's accelerator if it has one.
        dtype: "float32", "bfloat16", "float16" or a torch dtype; "int8" computes products in int8 on an
            x86 CPU; "fastest" is float32, bfloat16 or int8, whichever is fastest in a few trial translations. The
            latter take part if their log-probabilities are off by less than 0.05 per token. The choice is remembered
            for the folder and the machine. None is the checkpoint's.
        trust_remote_code: run the code of a subclass that the folder contains, as in `from_pretrained`.
        model_class: load this class instead of the one that the Auto classes know for the folder.

    Raises:
        UserError: no such folder, no complete model in it, an unknown class, a device that does not exist, an unknown
            dtype.
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
    measured_cpu_time()  # while the model loads
    if trust_remote_code:
        trust_code(folder)
    model = _from_folder(folder, target_dtype, model_class).to(target_device)
    if dtype == INT8:
        try:
            optimize_for_inference(model.eval(), quantization=INT8)
        except ValueError as error:
            raise UserError(f"dtype: {INT8!r} is not available here ({error}); take bfloat16") from error
    return _in_fastest_dtype(model, folder) if dtype == FASTEST else model


def _in_fastest_dtype(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model in float32, bfloat16 or int8, as measured once for this folder and machine.

    The processor alone does not decide it: a small model loses more by conversions than it gains.
    """
    candidates = ["float32", "bfloat16"]
    if not_optimizable(model) is None and int8_error(model.device, torch.float32) is None and library() is not None:
        candidates.append(INT8)
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if path.suffix in _OF_MODEL
    )
    key = json.dumps([files, str(model.device), describe_hardware(), versions()])
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / __package__ / "fastest_dtypes.json"
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
        chosen = choices.get(key)
    except (OSError, ValueError, AttributeError):  # none yet, or damaged
        choices, chosen = {}, None
    if chosen not in candidates:
        chosen = choices[key] = _fastest(model, candidates)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(choices), encoding="utf-8")
    logger.info("dtype: %s is the fastest of %s on this machine", chosen, ", ".join(candidates))
    return _converted(model, chosen)


def _converted(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    if dtype != INT8:
        return model.to(DTYPES[dtype])
    return optimize_for_inference(model.to(_dtype(INT8)).eval(), INT8)


def _fastest(model: PreTrainedModel, candidates: list[str]) -> str:
    """The candidate in which a few short translations take least time, measured for two seconds.

    A dtype takes part if the log-probabilities of its translations are float32's, but for `_MAX_ERROR` per token.
    """
    tokens = torch.arange(_TRIAL_SENTENCES * _TRIAL_TOKENS, device=model.device) % max(4, model.config.vocab_size - 1)
    tokens = tokens.view(_TRIAL_SENTENCES, _TRIAL_TOKENS)  # (B, S)
    models = {dtype: _converted(copy.deepcopy(model), dtype) for dtype in candidates}
    known = isinstance(model, modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration)
    for dtype in candidates[1:] if known else ():
        if not error_per_token(model, models[dtype], tokens) <= _MAX_ERROR:
            del models[dtype]
    for each in models.values():
        optimize_if_possible(each)
    with on_fitting_threads():
        best = {dtype: _seconds(each, tokens) for dtype, each in models.items()}  # warms up
        start = time.perf_counter()
        best = {dtype: _seconds(each, tokens) for dtype, each in models.items()}
        while time.perf_counter() - start < _TRIAL_SECONDS:
            best = {dtype: min(best[dtype], _seconds(each, tokens)) for dtype, each in models.items()}
    return min(best, key=best.__getitem__)


@torch.inference_mode()
def error_per_token(model: PreTrainedModel, other: PreTrainedModel, tokens: torch.Tensor) -> float:
    """The mean difference between the log-probabilities of a token in translations of `tokens` (B, S) by `other`."""
    length = {"min_new_tokens": _TRIAL_TOKENS, "max_new_tokens": _TRIAL_TOKENS, "length_penalty": 0.0, "num_beams": 2}
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    output = other.generate(**inputs, **length, return_dict_in_generate=True)
    targets = output.sequences[:, 1:, None]  # (B, T, 1)
    log_probs = model(**inputs, decoder_input_ids=output.sequences[:, :-1]).logits.float().log_softmax(dim=-1)
    return float((output.sequences_scores - log_probs.gather(2, targets).sum(dim=(1, 2))).abs().mean() / _TRIAL_TOKENS)


@torch.inference_mode()
def _seconds(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    output = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=_TRIAL_TOKENS)
    output[0, 0].item()  # synchronises the device
    return time.perf_counter() - start


def _from_folder(folder: Path, dtype: torch.dtype | str, model_class: type[PreTrainedModel] | None) -> PreTrainedModel:
    if model_class is None:
        registered_class(folder)
    try:
        return load_whole(model_class or AutoModelForSeq2SeqLM, folder, dtype=dtype, trust_remote_code=False)
    except UserError:
        raise
    # raised by damaged files or a different model type. Other errors keep their traceback
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"{folder}: cannot load the model ({one_line(error)})") from error


def load_whole(model_class: Any, folder: Path, **settings: Any) -> PreTrainedModel:
    """Return `model_class.from_pretrained(folder)` if the weights in the folder are complete and of this class."""
    settings |= {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = model_class.from_pretrained(folder, **settings)
    check_weights(folder, info)
    _check_dtypes(folder, model)
    _check_architecture(folder, model)
    return model


# Classes of the user


def import_class(name: str) -> type[PreTrainedModel]:
    """Import the subclass MODULE:CLASS of this package's translator."""
    try:
        model_class = import_object(name)
        if issubclass(model_class, modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration):
            inspect.signature(model_class).bind("its configuration")
            return model_class
        reason = "it is no subclass of VanillaTransformerForConditionalGeneration"
    except Exception as error:  # the code of the user
        reason = one_line(error)
    raise UserError(f"model_class: {name}: {reason}; give MODULE:CLASS, such as gated:GatedTranslator")


def register_class(model_class: type[PreTrainedModel]) -> None:
    """Let the Auto classes, and so every function of this package, load folders of `model_class`."""
    config_class: Any = model_class.config_class
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(config_class, model_class, exist_ok=True)


def trust_code(folder: Path) -> None:
    """Run the code in a model folder of a subclass, and register its class. Other folders stay as they are.

    Raises:
        UserError: the code is missing or cannot be imported.
    """
    config = _config(folder)
    reference = (config.get("auto_map") or {}).get(AutoModelForSeq2SeqLM.__name__)
    names = set(config.get("architectures") or ())
    if reference is None or names & set(modeling_vanilla_transformer.__all__):
        return
    try:
        register_class(get_class_from_dynamic_module(reference, folder, local_files_only=True))
    except Exception as error:  # the code of somebody else
        raise UserError(f"trust_remote_code: {folder}: its class {reference} fails ({one_line(error)})") from error


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}


def registered_class(folder: Path) -> type[PreTrainedModel] | None:
    """The translator that the Auto classes load from a folder, or None if they have none.

    Raises:
        UserError: nobody registered its model type.
    """
    config = read_json_object(folder / "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return None
    if kind in CONFIG_MAPPING:
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    code = AutoModelForSeq2SeqLM.__name__ in (config.get("auto_map") or {})
    remedy = "run the code of the folder with --trust_remote_code, or give" if code else "give"
    raise UserError(f"{folder}: model_type={kind!r} is unknown: {remedy} its class with --model_class MODULE:CLASS")


def check_model_folder(folder: Path, subclasses: bool = True) -> None:
    """Refuse a folder with whole weights of this package that do not fit the class in its config.json."""
    config = _config(folder)
    name = (config.get("architectures") or [""])[0].removeprefix("FSDP")  # FSDP2 saves a class with this prefix
    model_class = getattr(modeling_vanilla_transformer, name, None)
    whole = (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file()
    if whole and config.get("model_type") == VanillaTransformerConfig.model_type and (model_class or subclasses):
        with reading_weights(folder):
            load_whole(model_class or registered_class(folder), folder)


def check_weights(folder: Path, info: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would fill with random numbers or leave out with a warning.

    `info` is the loading information of `from_pretrained(…, output_loading_info=True)`.
    """
    remedies = {
        "missing_keys": "the weights lack {names}; save the model again",
        "unexpected_keys": "the model lacks {names} of the weights; save the model again, or load a subclass with its "
        "class: --model_class MODULE:CLASS",
        "mismatched_keys": "other shapes than config.json says: {names}; save the model again",
    }
    for kind, remedy in remedies.items():
        if keys := sorted(key if isinstance(key, str) else key[0] for key in info[kind]):
            names = keys[0] + (f" and {len(keys) - 1:,} more" if len(keys) > 1 else "")
            raise UserError(f"{folder}: {remedy.format(names=names)}")


def _check_dtypes(folder: Path, model: PreTrainedModel) -> None:
    """Refuse parameters that transformers would convert from integers, unless the model is a quantised one."""
    parameters = dict(model.named_parameters())
    for file in () if hasattr(model.config, "quantization_config") else folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in parameters.keys() & tensors.keys():
                if (dtype := tensors.get_slice(name).get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                    raise UserError(f"{folder}: {name} is {dtype}, not F32, F16 or BF16; save the model again")


def _check_architecture(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a folder of a subclass that kept this package's model type: it would decode as its base class."""
    if not isinstance(model, modeling_vanilla_transformer.VanillaTransformerPreTrainedModel):
        return
    for name in model.config.architectures or ():
        if name.removeprefix("FSDP") not in (*modeling_vanilla_transformer.__all__, type(model).__name__):
            raise UserError(
                f"{folder}: architectures={name} in config.json is not a class of this package, and would be loaded "
                f"as {type(model).__name__}; give its class: --model_class MODULE:CLASS, or in Python "
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
