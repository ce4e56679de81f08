"""ONNX: the exported programs of `exported_programs.py` as graphs for onnxruntime."""

import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram

from ..utils.errors import UserError, naming_extras
from ..utils.untrusted import one_line


def require_onnx() -> Any:
    """Return the library onnx_ir, or raise a UserError if it or onnxscript is not installed."""
    with naming_extras():
        import onnx_ir
        import onnxscript  # noqa: F401 torch's exporter needs it
    return onnx_ir


def to_onnx(
    exported_program: ExportedProgram, inputs: list[str], outputs: list[str], function: str
) -> Any:
    """An exported program as an `onnx_ir.Model`, with named inputs, outputs and dynamic axes (see `_name_axes`).

    Args:
        exported_program: is modified.
        function: the model's activation function, for the error if ONNX has no such operator.
    """
    _replace_cosines(exported_program)
    with without_log_messages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            names = {"input_names": inputs, "output_names": outputs}
            converted: Any = torch.onnx.export(exported_program, **names, verbose=False)  # type: ignore[arg-type]
        except torch.onnx.errors.OnnxExporterError as error:
            raise UserError(f"activation_function={function}: {one_line(error)}") from error
    for node in converted.model.graph.all_nodes():
        node.metadata_props.clear()  # source locations, most of the file
    _name_axes(converted.model.graph)
    return converted.model


# Dynamic axes by the start of a value's name. transformers.js reads these names of optimum.
_BATCH = "batch_size"
_SOURCE = "encoder_sequence_length"
_TARGET = "decoder_sequence_length"
_PAST = "past_decoder_sequence_length"
AXES = {
    "input_ids": (_BATCH, _TARGET),
    "attention_mask": (_BATCH, _SOURCE),
    "encoder_attention_mask": (_BATCH, _SOURCE),
    "last_hidden_state": (_BATCH, _SOURCE, None),
    "encoder_hidden_states": (_BATCH, _SOURCE, None),
    "encoder_cache": (_BATCH, None, _SOURCE, None),
    "decoder_past": (_BATCH, None, _PAST, None),
    "decoder_present": (_BATCH, None, f"{_PAST} + {_TARGET}", None),
    "logits": (_BATCH, _TARGET, None),
    "cross_scores": (_BATCH, None, _TARGET, _SOURCE),
    "decoder_scores": (_BATCH, None, _TARGET, f"{_PAST} + {_TARGET}"),
    "decoder_norms": (_BATCH, None, _TARGET),
    "decoder_positions": (_TARGET, None),
    "encoder_scores": (_BATCH, None, _SOURCE, _SOURCE),
    "encoder_norms": (_BATCH, None, _SOURCE),
    "encoder_positions": (_SOURCE, None),
}


def _name_axes(graph: Any) -> None:
    """Replace the exporter's `s0`, `s1` … in the shapes of inputs and outputs. None in `AXES` keeps a static size."""
    encoder = any(value.name == "attention_mask" for value in graph.inputs)
    for value in (*graph.inputs, *graph.outputs):
        kind, *rest = value.name.split(".")
        if kind in ("past_key_values", "present"):
            kind = "encoder_cache" if "encoder" in rest else f"decoder_{kind.split('_')[0]}"
        names = (_BATCH, _SOURCE) if encoder and kind == "input_ids" else AXES[kind]
        value.shape = type(value.shape)(
            name or size for name, size in zip(names, value.shape, strict=True)
        )
    for node in graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None  # its names are the exporter's, and the shape can be inferred


def _replace_cosines(exported_program: ExportedProgram) -> None:
    """Replace cos(x) by sin(x + π/2): the angles of §3.5 are float64, and onnxruntime 1.23 has no such cosine."""
    graph = exported_program.graph
    aten = torch.ops.aten
    for node in list(graph.find_nodes(op="call_function", target=aten.cos.default)):
        with graph.inserting_before(node):
            shifted = graph.call_function(aten.add.Tensor, (node.args[0], math.pi / 2))
            shifted.meta = dict(node.meta)
        node.target = aten.sin.default
        node.args = (shifted,)
    exported_program.graph_module.recompile()


def cache_names(prefix: str, layers: int, *stacks: str) -> list[str]:
    """The names of keys and values, of source ("encoder") and target ("decoder"), of all layers."""
    parts = itertools.product(stacks, range(layers), ("key", "value"))
    return [f"{prefix}.{layer}.{stack}.{part}" for stack, layer, part in parts]


@contextmanager
def without_log_messages() -> Iterator[None]:
    """Suppress the log messages of exporters and quantisers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
