"""ONNX: the two programs of `exported_programs.py` as graphs for onnxruntime, with one file of weights for both."""

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
from .exported_programs import export_programs

WEIGHTS = "weights.bin"

# Smaller ones stay in the graphs; what is in the file begins at a page, so that it can be mapped into memory.
_LEAST_IN_FILE, _PAGE = 1024, 4096


def write(model: VanillaTransformerForConditionalGeneration, folder: Path) -> None:
    """Write `encoder.onnx`, `decoder.onnx` and their weights into a folder that is there.

    The names of inputs and outputs are those that Hugging Face's exporters use: `input_ids`, `attention_mask` and
    `encoder_attention_mask`, `last_hidden_state`, `logits`; `past_key_values.0.decoder.key` … go in and
    `present.0.decoder.key` … come out, in the past of no words too. The keys and values of the source,
    `present.0.encoder.key` …, come from the encoder. A matrix that is used twice is in the file once.

    Args:
        model: any; see `export_programs`.

    Raises:
        UserError: onnx and onnxscript are not installed, or the model has what cannot be exported.
    """
    try:
        import onnx_ir
        import onnxscript  # noqa: F401 torch's exporter needs it
    except ImportError as error:
        raise UserError("onnx and onnxscript are needed: pip install onnx onnxscript onnxruntime") from error
    graphs = {}
    for name, program in export_programs(model).items():
        _without_cosines(program)
        inputs, outputs = _names(name, model.config.decoder_layers)
        with _quietly():
            try:
                made: Any = torch.onnx.export(program, input_names=inputs, output_names=outputs, verbose=False)
            except torch.onnx.errors.OnnxExporterError as error:
                reason = " ".join(str(error).split())[:300]
                raise UserError(f"activation_function={model.config.activation_function}: {reason}") from error
        graphs[name] = made.model
    with (folder / WEIGHTS).open("wb") as file:
        _move_weights(list(graphs.values()), file, onnx_ir)
    for name, graph in graphs.items():
        for node in graph.graph.all_nodes():
            node.metadata_props.clear()  # where in the source each came from: most of the file
        onnx_ir.save(graph, folder / f"{name}.onnx")


def _without_cosines(program: ExportedProgram) -> None:
    """cos(x) becomes sin(x + π/2): onnxruntime 1.23 has no cosine of float64, in which the angles of §3.5 are."""
    graph, aten = program.graph, torch.ops.aten
    for node in list(graph.find_nodes(op="call_function", target=aten.cos.default)):
        with graph.inserting_before(node):
            shifted = graph.call_function(aten.add.Tensor, (node.args[0], math.pi / 2))
            shifted.meta = dict(node.meta)
        node.target, node.args = aten.sin.default, (shifted,)
    program.graph_module.recompile()


def _names(program: str, layers: int) -> tuple[list[str], list[str]]:
    """What goes into a graph, and what comes out."""

    def parts(prefix: str, stack: str) -> list[str]:
        return [f"{prefix}.{i}.{stack}.{part}" for i in range(layers) for part in ("key", "value")]

    if program == "encoder":
        return ["input_ids", "attention_mask"], ["last_hidden_state", *parts("present", "encoder")]
    past = [*parts("past_key_values", "encoder"), *parts("past_key_values", "decoder")]
    return ["input_ids", "encoder_attention_mask", *past], ["logits", *parts("present", "decoder")]


def _move_weights(graphs: list[Any], file: BinaryIO, onnx_ir: Any) -> None:
    """Put the matrices of all graphs into one file, the same numbers once, and leave their places in the graphs."""
    places: dict[bytes, int] = {}
    for model in graphs:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor.nbytes < _LEAST_IN_FILE:
                continue
            numbers = tensor.tobytes()
            digest = hashlib.sha256(numbers).digest()
            if digest not in places:
                file.seek(-(-file.tell() // _PAGE) * _PAGE)
                places[digest] = file.tell()
                file.write(numbers)
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, places[digest], len(numbers), tensor.dtype, shape=tensor.shape, name=name
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch's exporter says of itself on the way."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
