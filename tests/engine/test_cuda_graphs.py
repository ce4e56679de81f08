"""Captured steps with `CudaGraphs`, on a pretended `torch.cuda` that holds to torch's rules."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_vanilla_transformer.decoding_vanilla_transformer import additive_mask
from hf_vanilla_transformer.engine import captured
from hf_vanilla_transformer.engine.captured import CudaGraphs
from hf_vanilla_transformer.engine.read_ahead import CudaSideStream
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.engine.pretended_cuda import STREAMS, PretendedCuda, pretended_cuda
from tests.engine.recorded_steps import Eager, recording
from tests.search_helpers import Model, source, varied_model

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    with pretended_cuda() as cuda, recording(None):
        monkeypatch.setattr(captured, "recorder_of", CudaGraphs)
        monkeypatch.setattr(
            captured.logger, "warning", pytest.fail
        )  # of captures that are not possible
        yield cuda


def translated(model: Model, count: int) -> list[list[int]]:
    return model.generate(
        **source([5, 3, 6, 2][:count]),
        num_beams=3,
        max_new_tokens=20,
    ).tolist()


def test_steps_are_captured_again_after_all_are_freed(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "MAX_STEPS", 1)
    plain = varied_model()
    model = optimize_for_inference(varied_model())
    for count in (1, 4, 2, 1):
        assert translated(model, count) == translated(plain, count)
    assert len(cuda.captured) > 4


def test_steps_are_captured_on_a_stream_for_nothing_else(cuda: PretendedCuda) -> None:
    """cuBLAS has a workspace for each stream, and a graph keeps the address of its own."""
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    for device in devices:
        record_on(device)
    assert [stream.device for stream in cuda.captured] == devices
    others = {cuda.make_stream(device) for device in devices for _ in range(STREAMS)}
    assert not others & set(cuda.captured)
    for device in devices:
        record_on(device)
    assert len(set(cuda.captured)) == len(devices), "the pool of a device is used by one stream"


def record_on(device: torch.device) -> None:
    """On a device that does not exist, and without the first graph, which would be on it."""
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs.stream = captured._capture_stream(device)
    graphs.pool = torch.cuda.graph_pool_handle()
    graphs.record(lambda: torch.zeros(1))


@pytest.mark.parametrize("calls_before", [0, 1], ids=["in the warm-up", "in the capture"])
def test_capture_that_fails_leaves_the_current_stream(
    calls_before: int, cuda: PretendedCuda
) -> None:
    graphs = CudaGraphs(CPU)
    calls: list[None] = []

    def function() -> None:
        if len(calls) == calls_before:
            raise torch.OutOfMemoryError("CUDA out of memory")
        calls.append(None)

    with pytest.raises(torch.OutOfMemoryError):
        graphs.record(function)
    assert cuda.current_stream(CPU) == cuda.default_stream(CPU)
    graphs.record(lambda: torch.zeros(1))()


def test_one_thread_captures_at_a_time(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models, which share nothing, in two threads."""
    step = captured.CapturedStep._step
    is_capturing = threading.Event()

    def slow_step(self: captured.CapturedStep, weights: Any) -> None:
        step(self, weights)
        if cuda.capturing and not is_capturing.is_set():
            is_capturing.set()
            time.sleep(0.5)  # the other thread wants to capture meanwhile

    monkeypatch.setattr(captured.CapturedStep, "_step", slow_step)
    expected = translated(varied_model(), 2)
    first, second = (optimize_for_inference(varied_model()) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(translated, first, 2)
        assert is_capturing.wait(60)
        assert translated(second, 2) == expected
        assert other.result() == expected


@pytest.mark.parametrize("is_default", [True, False])
def test_searches_on_other_streams_are_not_captured(
    is_default: bool,
    cuda: PretendedCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would use the same memory at the same time."""
    device = torch.device("cuda:0")
    with cuda.stream(cuda.default_stream(device) if is_default else cuda.make_stream(device)):
        assert captured.is_on_default_stream(device) == is_default
    monkeypatch.setattr(captured, "is_on_default_stream", lambda device: is_default)
    model = optimize_for_inference(varied_model())
    before = len(cuda.captured)
    assert translated(model, 2) == translated(varied_model(), 2)
    assert (len(cuda.captured) > before) == is_default


def test_searches_share_a_side_stream(cuda: PretendedCuda) -> None:
    """Torch keeps the memory that was used on a stream for this stream."""
    streams = {CudaSideStream(CPU).stream for _ in range(2 * STREAMS)}
    assert len(streams) == 1


# Memory


class LittleMemory(Eager):
    """A recorder on a device with room for one step."""

    def __init__(self) -> None:
        self.attempts = 0
        self.steps: Any = None

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.attempts += 1
        if self.steps is None or self.steps.idle:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(function)


def test_steps_that_no_search_uses_make_room_for_another() -> None:
    recorder = LittleMemory()
    with recording(recorder):
        model = optimize_for_inference(varied_model())
        steps = model.inference_engine.weights(model).steps
        recorder.steps = steps
        first = translated(model, 1)
        gc.collect()
        assert {sizes.rows for sizes in steps.idle} == {1}
        expected = translated(varied_model(), 4)
        recorder.attempts = 0
        assert translated(model, 4) == expected
        gc.collect()
        assert recorder.attempts >= 2
        assert 4 in {sizes.rows for sizes in steps.idle}
        assert translated(model, 1) == first


def test_mask_is_made_from_a_number_of_the_host() -> None:
    """A copy from the host cannot be captured."""
    with torch.device("meta"):
        mask = additive_mask(torch.tensor([True, False], device="cpu"), torch.float32)
    assert mask.tolist() == [0.0, torch.finfo(torch.float32).min]
