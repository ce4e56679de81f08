"""Changes of users to a model after it was optimized, and the comparison of its translations with its modules."""

import copy
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model_helpers import EOS, assert_near, randomise, tiny_model
from tests.search_helpers import AS_DICT, Model, source


def translate(
    model: Model,
    lengths: list[int] | None = None,
    **settings: Any,
) -> tuple[list[list[int]], Tensor]:
    """Tokens and scores of a few sentences."""
    settings = {
        "max_new_tokens": 8,
        "num_beams": 2,
        **settings,
        **AS_DICT,
    }
    output = model.generate(**source(lengths or [5, 3]), **settings)
    return output.sequences.tolist(), output.sequences_scores


def by_modules(model: Model, **settings: Any) -> tuple[list[list[int]], Tensor]:
    """The translation of the model as it is now, without an engine."""
    engine = model.inference_engine
    model.inference_engine = None
    try:
        return translate(model, **settings)
    finally:
        model.inference_engine = engine


def assert_as_by_modules(
    model: Model,
    tolerance: float = 1e-5,
    **settings: Any,
) -> Tensor:
    """The scores come back."""
    tokens, scores = translate(model, **settings)
    expected, its_scores = by_modules(model, **settings)
    assert tokens == expected
    assert_near(scores.float(), its_scores.float(), tolerance)
    return scores


@torch.no_grad()
def aligning_model(tokenizer: Any, seed: int = 0) -> Model:
    """A model that gives each target token one clearly largest attention weight."""
    model = tiny_model(
        seed,
        vocab_size=len(tokenizer),
        decoder_layers=3,
        tie_word_embeddings=False,
    )
    for layer in model.model.decoder.layers:
        layer.cross_attn.q_proj.weight *= 4
    return model


def resident_bytes() -> int:
    """The memory of this process, after all that is free was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(pages[1]) * 4096


# Changes after a model was optimized

Change = Callable[[Model], Any]


def decoder_weight(model: Model) -> nn.Parameter:
    """One that packing copies, beside those of q and k. A layer of one matrix may share the model's own."""
    return model.model.decoder.layers[-1].self_attn.v_proj.weight


def trained_by(
    kind: type[torch.optim.Optimizer],
    only: str = "",
    **settings: Any,
) -> Change:
    """One step of an optimizer. Some do not change the version of a weight."""

    def step(model: Model) -> None:
        ids = torch.tensor([[5, 6, EOS]])
        with torch.enable_grad():
            model(input_ids=ids, labels=ids).loss.backward()
        weights = [weight for name, weight in model.named_parameters() if only in name]
        kind(weights, **settings).step()
        model.zero_grad()

    return step


def write_in_place(model: Model) -> None:
    decoder_weight(model)[-1] += 1.0


def write_through_flat(model: Model) -> None:
    weights = [decoder_weight(model)]
    nn.utils.vector_to_parameters(1.1 * nn.utils.parameters_to_vector(weights), weights)


def replace_module(model: Model) -> None:
    layer = model.model.decoder.layers[0]
    outputs, inputs = layer.fc2.weight.shape
    layer.fc2 = nn.Linear(inputs, outputs).to(model.dtype).eval()


def randomised(model: Model) -> dict[str, Tensor]:
    return randomise(copy.deepcopy(model), 1).state_dict()


def exchange_layers(model: Model) -> None:
    layers = model.model.decoder.layers
    layers[0], layers[-1] = layers[-1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
        layer.cross_attn.layer_idx = index


def replace_weight(make: Callable[[Tensor], Tensor]) -> Change:
    """By another tensor, half as large again, that has what `make` says of memory."""

    def replace(model: Model) -> None:
        layer = model.model.decoder.layers[0].fc1
        layer.weight = nn.Parameter(make(1.5 * layer.weight.data))

    return replace


def at_odd_offset(weight: Tensor) -> Tensor:
    memory = torch.empty(weight.numel() + 1, dtype=weight.dtype)
    return memory[1:].view_as(weight).copy_(weight)


def merge_adapter(model: Model) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "fc1"],
        r=2,
        init_lora_weights=False,
    )
    peft.get_peft_model(model, config).merge_and_unload()
    model.requires_grad_(True)  # a later change may train it, and PEFT has frozen its weights


CHANGES: dict[str, Change] = {
    "fused AdamW": trained_by(torch.optim.AdamW, lr=0.1, fused=True),
    "foreach AdamW": trained_by(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused SGD": trained_by(torch.optim.SGD, lr=1.0, fused=True),
    "fused AdamW of biases": trained_by(
        torch.optim.AdamW,
        only="bias",
        lr=0.1,
        fused=True,
    ),
    "fused AdamW of norms": trained_by(
        torch.optim.AdamW,
        only="norm",
        lr=0.1,
        fused=True,
    ),
    "write_in_place": write_in_place,
    "write_through_detach": lambda model: decoder_weight(model).detach().mul_(1.5),
    "write_through_flat": write_through_flat,
    "copy_another": lambda model: decoder_weight(model).copy_(
        torch.randn_like(decoder_weight(model))
    ),
    "assign_data": lambda model: setattr(
        decoder_weight(model), "data", 2 * decoder_weight(model).data
    ),
    "replace_parameter": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 2)
    ),
    "replace_module": replace_module,
    "write_encoder": lambda model: model.model.encoder.layers[0].fc1.weight.mul_(3),
    "load_other_weights": lambda model: model.load_state_dict(randomised(model)),
    "assign_other_weights": lambda model: model.load_state_dict(randomised(model), assign=True),
    "round_to_bfloat16": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "replace_activation": lambda model: setattr(
        model.model.decoder.layers[-1], "activation", nn.Tanh().eval()
    ),
    "remove_layer": lambda model: model.model.decoder.layers.__delitem__(slice(1, None)),
    "exchange_layers": exchange_layers,
    "use_transposed_weight": replace_weight(lambda weight: weight.t().contiguous().t()),
    "use_sliced_weight": replace_weight(lambda weight: torch.cat([weight, weight], dim=1)[:, :32]),
    "use_weight_at_odd_offset": replace_weight(at_odd_offset),
    "merge_adapter": merge_adapter,
}


# Changes that make modules compute more, nearly all twice as much. Each returns a function that undoes it

Undo = Callable[[], Any]


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class DoubleLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def train_decoder(model: Model) -> Undo:
    model.config.dropout = 0.5
    for module in model.model.decoder.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.5
    model.model.decoder.train()
    return model.model.decoder.eval


def hook_module(model: Model) -> Undo:
    layer = model.model.decoder.layers[-1].fc1
    return layer.register_forward_hook(lambda module, args, output: 2 * output).remove


def pre_hook_module(model: Model) -> Undo:
    layer = model.model.decoder.layers[-1].fc1
    return layer.register_forward_pre_hook(lambda module, args: (2 * args[0],)).remove


def hook_all_modules(model: Model) -> Undo:
    def double(
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> Any:
        return 2 * output if module is model.lm_head else None

    return nn.modules.module.register_module_forward_hook(double).remove


def pre_hook_all_modules(model: Model) -> Undo:
    def double(module: nn.Module, args: Any) -> Any:
        return (2 * args[0],) if module is model.lm_head else None

    return nn.modules.module.register_module_forward_pre_hook(double).remove


def replace_method_of(module: nn.Module, name: str) -> Undo:
    plain = getattr(module, name)
    setattr(module, name, lambda x: 2 * plain(x))
    return lambda: delattr(module, name)


def replace_forward(model: Model) -> Undo:
    return replace_method_of(model.lm_head, "forward")


def replace_method(model: Model) -> Undo:
    return replace_method_of(model.model.decoder.layers[0], "feed_forward")


def parametrize_weight(model: Model) -> Undo:
    layer = model.model.decoder.layers[0].fc2
    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    return lambda: nn.utils.parametrize.remove_parametrizations(
        layer, "weight", leave_parametrized=False
    )


def subclass_module(model: Model) -> Undo:
    layer = model.model.decoder.layers[0].fc1
    layer.__class__ = DoubleLinear
    return lambda: setattr(layer, "__class__", nn.Linear)


def replace_output_layer(model: Model) -> Undo:
    """By one without a weight of its own, as a quantized layer is."""
    plain = model.lm_head
    model.lm_head = nn.Sequential(plain, Double()).eval()
    return lambda: setattr(model, "lm_head", plain)


def inject_adapter(model: Model) -> Undo:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.eval()
    return lambda: None


Temporary = Callable[[Model], Undo]
TEMPORARY: list[Temporary] = [
    hook_module,
    pre_hook_module,
    hook_all_modules,
    pre_hook_all_modules,
    train_decoder,
    replace_forward,
    replace_method,
    parametrize_weight,
    subclass_module,
    inject_adapter,
    replace_output_layer,
]
TEMPORARY_CHANGES = {change.__name__: change for change in TEMPORARY}
