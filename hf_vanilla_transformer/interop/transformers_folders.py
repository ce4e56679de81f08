"""Model folders of transformers' own classes: weights, tokenizer and generation settings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..untrusted import one_line, read_json_object, reading_weights
from .converting import Converted
from .state_dicts import TensorRef, build_model, find_tying, require_tensors

#: Configuration fields that Marian and FSMT have under our names, with our meaning.
SAME_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("encoder_attention_heads", "decoder_attention_heads", "activation_function", "scale_embedding"),
    *("dropout", "attention_dropout", "activation_dropout", "max_position_embeddings"),
    *("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"),
)
#: The names of their tables of positions.
POSITION_TABLES = {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}


def from_peer(
    model_class: type[PreTrainedModel],
    folder: str | Path,
    output: str,
    tokenizer: PreTrainedTokenizerBase | None,
    other_fields: Callable[[Mapping[str, Tensor]], dict[str, Any]],
    locate: Callable[[str], str | TensorRef],
    unused: set[str],
) -> Converted:
    """The conversion that Marian and FSMT share; `load_peer` states what it raises.

    Args:
        output: the name of the output matrix.
        other_fields: from the tensors, the configuration fields that are not in `SAME_FIELDS`.
        locate, unused: see `build_model`.
    """
    peer = load_peer(model_class, folder)
    tensors = require_tensors(peer.state_dict(), str(folder))
    embeddings = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
    tying = find_tying(tensors, *embeddings, output)
    fields = {name: getattr(peer.config, name) for name in SAME_FIELDS} | tying.fields | other_fields(tensors)
    fields["unk_token_id"] = None if tokenizer is None else tokenizer.unk_token_id
    model = build_model(fields, tensors, locate, tying.copies | POSITION_TABLES | unused)
    set_generation_config(model, peer.generation_config.to_diff_dict())
    return Converted(model, tokenizer)


def load_peer(model_class: type[PreTrainedModel], source: str | Path) -> Any:
    """The model in a folder, complete and on the CPU; no code of the folder is run.

    Raises:
        UserError: no such folder, another kind of model, quantised or damaged weights, missing or unexpected ones.
    """
    folder, expected = Path(source), model_class.config_class.model_type
    config = read_json_object(folder / "config.json")
    # before the weights are read: that would need the library that quantised them
    if config.get("quantization_config"):
        raise UserError(f"{folder}: its weights are quantised (quantization_config); use the unquantised model")
    if (found := config.get("model_type")) != expected:
        raise UserError(f"{folder}: its config.json has model_type={found!r}, not {expected!r}")
    with reading_weights(folder):
        settings = {"local_files_only": True, "dtype": "auto", "output_loading_info": True}
        settings["ignore_mismatched_sizes"] = True  # reported below, by name
        model, info = model_class.from_pretrained(folder, **settings)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[what])):
            raise UserError(f"{folder}: {what.replace('_', ' ')} in the weights ({len(names)}): {names[0]} …")
    return model.eval()


def load_tokenizer(
    class_name: str, source: str | Path, files: tuple[str, ...], library: str
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, of a class of transformers; None if none of its files are there.

    Args:
        class_name: of transformers. files: what it needs. library: what it needs installed.

    Raises:
        UserError: only some of the files are there, or they are damaged; the library is not installed.
    """
    missing = [name for name in files if not (Path(source) / name).is_file()]
    if len(missing) == len(files):
        return None
    if missing:
        raise UserError(f"{source}: the tokenizer needs {', '.join(files)}; there is no {missing[0]}")
    try:
        # without the library, transformers has a placeholder class, or the class raises
        return getattr(transformers, class_name).from_pretrained(str(source), local_files_only=True)
    except ImportError as error:
        raise UserError(f"{class_name} needs {library}: pip install {library}") from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"{source}: cannot load the tokenizer ({one_line(error)})") from None


def set_generation_config(model: VanillaTransformerForConditionalGeneration, settings: Mapping[str, Any]) -> None:
    """Let `model` generate with a peer's settings, which have Hugging Face's names and meaning.

    Args:
        settings: of a `GenerationConfig`. Default: one beam, the score log P / length, and translations of at most 50
            tokens more than the source.
    """
    given = {name: value for name, value in settings.items() if not name.startswith(("_", "transformers_version"))}
    generation_config = GenerationConfig(**{"num_beams": 1, "length_penalty": 1.0} | given)
    generation_config._from_model_config = False  # otherwise `generate` derives a new one from the model's config
    model.generation_config = generation_config
