"""The modules that become ONNX graphs, called as they are: our logits, attention, ends and names.

Shapes: B batch, S source length, T target length, P tokens in the cache, V target vocabulary.
"""

import json
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.inference.inside_view import copy_with_scores
from hf_vanilla_transformer.interop import exported_programs as programs
from hf_vanilla_transformer.interop import transformers_js
from hf_vanilla_transformer.interop.joint_tokenizer import SourceIds
from hf_vanilla_transformer.interop.transformers_js import _Decoder, _Encoder, _merge, make_graphs
from tests.interop.exports import require_onnx, write_model
from tests.model_helpers import (
    EOS,
    PAD,
    assert_near,
    error_of,
    padded,
    sentences,
    tiny_config,
    tiny_model,
)

LENGTHS = [5, 3]  # of the sources


def outputs_in_steps(model, steps=(2, 2, 3), offset=0):
    """The model's own output, and the outputs of the parts, so many tokens in each step with the KV cache."""
    ids = padded(sentences(LENGTHS))
    target = padded(sentences([7, 7], seed=1))
    mask = ids.ne(PAD).long()
    model.set_attn_implementation("eager")
    expected = model(
        input_ids=ids,
        attention_mask=mask,
        decoder_input_ids=target,
        output_attentions=True,
    )
    copied = copy_with_scores(model)
    states, *_ = _Encoder(copied, SourceIds(40 + offset, offset))(ids + offset, mask)
    source = programs.Projections(copied)(states)
    past = [part[:, :, :0] for part in source]
    decoder = _Decoder(copied)
    found = []
    for tokens in target.split(list(steps), dim=1):
        logits, past, *scores, _, _ = decoder(tokens, mask, source, past)
        found.append((logits, scores))
    return expected, mask, found


@torch.no_grad()
@pytest.mark.parametrize("offset", [0, 9])
@pytest.mark.parametrize(
    "fields",
    [{}, {"head_dim": 3, "value_head_dim": 5, "layer_norm_position": "pre"}],
    ids=["paper", "widths"],
)
def test_parts_give_our_logits_and_attention(fields, offset):
    expected, mask, found = outputs_in_steps(tiny_model(**fields), offset=offset)
    assert_near(torch.cat([logits for logits, _ in found], dim=1), expected.logits)
    hidden = ~mask.bool()[:, None, None]  # (B, 1, 1, S)
    first = slice(0, 2)
    second = slice(2, 4)
    last = slice(4, 7)
    for rows, (_, (cross, own)) in zip((first, second, last), found, strict=True):
        future = torch.ones(7, 7, dtype=torch.bool).triu(1)[rows, : rows.stop]
        for layer in range(2):
            weights = cross[layer].masked_fill(hidden, -torch.inf).softmax(dim=-1)
            assert_near(weights, expected.cross_attentions[layer][:, :, rows])
            weights = own[layer].masked_fill(future, -torch.inf).softmax(dim=-1)
            assert_near(weights, expected.decoder_attentions[layer][:, :, rows, : rows.stop])


@torch.no_grad()
@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"max_length_over_source": 2}, [7, 5]),
        ({"max_length_over_source": 0}, [5, 3]),
        ({"max_new_tokens": 4}, [4, 4]),
        ({"max_length": 5}, [4, 4]),  # with the start token
        ({"max_new_tokens": 4, "forced_eos_token_id": EOS}, [3, 3]),
    ],
)
def test_translation_ends_after_the_most_tokens(settings, longest):
    model = tiny_model()
    model.generation_config.update(**settings)
    expected, _, found = outputs_in_steps(model)
    logits = torch.cat([logits for logits, _ in found], dim=1)
    added = torch.zeros_like(logits)
    for row, most in enumerate(longest):
        added[row, most:, EOS] = 1e4
    torch.testing.assert_close(logits, expected.logits + added, atol=1e-3, rtol=1e-5)


def test_traced_inputs_differ_in_each_dynamic_size(monkeypatch):
    """torch.export would take equal sizes for one, and one tensor for one input."""
    traced = []
    monkeypatch.setattr(
        programs, "export_module", lambda *arguments: traced.append(arguments) or len(traced)
    )
    config = tiny_config(head_dim=3, value_head_dim=5)
    assert programs.export_pair(config, "encoder", "decoder") == (1, 2)
    (encoder, encoder_inputs, encoder_shapes), (decoder, inputs, shapes) = traced
    assert (encoder, decoder) == ("encoder", "decoder")
    target, mask, source, past = inputs
    assert [list(part.shape) for part in source] == [[1, 4, 4, width] for width in (3, 5, 3, 5)]
    assert [list(part.shape) for part in past] == [[3, 4, 5, width] for width in (3, 5, 3, 5)]
    sizes = {}
    tensors = [*encoder_inputs, target, mask, *source, *past]
    for tensor, axes in zip(
        tensors, [*encoder_shapes, *shapes[:2], *chain(*shapes[2:])], strict=True
    ):
        for axis, name in axes.items():
            sizes.setdefault(name.__name__, set()).add(tensor.shape[axis])
    assert sizes == {"batch": {3}, "source": {4}, "target": {2}, "past": {5}}
    assert {tensor.dtype for tensor in (*encoder_inputs, target)} == {torch.int64}
    distinct = {id(tensor) for tensor in (target, mask, *source, *past)}
    assert len(distinct) == 2 + 4 + 4
    assert encoder_inputs[0] is not encoder_inputs[1]


def test_traced_widths_are_d_model_by_heads_unless_given(monkeypatch):
    traced = []
    monkeypatch.setattr(programs, "export_module", lambda *arguments: traced.append(arguments))
    programs.export_pair(tiny_config(decoder_layers=1), None, None)
    *_, past = traced[1][1]
    assert [part.shape[3] for part in past] == [8, 8]


def test_traced_module_is_in_evaluation_and_names_no_files():
    module = nn.Linear(2, 3)
    program = programs.export_module(module, (torch.ones(1, 2),), ({},))
    assert not module.training
    assert not any("stack_trace" in node.meta for node in program.graph.nodes)


@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
def test_layer_of_another_class_is_refused_by_its_name(name):
    model = tiny_model()
    programs.refuse(model)
    setattr(model.model.decoder.layers[1].cross_attn, name, nn.Sequential(nn.Linear(32, 32)))
    message = error_of(programs.refuse, model)
    assert message.startswith(f"model.decoder.layers.1.cross_attn.{name} is no plain linear layer")


CACHES = [f"{layer}.{{}}.{part}" for layer in (0, 1) for part in ("key", "value")]


def test_graphs_have_the_names_of_optimum(monkeypatch):
    require_onnx()
    converted = []
    projected = []

    def to_onnx(program, inputs, outputs, function):
        converted.append((program, inputs, outputs, function))
        return SimpleNamespace(graph=program)

    monkeypatch.setattr(transformers_js, "to_onnx", to_onnx)
    monkeypatch.setattr(transformers_js, "_merge", lambda *graphs: projected.append(graphs[:2]))
    monkeypatch.setattr(programs, "export_pair", lambda *_: ("encoder", "decoder"))

    def export_module(module, arguments, shapes):
        assert isinstance(module, programs.Projections)
        (states,) = arguments
        ((batch, source),) = (tuple(shape.items()) for shape in shapes)
        assert (batch, source) == ((0, programs.BATCH), (1, programs.SOURCE))
        assert len(set(states.shape)) == 3
        return "projections"

    monkeypatch.setattr(programs, "export_module", export_module)
    graphs = make_graphs(tiny_model(encoder_layers=3, activation_function="gelu"), SourceIds(40))
    assert {name: graph.graph for name, graph in graphs.items()} == {
        "encoder_model": "encoder",
        "decoder_model_merged": "decoder",
    }
    assert projected == [("decoder", "projections")]
    encoder_caches, decoder_caches = (
        [cache.format(stack) for cache in CACHES] for stack in ("encoder", "decoder")
    )
    assert sorted(converted) == [
        (
            "decoder",
            [
                "input_ids",
                "encoder_attention_mask",
                *(f"past_key_values.{cache}" for cache in encoder_caches + decoder_caches),
            ],
            [
                "logits",
                *(f"present.{cache}" for cache in decoder_caches),
                *("cross_scores.0", "cross_scores.1", "decoder_scores.0", "decoder_scores.1"),
                *("decoder_norms", "decoder_positions"),
            ],
            "gelu",
        ),
        (
            "encoder",
            ["input_ids", "attention_mask"],
            [
                "last_hidden_state",
                *("encoder_scores.0", "encoder_scores.1", "encoder_scores.2"),
                *("encoder_norms", "encoder_positions"),
            ],
            "gelu",
        ),
        (
            "projections",
            ["encoder_hidden_states"],
            [f"present.{cache}" for cache in encoder_caches],
            "gelu",
        ),
    ]


# Two graphs that are joined, small enough to be written by hand


def small_graphs(ir):
    """The decoder y = past + 1, and the projection present = 2 · states, each of shape (1, 1, S, 2)."""

    def value(name, *sizes):
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(sizes))

    def graph(kind, given, constant, outputs):
        number = ir.tensor([constant], dtype=ir.DataType.FLOAT, name="number")
        weight = ir.Value(name="number", type=given.type, shape=ir.Shape([1]), const_value=number)
        node = ir.Node("", kind, [given, weight], outputs=[outputs])
        inputs = [given]
        return ir.Graph(
            inputs,
            [outputs],
            nodes=[node],
            initializers=[weight],
            opset_imports={"": 18},
            name=kind,
        )

    past = value("past_key_values.0.encoder.key", "batch_size", 1, "encoder_sequence_length", 2)
    decoder = graph("Add", past, 1.0, value("logits", "batch_size", 1, "n", 2))
    states = value("encoder_hidden_states", "batch_size", 1, "encoder_sequence_length", 2)
    present = value("present.0.encoder.key", "batch_size", 1, "encoder_sequence_length", 2)
    return decoder, graph("Mul", states, 2.0, present)


def test_first_step_projects_the_source_and_others_read_the_cache(tmp_path):
    require_onnx()
    import numpy as np
    import onnx_ir as ir
    import onnxruntime

    decoder, projections = small_graphs(ir)
    _merge(decoder, projections, ir)
    assert [value.name for value in decoder.inputs] == [
        "encoder_hidden_states",
        "past_key_values.0.encoder.key",
        "use_cache_branch",
    ]
    assert [value.name for value in decoder.outputs] == ["logits", "present.0.encoder.key"]
    # optimum's name of the length, which is 0 at the first step
    assert [str(size) for size in decoder.inputs[1].shape] == [
        "batch_size",
        "1",
        "encoder_sequence_length_out",
        "2",
    ]
    assert list(decoder.inputs[2].shape) == [1]
    ir.save(ir.Model(decoder, ir_version=9), tmp_path / "merged.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "merged.onnx"))
    states = np.float32([[[[1, 2], [3, 4], [5, 6]]]])
    for past, use_cache, present in (
        (np.zeros((1, 1, 0, 2), np.float32), False, 2 * states),
        (states + 10, True, states + 10),
    ):
        feeds = {
            "encoder_hidden_states": states,
            "past_key_values.0.encoder.key": past,
            "use_cache_branch": np.array([use_cache]),
        }
        logits, cached = session.run(["logits", "present.0.encoder.key"], feeds)
        np.testing.assert_array_equal(cached, present)
        np.testing.assert_array_equal(logits, present + 1)


def test_graphs_are_saved_in_each_dtype(tmp_path):
    require_onnx()
    import onnx
    import onnx_ir as ir

    numbers = ir.tensor(torch.randn(64, 64).numpy(), name="weight")
    weight = ir.Value(
        name="weight",
        type=ir.TensorType(numbers.dtype),
        shape=ir.Shape([64, 64]),
        const_value=numbers,
    )
    given, output = (
        ir.Value(name=name, type=ir.TensorType(numbers.dtype), shape=ir.Shape([2, 64]))
        for name in ("x", "y")
    )
    turned = ir.Node("", "Transpose", [weight], [ir.AttrInt64s("perm", [1, 0])])
    product = ir.Node("", "MatMul", [given, turned.outputs[0]], outputs=[output])
    graph = ir.Graph(
        [given],
        [output],
        nodes=[turned, product],
        initializers=[weight],
        opset_imports={"": 18},
        name="product",
    )
    graphs = {"encoder_model": ir.Model(graph, ir_version=9)}
    sizes = {
        dtype: transformers_js._save(graphs, tmp_path, dtype) for dtype in transformers_js.DTYPES
    }
    files = {"fp32": "encoder_model", "q8": "encoder_model_quantized", "fp16": "encoder_model_fp16"}
    kinds = {
        "fp32": onnx.TensorProto.FLOAT,
        "q8": onnx.TensorProto.INT8,
        "fp16": onnx.TensorProto.FLOAT16,
    }
    for dtype, file in files.items():
        path = tmp_path / f"{file}.onnx"
        assert sizes[dtype] == path.stat().st_size
        stored = onnx.load(path).graph
        of_matrix = {each.data_type for each in stored.initializer if list(each.dims) == [64, 64]}
        assert of_matrix == {kinds[dtype]}
        has_transpose = any(node.op_type == "Transpose" for node in stored.node)
        assert has_transpose is (dtype == "fp32")  # the quantiser expects plain weights
    scales = [
        each for each in onnx.load(tmp_path / "encoder_model_quantized.onnx").graph.initializer
    ]
    assert [64] in [
        list(each.dims) for each in scales if each.data_type == onnx.TensorProto.FLOAT
    ]  # per channel
    assert {value.type.tensor_type.elem_type for value in onnx.load(path).graph.input} == {
        onnx.TensorProto.FLOAT
    }


def test_folder_has_the_files_of_the_library(tmp_path, monkeypatch):
    saved = []

    def save(graphs, folder, dtype):
        assert folder.is_dir()
        saved.append((graphs, folder, dtype))
        return len(saved)

    monkeypatch.setattr(
        transformers_js, "make_graphs", lambda model, ids: ("graphs", ids.vocab_size)
    )
    monkeypatch.setattr(transformers_js, "_save", save)
    model = write_model(tmp_path / "model")
    out = tmp_path / "new" / "out"
    assert transformers_js.write(model, tmp_path / "model", out) == {"fp32": 1, "q8": 2}
    assert saved == [(("graphs", 320), out / "onnx", dtype) for dtype in ("fp32", "q8")]
    content = {
        path.name: path.read_text(encoding="utf-8") for path in out.iterdir() if path.is_file()
    }
    assert content.keys() == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name, text in content.items():
        assert text.endswith("}\n")
        assert text.isascii() is (name != "tokenizer.json")  # its bytes are letters
        assert (text.count("\n") == 1) is (name == "tokenizer.json")
        assert text.startswith("{" if name == "tokenizer.json" else '{\n  "')
    assert json.loads(content["config.json"])["transformers.js_config"] == {"dtype": "fp32"}
    assert json.loads(content["generation_config.json"])["num_beams"] == 1
