"""ONNX: the exported programs of `exported_programs.py` as graphs for onnxruntime, with one shared file of weights."""

import hashlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram

from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..untrusted import one_line
from .exported_programs import export_programs

WEIGHTS = "weights.bin"

# Smaller tensors stay in the graphs. Each tensor of the file begins at a page, so that it can be memory-mapped.
_MIN_BYTES, _PAGE = 1024, 4096


def write(model: VanillaTransformerForConditionalGeneration, folder: Path) -> None:
    """Write `encoder.onnx`, `decoder.onnx` and their weights into an existing folder.

    Inputs and outputs have the names of Hugging Face's exporters. The KV cache is `past_key_values.0.decoder.key` … as
    input, empty at the first step, and `present.0.decoder.key` … as output; the encoder returns the cross-attention
    keys and values, `present.0.encoder.key` …. A matrix that both graphs use is stored once.

    Args:
        model: any; see `export_programs`.

    Raises:
        UserError: onnx and onnxscript are not installed, or the model cannot be exported.
    """
    try:
        import onnx_ir
        import onnxscript  # noqa: F401 torch's exporter needs it
    except ImportError as error:
        raise UserError("onnx and onnxscript are needed: pip install onnx onnxscript onnxruntime") from error
    graphs = {}
    for name, exported_program in export_programs(model).items():
        _replace_cosines(exported_program)
        inputs, outputs = _names(name, model.config.decoder_layers)
        with _silent_exporter():
            try:
                converted: Any = torch.onnx.export(
                    exported_program, input_names=inputs, output_names=outputs, verbose=False
                )
            except torch.onnx.errors.OnnxExporterError as error:
                function = model.config.activation_function
                raise UserError(f"activation_function={function}: {one_line(error)}") from error
        graphs[name] = converted.model
    with (folder / WEIGHTS).open("wb") as file:
        _move_weights(list(graphs.values()), file, onnx_ir)
    for name, graph in graphs.items():
        for node in graph.graph.all_nodes():
            node.metadata_props.clear()  # source locations, most of the file
        onnx_ir.save(graph, folder / f"{name}.onnx")


def _replace_cosines(exported_program: ExportedProgram) -> None:
    """cos(x) becomes sin(x + π/2): onnxruntime 1.23 has no float64 cosine, which the angles of §3.5 need."""
    graph, aten = exported_program.graph, torch.ops.aten
    for node in list(graph.find_nodes(op="call_function", target=aten.cos.default)):
        with graph.inserting_before(node):
            shifted = graph.call_function(aten.add.Tensor, (node.args[0], math.pi / 2))
            shifted.meta = dict(node.meta)
        node.target, node.args = aten.sin.default, (shifted,)
    exported_program.graph_module.recompile()


def _names(graph: str, layers: int) -> tuple[list[str], list[str]]:
    """Input and output names of a graph."""

    def parts(prefix: str, stack: str) -> list[str]:
        return [f"{prefix}.{i}.{stack}.{part}" for i in range(layers) for part in ("key", "value")]

    if graph == "encoder":
        return ["input_ids", "attention_mask"], ["last_hidden_state", *parts("present", "encoder")]
    past = [*parts("past_key_values", "encoder"), *parts("past_key_values", "decoder")]
    return ["input_ids", "encoder_attention_mask", *past], ["logits", *parts("present", "decoder")]


def _move_weights(graphs: list[Any], file: BinaryIO, onnx_ir: Any) -> None:
    """Move the large tensors of all graphs into one file, equal ones once; the graphs keep their offsets."""
    offsets: dict[bytes, int] = {}
    for model in graphs:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor.nbytes < _MIN_BYTES:
                continue
            content = tensor.tobytes()
            digest = hashlib.sha256(content).digest()
            if digest not in offsets:
                file.seek(-(-file.tell() // _PAGE) * _PAGE)
                offsets[digest] = file.tell()
                file.write(content)
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, offsets[digest], len(content), tensor.dtype, shape=tensor.shape, name=name
            )


@contextmanager
def _silent_exporter() -> Iterator[None]:
    """Without the log messages and warnings of torch's exporter."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
