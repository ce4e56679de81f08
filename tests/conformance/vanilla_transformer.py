"""Hugging Face's tests of the models of this package."""

from unittest import TestCase

import suite
from adapters import VanillaTransformerReadsItsSource
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
)

# The mixins know by these names which models take labels, and their shape.
_NAME = VanillaTransformerConfig.model_type
MODEL_MAPPING_NAMES[_NAME] = ("VanillaTransformerModel", "VanillaTransformerEncoderModel")
MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[_NAME] = "VanillaTransformerForConditionalGeneration"
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[_NAME] = (
    "VanillaTransformerForSequenceClassification"
)


class TranslatorTester(suite.ModelTester):
    config_class = VanillaTransformerConfig
    model_classes = (VanillaTransformerModel, VanillaTransformerForConditionalGeneration)
    translator_class = VanillaTransformerForConditionalGeneration
    causal_lm_class = VanillaTransformerReadsItsSource


class OptionsTester(TranslatorTester):
    """Every part of the configuration that changes the parameters, as it is not by default."""

    own_fields = {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "position_encoding_type": "learned",
        "attention_bias": False,
        "lm_head_bias": True,
        "final_layer_norm": True,
        "head_dim": 6,
        "value_head_dim": 10,
    }


class EncoderTester(suite.EncoderTester):
    config_class = VanillaTransformerConfig
    model_classes = (VanillaTransformerEncoderModel,)


class ClassifierTester(suite.EncoderTester):
    config_class = VanillaTransformerConfig
    model_classes = (VanillaTransformerForSequenceClassification,)


class ModelTests(suite.ModelTests, TestCase):
    models_tester = TranslatorTester
    test_can_init_all_missing_weights_before_2023 = True  # our file has no date: ask for the test


class OptionsTests(suite.ModelTests, TestCase):
    models_tester = OptionsTester
    test_can_init_all_missing_weights_before_2023 = True


class EncoderTests(suite.EncoderModelTests, TestCase):
    models_tester = EncoderTester
    test_can_init_all_missing_weights_before_2023 = True


class ClassifierTests(suite.EncoderModelTests, TestCase):
    models_tester = ClassifierTester
    test_can_init_all_missing_weights_before_2023 = True


class ConfigTests(suite.ConfigTests, TestCase):
    models_tester = TranslatorTester


class TrainingTests(suite.TrainingTests, TestCase):
    models_tester = TranslatorTester


class MemoryTests(suite.MemoryTests, TestCase):
    models_tester = TranslatorTester


class FsdpTests(suite.FsdpTests, TestCase):
    models_tester = TranslatorTester


class TensorParallelTests(suite.TensorParallelTests, TestCase):
    models_tester = TranslatorTester
