"""Model folders of transformers' classes: weights, tokenizer and generation settings.

The weights are read from the files without the class, because it may tie matrices that differ in the files.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..inference.loading import load_whole
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError, naming_extras, shown
from ..utils.model_folder import check_model_files, check_search, refuse_adapter
from ..utils.untrusted import one_line, read_json_object, reading_weights
from .converted import Converted, Fields, Tensors
from .sources import EMBEDDINGS, read_parts, weight_files
from .state_dicts import STACKS, TensorRef, build_model, same, weights_decide

#: Configuration fields that these classes have under our names, with our meaning.
SAME_FIELDS = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "activation_function",
    "scale_embedding",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "max_position_embeddings",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "decoder_start_token_id",
)
#: The model types of the classes whose folders are converted.
MODEL_TYPES = ("marian", "fsmt", "m2m_100")
#: The names of their tables of positions.
POSITION_TABLES = {f"model.{stack}.embed_positions.weight" for stack in STACKS}

_SHARED, *_EMBEDDINGS = EMBEDDINGS


class PeerFolder(NamedTuple):
    """The content of a folder of one of transformers' models."""

    config: PreTrainedConfig
    tensors: Tensors
    generation: Fields


def read_folder(config_class: type[PreTrainedConfig], source: str | Path) -> PeerFolder:
    """Configuration, weights and generation settings. No code of the folder is run."""
    folder = Path(source)
    values = _read_config(folder, config_class.model_type)
    file = folder / "generation_config.json"
    with reading_weights(folder / "config.json"):
        config = config_class.from_dict(values)
        # a configuration class drops the search, which transformers before 4.26 saved in config.json only
        settings = GenerationConfig.from_model_config({**config.to_dict(), **values}).to_diff_dict()
    if file.is_file():
        settings = read_json_object(file)
    return PeerFolder(config, read_parts(weight_files(folder), *EMBEDDINGS), settings)


def _read_config(folder: Path, model_type: str) -> Fields:
    refuse_adapter(folder)
    check_model_files(folder)
    values = read_json_object(folder / "config.json")
    if values.get("quantization_config"):
        raise UserError(
            f"{folder}: its weights are quantised (quantization_config); use the unquantised model"
        )
    found = values.get("model_type")
    if found == model_type:
        return values
    reason = f"{folder}: its config.json has model_type={shown(found)}, not {model_type}"
    if model_type not in MODEL_TYPES:
        raise UserError(reason)
    if found in MODEL_TYPES:
        raise UserError(f"{reason}; take --from {str(found).replace('_', '')}")
    raise UserError(
        f"{reason}; of transformers' models {', '.join(MODEL_TYPES)} can be converted, no other family"
    )


def from_peer(
    peer: PeerFolder,
    tokenizer: PreTrainedTokenizerBase | None,
    renames: Mapping[str, str | TensorRef] = MappingProxyType({}),
    unused: Iterable[str] = (),
    **other_fields: Any,
) -> Converted:
    """Convert a folder of any of these classes.

    `renames` has the tensors of our parameters whose names differ in more than the cross-attention's. `other_fields`
    are the configuration fields that are not in `SAME_FIELDS`. `unused` tensors may be left out.
    """
    output = str(renames.get("lm_head.weight", "lm_head.weight"))
    tensors, notes = _untied(peer, output)
    fields = {name: getattr(peer.config, name) for name in SAME_FIELDS} | other_fields
    if (
        fields["position_encoding_type"] == "sinusoidal_fairseq"
        and fields["pad_token_id"] is not None
    ):
        fields["position_offset"] = fields["pad_token_id"] + 1
    fields["unk_token_id"] = None if tokenizer is None else tokenizer.unk_token_id

    def locate(name: str) -> str | TensorRef:
        return renames.get(name, name.replace("cross_attn", "encoder_attn"))

    shared = weights_decide(tensors, locate)["share_encoder_decoder_embeddings"]
    if tokenizer is not None and not shared:
        for name in ("pad_token_id", "eos_token_id"):  # config.json has those of the target
            fields[f"decoder_{name}"], fields[name] = fields[name], getattr(tokenizer, name)
    model = build_model(fields, tensors, locate, POSITION_TABLES.union(unused, [_SHARED]))
    set_generation_config(model, peer.generation)
    return Converted(model, tokenizer, notes=notes)


def _untied(peer: PeerFolder, output: str) -> tuple[Tensors, list[str]]:
    """The tensors, each embedding under its name, and a note for each pair that config.json ties but that differs."""
    tensors = dict(peer.tensors)
    notes = []
    is_shared = getattr(peer.config, "share_encoder_decoder_embeddings", False)
    is_tied = peer.config.tie_word_embeddings or is_shared
    shared = tensors.get(_SHARED)
    # some classes save only one of several tied matrices
    only = next((tensors[name] for name in (_SHARED, *_EMBEDDINGS) if name in tensors), None)
    if only is not None and (shared is not None or is_tied):
        for name in _EMBEDDINGS:
            tensors.setdefault(name, only)
    if output not in tensors and not is_tied:
        raise UserError(
            f"{output} is missing in the weights, and config.json does not tie it to the embedding"
        )
    source, target = _EMBEDDINGS
    for first, second, tied in ((source, target, is_shared), (target, output, is_tied)):
        if tied and second in tensors and not same(tensors.get(first), tensors[second]):
            notes.append(
                f"config.json ties {first} and {second}, which differ: each is used as it is"
            )
    used = [tensors[name] for name in (*_EMBEDDINGS, output) if name in tensors]
    if shared is not None and not any(same(shared, matrix) for matrix in used):
        notes.append(f"{_SHARED} differs from the embeddings and from {output}, so it is not used")
    return tensors, notes


def load_peer(model_class: type[PreTrainedModel], source: str | Path) -> Any:
    """The model in a folder, complete and on the CPU. No code of the folder is run."""
    folder = Path(source)
    _read_config(folder, model_class.config_class.model_type)
    with reading_weights(folder):
        return load_whole(model_class, folder, dtype="auto").eval()


def load_tokenizer(
    class_name: str, source: str | Path, files: tuple[str, ...], **settings: Any
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, of a class of transformers that needs `files`. None if no file exists. `settings`
    are arguments of the class.
    """
    missing = [name for name in files if not (Path(source) / name).is_file()]
    if len(missing) == len(files):
        return None
    if missing:
        raise UserError(
            f"{source}: the tokenizer needs {', '.join(files)}; there is no {missing[0]}"
        )
    try:
        # without the library, transformers has a placeholder class, or the class raises
        with naming_extras():
            return getattr(transformers, class_name).from_pretrained(
                str(source), local_files_only=True, **settings
            )
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"{source}: cannot load the tokenizer ({one_line(error)})") from None


def check_generation_config(generation_config: GenerationConfig) -> None:
    """Raise a UserError for values that the class accepts but `generate` does not."""
    check_search("generation settings", generation_config.to_dict())
    with reading_weights("generation settings"):
        generation_config.to_json_string()


def set_generation_config(
    model: VanillaTransformerForConditionalGeneration, settings: Fields
) -> None:
    """Let `model` generate with a peer's settings, under Hugging Face's names.

    Args:
        settings: arguments of a `GenerationConfig`. `unk_token_id` is ignored. The defaults are one beam, the score
            log P / length, and translations of at most 50 tokens more than the source.
    """
    no_settings = ("_", "transformers_version", "unk_token_id")
    settings = {name: value for name, value in settings.items() if not name.startswith(no_settings)}
    settings = {"num_beams": 1, "length_penalty": 1.0} | settings
    with reading_weights("generation settings"):
        generation_config = GenerationConfig(**settings)
    check_generation_config(generation_config)
    model.generation_config = generation_config


def make_savable(search: GenerationConfig) -> None:
    """Drop what has no effect with one beam, or raise a UserError for what transformers does not save either."""
    if search.num_beams == 1:
        search.early_stopping = False
        if search.length_penalty is not None:  # the paper's may be in its place, which is saved
            search.length_penalty = 1.0
    with reading_weights("generation settings"):
        search.validate(strict=True)
