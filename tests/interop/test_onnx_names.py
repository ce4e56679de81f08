"""Names of ONNX graphs, which transformers.js and optimum read, without an export."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.interop.exported_programs import export_module
from hf_vanilla_transformer.interop.onnx import (
    _name_axes,
    _replace_cosines,
    cache_names,
    without_log_messages,
)


def test_caches_are_named_by_stack_layer_and_part():
    assert cache_names("present", 2, "decoder", "encoder") == [
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.1.decoder.key",
        "present.1.decoder.value",
        "present.0.encoder.key",
        "present.0.encoder.value",
        "present.1.encoder.key",
        "present.1.encoder.value",
    ]


class Value:
    """A value of a graph with the exporter's names of axes."""

    def __init__(self, name, *shape, is_output=True):
        self.name = name
        self.shape = shape
        self.is_graph_output = lambda: is_output


SOURCE = "encoder_sequence_length"
TARGET = "decoder_sequence_length"
PAST = f"past_{TARGET}"
INSIDE = Value("inside", "s0", is_output=False)


def named(inputs, outputs):
    """Name -> shape, after the axes are named."""
    node = SimpleNamespace(outputs=[*outputs, INSIDE])
    _name_axes(SimpleNamespace(inputs=inputs, outputs=outputs, all_nodes=lambda: [node]))
    assert INSIDE.shape is None
    return {value.name: value.shape for value in (*inputs, *outputs)}


def test_axes_of_the_encoder():
    inputs = [Value("input_ids", "s0", "s1"), Value("attention_mask", "s0", "s1")]
    outputs = [
        Value("last_hidden_state", "s0", "s1", 8),
        Value("encoder_scores.1", "s0", 2, "s1", "s1"),
    ]
    outputs += [Value("encoder_norms", "s0", 3, "s1"), Value("encoder_positions", "s1", 8)]
    assert named(inputs, outputs) == {
        "input_ids": ("batch_size", SOURCE),
        "attention_mask": ("batch_size", SOURCE),
        "last_hidden_state": ("batch_size", SOURCE, 8),
        "encoder_scores.1": ("batch_size", 2, SOURCE, SOURCE),
        "encoder_norms": ("batch_size", 3, SOURCE),
        "encoder_positions": (SOURCE, 8),
    }


def test_axes_of_the_decoder():
    inputs = [Value("input_ids", "s0", "s1"), Value("encoder_attention_mask", "s0", "s2")]
    inputs += [Value("encoder_hidden_states", "s0", "s2", 8)]
    inputs += [
        Value(f"past_key_values.1.{stack}.key", "s0", 2, "s3", 4)
        for stack in ("encoder", "decoder")
    ]
    outputs = [Value("logits", "s0", "s1", 9)]
    outputs += [
        Value(f"present.0.{stack}.value", "s0", 2, "s4", 4) for stack in ("encoder", "decoder")
    ]
    outputs += [
        Value("cross_scores.0", "s0", 2, "s1", "s2"),
        Value("decoder_scores.0", "s0", 2, "s1", "s4"),
    ]
    outputs += [Value("decoder_norms", "s0", 3, "s1"), Value("decoder_positions", "s1", 8)]
    assert named(inputs, outputs) == {
        "input_ids": ("batch_size", TARGET),
        "encoder_attention_mask": ("batch_size", SOURCE),
        "encoder_hidden_states": ("batch_size", SOURCE, 8),
        "past_key_values.1.encoder.key": ("batch_size", 2, SOURCE, 4),
        "past_key_values.1.decoder.key": ("batch_size", 2, PAST, 4),
        "logits": ("batch_size", TARGET, 9),
        "present.0.encoder.value": ("batch_size", 2, SOURCE, 4),
        "present.0.decoder.value": ("batch_size", 2, f"{PAST} + {TARGET}", 4),
        "cross_scores.0": ("batch_size", 2, TARGET, SOURCE),
        "decoder_scores.0": ("batch_size", 2, TARGET, f"{PAST} + {TARGET}"),
        "decoder_norms": ("batch_size", 3, TARGET),
        "decoder_positions": (TARGET, 8),
    }


def test_value_of_another_rank_is_an_error():
    with pytest.raises(ValueError):
        named([Value("input_ids", "s0", "s1", "s2")], [])


class Cosines(nn.Module):
    """Two cosines, in the precision of the angles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x) + torch.cos(2 * x)


def test_cosines_are_sines_of_shifted_angles():
    angles = torch.linspace(-7, 7, 50, dtype=torch.float64)
    program = export_module(Cosines(), (angles,), ({},))
    _replace_cosines(program)
    assert not any("cos" in str(node.target) for node in program.graph.nodes)
    expected = [math.cos(x) + math.cos(2 * x) for x in angles.tolist()]
    torch.testing.assert_close(
        program.module()(angles), torch.tensor(expected, dtype=torch.float64)
    )


def test_log_messages_are_suppressed_for_a_while(caplog):
    logger = logging.getLogger("onnxruntime")
    logging.disable(logging.DEBUG)
    with pytest.raises(KeyError), without_log_messages():
        logger.warning("suppressed")
        logger.error("an error")
        raise KeyError
    assert logging.root.manager.disable == logging.DEBUG
    logging.disable(logging.NOTSET)
    assert [record.message for record in caplog.records] == ["an error"]
