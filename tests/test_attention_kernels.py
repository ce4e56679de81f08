"""Scaled dot-product attention leaves cuDNN out on a GPU, and nothing of torch's settings is left changed.

The flags exist without a GPU, and tensors on the meta device are not on a CPU.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vanilla_transformer.attention_vanilla_transformer import attention_kernels
from tests.model_helpers import tiny_config, tiny_model

GPU, CPU = torch.device("meta"), torch.device("cpu")


@pytest.fixture(autouse=True)
def cudnn_enabled() -> Any:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def flags() -> list[bool]:
    names = ("cudnn", "flash", "mem_efficient", "math")
    return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names]


def flags_in_a_step(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, **fields: Any
) -> set[bool]:
    """Values of cuDNN's flag in every attention of a training step, forward and recomputed."""
    seen: list[bool] = []
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", recording)
    model = tiny_model(**fields).train().to(device)
    model.gradient_checkpointing_enable()
    source = torch.zeros(2, 5, 32, device=device)
    target = torch.zeros(2, 4, 32, device=device)
    labels = torch.zeros(2, 4, dtype=torch.long, device=device)
    outputs = model(
        inputs_embeds=source, decoder_inputs_embeds=target, labels=labels, skip_logits=False
    )
    forward = len(seen)
    outputs.loss.backward()
    assert len(seen) == 2 * forward > 0
    return set(seen)


def test_own_attention_trains_in_the_dtype_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()

    def own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        dtypes.update({query.dtype, key.dtype, value.dtype})
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", own)
    model = tiny_model(attn_implementation="own").bfloat16().train()
    ids = torch.tensor([[5, 6, 7]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("device", "kernels", "uses_cudnn"),
    [
        (GPU, "auto", False),
        (GPU, "torch", True),
        (CPU, "auto", True),
    ],
)
def test_a_training_step_on_a_gpu_leaves_cudnn_out(device, kernels, uses_cudnn, monkeypatch):
    """Unless torch may choose the kernel."""
    before = flags()
    assert flags_in_a_step(monkeypatch, device, attention_kernels=kernels) == {uses_cudnn}
    assert flags() == before
    assert before[0]


def test_auto_is_the_default() -> None:
    assert tiny_config().attention_kernels == "auto"


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_kernels='cudnn' must be one of auto, torch"):
        tiny_config(attention_kernels="cudnn")


def test_other_settings_of_the_caller_stay() -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]), attention_kernels("auto", GPU):
        assert flags() == [False, False, False, True]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), attention_kernels("auto", GPU):
        assert flags() == [True, False, False, False]  # asked for


def test_threads_may_leave_in_any_order() -> None:
    """The flags belong to the process. The first thread to leave does not switch cuDNN on for the second."""
    before = flags()
    first = attention_kernels("auto", GPU)
    second = attention_kernels("auto", GPU)
    with second:
        with first:
            pass
        assert not flags()[0]
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not flags()[0]
    second.__exit__(None, None, None)
    assert flags() == before


def test_threads_that_enter_at_once_leave_the_settings_as_they_were() -> None:
    """Each thread switches while others enter and leave."""
    before = flags()
    seen: list[bool] = []

    def enter_and_leave(_: int) -> None:
        for _ in range(300):
            with attention_kernels("auto", GPU):
                seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(enter_and_leave, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert not any(seen)
    assert flags() == before


def test_settings_are_restored_after_an_error() -> None:
    before = flags()
    with pytest.raises(RuntimeError), attention_kernels("auto", GPU):
        raise RuntimeError
    assert flags() == before


@pytest.mark.slow
def test_the_context_is_traced() -> None:
    def attend(query: Tensor) -> Tensor:
        with attention_kernels("auto", GPU):
            return F.scaled_dot_product_attention(query, query, query)

    before = flags()
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(query), attend(query))
    assert flags() == before
