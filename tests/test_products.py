"""Products of few rows, in every way that this processor can, against float64."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_vanilla_transformer import products_vanilla_transformer as products
from hf_vanilla_transformer.products_vanilla_transformer import AsItStands, EightBits, LaidOut, Product

WIDTH = 64

# The error of a product, root mean square over that of the product: half a step of each kind of number, some times.
TOLERANCES = {
    (torch.float64, None): 1e-14,
    (torch.float32, None): 1e-6,
    (torch.bfloat16, None): 5e-3,
    (torch.float32, "int8"): 2e-2,
    (torch.bfloat16, "int8"): 2e-2,
}
ROWS = [0, 1, 2, products._MOST_ROWS_OF_EIGHT_BITS, products._MOST_ROWS_OF_EIGHT_BITS + 1, 40]


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
    if len(expected):
        assert ((found.double() - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.parametrize(("dtype", "kind"), TOLERANCES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@torch.no_grad()
def test_products_are_those_of_float64(rows: int, bias: bool, dtype: torch.dtype, kind: str | None) -> None:
    layers = linears(bias)
    product, x = Product(layers, dtype, kind), torch.randn(rows, WIDTH).to(dtype)
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
    assert not isinstance(product.few, EightBits) and not isinstance(product.many, EightBits)
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


def test_weights_of_eight_bits_are_held_once_where_rows_are_all_alike() -> None:
    layers = linears(True)
    alone = Product(layers, torch.float32, "int8")
    assert alone.few is alone.many
    both = Product(layers, torch.bfloat16, "int8")
    assert isinstance(both.few, EightBits) and isinstance(both.many, LaidOut | AsItStands)
