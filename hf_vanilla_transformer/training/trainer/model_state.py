"""What a fast path reads of a model once, and what tells that it was changed since."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...attention_vanilla_transformer import eager_attention_forward, hooks_of


@dataclass(frozen=True)
class ModelState:
    """All of a model that `foreign_part` looks at, and its weights. Two states differ if a part was changed."""

    modules: list[nn.Module]
    #: the objects, so that no other gets their id
    weights: list[nn.Parameter]
    #: of each module: its class, the number of its attributes, its own `forward`, its hooks
    code: list[Any]
    #: the `forward` of each class, the attention function, and the hooks of all modules
    shared: list[Any]

    @classmethod
    def of(cls, model: Any) -> "ModelState":
        """The state of a model. Each update pays for it: 0.2 ms for six layers on each side."""
        modules: list[nn.Module] = []
        weights: list[nn.Parameter] = []
        code: list[Any] = []
        left = [model]
        while left:
            module = left.pop()
            fields = vars(module)
            modules.append(module)
            code += type(module), len(fields), fields.get("forward")
            if fields["_forward_hooks"] or fields["_forward_pre_hooks"]:
                code += *fields["_forward_hooks"].values(), *fields["_forward_pre_hooks"].values()
            if fields["_backward_hooks"] or fields["_backward_pre_hooks"]:
                code += *fields["_backward_hooks"].values(), *fields["_backward_pre_hooks"].values()
            weights += fields["_parameters"].values()
            left += [child for child in fields["_modules"].values() if child is not None]
        backend = model.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        kinds = {type(module): type(module).forward for module in modules}
        return cls(modules, weights, code, [kinds, attention, hooks_of(model)])

    def has_code_of(self, other: "ModelState") -> bool:
        """True if no class, method, hook or attention differs."""
        return self.code == other.code and self.shared == other.shared

    def has_layers_of(self, other: "ModelState") -> bool:
        """True if modules and weights are the same objects."""
        return self.modules == other.modules and list(map(id, self.weights)) == list(
            map(id, other.weights)
        )
