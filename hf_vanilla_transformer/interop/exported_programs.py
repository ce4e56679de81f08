"""`torch.export`: the model as two programs that need nothing but torch, and from which the ONNX graphs are made.

Shapes: B batch, S source length, T target words read at once, P target words read before, D d_model, H heads of the
decoder, d_k and d_v the widths of a head, V target vocabulary. B, S, T and P are free in every call; P may be 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

#: The two programs, in the order in which they are run.
NAMES = ("encoder", "decoder")


class ExportableEncoder(nn.Module):
    """The encoder, and what each decoder layer reads of the source: keys and values, computed once a sentence."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        layers: Any = model.model.decoder.layers
        self.encoder = model.model.encoder
        self.cross_attentions = nn.ModuleList(layer.cross_attn for layer in layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Read sources (B, S) with their mask (B, S), 1 for words and 0 for padding.

        Returns:
            The encoder's output (B, S, D); then for each layer of the decoder keys (B, H, S, d_k) and values
            (B, H, S, d_v).
        """
        states = self.encoder(input_ids, attention_mask).last_hidden_state
        attentions: Any = self.cross_attentions
        return states, [part for attention in attentions for part in attention._project(states)]


class ExportableDecoder(nn.Module):
    """The decoder and the output layer, from what was read before to what is read after T words more."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, source: list[Tensor], past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Read the next words.

        Args:
            input_ids: (B, T).
            encoder_attention_mask: (B, S), of the source.
            source: what `ExportableEncoder` gives for the layers.
            past: for each layer keys (B, H, P, d_k) and values (B, H, P, d_v) of the words before, P = 0 at first.

        Returns:
            Logits (B, T, V); then `past` with the T words added.
        """
        read, written = (DynamicCache(list(zip(parts[::2], parts[1::2], strict=True))) for parts in (source, past))
        cache = EncoderDecoderCache(written, read)
        cache.is_updated = dict.fromkeys(range(len(written.layers)), True)
        # The layers have the source in the cache; of these states only the length is asked.
        states = source[0].transpose(1, 2).flatten(2)  # (B, H, S, d_k) -> (B, S, H * d_k)
        output = self.decoder(
            input_ids, None, states, encoder_attention_mask, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return self.lm_head(output), [part for layer in written.layers for part in (layer.keys, layer.values)]


def export_programs(model: VanillaTransformerForConditionalGeneration) -> dict[str, ExportedProgram]:
    """The model as `torch.export` programs: `encoder` and `decoder`, with the forwards of the two classes above.

    Args:
        model: stays as it is; the programs share its weights.

    Returns:
        The programs by their `NAMES`. In them attention is Eq. 1 written out, which every other program understands.

    Raises:
        UserError: a model with something that `torch.export` cannot follow, such as quantised weights or adapters.
    """
    refuse(model)
    config = model.config
    heads = config.decoder_attention_heads
    widths = config.head_dim or config.d_model // heads, config.value_head_dim or config.d_model // heads
    device, dtype = model.device, model.dtype
    # Only the shapes of these examples are looked at, and no two are alike: B = 3, S = 4, T = 2, P = 5.
    ids, words = (torch.ones(3, length, dtype=torch.long, device=device) for length in (4, 2))
    source, past = (
        [torch.zeros(3, heads, length, width, device=device, dtype=dtype) for width in widths * config.decoder_layers]
        for length in (4, 5)
    )
    batch, s, t, p = Dim("batch"), Dim("source"), Dim("words"), Dim("past")
    shapes = {0: batch, 1: t}, {0: batch, 1: s}, [{0: batch, 2: s}] * len(source), [{0: batch, 2: p}] * len(past)
    with _plainly(model), torch.no_grad():
        return {
            "encoder": _export(ExportableEncoder(model), (ids, torch.ones_like(ids)), ({0: batch, 1: s},) * 2),
            "decoder": _export(ExportableDecoder(model), (words, torch.ones_like(ids), source, past), shapes),
        }


def _export(module: nn.Module, arguments: tuple, dynamic_shapes: tuple) -> ExportedProgram:
    try:
        program = torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch.export raises whatever the code that it follows raises
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"torch.export cannot follow the {type(module).__name__[10:].lower()}: {reason}") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


@contextmanager
def _plainly(model: VanillaTransformerForConditionalGeneration) -> Iterator[None]:
    """No dropout, and attention in steps that have no kernel of their own."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.train(training)
        model.config._attn_implementation = attention


def refuse(model: nn.Module) -> None:
    """Raise a UserError for layers that are not those of the architecture."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            "quantization_config: quantised weights cannot be exported; export the model they were made of"
        )
    foreign = [
        name for name, module in model.named_modules() if name.endswith("_proj") and type(module) is not nn.Linear
    ]
    if foreign:
        raise UserError(f"{foreign[0]} is no plain linear layer; merge the adapter into the model (merge_and_unload)")


def write(model: VanillaTransformerForConditionalGeneration, folder: Path) -> None:
    """Write `encoder.pt2` and `decoder.pt2` (`torch.export.save`) into a folder that is there.

    Args:
        model: any; the programs are in float32.
    """
    for name, program in export_programs(model.float()).items():
        torch.export.save(program, folder / f"{name}.pt2")
