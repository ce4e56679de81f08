"""Load a model folder on a device and in a precision, and refuse incomplete weights."""

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import LogRecord
from pathlib import Path
from typing import Any

import torch
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
from ..utils.cpu_time import measured_cpu_time
from ..utils.errors import UserError, shown
from ..utils.finite import require_finite
from ..utils.model_folder import check_model_files, refuse_adapter, require_model_folder
from ..utils.untrusted import (
    one_line,
    read_json_object,
    read_safetensors_header,
    reading_weights,
)
from .dtypes import FASTEST, INT8, fastest_dtype, torch_dtype

logger = logging.get_logger(__name__)


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
            x86 CPU; "fastest" is float32, bfloat16 or int8, see `fastest_dtype`. None is the checkpoint's.
        trust_remote_code: run the code of a subclass that the folder contains, as in `from_pretrained`.
        model_class: load this class instead of the one that the Auto classes know for the folder.

    Raises:
        UserError: no such folder, no complete model in it, an unknown class, a device that does not exist, an unknown
            dtype.
    """
    folder = Path(directory)
    require_model_folder(folder)
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: this folder has no config.json, so it contains no model; give a run's output_dir"
        )
    check_model_files(folder)
    target_device = _device(device)
    target_dtype = torch_dtype(dtype)
    measured_cpu_time()  # while the model loads
    if trust_remote_code:
        trust_code(folder)
    model = _from_folder(folder, target_dtype, model_class).to(target_device)
    if dtype == FASTEST:
        dtype = fastest_dtype(model)
        logger.info("dtype: %s is the fastest on this machine", dtype)
        model = model.to(torch_dtype(dtype))
    if dtype == INT8:
        from ..engine.optimize import optimize_for_inference

        try:
            optimize_for_inference(model.eval(), quantization=INT8)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(
                f"dtype: {INT8!r} is not available here ({error}); take bfloat16"
            ) from error
    return model


def _from_folder(
    folder: Path, dtype: torch.dtype | str, model_class: type[PreTrainedModel] | None
) -> PreTrainedModel:
    if model_class is None and registered_class(folder) is None:
        kind = shown(_config(folder).get("model_type"))
        raise UserError(f"{folder}: model_type={kind} in config.json is no model that translates")
    with reading_weights(folder):
        return load_whole(
            model_class or AutoModelForSeq2SeqLM, folder, dtype=dtype, trust_remote_code=False
        )


def load_whole(model_class: Any, folder: Path, **settings: Any) -> PreTrainedModel:
    """Return `model_class.from_pretrained(folder)` if the weights in the folder are complete and of this class."""
    refuse_adapter(folder)
    settings |= {
        "local_files_only": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    with _without_load_report():
        model, info = model_class.from_pretrained(folder, **settings)
    own_weights(model)
    check_weights(folder, info)
    _check_dtypes(folder, model)
    _check_architecture(folder, model)
    _check_numbers(folder, model)
    return model


def own_weights(model: torch.nn.Module) -> None:
    """Copy the weights that are still in a mapped file, so that nothing that happens to the file reaches them.

    `from_pretrained` maps files. A write into one changes the weights of the process, and the signal SIGBUS ends the
    process if the file becomes shorter. One weight is copied at a time. Tied weights stay tied.
    """
    for weight in (*model.parameters(), *model.buffers()):
        _own(weight)


def _own(tensor: Any) -> None:
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight consists of several
        for name in tensor.__tensor_flatten__()[0]:
            _own(getattr(tensor, name))
    elif tensor.is_cpu and not tensor.untyped_storage().resizable():  # torch did not allocate it
        tensor.data = tensor.data.clone()


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers from logging its table of weights that do not fit: `check_weights` names them in one line."""

    def is_other(record: LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    loading_logger = logging.get_logger("transformers.modeling_utils")
    loading_logger.addFilter(is_other)
    try:
        yield
    finally:
        loading_logger.removeFilter(is_other)


# Classes of the user


def import_class(name: str) -> type[PreTrainedModel]:
    """Import the subclass MODULE:CLASS of this package's translator."""
    # few programs need it
    from ..utils.user_code import import_object

    try:
        model_class = import_object(name)
        if issubclass(
            model_class, modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration
        ):
            inspect.signature(model_class).bind("its configuration")
            return model_class
        reason = "it is no subclass of VanillaTransformerForConditionalGeneration"
    except Exception as error:  # the code of the user
        reason = one_line(error)
    raise UserError(
        f"model_class: {name}: {reason}; give MODULE:CLASS, such as gated:GatedTranslator"
    )


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
        raise UserError(
            f"trust_remote_code: {folder}: its class {reference} fails ({one_line(error)})"
        ) from error


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
    raise UserError(
        f"{folder}: model_type={kind!r} is unknown: {remedy} its class with --model_class MODULE:CLASS"
    )


def check_model_folder(folder: Path, subclasses: bool = True) -> None:
    """Refuse a folder with whole weights of this package that do not fit the class in its config.json."""
    check_model_files(folder)
    config = _config(folder)
    # FSDP2 saves a class with this prefix.
    name = (config.get("architectures") or [""])[0].removeprefix("FSDP")
    model_class = getattr(modeling_vanilla_transformer, name, None)
    whole = (folder / "model.safetensors").is_file() or (
        folder / "model.safetensors.index.json"
    ).is_file()
    if (
        whole
        and config.get("model_type") == VanillaTransformerConfig.model_type
        and (model_class or subclasses)
    ):
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
        keys = sorted(key if isinstance(key, str) else key[0] for key in info[kind])
        if not keys:
            continue
        names = keys[0]
        if len(keys) > 1:
            names += f" and {len(keys) - 1:,} more"
        raise UserError(f"{folder}: {remedy.format(names=names)}")


def _check_dtypes(folder: Path, model: PreTrainedModel) -> None:
    """Refuse parameters that transformers would convert from integers, unless the model is a quantised one."""
    if hasattr(model.config, "quantization_config"):
        return
    parameters = dict(model.named_parameters())
    for file in folder.glob("model*.safetensors"):
        for name, tensor in read_safetensors_header(file).items():
            dtype = tensor["dtype"]
            if name in parameters and dtype not in ("F64", "F32", "F16", "BF16", "F8_E4M3"):
                raise UserError(
                    f"{folder}: {name} is {dtype}, not F32, F16, BF16 or F8_E4M3; "
                    "save the model again"
                )


def _check_numbers(folder: Path, model: PreTrainedModel) -> None:
    """Refuse weights that are not finite, in the file or after the conversion to the dtype of the model."""
    remedy = "take a checkpoint from before its training diverged"
    if model.dtype == torch.float16:
        remedy += ", or load it in float32: float16 ends at 65,504"
    require_finite(model.named_parameters(), folder, remedy)


def _check_architecture(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a folder of a subclass that kept this package's model type: it would decode as its base class."""
    if not isinstance(model, modeling_vanilla_transformer.VanillaTransformerPreTrainedModel):
        return
    known = {*modeling_vanilla_transformer.__all__, type(model).__name__}
    for name in model.config.architectures or ():
        if name.removeprefix("FSDP") not in known:
            raise UserError(
                f"{folder}: architectures={name} in config.json is not a class of this package, and would be loaded "
                f"as {type(model).__name__}; give its class: --model_class MODULE:CLASS, or in Python "
                "Translator(CLASS.from_pretrained(FOLDER), TOKENIZER)"
            )


def _device(device: str | torch.device | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        chosen = torch.device(device or accelerator or "cpu")
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device: {str(device)!r} cannot be used here ({one_line(error)}); take cpu"
        ) from error
    return chosen
