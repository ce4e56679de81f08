"""A number that is none in each tensor of a model, each dtype and each engine is refused, and nothing translated."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_vanilla_transformer.engine.continuous import ContinuousSearch
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.inference.loading import check_model_folder, load_model
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.finite import first_not_finite
from tests.model_helpers import error_of, slow, tiny_model
from tests.search_helpers import source

NAN = float("nan")
INF = float("inf")
DTYPES = ["float32", "bfloat16", "float16", "int8", "fastest"]
UNTIED: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "share_encoder_decoder_embeddings": False,
    "tie_word_embeddings": False,
    "lm_head_bias": True,
    "final_layer_norm": True,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**UNTIED).save_pretrained(folder)
    return folder


@contextmanager
def spoilt(folder: Path, name: str, number: float) -> Iterator[None]:
    """The saved model with a number in one tensor."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    weights = load_file(file)
    weights[name].view(-1)[-1] = number
    save_file(weights, file, metadata={"format": "pt"})
    try:
        yield
    finally:
        file.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_are_not_loaded(saved: Path, dtype: str) -> None:
    load_model(saved, "cpu", dtype)
    tensors = names(saved)
    assert len(tensors) > 40
    # every tensor in float32, in the others one of each kind
    chosen = tensors if dtype == "float32" else tensors[:: len(tensors) // 6]
    for place, name in enumerate(chosen):
        with spoilt(saved, name, (NAN, INF, -INF)[place % 3]):
            message = error_of(load_model, saved, "cpu", dtype)
            assert message.startswith(f"{saved}: {name} contains numbers that are not finite; ")


def test_weights_beyond_float16_are_refused_in_float16_alone(saved: Path) -> None:
    with spoilt(saved, names(saved)[3], 70_000.0):
        assert "float16 ends at 65,504" in error_of(load_model, saved, "cpu", "float16")
        for dtype in ("float32", "bfloat16", "int8"):
            load_model(saved, "cpu", dtype)


def test_folder_that_is_published_is_checked(saved: Path) -> None:
    check_model_folder(saved)
    with spoilt(saved, names(saved)[0], NAN):
        assert "not finite" in error_of(check_model_folder, saved)


@contextmanager
def written(weight: Tensor, number: float = NAN) -> Iterator[None]:
    """A number in the first column, which each row of an embedding has."""
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[..., 0] = number
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["modules", *slow("packed", "int8")])
def test_weights_that_a_user_spoils_translate_nothing(engine: str, dtype: torch.dtype) -> None:
    model = tiny_model(**UNTIED).to(dtype)

    if engine != "modules":
        optimize_for_inference(model, "int8" if engine == "int8" else None)
    weights = dict(model.named_parameters())
    if (
        engine == "modules"
    ):  # torch's fused attention takes a score that is no number for a masked one
        weights = {
            name: weight for name, weight in weights.items() if not re.search("[qk]_proj", name)
        }
    inputs = source([5, 3])
    for beams in (1, 3):
        inputs |= {"num_beams": beams, "max_new_tokens": 3}
        expected = model.generate(**inputs)
        for name, weight in weights.items():
            with written(weight), pytest.raises(ValueError, match="not finite") as caught:
                model.generate(**inputs)
            if engine == "int8" or ("decoder." in name and engine == "packed"):
                assert name in str(caught.value)
        assert model.generate(**inputs).equal(expected)
    weight = model.model.decoder.layers[0].fc1.weight
    with written(weight, INF), pytest.raises(UserError, match="fc1"):
        optimize_for_inference(model)


@pytest.mark.parametrize("beams", [1, 3])
def test_server_translates_nothing_with_weights_that_are_not_finite(beams: int) -> None:
    model = tiny_model(**UNTIED)
    search = ContinuousSearch(model, num_beams=beams)

    def translation() -> Any:
        search.join([("key", [5, 6, 2], 1, [])])
        while search:
            if found := search.step():
                return found
        return None

    assert translation()
    with written(model.lm_head.weight), pytest.raises(ValueError, match="logits are not finite"):
        translation()


@pytest.mark.parametrize("beams", [1, 2])
def test_suppressed_tokens_are_no_wrong_numbers(beams: int) -> None:
    """Scores of minus infinity are those of tokens that may not be chosen."""
    model = tiny_model()
    forbidden = list(range(model.config.vocab_size))
    settings = {"max_new_tokens": 3, "num_beams": beams}
    tokens = model.generate(**source([5, 3]), suppress_tokens=forbidden, **settings)
    assert len(tokens) == 2


def test_first_tensor_that_is_not_finite_is_found() -> None:
    good: dict[str, Tensor] = {
        "empty": torch.ones(0),
        "integers": torch.ones(3, dtype=torch.int8),
        "largest": torch.full((2, 2), torch.finfo(torch.float32).max),
        "float64": torch.full((2,), 1e300, dtype=torch.float64),
        "float16": torch.full((2,), 65_504.0, dtype=torch.float16),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "meta": torch.ones(3, device="meta"),
        "parameter": nn.Parameter(torch.ones(3)),
    }
    assert first_not_finite(good.items()) is None
    for name in ("largest", "float64", "float16", "parameter"):
        for number in (NAN, INF, -INF):
            wrong = good[name].detach().clone()
            wrong.view(-1)[1] = number
            tensors = good | {name: wrong, "z": torch.tensor(NAN)}
            assert first_not_finite(tensors.items()) == name
