"""Compiled modules, for requests of one sentence on a CPU.

At batch size 1 half of a decoding step is operator dispatch. Inductor fuses a whole step, the search's part included,
with the weights as constants. This takes about a minute, and torch caches most of it on disk.

Modules are exported (`torch.export`) before Inductor compiles the graph: then no guards run at a call, and the code
belongs to its `CompiledModule` and is freed with it, where `torch.compile` keeps it with a function's code object.

Shapes: K beams, C slots of the KV cache, S source length, T capacity of a hypothesis, N positions, D d_model.
"""

import copy
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from ..arguments_vanilla_transformer import check_ids
from ..generation_vanilla_transformer import (
    BeamCacheSlots,
    EncodedSource,
    additive_mask,
    beam_numbers,
    take_slots,
)
from ..search_vanilla_transformer import BeamState, Decoder, SearchConfig, resized
from .kernels import compile_graph, has_compiler
from .packed_weights import CrossKV, PackedWeights, PositionEncodings

#: Products are Inductor's templates: to choose them by measuring goes wrong on a busy machine, and oneDNN's are no
#: better for so few rows.
OPTIONS: dict[str, object] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "size_asserts": False,
    "alignment_asserts": False,
}

#: Sizes of the example that is traced, for each dimension that varies. All differ, or the compiler would unify two.
EXAMPLE_SIZES = {"T": 64, "T1": 65, "C": 48, "S": 23, "N": 128}

Dynamic = tuple[int, str] | None  # which dimension of a tensor varies between calls, and its name


class CompiledModule:
    """A module that is compiled at its first call, and again for a different number of threads, dtype or fixed size.

    `make` makes the module for a compilation. Nobody else writes to its weights. `function` takes it and a list of
    tensors, and computes without gradients. `dynamic` belongs to the tensors.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        function: Callable[[Any, list[Tensor]], Any],
        dynamic: list[Dynamic],
    ):
        self.make = make
        self.function = function
        self.dynamic = dynamic
        self.compiled: dict[Any, Any] = {}
        self.lock = threading.Lock()

    def __call__(self, tensors: list[Tensor]) -> Any:
        return self.code(tensors)(tensors)

    def code(self, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """The compiled code for tensors of these dtypes and fixed sizes."""
        fixed = (
            (tensor.dtype, _sizes(tensor, dynamic))
            for tensor, dynamic in zip(tensors, self.dynamic, strict=True)
        )
        key = torch.get_num_threads(), *fixed
        if key not in self.compiled:
            with self.lock:
                if key not in self.compiled:
                    self.compiled[key] = self._compile(tensors)
        return self.compiled[key]

    def module(self) -> nn.Module:
        return _Call(self.make(), self.function)

    def _compile(self, tensors: list[Tensor]) -> Any:
        dims = {name: Dim(name, min=2) for name in EXAMPLE_SIZES}
        example = [
            torch.zeros(_sizes(*pair, EXAMPLE_SIZES), dtype=pair[0].dtype)
            for pair in zip(tensors, self.dynamic, strict=True)
        ]
        shapes = [
            None if dynamic is None else {dynamic[0]: dims[dynamic[1]]} for dynamic in self.dynamic
        ]
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")
            graph = torch.export.export(
                self.module(), (example,), dynamic_shapes=(shapes,), strict=False
            ).module()
            symbolic = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            compiled = compile_graph(graph, [symbolic], OPTIONS)
            # The compiled code keeps the graph alive, but has constants in the place of its weights.
            for part in graph.modules():
                weights = part.named_parameters(recurse=False, remove_duplicate=False)
                buffers = part.named_buffers(recurse=False, remove_duplicate=False)
                for name, _ in [*weights, *buffers]:
                    delattr(part, name)
            return compiled


def _sizes(
    tensor: Tensor,
    dynamic: Dynamic,
    sizes: dict[str, int] | None = None,
) -> tuple[int, ...]:
    """The shape, with a size of the example, or 0, in the dynamic dimension."""
    shape = list(tensor.shape)
    if dynamic is not None:
        shape[dynamic[0]] = sizes[dynamic[1]] if sizes else 0
    return tuple(shape)


class _Call(nn.Module):
    def __init__(self, module: nn.Module, function: Callable[[object, list[Tensor]], object]):
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, tensors: list[Tensor]) -> Any:
        return self.function(self.module, tensors)


def _encode(encoder: nn.Module, tensors: list[Tensor]) -> Tensor:
    """Unscaled embeddings (1, S, D) to states (1, S, D)."""
    (embeds,) = tensors
    visible = torch.ones(embeds.shape[:2], dtype=torch.long)
    return encoder(inputs_embeds=embeds, attention_mask=visible).last_hidden_state


def _step(
    config: SearchConfig | None,
) -> Callable[[PackedWeights, list[Tensor]], tuple[Tensor, ...]]:
    """A decoding step, up to the logits or, with a `SearchConfig`, to the next state. See `PackedWeights.forward`."""

    def step(weights: PackedWeights, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        layers = len(weights.layers)
        embeds, visible, encodings, penalties = tensors[:4]
        self_kv = tensors[4 : 4 + layers]
        cross_kv = tensors[4 + layers : 4 + 2 * layers]
        state = BeamState(*tensors[4 + 2 * layers :])
        numbers = beam_numbers(state.parents)
        visible, slots = take_slots(visible, state.parents, numbers)  # (1, K, C), (1, K)
        mask = additive_mask(visible, torch.float32)[:, None]  # (1, 1, K, C)
        logits = weights(
            embeds=embeds,
            lengths=state.lengths,
            encodings=encodings,
            rows=slots.flatten(),
            self_kv=self_kv,
            mask=mask,
            cross_kv=cross_kv,
            source_mask=None,
        )
        if config is None:
            return visible, logits
        return visible, *config.advance(state, logits, penalties)

    return step


class CompiledWeights:
    """Encoder and decoder of a model, compiled for one sentence. See `PackedWeights` for the arguments.

    Embeddings are looked up outside: compiled code contains copies of its weights, and theirs are the largest matrix.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        quantization: str | None,
    ):
        self.owner = weakref.ref(model)  # which would stay alive until a collection
        self.settings = dtype, quantization
        self.cross_kv = CrossKV(model, *self.settings)
        self.position_encodings = PositionEncodings(model.get_decoder())
        self.encoder = CompiledModule(self._encoder, _encode, [(1, "S")])
        self.steps: dict[SearchConfig | None, CompiledModule] = {}

    @property
    def model(self) -> Any:
        return self.owner()

    def _encoder(self) -> nn.Module:
        encoder = self.model.get_encoder()
        return copy.deepcopy(encoder, {id(encoder.embed_tokens): None})

    def _decoder(self) -> PackedWeights:
        return PackedWeights(self.model, *self.settings, compiled=True)

    def encode(self, ids: Tensor, mask: Tensor) -> BaseModelOutput:
        """The source (1, S) as states (1, S, D)."""
        visible = mask.ne(0)
        if visible.sum() < 2:  # the compiler specialises on size 1
            return self.model.get_encoder()(ids, mask)
        check_ids(ids, self.model.config.vocab_size, "input_ids")
        states = self.encoder([self.model.get_encoder().embed_tokens(ids[visible][None])])
        if states.shape[1] < ids.shape[1]:
            states = states.new_zeros(*ids.shape, states.shape[2]).masked_scatter(
                visible[..., None], states
            )
        return BaseModelOutput(last_hidden_state=states)

    def step(self, config: SearchConfig | None) -> CompiledModule:
        """The compiled `_step`."""
        if config not in self.steps:
            layers = len(self.cross_kv.projections)
            varying = {"tokens": (2, "T"), "ended_tokens": (2, "T")}
            kv: list[Dynamic] = [*[(1, "C")] * layers, *[(1, "S")] * layers]
            dynamic = [
                None,
                (2, "C"),
                (0, "N"),
                (0, "T1"),
                *kv,
                *map(varying.get, BeamState._fields),
            ]
            self.steps[config] = CompiledModule(self._decoder, _step(config), dynamic)
        return self.steps[config]


class CompiledDecoder(Decoder):
    """A `Decoder` of one sentence, compiled together with the search for K `beams`."""

    def __init__(
        self,
        weights: CompiledWeights,
        source: EncodedSource,
        beams: int,
    ):
        states = source.states[source.mask.ne(0)][None]
        if states.shape[1] == 1:
            # A token that is there twice is attended to as if it were there once.
            states = states.repeat(1, 2, 1)
        self.weights = weights
        self.initial_beams = beams
        self.cross_kv = weights.cross_kv(states)
        self.slots = BeamCacheSlots(1, states.device, beams)
        self.self_kv = [kv[:, :0] for kv in self.cross_kv]
        self.embed_tokens = weights.model.get_decoder().embed_tokens
        # Of this search: fixed sizes stay.
        self.code: dict[SearchConfig | None, Callable[[list[Tensor]], Any]] = {}

    def prefill(self, tokens: Tensor) -> None:
        for state in BeamState.of_prefix(tokens, self.initial_beams):
            self.logits(state)

    def logits(self, state: BeamState) -> Tensor:
        penalties = torch.ones(state.tokens.shape[2] + 1)  # not read
        (logits,) = self._run(None, state, penalties)
        return logits

    def step(
        self,
        state: BeamState,
        config: SearchConfig,
        penalties: Tensor,
    ) -> BeamState:
        return BeamState(*self._run(config, state, penalties))

    def _run(
        self,
        config: SearchConfig | None,
        state: BeamState,
        penalties: Tensor,
    ) -> list[Tensor]:
        capacity = self.slots.reserve(state.parents)
        self.self_kv = [resized(kv, capacity, 1) for kv in self.self_kv]
        encodings = self.weights.position_encodings(state.tokens.shape[2])
        embeds = self.embed_tokens(state.next_tokens)  # (1, K, D)
        tensors = [
            embeds,
            self.slots.visible,
            encodings,
            penalties,
            *self.self_kv,
            *self.cross_kv,
            *state,
        ]
        if config not in self.code:
            self.code[config] = self.weights.step(config).code(tensors)
        self.slots.visible, *found = self.code[config](tensors)
        return found

    def select(self, rows: Tensor) -> None:
        """Nothing: the only sentence stays in the batch until it is done."""

    def replace(self, rows: Tensor, other: Any) -> None:
        """Nothing: a search of one sentence takes the decoder of the next one instead."""


def compile_error(device: torch.device) -> str | None:
    """Why nothing can be compiled here, or None."""
    if device.type != "cpu":
        return f"compile: compiled decoding is for a CPU; the model is on {device}; leave it out"
    if not has_compiler():
        return "compile: this version of torch has no compiler for exported graphs; leave it out"
    if not any(name and shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++")):
        return "compile: no C++ compiler was found; install g++, name one in CXX, or leave it out"
    return None
