"""`torch.export`: parts of the model as exported programs. The ONNX graphs are made from them.

Shapes: B batch, S source length, T target tokens of the call, P target tokens in the KV cache, D d_model, H decoder
heads, d_k and d_v the widths of a head, V target vocabulary. B, S, T and P are dynamic; P may be 0.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from ..utils.untrusted import one_line

BATCH, SOURCE, TARGET, PAST = (Dim(name) for name in ("batch", "source", "target", "past"))


class Projections(nn.Module):
    """The cross-attention keys and values of each decoder layer, computed once for a source."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        layers: Any = model.model.decoder.layers
        self.attentions = nn.ModuleList(layer.cross_attn for layer in layers)

    def forward(self, encoder_hidden_states: Tensor) -> list[Tensor]:
        """(B, S, D) to keys (B, H, S, d_k) and values (B, H, S, d_v) of each layer."""
        parts = []
        for attention in self.attentions:
            parts += attention.keys_and_values(encoder_hidden_states)  # type: ignore[operator]
        return parts


def decode(
    decoder: Any,
    input_ids: Tensor,
    states: Tensor,
    mask: Tensor,
    source: list[Tensor],
    past: list[Tensor],
    **settings: Any,
) -> tuple[Any, list[Tensor]]:
    """Run the decoder with the KV caches of `export_pair`, and return its output and the new `past`.

    The layers read the source from the cache. They use only the size of `states`.
    """
    own = _cache(past)
    cache = EncoderDecoderCache(own, _cache(source))
    cache.is_updated = dict.fromkeys(range(len(own.layers)), True)
    output = decoder(
        input_ids, None, states, mask, past_key_values=cache, use_cache=True, **settings
    )
    return output, [part for layer in own.layers for part in (layer.keys, layer.values)]


def _cache(parts: list[Tensor]) -> DynamicCache:
    return DynamicCache(list(zip(parts[::2], parts[1::2], strict=True)))


def export_pair(
    config: VanillaTransformerConfig, encoder: nn.Module, decoder: nn.Module
) -> tuple[ExportedProgram, ExportedProgram]:
    """Trace an encoder and a decoder, or raise a UserError if that fails.

    The cross-attention keys and values have one row for all rows of a batch.

    Args:
        config: the model's.
        encoder: a function of ids (B, S) and their mask.
        decoder: a function of ids (B, T), the source's mask (B, S), the keys and values of `Projections`, and for each
            layer keys (B, H, P, d_k) and values (B, H, P, d_v) of the tokens before, P = 0 at first.
    """
    # Only the shapes matter. All sizes differ: B = 3, S = 4, T = 2, P = 5.
    heads = config.decoder_attention_heads
    width = config.d_model // heads
    widths = [config.head_dim or width, config.value_head_dim or width] * config.decoder_layers
    # No two inputs are one tensor, which torch.export would take for one input.
    tokens = torch.ones(3, 4, dtype=torch.long)
    mask = torch.ones_like(tokens)
    target = torch.ones(3, 2, dtype=torch.long)
    source = [torch.zeros(1, heads, 4, each) for each in widths]
    past = [torch.zeros(3, heads, 5, each) for each in widths]
    shape = {0: BATCH, 1: SOURCE}
    caches = [{2: SOURCE}] * len(source), [{0: BATCH, 2: PAST}] * len(past)
    exported = export_module(encoder, (tokens, mask), (shape, shape))
    inputs = target, mask, source, past
    return exported, export_module(decoder, inputs, ({0: BATCH, 1: TARGET}, shape, *caches))


def export_module(module: nn.Module, arguments: tuple, dynamic_shapes: tuple) -> ExportedProgram:
    """Trace a module with `torch.export`, or raise a UserError if that fails."""
    try:
        with torch.no_grad():
            program = torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch.export raises whatever the traced code raises
        name = type(module).__name__.lstrip("_").lower()
        raise UserError(f"torch.export cannot trace the {name}: {one_line(error)}") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths on this machine
    return program


def refuse(model: nn.Module) -> None:
    """Raise a UserError for adapters."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and type(module) is not nn.Linear:
            raise UserError(
                f"{name} is no plain linear layer; merge the adapter into the model (merge_and_unload)"
            )
