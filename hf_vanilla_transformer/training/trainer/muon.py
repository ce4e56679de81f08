"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of the layers, AdamW for the rest.

Adam's update of a matrix has a few large singular values and many small ones. Muon makes the momentum orthogonal, so
that every direction is learnt at the same rate. Instead of Adam's two moments it keeps one. Its updates are scaled to
the root mean square of Adam's (Liu et al. 2025, arXiv 2502.16982, §2.2), so that both share one learning rate.

torch.optim.Muon computes in bfloat16, matrix by matrix, and leaves the other parameters to a second optimizer, but
`Trainer` has only one. Here matrices of one shape are one batch, and a run in float32 on a CPU keeps them in float32.

Shapes: M matrices (O, D).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

MOMENTUM = 0.95  # Nesterov's
# Typical root mean square of an update of Adam, in learning rates (Liu et al., §2.2).
ADAM_RMS = 0.2
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5  # of the iteration, by Jordan et al.

#: A group of parameters and its settings, as torch's optimizers keep it.
ParameterGroup: TypeAlias = dict[str, Any]


class MuonAdamW(AdamW):
    """AdamW, with Muon for the parameter groups with `muon: True`. These contain matrices only.

    Args:
        groups: of parameters.
        dtype: in which the momenta are made orthogonal. The weights and the momenta keep their own.
        settings: of AdamW.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        *,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ):
        super().__init__([{"muon": False, **group} for group in groups], **settings)
        self._dtype = dtype

    def __setstate__(self, state: dict[str, object]) -> None:
        Optimizer.__setstate__(self, state)  # Adam's counts the updates of every parameter

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)
        return loss

    @torch.no_grad()
    def _step_matrices(self, group: ParameterGroup) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights]
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        # On a GPU a few kernels for all matrices.
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for weight, direction in zip(weights, directions, strict=True):
            by_shape[weight.shape].append((weight, direction))
        for shape, pairs in by_shape.items():
            alike, matrices = zip(*pairs, strict=True)
            rate = group["lr"] * ADAM_RMS * math.sqrt(max(shape))
            updates = orthogonalized(torch.stack(matrices), self._dtype).unbind()
            torch._foreach_add_(alike, updates, alpha=-rate)


def orthogonalized(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """About U V^T for each matrix U Σ V^T of (M, O, D), computed in `dtype`.

    Newton-Schulz iteration: after division by the Frobenius norm no singular value is above 1, and five times the same
    odd polynomial takes all but the smallest to between 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    x = matrices.float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(dtype)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    for _ in range(STEPS):
        gram = x @ x.mT  # (M, O, O), of the shorter side
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def muon_groups(
    model: nn.Module, weight_decay: float, decaying: Collection[str]
) -> list[ParameterGroup]:
    """Make the parameter groups of `MuonAdamW`: the weights of linear layers inside the stacks' layers, and the rest.

    AdamW trains the embeddings and the output layer, tied to them (§3.4), as Jordan et al. advise. `decaying` are
    names of parameters with weight decay.
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    groups: dict[tuple[bool, bool], ParameterGroup] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            muon = ".layers." in f".{name}" and id(parameter) in linear
            decays = name in decaying
            empty = {"params": [], "muon": muon, "weight_decay": weight_decay if decays else 0.0}
            groups.setdefault((muon, decays), empty)["params"].append(parameter)
    return list(groups.values())
