"""Every private or undocumented name of torch that this package uses. Tried with torch 2.9 to 2.15.

oneDNN's kernels, hooks and version counters have no public form. Each function says what happens if a
version of torch lacks its names.

Shapes: R rows, D inputs, O outputs.
"""

import torch
from torch import Tensor, nn

# oneDNN's blocked layout


def can_reorder(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes with reordered weights of this dtype. If not, layers call `F.linear`."""
    kernels = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if not hasattr(kernels, "_reorder_linear_weight") or not hasattr(kernels, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return hasattr(kernels, "_is_mkldnn_bf16_supported") and kernels._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def reorder(weight: Tensor) -> Tensor:
    """A weight (O, D) in oneDNN's blocked layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def linear_pointwise(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x W^T + b of x (R, D), followed by "relu" or "none"."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, activation, [], "")


def linear_add(x: Tensor, residual: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`residual` (R, O) + x W^T + b of x (R, D)."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")


# Products on a GPU


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """max(0, x W^T + b) of x (R, D), (R, O), in one kernel. Without the name, in two."""
    fused = getattr(torch, "_addmm_activation", None)
    if fused is None:
        return nn.functional.linear(x, weight, bias).relu_()
    return fused(bias, x, weight.T)


# oneDNN's int8 products


def has_int8() -> bool:
    """Return whether there are int8 products. If not, `optimize_for_inference` refuses int8."""
    return hasattr(torch.ops.onednn, "qlinear_prepack") and hasattr(
        torch.ops.onednn, "qlinear_pointwise"
    )


def prepack_int8(weight: Tensor) -> Tensor:
    """Signed bytes (O, D) as `int8_product` takes them."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def int8_product(
    x: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor, bias: Tensor | None
) -> Tensor:
    """`scales` (O,) · x W^T + `bias` (O,), for unsigned bytes x (R, D): float32 (R, O)."""
    output: tuple = 1.0, 0, torch.float32, "none", [], ""
    return torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 0, packed, scales, zero_points, bias, *output
    )


def has_fast_bfloat16() -> bool:
    """Return whether the CPU computes in bfloat16. If torch cannot tell, int8 models compute the rest in float32."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and supported()


def has_vnni() -> bool:
    """Return whether the CPU has AVX-512 VNNI. If torch cannot tell, products of few rows are slower."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and supported()


# Changes of a model

# Their hooks stay in a model that has once returned its attention weights or hidden states, or was trained with
# gradient checkpointing. They record outputs on request, and mark them for gradients.
_HARMLESS = frozenset({"transformers.utils.output_capturing", "transformers.modeling_utils"})


def version(weight: Tensor) -> float | None:
    """The number of writes that torch counted. None for tensors made in inference mode, which have no counter.

    `_version` is torch's only name for it. Without it the version differs at each call, and every request packs anew.
    """
    return None if weight.is_inference() else getattr(weight, "_version", float("nan"))


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call runs forward hooks that may change something.

    If torch cannot tell, models decode through their modules.
    """
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, name, None)
        if hooks is None:
            return True
        # Every request asks, and most modules have none.
        if hooks and not _HARMLESS.issuperset(map(_home, hooks.values())):
            return True
    return False


def _home(hook: object) -> str:
    return getattr(hook, "__module__", None) or ""


def has_global_hooks() -> bool:
    """`has_hooks` for the hooks of all modules."""
    modules = nn.modules.module
    return bool(
        getattr(modules, "_global_forward_hooks", True)
        or getattr(modules, "_global_forward_pre_hooks", True)
    )
