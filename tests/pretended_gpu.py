"""A pretended GPU: counts what a real one would be asked to do, without having one.

A tensor on it keeps its values on the CPU and says that it is on the device "pretended". Results can be compared with
those of a CPU, and code for GPUs runs, because the device is not "cpu". Every operation counts the kernels that CUDA
would launch for it. Reading a value on the host counts as a wait, and a tensor made on the host as a copy.

  model = on_gpu(model)
  with counted() as count:
      model(**on_gpu(batch)).loss.backward()
  count.launches, count.waits, count.copies, count.shapes

Autocast casts as CUDA's does. Dropout is left out of attention. Times mean nothing here.

The numbers of kernels are estimates that see about three quarters of the real launches: 1,344 of 1,930 in an update of
the base model on an H200, where optimizer, memsets and chunks of the loss add to them, and 175 of 225 in a step of a
search with four beams. They are for ratchets. Waits are exact.
"""

import gc
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import Library, fallthrough_kernel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

try:
    from torch.utils.backend_registration import (
        _DummyBackendModule,
        _DummyDeviceGuard,
        _DummyPrivateUse1Hook,
    )
except ImportError:  # torch 2.9
    _DummyBackendModule = _DummyPrivateUse1Hook = object
    _DummyDeviceGuard = None

NAME = "pretended"
DEVICE = f"{NAME}:0"
aten = torch.ops.aten


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that only make or change the description of a tensor, or allocate memory.
FREE = _words(
    """
    view _unsafe_view reshape _reshape_alias expand transpose t permute unsqueeze squeeze slice select split
    split_with_sizes as_strided detach alias unbind unfold diagonal lift_fresh empty empty_like empty_strided new_empty
    new_empty_strided set_ resize_ is_pinned record_stream is_same_size sym_size sym_stride _local_scalar_dense
    """
)
# Operations whose result, or its size, the host has to know.
WAITING = _words(
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive equal is_nonzero bincount"
)
# Kernels of an operation, if there are several.
KERNELS = {
    "native_layer_norm_backward": 2,
    "embedding_dense_backward": 4,
    "topk": 5,
    "sort": 3,
    "nonzero": 3,
    "index_put": 2,
    "index_put_": 2,
    "_index_put_impl_": 2,
}
KERNELS_OF_A_LIST = (
    8  # of `_foreach` and `_fused` operations, which are launched for groups of tensors
)
TENSORS_OF_A_CAT = 64  # that one kernel joins
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "attend", "attend_backward"}


@dataclass
class Count:
    """What the pretended GPU was asked to do."""

    operations: Counter[str] = field(default_factory=Counter)  #: kernels by operation
    waits: Counter[str] = field(default_factory=Counter)  #: by operation and line
    copies: Counter[str] = field(default_factory=Counter)  #: from memory of the host, by line
    blocking: Counter[str] = field(
        default_factory=Counter
    )  #: those of the copies that wait for the device
    shapes: Counter[tuple] = field(
        default_factory=Counter
    )  #: products and attentions by their inputs

    @property
    def launches(self) -> int:
        """Kernels."""
        return sum(self.operations.values())

    @property
    def attention_shapes(self) -> set[tuple]:
        """Distinct shapes of attention, for each of which cuDNN builds a plan."""
        return {shape for shape in self.shapes if shape[0] == "attend"}


COUNTS: list[Count] = []  # the counts that are open, the innermost one last


@contextmanager
def counted() -> Iterator[Count]:
    """Count the operations within the context."""
    install()
    count = Count()
    with pytest.MonkeyPatch.context() as patch, _Dispatch():
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        COUNTS.append(count)
        try:
            yield count
        finally:
            COUNTS.pop()


@dataclass
class Held:
    """Bytes of the device's memory that tensors hold."""

    now: int = 0
    peak: int = 0
    tensors: Counter[int] = field(
        default_factory=Counter
    )  #: of each block of memory, by its address

    def hold(self, tensor: "OnGpu") -> None:
        memory = tensor.values.untyped_storage()
        address = memory.data_ptr()
        self.tensors[address] += 1
        if self.tensors[address] == 1:
            self.now += memory.nbytes()
            self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._release, address, memory.nbytes())

    def _release(self, address: int, nbytes: int) -> None:
        self.tensors[address] -= 1
        if not self.tensors[address]:
            self.now -= nbytes


@contextmanager
def held_memory() -> Iterator[Held]:
    """The memory that is allocated within the context. What operations allocate for themselves is not seen."""
    gc.collect()
    # Kept alive: memory that were freed could be given to a new tensor, which would not be counted then.
    before = [each.values for each in gc.get_objects() if type(each) is OnGpu]
    there = {values.untyped_storage().data_ptr() for values in before}
    held = Held()
    make = OnGpu.__new__

    def make_and_hold(cls: type[OnGpu], values: Tensor) -> OnGpu:
        tensor = make(cls, values)
        if values.untyped_storage().data_ptr() not in there:
            held.hold(tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnGpu, "__new__", staticmethod(make_and_hold))
        yield held
    del before


def on_gpu(values: Any) -> Any:
    """The tensors of a tree on the pretended GPU. A module is moved in place, and its tied weights stay tied."""
    install()
    if isinstance(values, nn.Module):
        return _move(values)
    if isinstance(values, Mapping):
        return {name: on_gpu(each) for name, each in values.items()}
    return tree_map(lambda each: OnGpu(each) if isinstance(each, Tensor) else each, values)


def on_cpu(values: Any) -> Any:
    """The tensors of a tree on the CPU, uncounted."""
    return tree_map(lambda each: each.values if isinstance(each, OnGpu) else each, values)


def _move(module: nn.Module) -> nn.Module:
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is None:
                continue
            if id(weight) not in moved:
                values = OnGpu(weight.detach().clone())
                moved[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
            part._parameters[name] = moved[id(weight)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnGpu(buffer)
    return module


class OnGpu(Tensor):
    """A tensor that says that it is on the pretended GPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "OnGpu":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device(DEVICE),
        )
        tensor.values = values
        return tensor

    def __repr__(self, **kwargs: Any) -> str:
        return f"OnGpu({self.values})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        if func is Tensor.__getitem__:
            return _get_item(*args)
        if func is Tensor.__setitem__:
            return _set_item(*args)
        if func is Tensor.tolist:
            _wait("tolist")
            return args[0].values.tolist()
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and (
            args[0].dim(),
            args[1].dim(),
        ) == (1, 2):
            # torch would write the result into memory that it resizes
            return (args[0][None] @ args[1]).squeeze(0)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    """Sends the operations that make a tensor on the device to it. They have no argument that is there already."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, count it, and put its results on the device."""
    name = func._schema.name.split("::")[1]
    inputs: dict[int, OnGpu] = {}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, OnGpu):
            inputs[id(value.values)] = value
            return value.values
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    results = func(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs))
    requested = kwargs.get("device")
    to_device = requested is not None and torch.device(requested).type == NAME
    if name == "_to_copy" and requested is not None:
        if inputs and not to_device:
            if not kwargs.get("non_blocking"):  # torch copies to pinned memory then
                _wait("copy to the host")
            return results
        if to_device and not inputs:
            _copy(args[0], kwargs.get("non_blocking", False))
            return tree_map(lambda each: OnGpu(each) if isinstance(each, Tensor) else each, results)
    if not inputs and not to_device:
        return results
    _count(func, name, args)

    def to_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, OnGpu):
            return value
        return inputs[id(value)] if id(value) in inputs else OnGpu(value)

    return tree_map(to_gpu, results)


def _count(func: Any, name: str, args: tuple) -> None:
    if not COUNTS:
        return
    count = COUNTS[-1]
    indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    by_mask = any(
        isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
        for each in indices or ()
    )
    if name in WAITING or by_mask:
        _wait(name)
    if name.startswith(("_foreach", "_fused")):
        kernels = KERNELS_OF_A_LIST
    elif name in ("addmm", "_addmm_activation"):
        # cuBLAS adds a vector to several rows, and takes their ReLU. Torch copies others into the result first.
        apart = 3 if name == "_addmm_activation" else 2
        kernels = 1 if args[0].dim() == 1 and len(args[1]) > 1 else apart
    elif name == "cat":
        kernels = -(-len(args[0]) // TENSORS_OF_A_CAT)
    else:
        kernels = 0 if name in FREE else KERNELS.get(name, 1)
    if kernels:
        count.operations[name] += kernels
    if name in PRODUCTS:
        count.shapes[(name, *(tuple(each.shape) for each in args if isinstance(each, Tensor)))] += 1


def _wait(what: str) -> None:
    if COUNTS:
        COUNTS[-1].waits[f"{what} at {_place()}"] += 1


def _copy(values: Any, non_blocking: bool) -> None:
    if not COUNTS:
        return
    copy = f"{tuple(values.shape)} {values.dtype} at {_place()}"
    COUNTS[-1].copies[copy] += 1
    if not non_blocking:  # torch synchronises the stream after such a copy
        COUNTS[-1].blocking[copy] += 1


def _place() -> str:
    """The innermost line of this package, or of transformers, in the call stack."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        known = {"hf_vanilla_transformer", "transformers", "accelerate"} & set(path.parts)
        if known and path.name != Path(__file__).name:
            return f"{path.parent.name}/{path.name}:{frame.lineno} {frame.line}"
    return "?"


# Indexing: torch's own code for it reads the device's memory


def _split_index(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply numbers, slices and None of an index, and return what is left: a tensor or None for each dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    used = sum(_dimensions(part) for part in parts)
    dimension = 0
    tensors: list[Tensor | None] = []
    for part in parts:
        if part is Ellipsis:
            skipped = (
                tensor.dim()
                - dimension
                - (used - sum(_dimensions(each) for each in parts[: parts.index(part)]))
            )
            tensors += [None] * skipped
            dimension += skipped
        elif part is None:
            tensor = tensor.unsqueeze(dimension)
            tensors.append(None)
            dimension += 1
        elif isinstance(part, int):
            tensor = tensor.select(dimension, part)
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = aten.slice.Tensor(
                    tensor,
                    dimension,
                    part.start,
                    part.stop,
                    part.step or 1,
                )
            tensors.append(None)
            dimension += 1
        else:
            indices = part if isinstance(part, Tensor) else torch.tensor(part, device=DEVICE)
            tensors.append(indices)
            dimension += indices.dim() if indices.dtype == torch.bool else 1
    return tensor, tensors


def _dimensions(part: Any) -> int:
    """Dimensions of the tensor that a part of an index takes."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _get_item(tensor: Tensor, index: Any) -> Tensor:
    part, tensors = _split_index(tensor, index)
    return aten.index.Tensor(part, tensors) if any(each is not None for each in tensors) else part


def _set_item(tensor: Tensor, index: Any, value: Any) -> None:
    part, tensors = _split_index(tensor, index)
    if any(each is not None for each in tensors):
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device=DEVICE)
        aten.index_put_.default(part, tensors, value.to(tensor.dtype))
    elif isinstance(value, Tensor):
        part.copy_(value)
    else:
        part.fill_(value)


# Attention: one kernel forward and one backward, as torch's fused ones


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.settings = causal, scale
        return torch.ops.pretended.attend(query, key, value, mask, causal, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.pretended.attend_backward(
            grad,
            *ctx.saved_tensors,
            *ctx.settings,
        )
        return *gradients, None, None, None


ATTEND_ON_CPU = F.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not isinstance(query, OnGpu):
        return ATTEND_ON_CPU(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if torch.is_autocast_enabled(NAME):
        query, key, value = (
            each.to(torch.get_autocast_dtype(NAME)) for each in (query, key, value)
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(query, key, value, attn_mask, is_causal, scale)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    output = _weights(query, key, mask, causal, scale) @ value.float()  # (B, H, T, d_v)
    return like_kernels(output, query.dtype)


def _weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -1e30)
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -1e30).softmax(dim=-1)
    return (scores + mask.float()).softmax(dim=-1)


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights, grad = _weights(query, key, mask, causal, scale), grad.float()
    by_weights = grad @ value.float().transpose(-1, -2)
    by_scores = weights * (by_weights - (by_weights * weights).sum(dim=-1, keepdim=True)) * scale
    by_query = by_scores @ key.float()
    by_key = by_scores.transpose(-1, -2) @ query.float()
    by_value = weights.transpose(-1, -2) @ grad
    return (
        like_kernels(by_query, query.dtype),
        like_kernels(by_key, key.dtype),
        like_kernels(by_value, value.dtype),
    )


def like_kernels(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, T, d) with the memory layout that torch's kernels give to outputs and gradients: (B, T, H, d)."""
    return heads.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


# The device


class _Module(_DummyBackendModule):
    """`torch.pretended`. It is not available, so that no library chooses it by itself."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def synchronize(self, *args: Any) -> None:
        _wait("synchronize")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return False


@cache
def reserve() -> Any:
    """Give the device a queue in autograd, before the first backward pass of the process. Nothing else changes."""
    if _DummyDeviceGuard is None:
        return None
    guard = _DummyDeviceGuard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    return guard


# Operations that CUDA's autocast runs in the lower precision, and in float32.
LOWER = _words("linear matmul mm addmm bmm baddbmm")
FLOAT32 = _words(
    """
    layer_norm native_layer_norm cross_entropy_loss nll_loss exp norm.Scalar softmax.int log_softmax.int
    sum.dim_IntList sum cumsum prod
    """
)


@cache
def install() -> tuple[Library, ...]:
    """Register the device, once in a process. The result keeps the registrations alive."""
    if torch.cuda.is_available():
        pytest.skip("torch knows one accelerator, and here it is a real one")
    if reserve() is None:
        pytest.skip("this torch knows no device that is written in Python")
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, _Module())
    torch._C._acc.register_python_privateuseone_hook(_Hook())
    attention = Library(NAME, "DEF")
    inputs = "Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale"
    attention.define(f"attend({inputs}) -> Tensor")
    attention.define(f"attend_backward(Tensor grad, {inputs}) -> (Tensor, Tensor, Tensor)")
    attention.impl("attend", _attend, "CPU")
    attention.impl("attend_backward", _attend_backward, "CPU")

    every = Library("_", "IMPL", "PrivateUse1")
    every.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs))
    memory = Library("aten", "IMPL", "PrivateUse1")
    memory.impl("empty_strided", _empty_strided)
    memory.impl("empty.memory_format", _empty)
    memory.impl("_copy_from", _copy_from)

    without_cast = Library("_", "IMPL", "AutocastPrivateUse1")
    without_cast.fallback(fallthrough_kernel)
    casts = Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, lower in ((LOWER, True), (FLOAT32, False)):
        for name in names:
            operation, _, overload = name.partition(".")
            casts.impl(
                name, _with_casts(getattr(getattr(aten, operation), overload or "default"), lower)
            )
    return attention, every, memory, without_cast, casts


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: Any = None,
    **kwargs: Any,
) -> OnGpu:
    return OnGpu(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size: Any, dtype: Any = None, **kwargs: Any) -> OnGpu:
    return OnGpu(torch.empty(size, dtype=dtype))


def _copy_from(
    source: Tensor,
    target: Tensor,
    non_blocking: bool = False,
) -> Tensor:
    if not isinstance(target, OnGpu):
        _wait("copy to the host")
        return target.copy_(on_cpu(source))
    if not isinstance(source, OnGpu):
        _copy(source, non_blocking)
    target.values.copy_(on_cpu(source))
    return target


def _with_casts(operation: Any, lower: bool) -> Callable:
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32
            args, kwargs = tree_map(lambda each: _cast(each, dtype), (args, kwargs))
            return operation(*args, **kwargs)

    return run


CAST_WEIGHTS: dict[int, Tensor] = {}  # autocast keeps the casts of weights until its end


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != NAME:
        return value
    if value.dtype == dtype:
        return value
    is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
    if dtype == torch.float32 or not is_weight:
        return value.to(dtype)
    if id(value) not in CAST_WEIGHTS:
        CAST_WEIGHTS[id(value)] = value.to(dtype)
    return CAST_WEIGHTS[id(value)]


@contextmanager
def autocast(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """`torch.autocast` of the device."""
    CAST_WEIGHTS.clear()
    try:
        with torch.autocast(NAME, dtype=dtype):
            yield
    finally:
        CAST_WEIGHTS.clear()
