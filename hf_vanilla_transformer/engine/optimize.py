"""`optimize_for_inference`: pack a model's weights once, and decode with them.

The engine belongs to the model. `train()` drops it. It checks at every request that the packed weights match.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import logging

from ..attention_vanilla_transformer import eager_attention_forward
from ..decoding_vanilla_transformer import EncodedSource, ModuleDecoder
from ..generation_vanilla_transformer import position_limit
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..search_vanilla_transformer import Decoder
from ..utils.finite import require_finite
from . import captured, read_ahead
from .c_kernels import library
from .int8_model import Int8Decoder, Int8Weights
from .kernels import has_global_hooks, has_hooks, version
from .linear import INT8, int8_error
from .ownership import altered_part, foreign_part, is_known
from .packed_decoder import PackedDecoder
from .packed_weights import PackedWeights, fold_biases
from .read_ahead import ReadAhead, Sentences

logger = logging.get_logger(__name__)

Packed: TypeAlias = PackedWeights | Int8Weights

# For torch's hooks, which are there as long as an engine is.
_engines: dict[int, weakref.ref["InferenceEngine"]] = {}  # of all models, by their `id`
_hooks: list[RemovableHandle] = []
_engines_lock = threading.RLock()  # a collection may end an engine anywhere


def optimize_for_inference(
    model: VanillaTransformerForConditionalGeneration,
    quantization: str | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Decode faster from now on: `generate`, `Translator` and pipelines use packed weights.

    `deoptimize` and `train()` undo it. Weights that change are packed again at the next request: optimizer steps,
    in-place operations, `to`, `load_state_dict`, merged adapters, replaced weights, modules and methods are
    noticed. Call it again after a write through `.data` or a NumPy array, and after a change of a class or of a
    setting such as `eps`.

    On a CUDA GPU a decoding step is captured as a graph for each size of a batch, on the default stream only. The
    sentences that join next are encoded meanwhile. All this takes at most `captured.MAX_BYTES`, 4 GiB, for caches, the
    state of searches, intermediate results and encoded sentences that wait.

    Args:
        model: in evaluation mode, whole on one device, without adapters or hooks. It is returned.
        quantization: None computes in the model's dtype, "int8" all products in dynamic int8 (x86 CPUs). Without the
            C functions it is half as fast, and the encoder computes in the model's dtype.

    Raises:
        ValueError: for a setting that is not available here. The model then translates as before. Also, then and at
            later requests, for weights that are not finite.
    """
    reason = not_optimizable(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    if quantization not in (None, INT8):
        raise ValueError(
            f"quantization: {quantization!r} is not {INT8!r}; None computes in the model's dtype"
        )
    error = int8_error(model.device, model.dtype) if quantization else None
    if error is not None:
        raise ValueError(error)
    model.inference_engine = InferenceEngine(quantization)
    model.inference_engine.weights(model)
    return model


def optimize_if_possible(model: PreTrainedModel) -> None:
    """`optimize_for_inference`, unless the model is optimized, or cannot be."""
    is_optimized = getattr(model, "inference_engine", None) is not None
    if not is_optimized and not_optimizable(model) is None:
        optimize_for_inference(model)


def deoptimize(
    model: VanillaTransformerForConditionalGeneration,
) -> VanillaTransformerForConditionalGeneration:
    """Decode through the modules again, and free the packed weights. Return the model."""
    model.inference_engine = None
    return model


def not_optimizable(model: nn.Module) -> str | None:
    """Why packed weights would not give the outputs of the model, with a remedy, or None."""
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        return f"{type(model).__name__} is not a VanillaTransformerForConditionalGeneration; merge or unwrap it first"
    if model.config._attn_implementation != "sdpa":
        return f"attn_implementation={model.config._attn_implementation!r}; call model.set_attn_implementation('sdpa')"
    if has_global_hooks():
        return "global forward hooks would not run; remove them"
    for name, module in model.named_modules():
        if not is_known(type(module)):
            full_name = f"{type(module).__module__}.{type(module).__qualname__}"
            remedy = "merge adapters, and load without quantization"
            bases = type(module).__mro__
            if any(base.__module__.endswith("_vanilla_transformer") for base in bases):
                remedy = "subclasses are decoded through their modules"
            return f"{name or 'it'} is a {full_name}; {remedy}"
        if module.training:
            return f"{name or 'it'} is in training mode; call model.eval()"
        if has_hooks(module) or "forward" in vars(module):
            hooked = (
                f"{name or 'it'} has hooks, as offloaded, sharded and mixed-precision models have"
            )
            return f"{hooked}; remove them, or save it and load it on one device"
        for weight in module.parameters(recurse=False):
            if type(weight) is not nn.Parameter or weight.is_meta:
                return f"{name} has sharded, quantized or offloaded weights; load the model whole on one device"
    if changed := foreign_part(cast(Any, model.model)) or altered_part(model):
        return f"it has {changed}, which packed weights would pass by"
    return None


class InferenceEngine:
    """Packed weights of one model for each dtype that it computes in.

    Checks at every request that the packed weights match the model, and repacks if not.
    """

    def __init__(self, quantization: str | None):
        self.quantization = quantization
        self.lock = threading.Lock()
        # Of encoder (True) and decoder (False), when they were packed.
        self.states: dict[bool, list[Any]] = {}
        # Modules and weights of these states, so that no other gets their id or address.
        self.held: list[object] = []
        self.packed: dict[torch.dtype, Packed] = {}
        _watch(self)

    def weights(self, model: PreTrainedModel, for_encoder: bool = False) -> Packed | None:
        """Packed weights for the current model and compute dtype, or None if it cannot be packed."""
        device = model.device.type
        dtype = model.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        state = _state(model, for_encoder)
        with self.lock:
            if state != self.states.get(for_encoder):
                reason = not_optimizable(model)
                if reason is not None:
                    logger.warning_once(
                        f"optimize_for_inference: decoding through the modules, since {reason}"
                    )
                    return None
                # int8 would make ordinary translations of them.
                require_finite(model.named_parameters(), "model", "load it again")
                self.packed = {}
                self.states = {part: _state(model, part) for part in (False, True)}
                self.held = [weight.detach() for weight in model.parameters()]
                # Not the model, which would keep itself alive.
                self.held += [module for module in model.modules() if module is not model]
            if dtype not in self.packed:
                with torch.no_grad():
                    self.packed[dtype] = self._pack(model, dtype)
            return self.packed[dtype]

    def _pack(self, model: PreTrainedModel, dtype: torch.dtype) -> Packed:
        if self._is_fused:
            return Int8Weights(model)
        weights = PackedWeights(model, dtype, self.quantization)
        recorder = captured.recorder_of(model.device)
        if weights.lm_head.fuses:
            fold_biases(weights)
        if recorder is not None:
            weights.steps = captured.CapturedSteps(recorder)
        return weights

    @property
    def _is_fused(self) -> bool:
        """True if this package's int8 kernels run."""
        return self.quantization == INT8 and library() is not None

    def encode(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> EncodedSource:
        """Encode the source (B, S) with modules or packed weights."""
        found = None
        # Learned positions end. The modules then say so.
        fits = ids.shape[1] < position_limit(model.config) and mask.shape == ids.shape
        if model.device.type == "cpu" and fits and bool(mask.any()):
            weights = self.weights(model, for_encoder=True)
            found = None if weights is None else weights.encode(ids, mask)
        if found is None:
            found = model.get_encoder()(ids, mask)
        return EncodedSource(found.last_hidden_state, mask, ids)

    def read_ahead(
        self,
        model: PreTrainedModel,
        read: Callable[[int], Sentences | None],
        rows: int,
    ) -> ReadAhead | None:
        """Return a reader that encodes sentences by `read` while a GPU decodes others. None on a CPU."""
        stream = read_ahead.side_stream_of(model.device)
        return None if stream is None else ReadAhead(read, rows, stream)

    def decoder(self, model: PreTrainedModel, source: EncodedSource, beams: int) -> Decoder:
        """A decoder of encoded sentences."""
        weights = self.weights(model)
        if weights is None:
            return ModuleDecoder(model, source)
        if isinstance(weights, Int8Weights):
            return Int8Decoder(weights, source)
        if weights.steps is not None:
            return captured.CapturedDecoder(weights, source, weights.steps, beams)
        return PackedDecoder(weights, source)


def _state(model: PreTrainedModel, of_encoder: bool) -> list[Any]:
    """Everything that torch reports about changes of the encoder, or of the decoder. Every request pays for it."""
    stack: Any = model.get_encoder() if of_encoder else model.get_decoder()
    modules = [model, model.model, *stack.modules()]
    weights = list(stack.parameters())
    if not of_encoder:
        modules += model.lm_head.modules()
        weights += model.lm_head.parameters()
    backend = model.config._attn_implementation
    return [
        backend,
        id(ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)),
        has_global_hooks(),
        # A method that is replaced is one attribute more.
        [
            (id(module), type(module), module.training, len(vars(module)), has_hooks(module))
            for module in modules
        ],
        [(id(weight), version(weight)) for weight in weights],
        [weight.data_ptr() if type(weight) is nn.Parameter else None for weight in weights],
    ]


def _count_fused_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count a step in the versions of the weights. Fused optimizers are the only ones that do not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version(group["params"])


def _forget_packed(parent: nn.Module, *_: object) -> None:
    """Notice a new child of a module, also if the old one returns: PEFT merges adapters so, and writes to `.data`."""
    with _engines_lock:
        references = list(_engines.values())
    for reference in references:
        engine = reference()
        if engine is not None and any(parent is module for module in engine.held):
            engine.states = {}


def _watch(engine: InferenceEngine) -> None:
    """Let torch's hooks tell this engine about changes. They are registered with the first engine."""
    with _engines_lock:
        _engines[id(engine)] = weakref.ref(engine)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count_fused_step))
            _hooks.append(register_module_module_registration_hook(_forget_packed))
    weakref.finalize(engine, _unwatch, id(engine)).atexit = False


def _unwatch(engine_id: int) -> None:
    """Forget an engine, and remove torch's hooks with the last.

    A thread that runs the hook then goes on: an iteration over an `OrderedDict` does not miss the entry it has passed.
    """
    with _engines_lock:
        del _engines[engine_id]
        if not _engines:
            for hook in _hooks:
                hook.remove()
            _hooks.clear()
