"""The Transformer of "Attention Is All You Need" as a first-class Hugging Face model.

Importing this package registers the model with the Auto classes of `transformers`.
"""

import ast
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .utils.version import warn_of_untested_versions


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package whose names are imported on first use (PEP 562).

    A face that imports everything it names makes each import of a small module pay for the largest one.

    Args:
        package: `__name__` of the package.
        modules: name -> the module that defines it, as a relative import writes it (".translator").
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name], package)
        return getattr(module, name)

    return get


def stub_names(package: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Return `__getattr__` and `__all__` of a subpackage whose names are the imports in its stub, `__init__.pyi`.

    Each name stands once, where type checkers read it, as with `attach_stub` of lazy-loader.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: "." * node.level + str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return lazy_names(package, modules), list(modules)


_AUTO_CLASSES = {
    AutoModel: VanillaTransformerModel,
    AutoModelForSeq2SeqLM: VanillaTransformerForConditionalGeneration,
    AutoModelForCausalLM: VanillaTransformerForCausalLM,
    AutoModelForTextEncoding: VanillaTransformerEncoderModel,
    AutoModelForSequenceClassification: VanillaTransformerForSequenceClassification,
}


def _register() -> None:
    name = VanillaTransformerConfig.model_type
    if name in CONFIG_MAPPING and CONFIG_MAPPING[name] is not VanillaTransformerConfig:
        raise ValueError(
            f"model_type {name!r} is already registered for {CONFIG_MAPPING[name]}, which is not ours"
        )
    AutoConfig.register(name, VanillaTransformerConfig, exist_ok=True)
    AutoTokenizer.register(VanillaTransformerConfig, fast_tokenizer_class=PreTrainedTokenizerFast)
    for auto_class, model_class in _AUTO_CLASSES.items():
        auto_class.register(VanillaTransformerConfig, model_class)
        # Saves the code with each checkpoint, for use without this package.
        model_class.register_for_auto_class(auto_class.__name__)
    VanillaTransformerConfig.register_for_auto_class("AutoConfig")


_register()
warn_of_untested_versions()

__all__ = [
    "BatchTranslator",
    "TranslationPipeline",
    "Translator",
    "VanillaTransformerConfig",
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerForSequenceClassification",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "VanillaTransformerTrainer",
    "VanillaTransformerTrainingArguments",
]

# Imported on first use: training needs datasets and accelerate, which a model does not. name -> module
_LAZY = {
    "BatchTranslator": ".inference.batch_translator",
    "TranslationPipeline": ".pipeline_vanilla_transformer",
    "Translator": ".inference.translator",
    "VanillaTransformerTrainer": ".training.trainer.trainer",
    "VanillaTransformerTrainingArguments": ".training.run.arguments",
    "__version__": ".utils.version",
}

__getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
