"""Products of few rows, in every way that this processor can, against float64."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer import products_vanilla_transformer as products
from hf_vanilla_transformer.products_vanilla_transformer import (
    AsItStands,
    EightBits,
    EightBitsOfMany,
    EightBitsOfWeight,
    LaidOut,
    Product,
)
from tests.model_helpers import EOS, PAD, START, padded, sentences, tiny_model

WIDTH = 64

# The error of a product, root mean square over that of the product: half a step of each kind of number, some times.
TOLERANCES = {
    (torch.float64, None): 1e-14,
    (torch.float32, None): 1e-6,
    (torch.bfloat16, None): 5e-3,
    (torch.float32, "int8"): 2e-2,
    (torch.bfloat16, "int8"): 2e-2,
}
ROWS = [0, 1, 2, products._MOST_FEW, products._MOST_FEW + 1, 40]


@pytest.fixture(autouse=True)
def small_matrices_are_laid_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST_LAID_OUT", 0)


def linears(bias: bool, outputs: tuple[int, ...] = (48, 32)) -> list[nn.Linear]:
    """Rows of a weight differ in size, as those of a trained one."""
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, size, bias=bias) for size in outputs]
    for linear in made:
        linear.weight.data *= torch.rand(len(linear.weight), 1) * 3 + 0.1
    return made


def exact(layers: list[nn.Linear], x: Tensor) -> Tensor:
    weights = [(layer.weight.double(), None if layer.bias is None else layer.bias.double()) for layer in layers]
    return torch.cat([F.linear(x.double(), *each) for each in weights], dim=1)


def assert_within(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).norm().item() <= tolerance * expected.norm().item()


@pytest.mark.parametrize(("dtype", "kind"), TOLERANCES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@torch.no_grad()
def test_products_are_those_of_float64(
    rows: int, compiled: bool, bias: bool, dtype: torch.dtype, kind: str | None
) -> None:
    layers = linears(bias)
    product, x = Product(layers, dtype, kind, compiled), torch.randn(rows, WIDTH).to(dtype)
    residual = torch.randn(rows, 80).to(dtype)
    given = residual.clone(), x.clone()
    expected, tolerance = exact(layers, x), TOLERANCES[dtype, kind]
    for found, right in (
        (product(x), expected),
        (product.with_relu(x), expected.relu()),
        (product.added_to(residual, x), expected + residual.double()),
    ):
        assert found.dtype == dtype
        assert_within(found, right, tolerance)
    assert residual.equal(given[0]) and x.equal(given[1])


@pytest.mark.parametrize(("dtype", "kind"), TOLERANCES)
@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.no_grad()
def test_rows_need_not_stand_together(rows: int, dtype: torch.dtype, kind: str | None) -> None:
    layers = linears(True)
    product, x = Product(layers, dtype, kind), torch.randn(WIDTH, 2 * rows).to(dtype).t()[::2]
    assert not x.is_contiguous() or rows == 1
    assert_within(product(x), exact(layers, x), TOLERANCES[dtype, kind])


@torch.no_grad()
def test_eight_bits_have_a_scale_for_each_output() -> None:
    layer = linears(False, (80,))[0]
    layer.weight.data[0] *= 1e4  # with one scale for all, nothing would be left of the others
    layer.weight.data[1] = 0
    x = torch.randn(3, WIDTH)
    found = Product([layer], torch.float32, "int8")(x)
    assert found[:, 1].count_nonzero() == 0
    assert_within(found[:, 2:], exact([layer], x)[:, 2:], 2e-2)


def on_arm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(products.platform, "machine", lambda: "aarch64")


def without_fbgemm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.quantized, "engine", "qnnpack")


def without_quantised_tensors(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch, "quantize_per_channel")


@pytest.mark.parametrize("lack", [on_arm, without_fbgemm, without_quantised_tensors])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_others_compute_without_eight_bits(lack: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch)
    layers = linears(True)
    product, x = Product(layers, dtype, "int8"), torch.randn(3, WIDTH).to(dtype)
    assert not any(isinstance(way, EightBits | EightBitsOfMany | EightBitsOfWeight) for _, way in product.ways)
    assert_within(product(x), exact(layers, x), TOLERANCES[dtype, None])


@torch.no_grad()
def test_activations_have_seven_bits_where_sums_would_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    layers = linears(True)
    x = torch.randn(4, WIDTH)
    product = Product(layers, torch.float32, "int8")
    assert_within(product(x), exact(layers, x), 2e-2)
    monkeypatch.undo()
    assert not product(x).equal(Product(layers, torch.float32, "int8")(x))


def test_eight_bits_are_laid_out_in_silence_by_several_threads() -> None:
    layers, made = linears(True), []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        torch.set_warn_always(True)
        try:
            work = [
                threading.Thread(target=lambda: made.append(Product(layers, torch.float32, "int8"))) for _ in range(4)
            ]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
        finally:
            torch.set_warn_always(False)
        assert warnings.filters == before
    assert len(made) == 4 and not heard


@pytest.mark.parametrize(
    ("dtype", "least", "many"),
    [(torch.float32, 2**22, EightBitsOfMany), (torch.bfloat16, 0, EightBitsOfMany), (torch.bfloat16, 2**22, LaidOut)],
)
@torch.no_grad()
def test_many_rows_by_eight_bits(dtype: torch.dtype, least: int, many: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST_WIDE", least)
    for bias in (True, False):
        layers = linears(bias)
        product = Product(layers, dtype, "int8")
        kinds = [type(way) for _, way in product.ways]
        assert kinds[:2] == [EightBitsOfWeight, EightBits] and kinds[2] in (many, AsItStands)
        for x in (torch.randn(30, WIDTH).to(dtype), torch.zeros(30, WIDTH, dtype=dtype)):
            residual = torch.randn(30, 80).to(dtype)
            assert_within(product(x), exact(layers, x), 2e-2)
            assert_within(product.with_relu(x), exact(layers, x).relu(), 2e-2)
            assert_within(product.added_to(residual, x), exact(layers, x) + residual.double(), 2e-2)


@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-6), ("high", 1e-3), ("medium", 5e-3)])
@torch.no_grad()
def test_weights_laid_out_before_torch_is_told_another_precision(precision: str, tolerance: float) -> None:
    layers, x, before = linears(True), torch.randn(40, WIDTH), torch.get_float32_matmul_precision()
    product = Product(layers, torch.float32)
    try:
        torch.set_float32_matmul_precision(precision)
        assert_within(product(x), exact(layers, x), tolerance)
    finally:
        torch.set_float32_matmul_precision(before)


# In a search


def translator() -> VanillaTransformerForConditionalGeneration:
    """A model whose sentences do not end by themselves: a tiny model's ends hang by a hair."""
    model = tiny_model(2, d_model=64, tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[[PAD, START, EOS]] = -1e4
    return model


def score(model: nn.Module, source: dict[str, Tensor], words: Tensor) -> Tensor:
    """Of each translation (B, T), by the model itself: log P / ((5 + length) / 6)^0.6."""
    logits = model(**source, decoder_input_ids=words[:, :-1]).logits.float().log_softmax(dim=-1)
    each = logits.gather(-1, words[:, 1:, None]).squeeze(-1)
    real = words[:, 1:] != PAD
    return (each * real).sum(dim=1) / ((5 + real.sum(dim=1)) / 6) ** 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5], [6, 3, 8, 1, 5]])
@torch.no_grad()
def test_translations_by_eight_bits_are_as_likely(lengths: list[int], dtype: torch.dtype) -> None:
    plain, model = translator(), translator().to(dtype)
    ids = padded(sentences(lengths))
    source = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
    settings = {"return_dict_in_generate": True, "max_new_tokens": 8, "num_beams": 8}
    full, eight = plain.generate(**source, **settings), model.generate(**source, **settings, decoder_weights="int8")
    assert not eight.sequences_scores.equal(model.generate(**source, **settings).sequences_scores)
    best, found = score(plain, source, full.sequences), score(plain, source, eight.sequences)
    assert (best - found).abs().max() < 0.2
    # and what the search says of them is nearly what the model says
    assert (eight.sequences_scores - found).abs().max() < 0.2


@torch.no_grad()
def test_a_checkpoint_may_ask_for_eight_bits(tmp_path: Any) -> None:
    model = translator()
    ids = padded(sentences([5, 3]))
    settings = {"return_dict_in_generate": True, "max_new_tokens": 9}
    expected = model.generate(ids, **settings, decoder_weights="int8").sequences_scores
    model.generation_config.decoder_weights = "int8"
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generate(ids, **settings).sequences_scores.equal(expected)
    ensemble = loaded.generate(ids, **settings, ensemble=[model])  # all members compute alike
    assert ensemble.sequences_scores.allclose(expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder_weights": "int4"}, "decoder_weights: 'int4' is not 'int8'"),
        (
            {"decoder_weights": "int8", "do_sample": True},
            "decoder_weights: with these settings transformers' own loop",
        ),
    ],
)
def test_what_cannot_have_eight_bits_says_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(torch.tensor([[5, 6, EOS]]), max_new_tokens=3, **settings)
