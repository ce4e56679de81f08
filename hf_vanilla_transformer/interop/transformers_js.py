"""transformers.js and optimum: a folder in the layout of optimum's export of `MarianMTModel`, which both can load.

The graphs contain all differences from Marian, such as the positions.

Shapes: B batch, S source length, T target tokens of the call, P target tokens in the KV cache, D d_model, H decoder
heads, d_k and d_v the widths of a head, V target vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE
from ..inference.inside_view import INSIDE, copy_with_scores, norms_and_positions
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError
from . import exported_programs as programs
from .converted import Fields
from .joint_tokenizer import SourceIds, joint_tokenizer
from .onnx import AXES, cache_names, require_onnx, to_onnx, without_log_messages
from .search_settings import APPLIED, ONNX, check_search, longest
from .state_dicts import STACKS
from .transformers_folders import SAME_FIELDS

#: dtypes by their names in transformers.js, and the ends of their files' names.
DTYPES = {"fp32": "", "q8": "_quantized", "fp16": "_fp16"}
GRAPHS = ("encoder_model", "decoder_model_merged")
_LARGEST = 2**31  # bytes of a file of ONNX
_END = 1e4  # above every logit, and finite in float16


def write(
    model: VanillaTransformerForConditionalGeneration,
    source: str | Path,
    folder: Path,
    dtypes: Sequence[str] = ("fp32", "q8"),
) -> dict[str, int]:
    """Write config.json, generation_config.json, the tokenizer and `onnx/` into a new folder.

    Args:
        model: in float32. It is not changed.
        source: the model's folder, with its tokenizers.
        folder: is created.
        dtypes: keys of `DTYPES`, the default of the folder first. "q8" is onnxruntime's dynamic quantisation of matrix
            products and embeddings to int8, one scale for each output feature.

    Returns:
        The bytes of the graphs of each dtype.
    """
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown or not dtypes:
        raise UserError(f"dtype: {' '.join(unknown) or 'none'}: choose from {', '.join(DTYPES)}")
    programs.refuse(model)
    check_search(model, ONNX)
    size = sum(weight.numel() * 4 for weight in model.parameters())
    if size >= _LARGEST:
        raise UserError(f"the model has {size / 1e9:.1f} GB: a file of ONNX holds at most 2 GB")
    tokenizer, tokenizer_config, ids = joint_tokenizer(*load_tokenizers(source), model.config)
    graphs = make_graphs(model, ids)
    (folder / "onnx").mkdir(parents=True)
    for name, content in {
        "config.json": _config(model, ids, dtypes[0]),
        "generation_config.json": generation_settings(model),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        text = json.dumps(
            content, indent=None if name == "tokenizer.json" else 2, ensure_ascii=False
        )
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return {dtype: _save(graphs, folder / "onnx", dtype) for dtype in dtypes}


# Graphs


class _Encoder(nn.Module):
    """The encoder, for ids of the joint tokenizer."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration, ids: SourceIds):
        super().__init__()
        self.encoder = model.model.encoder
        self.ids = ids

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        """(B, S) and their mask, to (B, S, D) and the view of the inside."""
        output = self.encoder(self.ids.to_model(input_ids), attention_mask, **INSIDE)
        view = norms_and_positions(self.encoder, output.hidden_states)
        return output.last_hidden_state, list(output.attentions), *view


class _Decoder(nn.Module):
    """The decoder and the output layer, with the view of the inside as further outputs.

    §6.1 bounds a translation by the length of its source. transformers.js and optimum have no such setting, and the
    pipelines of transformers.js ignore `max_new_tokens` of the model, so the graph ends the translation.
    """

    end: Tensor

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head
        settings = model.generation_config.to_diff_dict()
        self.over = settings.get("max_length_over_source", MAX_LENGTH_OVER_SOURCE)
        self.limit = longest(settings)
        if self.limit is not None and settings.get("forced_eos_token_id") is not None:
            self.limit -= 1
        end = torch.zeros(model.config.target_vocab_size)
        end[model.generation_config.eos_token_id] = _END  # added to the logits (V) after the bound
        self.register_buffer("end", end, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        encoder_attention_mask: Tensor,
        source: list[Tensor],
        past: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
        """Return the scores (B, H, T, S) and (B, H, T, P + T) of each layer too, and what the encoder returns."""
        states = encoder_attention_mask[..., None].float()  # (B, S, 1)
        output, present = programs.decode(
            self.decoder, input_ids, states, encoder_attention_mask, source, past, **INSIDE
        )
        logits = self.lm_head(output.last_hidden_state)
        # (T), with the token that is predicted.
        length = past[0].shape[2] + 1 + torch.arange(input_ids.shape[1])
        limit = (
            encoder_attention_mask.sum(dim=-1, keepdim=True) + self.over
            if self.limit is None
            else self.limit
        )
        late = length > limit  # (B, T) or (T)
        view = norms_and_positions(self.decoder, output.hidden_states, past[0].shape[2])
        scores = list(output.cross_attentions), list(output.attentions)
        return logits + late[..., None].float() * self.end, present, *scores, *view


def make_graphs(model: VanillaTransformerForConditionalGeneration, ids: SourceIds) -> Fields:
    """The graphs of `GRAPHS` by name, as `onnx_ir.Model`s in float32.

    Args:
        model: is not changed.
        ids: the ids of the source, from `joint_tokenizer`.
    """
    onnx_ir = require_onnx()
    function = model.config.activation_function
    layers = model.config.decoder_layers
    model = copy_with_scores(model)
    # one source for all rows, so that the graph broadcasts it: a beam search need not repeat it for each beam
    encoder, decoder = programs.export_pair(model.config, _Encoder(model, ids), _Decoder(model))
    states = torch.zeros(3, 4, model.config.d_model)
    shape = {0: programs.BATCH, 1: programs.SOURCE}
    projections = programs.export_module(programs.Projections(model), (states,), (shape,))
    inputs = ["input_ids", "encoder_attention_mask"]
    inputs += cache_names("past_key_values", layers, *STACKS)
    outputs = ["logits", *cache_names("present", layers, "decoder")]
    outputs += [f"cross_scores.{i}" for i in range(layers)] + _inside_names("decoder", layers)
    merged = to_onnx(decoder, inputs, outputs, function)
    outputs = cache_names("present", layers, "encoder")
    projected = to_onnx(projections, ["encoder_hidden_states"], outputs, function)
    _merge(merged.graph, projected.graph, onnx_ir)
    outputs = ["last_hidden_state", *_inside_names("encoder", model.config.encoder_layers)]
    encode = to_onnx(encoder, ["input_ids", "attention_mask"], outputs, function)
    return dict(zip(GRAPHS, (encode, merged), strict=True))


def _inside_names(stack: str, layers: int) -> list[str]:
    return [*(f"{stack}_scores.{i}" for i in range(layers)), f"{stack}_norms", f"{stack}_positions"]


def _merge(decoder: Any, projections: Any, onnx_ir: Any) -> None:
    """Add the projections of the encoder's output to the decoder, for the first step. Later steps use the cache.

    `use_cache_branch` chooses, as in the graphs that optimum merges: If(use_cache_branch, cached, projected).
    """
    (states,) = projections.inputs
    projections.inputs.clear()
    inner = [*projections.initializers.values()]
    inner += [value for node in projections for value in node.outputs]
    for value in inner:
        value.name = f"projected.{value.name}"
    use_cache = onnx_ir.Value(
        name="use_cache_branch",
        type=onnx_ir.TensorType(onnx_ir.DataType.BOOL),
        shape=onnx_ir.Shape([1]),
    )
    copies = []
    outputs = []
    for value in decoder.inputs:
        if not value.name.endswith((".encoder.key", ".encoder.value")):
            continue
        name = value.name.replace("past_key_values", "present")
        output = onnx_ir.Value(name=name, type=value.type, shape=value.shape)
        onnx_ir.convenience.replace_all_uses_with(value, output)
        copy = onnx_ir.node("Identity", [value])
        copy.outputs[0].name = f"cached.{value.name}"
        copy.outputs[0].type = value.type
        copy.outputs[0].shape = value.shape
        # optimum's name: the source's length, or 0 at the first step
        length = f"{AXES['encoder_hidden_states'][1]}_out"
        value.shape = onnx_ir.Shape([*value.shape[:2], length, value.shape[3]])
        copies.append(copy)
        outputs.append(output)
    cached = onnx_ir.Graph([], [copy.outputs[0] for copy in copies], nodes=copies, name="cached")
    branches = [
        onnx_ir.AttrGraph("then_branch", cached),
        onnx_ir.AttrGraph("else_branch", projections),
    ]
    choice = onnx_ir.Node("", "If", [use_cache], branches, outputs=outputs)
    decoder.insert_before(decoder[0], choice)
    decoder.inputs.extend([states, use_cache])
    decoder.outputs.extend(outputs)
    # optimum fills them by their order: of each layer the decoder's key and value, then the encoder's
    for values in (decoder.inputs, decoder.outputs):
        ordered = sorted(values, key=_rank)
        values.clear()
        values.extend(ordered)


def _rank(value: Any) -> tuple[int, int, str]:
    """The sort key of an input or output: the caches by layer, before `use_cache_branch` and the weights."""
    kind, *rest = value.name.split(".")
    if kind in ("past_key_values", "present"):
        layer, *part = rest
        return 1, int(layer), ".".join(part)
    is_first = kind in ("input_ids", "encoder_attention_mask", "encoder_hidden_states", "logits")
    return 0 if is_first else 2, 0, value.name


# Files


def _save(graphs: Fields, folder: Path, dtype: str) -> int:
    """Write both graphs in a dtype and return their bytes."""
    import onnx_ir
    from onnxscript import optimizer

    size = 0
    for name, graph in graphs.items():
        path = folder / f"{name}{DTYPES[dtype]}.onnx"
        if dtype == "fp32":
            onnx_ir.save(graph, path)
        else:
            # The quantiser expects plain weights. The float32 files store a tied embedding once, and onnxruntime
            # transposes it at loading time.
            folded = graph.clone()
            optimizer.fold_constants(
                folded,
                output_size_limit=_LARGEST,
                should_fold=lambda node: node.op_type == "Transpose",
            )
            {"q8": _quantise, "fp16": _halve}[dtype](onnx_ir.to_proto(folded), path)
        size += path.stat().st_size
    return size


def _quantise(proto: object, path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with without_log_messages():
        # Advice to optimise the graph first. onnxruntime does it at loading time.
        quantize_dynamic(
            proto,
            str(path),
            op_types_to_quantize=["MatMul", "Gather"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
        )


def _halve(proto: object, path: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(proto, keep_io_types=True), path)


# Configurations


def _config(
    model: VanillaTransformerForConditionalGeneration, ids: SourceIds, dtype: str
) -> Fields:
    """The configuration of a Marian model with these sizes. The libraries derive the names of the caches from it."""
    config = model.config
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "forced_eos_token_id": None,
        "transformers.js_config": {"dtype": dtype},
        **{name: getattr(config, name) for name in (*SAME_FIELDS, "tie_word_embeddings")},
        "pad_token_id": config.target_pad_token_id,
        "eos_token_id": config.target_eos_token_id,
        "vocab_size": ids.vocab_size,
        "decoder_vocab_size": config.target_vocab_size,
        "share_encoder_decoder_embeddings": ids.vocab_size == config.target_vocab_size,
    }


def generation_settings(model: VanillaTransformerForConditionalGeneration) -> Fields:
    """Greedy: transformers.js has no beam search, and would ignore all but the first of several beams."""
    config = model.config
    settings = model.generation_config.to_diff_dict()
    limit = config.max_position_embeddings if config.position_encoding_type == "learned" else 512
    start = settings.get("decoder_start_token_id", config.decoder_start_token_id)
    required = {
        "num_beams": 1,
        "max_length": settings.get("max_length") or limit,
        "decoder_start_token_id": start,
    }
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        required[name] = getattr(model.generation_config, name)
    kept = {name: settings.get(name) for name in (*APPLIED, "max_new_tokens")}
    return required | {name: value for name, value in kept.items() if value is not None}
