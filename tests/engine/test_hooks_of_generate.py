"""Code of a caller in `generate` has its effect with every engine. Its hooks are read from transformers."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList

from hf_vanilla_transformer.engine.linear import INT8, int8_error
from hf_vanilla_transformer.generation_vanilla_transformer import (
    VanillaTransformerGenerationMixin,
    plan_search,
)
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.model_helpers import EOS
from tests.search_helpers import LENGTHS, source, varied_model

DATA = {
    "self",
    "inputs",
    "generation_config",
    "synced_gpus",
    "use_model_defaults",
    "kwargs",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
}
MODES = {"assistant_model", "streamer"}  # tests/generation_modes.py
NO_INT8 = int8_error(torch.device("cpu"), torch.float32)
ENGINES = [
    "modules",
    "packed",
    pytest.param(INT8, marks=pytest.mark.skipif(NO_INT8 is not None, reason=str(NO_INT8))),
]


def even_tokens(ids: Tensor, scores: Tensor) -> Tensor:
    odd = torch.arange(scores.shape[-1]) % 2 == 1
    return scores.masked_fill(odd, -torch.inf)


def four_tokens(ids: Tensor, scores: Tensor) -> Tensor:
    return torch.full((len(ids),), ids.shape[1] >= 4)


def own_loop(
    model: Any,
    input_ids: Tensor,
    **kwargs: Any,
) -> Tensor:
    return torch.full((len(input_ids), 3), 9)


# The argument, and what every translation (T,) without its start token must then be
HOOKS: dict[str, tuple[Any, Any]] = {
    "logits_processor": (
        LogitsProcessorList([even_tokens]),
        lambda tokens: (tokens % 2 == 0).all(),
    ),
    "stopping_criteria": (StoppingCriteriaList([four_tokens]), lambda tokens: len(tokens) <= 3),
    "prefix_allowed_tokens_fn": (
        lambda row, ids: [EOS, 8, 9],
        lambda tokens: torch.isin(tokens, torch.tensor([8, 9])).all(),
    ),
    "custom_generate": (own_loop, lambda tokens: (tokens == 9).all()),
}


def optimized(engine: str) -> Any:
    model = varied_model()
    return (
        model
        if engine == "modules"
        else optimize_for_inference(model, INT8 if engine == INT8 else None)
    )


def assert_all_hold(translations: Tensor, holds: Any) -> None:
    config = varied_model().config
    special = torch.tensor([config.pad_token_id, EOS, config.decoder_start_token_id])
    for row in translations:
        assert bool(holds(row[~torch.isin(row, special)]))


def test_every_argument_of_generate_is_decided() -> None:
    assert set(inspect.signature(GenerationMixin.generate).parameters) <= {*DATA, *MODES, *HOOKS}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HOOKS)
@torch.no_grad()
def test_code_of_a_caller_has_its_effect(
    name: str,
    engine: str,
    beams: int,
) -> None:
    model = optimized(engine)
    hook, holds = HOOKS[name]
    settings: dict[str, Any] = {
        **source(LENGTHS),
        "num_beams": beams,
        "max_new_tokens": 8,
    }
    found = model.generate(**settings, **{name: hook})
    assert_all_hold(found, holds)
    with pytest.raises(AssertionError):  # the hook has an effect
        assert_all_hold(model.generate(**settings), holds)
    if engine == "packed":
        assert found.equal(varied_model().generate(**settings, **{name: hook}))


def test_every_method_of_generate_that_is_replaced_goes_to_transformers() -> None:
    ids = source(LENGTHS)["input_ids"]
    names = {name for name in vars(GenerationMixin) if callable(getattr(GenerationMixin, name))}
    names -= vars(VanillaTransformerGenerationMixin).keys()
    assert {"_sample", "_get_stopping_criteria", "_update_model_kwargs_for_generation"} <= names
    for name in names:
        model = varied_model()
        plain = getattr(model, name)
        setattr(model, name, lambda *args, plain=plain, **kwargs: plain(*args, **kwargs))
        subclass = type("Own", (type(model),), {name: getattr(model, name)})
        for each in (model, subclass(model.config).eval()):
            assert plan_search(each, ids, None, {})[2] == [name]


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_replaced_method_of_generate_has_its_effect(engine: str) -> None:
    model = optimized(engine)
    plain = model._get_stopping_criteria
    model._get_stopping_criteria = lambda *args, **kwargs: StoppingCriteriaList(
        [*plain(*args, **kwargs), four_tokens]
    )
    found = model.generate(**source(LENGTHS), max_new_tokens=8)
    assert_all_hold(found, HOOKS["stopping_criteria"][1])
