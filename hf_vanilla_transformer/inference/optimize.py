"""`optimize_for_inference`: pack a model's weights once, and decode with them.

The engine belongs to the model, which drops it in `train()`, and checks at every request what it has packed.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..generation_vanilla_transformer import ModuleDecoder
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..search_vanilla_transformer import Decoder
from .compiled import CompiledDecoder, CompiledWeights, compile_error
from .linear import INT8, int8_error
from .packed_decoder import PackedDecoder, PackedWeights

logger = logging.get_logger(__name__)

_PACKAGE, _, _ = __name__.partition(".")


def optimize_for_inference(
    model: VanillaTransformerForConditionalGeneration, quantization: str | None = None, compile: bool = False
) -> VanillaTransformerForConditionalGeneration:
    """Decode faster from now on: `generate`, `Translator` and pipelines use packed weights.

    `deoptimize` and `train()` undo it; weights that change are packed again when they are needed.

    Args:
        model: in evaluation mode, whole on one device, without adapters or hooks; it comes back.
        quantization: None computes in the model's dtype, "int8" the decoder's matrices in dynamic int8 (x86 CPUs).
        compile: compile encoder and decoder for requests of one sentence on a CPU. Needs a C++ compiler; the first
            sentence takes a minute or two, most of which torch caches on disk.

    Raises:
        ValueError: what cannot be had here, in one line; the model then translates as before.
    """
    reason = not_optimizable(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    if quantization not in (None, INT8):
        raise ValueError(f"quantization: {quantization!r} is not {INT8!r}; None computes in the model's own dtype")
    errors = [int8_error(model.device, model.dtype)] if quantization else []
    errors += [compile_error(model.device)] if compile else []
    for error in filter(None, errors):
        raise ValueError(error)
    model.inference_engine = InferenceEngine(quantization, compile)
    model.inference_engine.weights(model, compile)
    return model


def optimize_if_possible(model: PreTrainedModel) -> None:
    """`optimize_for_inference`, unless the model is optimized, or cannot be."""
    if not_optimizable(model) is None and model.inference_engine is None:
        optimize_for_inference(model)


def deoptimize(model: VanillaTransformerForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    """Decode through the modules again, and give the memory of packed weights back; the model comes back."""
    model.inference_engine = None
    return model


def not_optimizable(model: nn.Module) -> str | None:
    """Why packed weights would not compute what the model does, and what to do; None where they would."""
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        return f"{type(model).__name__} is not a VanillaTransformerForConditionalGeneration; merge or unwrap it first"
    if model.config._attn_implementation != "sdpa":
        return f"attn_implementation={model.config._attn_implementation!r}; call model.set_attn_implementation('sdpa')"
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "global forward hooks would not run; remove them"
    for name, module in model.named_modules():
        if module.training:
            return f"{name or 'it'} is in training mode; call model.eval()"
        if not _is_known(type(module)):
            full_name = f"{type(module).__module__}.{type(module).__qualname__}"
            return f"{name or 'it'} is a {full_name}; merge adapters, and load without quantization"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            hooked = f"{name or 'it'} has hooks, as offloaded and sharded models have"
            return f"{hooked}; remove them, or load it on one device"
        weights = [weight for weight in module._parameters.values() if weight is not None]
        if any(type(weight) is not nn.Parameter or weight.is_meta for weight in weights):
            return f"{name} has sharded, quantized or offloaded weights; load the model whole on one device"
    return None


def _is_known(module_class: type) -> bool:
    """Whether it is a module of torch, of transformers' activations, or of this package."""
    home = module_class.__module__
    if home.startswith(("torch.nn.modules.", "transformers.activations")):
        return True
    package, _, name = home.rpartition(".")
    return name.endswith("_vanilla_transformer") and (
        package == _PACKAGE or package.startswith("transformers_modules")
    )


class WeightSnapshot:
    """Notices writes to tensors without reading them.

    Copy-on-write copies share their memory: whatever torch writes to, also through `.data` or by a fused optimizer,
    which count no version, gets another address. What others may write to past torch is compared number by number.
    """

    def __init__(self, tensors: list[Tensor]):
        self.tensors, self.copies = tensors, [self._copy(tensor) for tensor in tensors]

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        try:
            copy = torch._lazy_clone(tensor.detach())
        except RuntimeError:  # memory that is not torch's own, as of a mapped file
            if not _is_shared(tensor):
                tensor.data = tensor.detach().clone()
                return torch._lazy_clone(tensor.detach())
        return tensor.detach().clone() if _has_other_writers(tensor) else copy

    def matches(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensors with the same numbers."""
        if len(tensors) != len(self.tensors):
            return False
        for index, (tensor, known, copy) in enumerate(zip(tensors, self.tensors, self.copies, strict=True)):
            if tensor is not known or tensor.dtype != copy.dtype or tensor.device != copy.device:
                return False
            if _address(tensor) != _address(copy):
                if tensor.shape != copy.shape or not tensor.equal(copy):
                    return False
                if not _has_other_writers(tensor):
                    self.copies[index] = self._copy(tensor)  # written with what it held, or only read by address
        return True


def _is_shared(tensor: Tensor) -> bool:
    """Whether other processes have this memory; on a GPU torch says so of all."""
    return tensor.device.type == "cpu" and tensor.is_shared()


def _has_other_writers(tensor: Tensor) -> bool:
    """Whether other processes have this memory, or a NumPy array of this one: torch then never moves it."""
    return _is_shared(tensor) or not tensor.untyped_storage().resizable()


def _address(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return torch._C._data_address(tensor), tensor.stride()  # type: ignore[attr-defined]


class InferenceEngine:
    """Packed weights of one model, by the dtype that it computes in, and whether they are compiled.

    At every request it looks whether the model is still what was packed, and packs it again where it is not.
    """

    def __init__(self, quantization: str | None, compile: bool):
        self.quantization, self.compile = quantization, compile
        self.lock = threading.Lock()
        self.signature: list[Any] | None = None
        self.snapshot = WeightSnapshot([])
        self.packed: dict[tuple[torch.dtype, bool], PackedWeights | CompiledWeights] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled model is not optimized

    def weights(self, model: PreTrainedModel, compiled: bool) -> PackedWeights | CompiledWeights | None:
        """Those of the model as it is now, in the dtype that it computes in; None where its modules do more."""
        device = model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.lm_head.weight.dtype
        signature, tensors = _signature(model)
        with self.lock:
            if signature != self.signature or not self.snapshot.matches(tensors):
                reason = not_optimizable(model)
                if reason is not None:
                    logger.warning_once(f"optimize_for_inference: decoding through the modules, since {reason}")
                    return None
                self.packed, self.signature, self.snapshot = {}, signature, WeightSnapshot(tensors)
            if (dtype, compiled) not in self.packed:
                make = CompiledWeights if compiled else PackedWeights
                with torch.no_grad():
                    self.packed[dtype, compiled] = make(model, dtype, self.quantization)
            return self.packed[dtype, compiled]

    def encode(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> BaseModelOutput:
        """The source (B, S) as states (B, S, D): by the model's encoder, or the compiled one for one sentence."""
        weights = self.weights(model, True) if self.compile and len(ids) == 1 else None
        encoder: Any = model.get_encoder()
        return encoder(ids, mask) if weights is None else weights.encode(ids, mask)  # type: ignore[operator]

    def decoder(self, model: PreTrainedModel, states: Tensor, mask: Tensor, beams: int, rows: int) -> Decoder:
        """A decoder of encoded sentences (B, S, D), for a search of so many rows."""
        weights = self.weights(model, compiled=self.compile and rows == 1 and bool(mask.any()))
        if weights is None:
            return ModuleDecoder(model, states, mask)
        if isinstance(weights, CompiledWeights):
            return CompiledDecoder(weights, states, mask, beams)
        return PackedDecoder(weights, states, mask)


def _signature(model: PreTrainedModel) -> tuple[list[Any], list[Tensor]]:
    """All but weights that decides what the modules compute: if it is as it was, `not_optimizable` is None still. And
    the weights, in one walk, which every request pays for."""
    torch_modules = nn.modules.module
    global_hooks = len(torch_modules._global_forward_hooks), len(torch_modules._global_forward_pre_hooks)
    found: list[Any] = [model.config._attn_implementation, global_hooks]
    weights: list[Tensor] = []
    for module in model.modules():
        fields = vars(module)
        weights += [weight for weight in module._parameters.values() if weight is not None]
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in fields
        numbers = map(fields.get, ("scaling", "eps", "embed_scale", "head_dim", "value_head_dim", "pre_norm"))
        owner = None if module is model else module  # a reference to the model would keep it alive until a collection
        found += (owner, type(module), module.training, *hooks, *numbers)
    return found, weights
