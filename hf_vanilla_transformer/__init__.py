"""The Transformer of "Attention Is All You Need" as a first-class Hugging Face model.

Importing this package registers the model with the Auto classes of `transformers`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
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
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .utils.lazy import lazy_names
from .utils.version import __version__ as __version__

_AUTO_CLASSES = {
    AutoModel: VanillaTransformerModel,
    AutoModelForSeq2SeqLM: VanillaTransformerForConditionalGeneration,
    AutoModelForTextEncoding: VanillaTransformerEncoderModel,
    AutoModelForSequenceClassification: VanillaTransformerForSequenceClassification,
}


def _register() -> None:
    name = VanillaTransformerConfig.model_type
    if name in CONFIG_MAPPING and CONFIG_MAPPING[name] is not VanillaTransformerConfig:
        raise ValueError(f"model_type {name!r} is already registered for {CONFIG_MAPPING[name]}, which is not ours")
    AutoConfig.register(name, VanillaTransformerConfig, exist_ok=True)
    AutoTokenizer.register(VanillaTransformerConfig, fast_tokenizer_class=PreTrainedTokenizerFast)
    for auto_class, model_class in _AUTO_CLASSES.items():
        auto_class.register(VanillaTransformerConfig, model_class)
        # Saves the code with each checkpoint, for use without this package.
        model_class.register_for_auto_class(auto_class.__name__)
    VanillaTransformerConfig.register_for_auto_class("AutoConfig")


_register()

__all__ = [
    "BatchTranslator",
    "TranslationPipeline",
    "Translator",
    "VanillaTransformerConfig",
    "VanillaTransformerEncoderModel",
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
    "VanillaTransformerTrainer": ".training.trainer",
    "VanillaTransformerTrainingArguments": ".training.arguments",
}

__getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
