"""Linear layers packed for decoding, in every kind that this processor can run, against float64."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_vanilla_transformer.attention_vanilla_transformer import joint_product
from hf_vanilla_transformer.engine import kernels, linear
from hf_vanilla_transformer.engine.linear import (
    DynamicInt8Linear,
    FloatLinear,
    PlainLinear,
    PrepackedLinear,
    int8_error,
    packed_linear,
    quantize_per_row,
)
from tests.pretended_gpu import counted, on_cpu, on_gpu

WIDTH = 64

# The error of a product, root mean square over that of the product: half a step of each kind of number, some times.
TOLERANCES = {
    (torch.float64, None): 1e-14,
    (torch.float32, None): 1e-6,
    (torch.bfloat16, None): 5e-3,
    (torch.float32, "int8"): 2e-2,
    (torch.bfloat16, "int8"): 2e-2,
}

needs_int8 = pytest.mark.skipif(
    int8_error(torch.device("cpu"), torch.float32) is not None,
    reason="dynamic int8 needs an x86 CPU",
)
KINDS = [pytest.param(*key, marks=needs_int8 if key[1] else ()) for key in TOLERANCES]
every_kind = pytest.mark.parametrize(("dtype", "quantization"), KINDS)
with_and_without_bias = pytest.mark.parametrize("bias", [True, False])


@pytest.fixture(autouse=True)
def small_weights_are_prepacked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 0)


def linears(bias: bool, outputs: tuple[int, ...] = (48, 32)) -> list[nn.Linear]:
    """Rows of a weight differ in size, as those of a trained one."""
    layers = [nn.Linear(WIDTH, size, bias=bias) for size in outputs]
    for layer in layers:
        layer.weight.data *= torch.rand(len(layer.weight), 1) * 3 + 0.1
    return layers


def exact(layers: list[nn.Linear], x: Tensor) -> Tensor:
    products = []
    for layer in layers:
        bias = None if layer.bias is None else layer.bias.double()
        products.append(F.linear(x.double(), layer.weight.double(), bias))
    return torch.cat(products, dim=1)


def assert_within(
    found: Tensor,
    expected: Tensor,
    tolerance: float = 1e-6,
) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).norm().item() <= tolerance * expected.norm().item()


def assert_computes(
    packed: Any,
    layers: list[nn.Linear],
    x: Tensor,
    tolerance: float = 1e-6,
) -> None:
    """A product, with a ReLU and with a residual, which change no input."""
    expected = exact(layers, x)
    residual = torch.randn(expected.shape).to(x.dtype)
    given = residual.clone(), x.clone()
    for found, right in (
        (packed(x), expected),
        (packed.linear_relu(x), expected.relu()),
        (packed.linear_add(residual, x), expected + residual.double()),
    ):
        assert found.dtype == x.dtype
        assert_within(found, right, tolerance)
    assert residual.equal(given[0])
    assert x.equal(given[1])


@every_kind
@with_and_without_bias
@pytest.mark.parametrize("rows", [1, 2, 16, 40])
@torch.no_grad()
def test_packed_linears_compute_float64s_products(
    rows: int,
    bias: bool,
    dtype: torch.dtype,
    quantization: str | None,
) -> None:
    layers = linears(bias)
    packed = packed_linear(layers, dtype, quantization)
    x = torch.randn(rows, WIDTH).to(dtype)
    assert_computes(packed, layers, x, TOLERANCES[dtype, quantization])


@pytest.mark.parametrize("outputs", [(48,), (48, 32), (48, 32, 16)])
@with_and_without_bias
@torch.no_grad()
def test_rows_in_c_are_those_of_all_layers(outputs: tuple[int, ...], bias: bool) -> None:
    layers = linears(bias, outputs)
    x = torch.randn(2, WIDTH)
    assert_within(FloatLinear.of(*layers, dtype=torch.float32)(x), exact(layers, x))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("without", [0, 1])
@torch.no_grad()
def test_layers_with_and_without_a_bias_are_joined(without: int, quantization: str | None) -> None:
    """Whisper, for example, has no bias for keys."""
    layers = linears(bias=True)
    layers[without].bias = None
    x = torch.randn(5, WIDTH)
    expected = exact(layers, x)
    packed = packed_linear(layers, torch.float32, quantization)
    assert_within(packed(x), expected, TOLERANCES[torch.float32, quantization])
    assert_within(torch.cat(list(joint_product(x, layers)), dim=1), expected)


@with_and_without_bias
@pytest.mark.parametrize("outputs", [80, 83])
@torch.no_grad()
def test_gpu_writes_rows_that_are_aligned(outputs: int, bias: bool) -> None:
    """cuBLAS computes others by slow kernels."""
    layers = linears(bias, (outputs,))
    x = torch.randn(6, WIDTH)
    packed = PlainLinear(on_gpu(layers[0].weight), on_gpu(layers[0].bias) if bias else None)
    with counted() as count:
        found = packed(on_gpu(x))
    assert found.stride() == (-(-outputs // 8) * 8, 1)
    assert_within(on_cpu(found), exact(layers, x))
    assert count.launches == (1 if outputs % 8 == 0 or not bias else 2)


class OnMps(Tensor):
    device = torch.device("mps")


@with_and_without_bias
@torch.no_grad()
def test_apple_gpus_have_no_fused_products(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has `_addmm_activation` for CPU, CUDA and XPU alone."""
    monkeypatch.setattr(kernels, "linear_relu", pytest.fail)
    layers = linears(bias, (83,))
    weight = layers[0].weight.as_subclass(OnMps)
    assert_computes(PlainLinear(weight, layers[0].bias), layers, torch.randn(6, WIDTH))


@torch.no_grad()
def test_gpu_adds_a_product_to_the_residual_by_one_kernel() -> None:
    layers = linears(False, (80,))
    x = torch.randn(6, WIDTH)
    residual = torch.randn(6, 80)
    expected = exact(layers, x) + residual.double()
    packed = PlainLinear(on_gpu(layers[0].weight), None)
    with counted() as count:
        found = packed.linear_add(on_gpu(residual), on_gpu(x))
    assert_within(on_cpu(found), expected)
    assert count.launches == 1


@every_kind
@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.no_grad()
def test_packed_linears_take_strided_rows(
    rows: int,
    dtype: torch.dtype,
    quantization: str | None,
) -> None:
    layers = linears(True)
    packed = packed_linear(layers, dtype, quantization)
    x = torch.randn(WIDTH, 2 * rows).to(dtype).t()[::2]
    assert_within(packed(x), exact(layers, x), TOLERANCES[dtype, quantization])


@pytest.mark.parametrize(
    ("dtype", "available", "kind"),
    [
        (torch.float32, True, PrepackedLinear),
        (torch.float32, False, PlainLinear),
        (torch.float64, True, PlainLinear),
        (torch.float16, True, PlainLinear),
    ],
)
def test_packed_linear_chooses_its_kind(
    dtype: torch.dtype,
    available: bool,
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    assert type(packed_linear(linears(True), dtype)) is kind


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (2, 3), (3, 3)])
@torch.no_grad()
def test_small_weights_are_packed_for_many_rows_where_mkl_is_slow(
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = linears(True)
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 2**19)
    monkeypatch.setattr(linear, "_LEAST_SLOW", 1)
    monkeypatch.setattr(linear, "_LEAST_PRODUCT", 8 * 80 * WIDTH)  # 8 rows
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    packed = packed_linear(layers, torch.float32)
    computed = []
    compute = kernels.linear_pointwise
    monkeypatch.setattr(
        kernels, "linear_pointwise", lambda *args: computed.append(args) or compute(*args)
    )
    x = torch.randn(*shape, WIDTH)
    rows = x.flatten(0, -2)
    assert_within(packed(x), exact(layers, rows).unflatten(0, shape))
    assert bool(computed) is (len(rows) > 8)


@pytest.mark.parametrize(
    ("dtype", "outputs", "plain_rows"),
    [
        (torch.float32, 512, 1),
        (torch.float32, 256, 4),  # 2^20 / (256 · 1024)
        (torch.bfloat16, 256, 0),
    ],
)
@torch.no_grad()
def test_few_rows_are_not_worth_a_call(
    dtype: torch.dtype,
    outputs: int,
    plain_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 2**19)
    monkeypatch.setattr(kernels, "reorder", lambda weight: weight)
    for name in ("linear_pointwise", "linear_add"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: called.append(name))
    layer = PrepackedLinear(torch.zeros(outputs, 1024, dtype=dtype), None)
    assert layer.plain_rows == plain_rows
    for rows, calls in ((plain_rows, 0), (plain_rows + 1, 3)):
        if rows == 0:
            continue
        x = torch.zeros(rows, 1024, dtype=dtype)
        layer(x)
        layer.linear_relu(x)
        layer.linear_add(torch.zeros(rows, outputs, dtype=dtype), x)
        assert len(called) == calls


@needs_int8
@torch.no_grad()
def test_dynamic_int8_has_a_scale_for_each_output() -> None:
    layer = linears(False, (80,))[0]
    layer.weight.data[0] *= 1e4  # with one scale for all, nothing would be left of the others
    layer.weight.data[1] = 0
    x = torch.randn(3, WIDTH)
    packed = packed_linear([layer], torch.float32, "int8")
    assert type(packed) is DynamicInt8Linear
    found = packed(x)
    assert found[:, 1].count_nonzero() == 0
    assert_within(found[:, 2:], exact([layer], x)[:, 2:], 2e-2)


@needs_int8
@torch.no_grad()
def test_dynamic_int8_has_a_scale_for_each_row() -> None:
    layers = linears(True)
    x = torch.randn(4, WIDTH)
    x[0] *= 1e4
    x[1] = 0
    found = packed_linear(layers, torch.float32, "int8")(x)
    for row, expected in zip(found, exact(layers, x), strict=True):
        assert_within(row, expected, 2e-2)


@pytest.mark.slow
@needs_int8
def test_dynamic_int8_is_exact_without_vnni() -> None:
    """There oneDNN adds two products in 16 bits that saturate: half of a sum was lost."""
    code = """
import torch
from hf_vanilla_transformer.engine.linear import DynamicInt8Linear
print(DynamicInt8Linear(torch.ones(8, 64), None)(torch.ones(3, 64)).tolist())
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}  # read once by a process
    printed = subprocess.check_output(
        [sys.executable, "-c", code],
        env=environment,
        timeout=300,
    )
    assert torch.tensor(json.loads(printed)).allclose(torch.full((3, 8), 64.0), rtol=1e-5)


def test_quantize_per_row_rounds_to_half_a_step() -> None:
    matrix = torch.randn(5, 33) * torch.tensor([[1.0], [1e-3], [1e3], [0.0], [1e-38]])
    integers, scales = quantize_per_row(matrix)
    assert integers.dtype == torch.int8
    assert (integers * scales[:, None] - matrix).abs().le(scales[:, None] * 0.501).all()


@pytest.mark.parametrize(
    ("machine", "has_kernels", "device", "dtype", "message"),
    [
        ("aarch64", True, "cpu", torch.float32, "quantization: 'int8'.* cpu, .* aarch64"),
        ("x86_64", True, "cuda", torch.float32, "quantization: 'int8'.* cuda"),
        ("x86_64", True, "cpu", torch.float16, "torch.float16"),
        ("x86_64", True, "cpu", torch.float64, "torch.float64"),
        ("x86_64", False, "cpu", torch.bfloat16, "oneDNN.*'int8'"),
    ],
)
def test_int8_error_names_what_is_missing(
    machine: str,
    has_kernels: bool,
    device: str,
    dtype: torch.dtype,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear.platform, "machine", lambda: machine)
    if not has_kernels:
        monkeypatch.setattr(linear.torch.ops, "onednn", object())
    assert re.search(message, int8_error(torch.device(device), dtype) or "")


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("highest", 1e-6), ("high", 1e-3), ("medium", 5e-3)]
)
@torch.no_grad()
def test_prepacked_linears_outlive_another_matmul_precision(
    precision: str, tolerance: float
) -> None:
    layers = linears(True)
    x = torch.randn(40, WIDTH)
    packed = packed_linear(layers, torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert_within(packed(x), exact(layers, x), tolerance)
    finally:
        torch.set_float32_matmul_precision(before)
