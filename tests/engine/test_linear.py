"""Linear layers packed for decoding, in every kind that this processor can run, against float64."""

import json
import os
import subprocess
import sys

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
    int8_error(torch.device("cpu"), torch.float32) is not None, reason="dynamic int8 needs an x86 CPU"
)
KINDS = [pytest.param(*key, marks=needs_int8) if key[1] else key for key in TOLERANCES]


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
    weights = [(layer.weight.double(), None if layer.bias is None else layer.bias.double()) for layer in layers]
    return torch.cat([F.linear(x.double(), *each) for each in weights], dim=1)


def assert_within(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).norm().item() <= tolerance * expected.norm().item()


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16, 40])
@torch.no_grad()
def test_packed_linears_compute_float64s_products(rows, bias, dtype, quantization):
    layers = linears(bias)
    packed, x = packed_linear(layers, dtype, quantization), torch.randn(rows, WIDTH).to(dtype)
    residual = torch.randn(rows, 80).to(dtype)
    given = residual.clone(), x.clone()
    expected, tolerance = exact(layers, x), TOLERANCES[dtype, quantization]
    for found, right in (
        (packed(x), expected),
        (packed.linear_relu(x), expected.relu()),
        (packed.linear_add(residual, x), expected + residual.double()),
    ):
        assert found.dtype == dtype
        assert_within(found, right, tolerance)
    assert residual.equal(given[0]) and x.equal(given[1]), "inputs must not change"


@pytest.mark.parametrize("outputs", [(48,), (48, 32), (48, 32, 16)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_rows_in_c_are_those_of_all_layers(outputs: tuple[int, ...], bias: bool) -> None:
    layers = linears(bias, outputs)
    x = torch.randn(2, WIDTH)
    assert_within(FloatLinear.of(*layers, dtype=torch.float32)(x), exact(layers, x), 1e-6)


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
    assert_within(torch.cat(list(joint_product(x, layers)), dim=1), expected, 1e-6)


@pytest.mark.parametrize("bias", [True, False])
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
    assert_within(on_cpu(found), exact(layers, x), 1e-6)
    assert count.launches == (1 if outputs % 8 == 0 or not bias else 2)


class OnMps(Tensor):
    device = torch.device("mps")


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_apple_gpus_have_no_fused_products(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has `_addmm_activation` for CPU, CUDA and XPU alone."""
    monkeypatch.setattr(kernels, "linear_relu", pytest.fail)
    layers = linears(bias, (83,))
    x, residual = torch.randn(6, WIDTH), torch.randn(6, 83)
    weight = layers[0].weight.as_subclass(OnMps)
    packed = PlainLinear(weight, layers[0].bias)
    given = residual.clone()
    assert_within(packed.linear_relu(x), exact(layers, x).relu(), 1e-6)
    assert_within(packed.linear_add(residual, x), exact(layers, x) + residual.double(), 1e-6)
    assert residual.equal(given)


@torch.no_grad()
def test_gpu_adds_a_product_to_the_residual_by_one_kernel() -> None:
    layers = linears(False, (80,))
    x, residual = torch.randn(6, WIDTH), torch.randn(6, 80)
    expected = exact(layers, x) + residual.double()
    packed = PlainLinear(on_gpu(layers[0].weight), None)
    with counted() as count:
        found = packed.linear_add(on_gpu(residual), on_gpu(x))
    assert_within(on_cpu(found), expected, 1e-6)
    assert count.launches == 1


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.no_grad()
def test_packed_linears_take_strided_rows(rows: int, dtype: torch.dtype, quantization: str | None) -> None:
    layers = linears(True)
    packed, x = packed_linear(layers, dtype, quantization), torch.randn(WIDTH, 2 * rows).to(dtype).t()[::2]
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
def test_packed_linear_chooses_its_kind(dtype, available, kind, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    assert type(packed_linear(linears(True), dtype)) is kind


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (2, 3), (3, 3)])
@torch.no_grad()
def test_small_weights_are_packed_for_many_rows_where_mkl_is_slow(shape: tuple[int, ...], monkeypatch) -> None:
    layers = linears(True)
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 2**19)
    monkeypatch.setattr(linear, "_LEAST_SLOW", 1)
    monkeypatch.setattr(linear, "_LEAST_PRODUCT", 8 * 80 * WIDTH)  # 8 rows
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    packed, rows = packed_linear(layers, torch.float32), []
    compute = linear.kernels.linear_pointwise
    monkeypatch.setattr(linear.kernels, "linear_pointwise", lambda x, *others: rows.append(x) or compute(x, *others))
    x = torch.randn(*shape, WIDTH)
    expected = exact(layers, x.flatten(0, -2)).unflatten(0, shape)
    assert_within(packed(x), expected, TOLERANCES[torch.float32, None])
    assert bool(rows) is (x[..., 0].numel() > 8)


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
    layers, x = linears(True), torch.randn(4, WIDTH)
    x[0] *= 1e4
    x[1] = 0
    found, expected = packed_linear(layers, torch.float32, "int8")(x), exact(layers, x)
    for row in range(4):
        assert_within(found[row], expected[row], 2e-2)


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
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    assert torch.tensor(json.loads(printed)).allclose(torch.full((3, 8), 64.0), rtol=1e-5)


def test_quantize_per_row_rounds_to_half_a_step() -> None:
    matrix = torch.randn(5, 33) * torch.tensor([[1.0], [1e-3], [1e3], [0.0], [1e-38]])
    integers, scales = quantize_per_row(matrix)
    assert integers.dtype == torch.int8
    assert (integers * scales[:, None] - matrix).abs().le(scales[:, None] * 0.501).all()


def on_arm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear.platform, "machine", lambda: "aarch64")


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear.platform, "machine", lambda: "x86_64")
    patch.setattr(linear.torch.ops, "onednn", object())


@pytest.mark.parametrize(
    ("lack", "device", "dtype", "message"),
    [
        (on_arm, "cpu", torch.float32, "quantization: 'int8'.* cpu, .* aarch64"),
        (None, "cuda", torch.float32, "quantization: 'int8'.* cuda"),
        (None, "cpu", torch.float16, "torch.float16"),
        (None, "cpu", torch.float64, "torch.float64"),
        (without_kernels, "cpu", torch.bfloat16, "oneDNN.*'int8'"),
    ],
)
def test_int8_error_names_what_is_missing(lack, device, dtype, message, monkeypatch):
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    if lack is not None:
        lack(monkeypatch)
    error = int8_error(torch.device(device), dtype)
    assert error is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-6), ("high", 1e-3), ("medium", 5e-3)])
@torch.no_grad()
def test_prepacked_linears_outlive_another_matmul_precision(precision: str, tolerance: float) -> None:
    layers, x, before = linears(True), torch.randn(40, WIDTH), torch.get_float32_matmul_precision()
    packed = packed_linear(layers, torch.float32)
    try:
        torch.set_float32_matmul_precision(precision)
        assert_within(packed(x), exact(layers, x), tolerance)
    finally:
        torch.set_float32_matmul_precision(before)
