"""Private names of torch and transformers: where the package may use them, and its behaviour without one."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_vanilla_transformer
from hf_vanilla_transformer.engine import kernels, linear
from hf_vanilla_transformer.engine.linear import PlainLinear, int8_error, packed_linear
from hf_vanilla_transformer.engine.optimize import not_optimizable
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.engine.model_changes import assert_as_by_modules
from tests.search_helpers import varied_model

PACKAGE = Path(hf_vanilla_transformer.__file__).parent
CPU = torch.device("cpu")

# Names that transformers' guides tell models to read, or that have no public one.
OF_MODELS = {"_attn_implementation", "_get_resized_embeddings", "_get_resized_lm_head"}
OF_TRAINERS = {
    # of `Trainer`, which subclasses override
    "_load_rng_state",
    "_tr_loss",
    "_gen_kwargs",
    "_remove_unused_columns",
    "_get_collator_with_removed_columns",
    "_prepare_inputs",
    "_get_default_store",  # torch.distributed has no public way to the store of its processes
    "_inductor",  # which modes of `torch.compile` make CUDA graphs
    # of torch's own optimizers: one kernel for many tensors
    "_foreach_lerp",
    "_foreach_lerp_",
    "_foreach_mul_",
    "_foreach_add_",
}
# of datasets, ctranslate2, os, evaluate, lxml
OF_OTHERS = {
    "_fingerprint",
    "_indices",
    "_SUPPORTED_ACTIVATIONS",
    "_exit",
    "_data_dir_root",
    "_Element",
}
ALLOWED = {"engine/kernels.py": None, "training": OF_TRAINERS}  # None: everything


def is_private(name: str) -> bool:
    if name in ("_", "_replace", "_fields") or name.startswith("__"):
        return False
    return name.startswith("_")


def names_of(tree: ast.Module) -> Iterator[str]:
    """Private names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def uses_of(tree: ast.Module) -> Iterator[str]:
    """Private names that a file reads or imports. `torch.ops` has undocumented ones only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield (
                "_ops"
                if ast.unparse(node) in ("torch.ops.mkldnn", "torch.ops.onednn")
                else node.attr
            )
        elif isinstance(node, ast.Import):
            parts = ".".join(alias.name for alias in node.names).split(".")
            yield from (part for part in parts if part != "_compat_pickle")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def test_private_names_of_libraries_are_in_one_place() -> None:
    files = PACKAGE.rglob("*.py")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    defined = {name for tree in trees.values() for name in names_of(tree)}
    outside = []
    for path, tree in trees.items():
        name = path.relative_to(PACKAGE).as_posix()
        folder, *_ = name.split("/")
        allowed = ALLOWED.get(name, ALLOWED.get(folder, set()))
        if allowed is None:
            continue
        known = defined | OF_MODELS | OF_OTHERS | allowed
        outside += [
            f"{name}: {use}" for use in uses_of(tree) if is_private(use) and use not in known
        ]
    assert not outside, outside


OF_ONEDNN = {"_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"}
OF_INT8 = {"qlinear_prepack", "qlinear_pointwise"}
OF_HOOKS = {"_global_forward_hooks", "_global_forward_pre_hooks"}


def namespace_of(names: set[str], value: Any = None) -> Any:
    return SimpleNamespace(**dict.fromkeys(names, value))


@pytest.mark.parametrize("removed", sorted(OF_ONEDNN))
def test_layers_are_plain_without_onednns_layout(
    removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkldnn = namespace_of(OF_ONEDNN - {removed}, lambda: True)
    monkeypatch.setattr(kernels.torch, "ops", SimpleNamespace(mkldnn=mkldnn))
    monkeypatch.setattr(linear, "_LEAST_PREPACKED", 0)
    packed = packed_linear([torch.nn.Linear(8, 8)], torch.bfloat16)
    assert type(packed) is PlainLinear


@pytest.mark.parametrize("removed", sorted(OF_INT8))
def test_int8_is_refused_without_its_kernels(removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    onednn = namespace_of(OF_INT8 - {removed})
    monkeypatch.setattr(kernels.torch, "ops", SimpleNamespace(onednn=onednn))
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    assert "quantization" in (int8_error(CPU, torch.float32) or "")


def test_int8_models_compute_in_float32_if_torch_cannot_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not kernels.has_fast_bfloat16()


@pytest.mark.parametrize("removed", sorted(OF_HOOKS))
def test_models_decode_through_modules_if_hooks_are_hidden(
    removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = optimize_for_inference(varied_model())
    with monkeypatch.context() as patch:
        module = namespace_of(OF_HOOKS - {removed})
        patch.setattr(kernels, "nn", SimpleNamespace(modules=SimpleNamespace(module=module)))
        assert "hooks" in (not_optimizable(model) or "")
        assert_as_by_modules(model)
    assert kernels.has_hooks(SimpleNamespace(_forward_hooks={})), (
        "a module without one of its dictionaries"
    )


def test_every_request_packs_anew_without_version_counters() -> None:
    weight: Any = SimpleNamespace(is_inference=lambda: False)
    assert [kernels.version(weight)] != [kernels.version(weight)]


@pytest.mark.parametrize("fused", [True, False])
def test_linear_relu_is_a_product_and_a_relu(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.delattr(torch, "_addmm_activation")
    x = torch.randn(5, 8)
    weight = torch.randn(6, 8)
    bias = torch.randn(6)
    expected = (x @ weight.T + bias).clamp(min=0)
    torch.testing.assert_close(kernels.linear_relu(x, weight, bias), expected)
