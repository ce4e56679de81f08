"""Hugging Face's test mixins, made to fit encoder-decoders: the same for Marian and for the models of this package.

A model's own file derives one class from each of the classes here and names its tester. No test is rewritten. Where
one is adapted, its docstring explains how.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from adapters import on_a_translator
from hf_tests import test_fsdp_mixin as fsdp_mixin
from hf_tests import test_tensor_parallel_mixin as tensor_parallel_mixin
from hf_tests.generation.test_utils import GenerationTesterMixin
from hf_tests.test_configuration_common import ConfigTester
from hf_tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor
from hf_tests.test_training_mixin import TrainingTesterMixin
from parameterized import parameterized
from torch import Tensor
from torch.multiprocessing import ProcessExitedException
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.testing_utils import torch_device

try:
    from hf_tests.test_memory_cleanup_mixin import MemoryCleanupMixin, with_grad
except ModuleNotFoundError:  # transformers before 5.18 has no such tests

    class MemoryCleanupMixin:
        __test__ = False

    def with_grad(test: Callable) -> Callable:
        return test


# Both mixins run their distributed tests for a few models of the library only. None means for every one.
fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
# Four processes of tiny models do not need four cores.
fsdp_mixin._get_available_fsdp_workers = lambda: 4

CONFIG_CHECKS = [
    (name,) for name in vars(ConfigTester) if name.startswith(("create_and_test_", "check_"))
]


class ModelTester:
    """Makes a tiny configuration and its inputs, under the names by which the mixins ask for them."""

    config_class: type[PreTrainedConfig]
    model_classes: tuple[type[PreTrainedModel], ...]
    translator_class: type[PreTrainedModel]
    causal_lm_class: type[PreTrainedModel] | None = None  # the tensor-parallel tests' model
    own_fields: dict[str, Any] = {}

    is_training = True
    batch_size, seq_length = 5, 7
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads, ffn_dim = 99, 32, 2, 4, 36
    bos_token_id, pad_token_id, eos_token_id, decoder_start_token_id = 0, 1, 2, 3

    def __init__(self, dropout: float):
        self.dropout = dropout

    def config_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"vocab_size": self.vocab_size, "d_model": self.hidden_size}
        for stack in ("encoder", "decoder"):
            fields[f"{stack}_layers"] = self.num_hidden_layers
            fields[f"{stack}_attention_heads"] = self.num_attention_heads
            fields[f"{stack}_ffn_dim"] = self.ffn_dim
        special = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        fields.update({name: getattr(self, name) for name in special})
        fields.update(
            dropout=self.dropout, attention_dropout=self.dropout, max_position_embeddings=80
        )
        return {**fields, **self.own_fields}

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(**self.config_fields())

    def token_ids(self) -> Tensor:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(3)
        ids[:, -1] = self.eos_token_id
        ids[-1, -2:] = torch.tensor(
            [self.eos_token_id, self.pad_token_id]
        )  # one sentence is shorter
        return ids

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        source, target = self.token_ids(), self.token_ids()
        inputs = {
            "input_ids": source,
            "attention_mask": source.ne(self.pad_token_id).long(),
            "decoder_input_ids": target,
            "decoder_attention_mask": target.ne(self.pad_token_id).long(),
        }
        return self.get_config(), inputs


class EncoderTester(ModelTester):
    """For models without a decoder."""

    own_fields = {"is_encoder_decoder": False}

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, {name: inputs[name] for name in ("input_ids", "attention_mask")}


class TesterMixin:
    """Gives every test its tester."""

    models_tester: type[ModelTester]
    model_tester: Any = None
    dropout = 0.1

    def setUp(self) -> None:
        super().setUp()
        global_rng.seed(0)
        self.model_tester = self.models_tester(self.dropout)
        self.all_model_classes = self.models_tester.model_classes


class ModelTests(TesterMixin, ModelTesterMixin, GenerationTesterMixin):
    is_encoder_decoder = True


class EncoderModelTests(TesterMixin, ModelTesterMixin):
    """For models that cannot generate."""


class ConfigTests(TesterMixin):
    """One test for each check of `ConfigTester`."""

    @parameterized.expand(CONFIG_CHECKS)
    def test(self, check: str) -> None:
        fields = self.model_tester.config_fields()
        getattr(ConfigTester(self, config_class=self.models_tester.config_class, **fields), check)()


class TrainingTests(TesterMixin, TrainingTesterMixin):
    """Some hundred steps on one batch must bring loss and gradient down, and the model must then write that batch.

    The mixin gives `generate` the first token and expects the rest. A translator is given the sentence that it was
    trained on, and must write all of it, the first token included.
    """

    dropout = 0.0
    training_overfit_steps = (
        450  # in the mixin's 300 Marian's gradient becomes small, but not by 90 %
    )

    def _create_text_training_batch(self, **sizes: int) -> dict[str, Tensor]:
        self.batch = super()._create_text_training_batch(**sizes)
        return self.batch

    def _get_trainable_model_class(self) -> type[PreTrainedModel]:
        test = self

        class Translator(self.models_tester.translator_class):
            def generate(self, prompt: Tensor, max_new_tokens: int, **kwargs: Any) -> Tensor:
                source = test.batch["input_ids"][:1]
                written = super().generate(
                    source, max_new_tokens=max_new_tokens + prompt.shape[1], **kwargs
                )
                return written[:, 1:]  # without the decoder's start

        return Translator


class MemoryTests(MemoryCleanupMixin, TesterMixin):
    """The mixin frees what a test leaves behind, and on a GPU measures it. Afterwards the model must be gone."""

    def make_model(self) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        self.model = self.models_tester.translator_class(config).to(torch_device)
        type(self).last = weakref.ref(self.model)
        return self.model, inputs

    def tearDown(self) -> None:
        last = self.last
        super().tearDown()
        gc.collect()
        assert last() is None, f"the model is still referred to by {gc.get_referrers(last())}"

    def test_forward(self) -> None:
        model, inputs = self.make_model()
        self.outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
        assert not self.outputs.logits.requires_grad

    def test_generation(self) -> None:
        model, inputs = self.make_model()
        self.written = model.generate(inputs["input_ids"], max_new_tokens=5)
        assert self.written.shape[0] == self.model_tester.batch_size

    @with_grad
    def test_training(self) -> None:
        model, inputs = self.make_model()
        self.loss = model.train()(
            input_ids=inputs["input_ids"], labels=inputs["decoder_input_ids"]
        ).loss
        self.loss.backward()
        assert model.get_output_embeddings().weight.grad is not None


class FsdpTests(TesterMixin, fsdp_mixin.FSDPTesterMixin):
    """Without dropout: the mixin compares one process that reads a whole batch with several that read a part each."""

    dropout = 0.0

    def _get_tiny_config(self) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
        """The mixin's, which changes `vocab_size` alone."""
        config_class, fields = super()._get_tiny_config()
        if fields.get("decoder_vocab_size"):
            fields["decoder_vocab_size"] = fields["vocab_size"]
        return config_class, fields

    def _run_fsdp2_distributed_test(self, name: str, test: Any, *args: Any, **kwargs: Any) -> None:
        """The mixin's, on a translator (see adapters.py), and once more if a signal ended a process.

        About once in a hundred runs the thread of gloo crashes in `malloc` on a CPU.
        """
        run = super()._run_fsdp2_distributed_test
        try:
            run(name, on_a_translator, test, *args, **kwargs)
        except ProcessExitedException as error:
            if error.signal_name is None:
                raise
            run(name, on_a_translator, test, *args, **kwargs)


class TensorParallelTests(TesterMixin, tensor_parallel_mixin.TensorParallelTesterMixin):
    """Without dropout: the mixin compares two models that draw their random numbers one after the other."""

    dropout = 0.0
