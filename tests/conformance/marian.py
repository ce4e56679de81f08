"""Hugging Face's tests of transformers' own Marian: the measure of this package's models."""

from unittest import TestCase

import suite
from adapters import MarianReadsItsSource
from transformers import MarianConfig, MarianModel, MarianMTModel


class MarianTester(suite.ModelTester):
    config_class = MarianConfig
    model_classes = (MarianModel, MarianMTModel)
    translator_class = MarianMTModel
    causal_lm_class = MarianReadsItsSource
    own_fields = {
        "forced_eos_token_id": None
    }  # its default would force the token 0 at the end of every sentence


class ModelTests(suite.ModelTests, TestCase):
    models_tester = MarianTester


class ConfigTests(suite.ConfigTests, TestCase):
    models_tester = MarianTester


class TrainingTests(suite.TrainingTests, TestCase):
    models_tester = MarianTester


class MemoryTests(suite.MemoryTests, TestCase):
    models_tester = MarianTester


class FsdpTests(suite.FsdpTests, TestCase):
    models_tester = MarianTester


class TensorParallelTests(suite.TensorParallelTests, TestCase):
    models_tester = MarianTester
