"""Folders of LoRA adapters (Hu et al. 2021, arXiv 2106.09685): PEFT, the extra `lora`, merges them into their base.

The folder is untrusted. PEFT reads no pickled code from it, and the base model is found here, not by PEFT.
"""

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..utils.errors import UserError, naming_extras, shown
from ..utils.hub_folders import from_hub
from ..utils.untrusted import one_line, read_json_object, refuse_special_files
from .converted import Tensors
from .options import Options
from .state_dicts import read_torch_file, require_tensors
from .transformers_folders import MODEL_CLASSES, load_peer

if TYPE_CHECKING:
    from peft import PeftModel

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_COPY = re.compile(r"\b(shared|embed_tokens|lm_head)\.(modules_to_save|original_module)\.")
_EMBEDDING = re.compile(r"\.(shared|embed_tokens|lm_head)(\.base_layer)?\.weight$")
_TOKENIZER_FILES = (".json", ".txt", ".spm", ".model")

#: Fields of `peft.LoraConfig` that may have any value: PEFT's reloaded adapter and its merged model agree for all.
UNDERSTOOD = frozenset(
    {
        # about the file
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        # which modules
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "trainable_token_indices",
        "bias",
        "fan_in_fan_out",
        # the product of matrices
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "lora_bias",
        # for training only
        "init_lora_weights",
        "lora_dropout",
        "eva_config",
        "corda_config",
        "loftq_config",
        "lora_ga_config",
        "runtime_config",
    }
)
#: Initialisations that leave the base weights as they are, or that PEFT repeats when it loads the adapter (olora,
#: pissa). Others change the base by something that the folder does not contain: data (corda, lora_ga), random numbers
#: (pissa_niter_4), a quantised model (loftq).
INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", "olora", "pissa")
_REMEDY = "merge it where it was trained: model.merge_and_unload().save_pretrained(FOLDER), then convert FOLDER"

_TOLERANCE = 1e-3  # of the largest logit, between the adapter and the merged model in float32
_PROBE_TOKENS = 64


@contextmanager
def merged_adapter(folder: Path) -> Iterator[Path]:
    """`folder`, or if it has a LoRA adapter of PEFT, a temporary folder of its base model with the adapter merged.

    The tokenizer is the adapter's if that folder has one.

    Raises:
        UserError: another kind of adapter, a field of its configuration with another meaning than those of
            `UNDERSTOOD`, no such base model, or a merged model that does not compute what the adapter does.
    """
    if not (folder / _CONFIG).is_file():
        yield folder
        return
    with naming_extras():
        import peft  # noqa: F401 is needed below
    options = Options(read_json_object(folder / _CONFIG), f"{folder / _CONFIG}: ")
    _check_fields(options)
    file = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: there is none of {', '.join(_WEIGHTS)}")
    weights = require_tensors(read_torch_file(file), str(file))
    base = _base_folder(options)
    model = _load_base(base)
    dtype = model.dtype
    merged = _merge(model.float(), folder, weights, options)
    with TemporaryDirectory() as temporary:
        output = Path(temporary)
        for source in (base, folder):
            _copy_tokenizer_and_settings(source, output)
        (output / _CONFIG).unlink()
        tensors = {name: tensor.to(dtype).clone() for name, tensor in merged.state_dict().items()}
        save_file(tensors, output / "model.safetensors")
        yield output


def _check_fields(options: Options) -> None:
    """Refuse each field that is neither understood nor has the value that it has in every adapter without it."""
    from peft import LoraConfig

    if options.text("peft_type") != "LORA":
        raise options.error("peft_type", "only LORA is merged")
    defaults = vars(LoraConfig())
    for name, value in options.values.items():
        is_default = name in defaults and value == defaults[name]
        is_unset = value is None or value is False or value in ([], {}, "")
        if name not in UNDERSTOOD and not is_default and not is_unset:
            raise options.error(name, f"such an adapter is not merged here; {_REMEDY}")
    initialisation = options.values.get("init_lora_weights", True)
    initialisation = initialisation.lower() if isinstance(initialisation, str) else initialisation
    if initialisation not in INITIALISATIONS:
        known = ", ".join(map(str, INITIALISATIONS))
        raise options.error("init_lora_weights", f"only {known} are merged here; {_REMEDY}")


def _base_folder(options: Options) -> Path:
    named = options.text("base_model_name_or_path")
    base = Path(named)
    if not base.is_dir():
        revision = options.text("revision") or None
        base = from_hub(named, f"{options.where}base_model_name_or_path=", revision)
    refuse_special_files(base)
    return base


def _load_base(folder: Path) -> PreTrainedModel:
    model_type = read_json_object(folder / "config.json").get("model_type")
    if model_type not in MODEL_CLASSES:
        raise UserError(
            f"{folder}: the base model has model_type={shown(model_type)}; "
            f"adapters of {', '.join(MODEL_CLASSES)} can be converted"
        )
    return load_peer(MODEL_CLASSES[model_type], folder)


def _merge(
    model: PreTrainedModel, folder: Path, weights: Tensors, options: Options
) -> PreTrainedModel:
    """The base model with the adapter in its weights, as PEFT loads and merges it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _resize_vocabulary(model, weights)
            adapted = _load_adapter(model, folder)
            probe = _probe(model, options)
            with torch.no_grad():
                expected = adapted(**probe).logits
                merged = adapted.merge_and_unload()
                actual = merged(**probe).logits
    except UserError:
        raise
    except Exception as error:  # PEFT raises all kinds for a configuration that does not fit the model or the weights
        raise UserError(
            f"{options.where}PEFT cannot merge this adapter ({one_line(error)})"
        ) from None
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE:
        raise _difference(difference, weights, options)
    return merged


def _load_adapter(model: PreTrainedModel, folder: Path) -> "PeftModel":
    """The model with the adapter of the folder, if its weights are those that the configuration asks for."""
    from peft import LoraConfig, PeftModel

    config = LoraConfig.from_pretrained(str(folder))
    # It adds methods around the model, which a version of transformers may lack.
    config.task_type = None
    adapted = PeftModel.from_pretrained(model, str(folder), config=config, torch_device="cpu")
    keys = adapted.load_adapter(str(folder), "default", torch_device="cpu")  # again, for the names
    # PEFT saves embeddings of a new size twice if they are also in modules_to_save, and reads them once.
    surplus = [name for name in keys.unexpected_keys if not _COPY.search(name)]
    if keys.missing_keys:
        raise UserError(
            f"{folder}: the weights of the adapter lack {shown(min(keys.missing_keys))}"
        )
    if surplus:
        reason = f"neither the base model nor the adapter's configuration has {shown(min(surplus))}"
        raise UserError(f"{folder}: {reason}")
    return adapted.eval()


def _resize_vocabulary(model: PreTrainedModel, weights: Tensors) -> None:
    """Give the model as many tokens as the embeddings in the adapter's file, as its author did for new tokens."""
    sizes = {len(weight) for name, weight in weights.items() if _EMBEDDING.search(name)}
    if len(sizes) == 1 and sizes != {model.get_input_embeddings().weight.shape[0]}:
        model.resize_token_embeddings(sizes.pop(), mean_resizing=False)


def _probe(model: PreTrainedModel, options: Options) -> Tensors:
    """A sentence and a translation, of random tokens and of those that the adapter changes."""
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    tokens = min(module.weight.shape[0] for module in modules)
    changed = options.values.get("trainable_token_indices") or []
    lists = changed.values() if isinstance(changed, Mapping) else [changed]
    indices = [min(index, tokens - 1) for part in lists for index in part]
    drawn = torch.randint(tokens, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([indices[:_PROBE_TOKENS] + drawn.tolist()])  # (1, S)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)}


def _difference(difference: float, weights: Tensors, options: Options) -> UserError:
    has_tokens = any("token_adapter" in name for name in weights)
    reason = (
        f"the merged model computes other logits (by {difference:.0%}), because the base model ties the embeddings "
        "that the adapter changes; train it on a base model that is saved with tie_word_embeddings=False"
    )
    return options.error("trainable_token_indices" if has_tokens else "target_modules", reason)


def _copy_tokenizer_and_settings(source: Path, output: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix in _TOKENIZER_FILES and "index" not in path.name:
            shutil.copy(path, output / path.name)
