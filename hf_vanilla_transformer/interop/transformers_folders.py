"""A model folder of transformers' own classes: its weights, its tokenizer, and how it decodes."""

from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..untrusted import one_line, read_json_object, reading_weights


def load_peer(model_class: type[PreTrainedModel], source: str | Path) -> Any:
    """The model in a folder, whole and on the CPU; no code of the folder is run.

    Raises:
        UserError: no such folder, another kind of model, damaged files, weights that are missing or left over.
    """
    folder, kind = Path(source), model_class.config_class.model_type
    found = read_json_object(folder / "config.json").get("model_type")
    if found != kind:
        raise UserError(f"{folder}: its config.json says model_type={found!r}, not {kind!r}")
    with reading_weights(folder):
        settings = {"local_files_only": True, "dtype": "auto", "output_loading_info": True}
        settings["ignore_mismatched_sizes"] = True  # to name them below
        model, info = model_class.from_pretrained(folder, **settings)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[what])):
            raise UserError(f"{folder}: {what.replace('_', ' ')} in the weights ({len(names)}): {names[0]} …")
    return model.eval()


def load_tokenizer(
    class_name: str, source: str | Path, files: tuple[str, ...], library: str
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, with transformers' own class for it, or None where there are no files of it.

    Args:
        class_name: of transformers. files: what it needs. library: what has to be installed for it.

    Raises:
        UserError: some of the files, but not all; damaged ones; the library is not installed.
    """
    missing = [name for name in files if not (Path(source) / name).is_file()]
    if len(missing) == len(files):
        return None
    if missing:
        raise UserError(f"{source}: the tokenizer needs {', '.join(files)}; there is no {missing[0]}")
    try:
        # a placeholder stands in the class's place, or the class raises, where its library is missing
        return getattr(transformers, class_name).from_pretrained(str(source), local_files_only=True)
    except ImportError as error:
        raise UserError(f"{class_name} needs {library}: pip install {library}") from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"{source}: cannot load the tokenizer ({one_line(error)})") from None


def decode_as(model: VanillaTransformerForConditionalGeneration, theirs: GenerationConfig) -> None:
    """Give `model` the peer's generation settings, whose meaning is Hugging Face's.

    Args:
        theirs: what the peer decodes with; where it says nothing, there is one beam, the score is log P / length, and
            a translation may have 50 words more than its source.
    """
    settings = {name: value for name, value in theirs.to_diff_dict().items() if not name.startswith("_")}
    settings.pop("transformers_version", None)
    generation_config = GenerationConfig(**{"num_beams": 1, "length_penalty": 1.0} | settings)
    generation_config._from_model_config = False  # or `generate` would make it anew from the model's configuration
    model.generation_config = generation_config
