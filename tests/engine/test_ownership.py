"""Which classes the engine and the fast paths know, so that what they bypass is the package's own."""

from collections.abc import Callable

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from hf_vanilla_transformer.engine.ownership import is_known, is_own
from hf_vanilla_transformer.layers_vanilla_transformer import VanillaTransformerEncoderLayer


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (VanillaTransformerEncoderLayer.__module__, True),
        ("hf_vanilla_transformer.own_layers", False),
        ("hf_vanilla_transformer.engine.layers_vanilla_transformer", False),
        # packages before and after this one in the alphabet
        ("acme.layers_vanilla_transformer", False),
        ("zoo.layers_vanilla_transformer", False),
        # the code of a checkpoint
        ("layers_vanilla_transformer", False),
        ("transformers_modules.folder.layers_vanilla_transformer", False),
    ],
)
def test_only_classes_of_the_bundle_are_known(module: str, known: bool) -> None:
    assert is_known(type("Layer", (nn.Module,), {"__module__": module})) is known


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (nn.Linear, True),
        (nn.Embedding, True),
        (nn.LayerNorm, True),
        (nn.ReLU, True),
        (nn.MultiheadAttention, False),
        (nn.TransformerEncoderLayer, False),
        (nn.GRU, False),
        (type("Own", (nn.Linear,), {}), False),
    ],
)
def test_classes_of_torch_are_known_that_compute_each_place_alone(kind: type, known: bool) -> None:
    assert is_known(kind) is known


def of_caller() -> None:
    pass


@pytest.mark.parametrize(
    "decorate",
    [lambda function: function, torch.no_grad(), convert_outputs_to_fp32],
    ids=["plain", "torch", "accelerate"],
)
def test_function_is_own_if_what_it_decorates_is(decorate: Callable) -> None:
    autocast = torch.autocast("cpu")
    for function, own in ((of_caller, False), (nn.Linear.forward, True)):
        assert is_own(decorate(function)) is own
        assert is_own(decorate(autocast(function))) is own
