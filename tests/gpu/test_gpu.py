"""A GPU gives what a CPU gives: `python -m pytest -m gpu` on a machine with one.

Each test has a CPU variant, which holds the test's own code to what it says where there is no GPU.
"""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationMixin, TrainerCallback

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer.engine import captured, read_ahead
from hf_vanilla_transformer.engine.captured import CapturedSteps
from hf_vanilla_transformer.engine.continuous import ContinuousSearch
from hf_vanilla_transformer.engine.ensemble import with_ensemble
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.loss_vanilla_transformer import fused_translation_loss, translation_loss
from tests import trainer_helpers
from tests.engine.recorded_steps import Eager
from tests.model_helpers import PAD, START, assert_near, gradients, tiny_model, translation_batch
from tests.search_helpers import AS_DICT, LENGTHS, batches, source, varied_model
from tests.trainer_helpers import flat, random_pairs

NO_GPU = "needs a CUDA GPU, which this machine lacks"


def needs_gpu(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)(test))


GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)],
)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Switch off TF32. It has three digits only."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield request.param
    matmul.allow_tf32, cudnn.allow_tf32 = before
    accelerate.state.AcceleratorState._reset_state(True)


def moved(batch: dict[str, Tensor], device: Any) -> dict[str, Tensor]:
    return {name: each.to(device) for name, each in batch.items()}


# The model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpu_logits_loss_and_gradients_are_those_of_the_cpu(device: str, attention: str) -> None:
    batch = translation_batch([9, 4, 30], [5, 12, 30])
    expected = tiny_model(label_smoothing=0.1).train()
    actual = tiny_model(label_smoothing=0.1, attn_implementation=attention).train().to(device)
    (loss, theirs), (found, ours) = (
        gradients(expected, **batch),
        gradients(actual, **moved(batch, device)),
    )
    assert found == pytest.approx(loss, rel=1e-5)
    for name, gradient in theirs.items():
        assert_near(ours[name].cpu(), gradient, 1e-5, name)
    with torch.no_grad():
        logits = actual.eval()(**moved(batch, device)).logits.cpu()
        assert_near(logits, expected.eval()(**batch).logits, 1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_gpu_autocast_is_near_float32(device: str, dtype: torch.dtype, tolerance: float) -> None:
    batch, expected = translation_batch([9, 4], [5, 12]), tiny_model(label_smoothing=0.1).train()
    model = tiny_model(label_smoothing=0.1).train().to(device)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16 and device == "cuda")
    with torch.autocast(device, dtype=dtype):
        loss = model(**moved(batch, device)).loss
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    theirs, gradient = gradients(expected, **batch)
    assert loss.item() == pytest.approx(theirs, rel=2e-2)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.float().cpu() / scale - gradient[name]).norm()
        assert error <= tolerance * gradient[name].norm() + 1e-3, name


def test_gpu_fused_loss_of_a_large_vocabulary_is_the_formula(device: str) -> None:
    size = 37_000 if device == "cuda" else 3_000
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(300, 64, generator=generator),
        torch.randn(size, 64, generator=generator) / 8,
    )
    labels = torch.randint(0, size, (300,), generator=generator)
    labels[::7] = -100
    results = []
    for fused in (True, False):
        states, matrix = (each.to(device, copy=True).requires_grad_() for each in (hidden, weight))
        target = labels.to(device)
        if fused:
            loss, _ = fused_translation_loss(states, matrix, None, target, 0.1)
        else:
            loss = translation_loss(states @ matrix.T, target, 0.1)
        loss.backward()
        results.append((loss.detach().cpu(), states.grad.cpu(), matrix.grad.cpu()))
    for actual, wanted in zip(*results, strict=True):
        assert_near(actual, wanted, 1e-5)


# Search


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("optimized", [False, True])
def test_gpu_search_returns_the_tokens_of_transformers(
    device: str, beams: int, optimized: bool
) -> None:
    model, batch = varied_model().to(device), moved(source(LENGTHS), device)
    settings: dict[str, Any] = {"num_beams": beams, "length_penalty": 1.0, "max_new_tokens": 20}
    expected = GenerationMixin.generate(model, **batch, **settings, early_stopping=False)
    if optimized:
        optimize_for_inference(model)
    assert model.generate(**batch, **settings).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"suppress_tokens": [PAD]}], ids=["captured", "processors"]
)
@pytest.mark.parametrize("beams", [1, 4])
def test_gpu_search_in_autocast_is_near_float32(
    device: str, beams: int, settings: dict[str, Any]
) -> None:
    """As evaluations of a training in bfloat16 search, with a prefix such as the token of a language."""
    model = optimize_for_inference(varied_model().to(device))
    batch = moved(
        {**source(LENGTHS), "decoder_input_ids": torch.tensor([[START, 5]] * len(LENGTHS))}, device
    )
    settings = {"num_beams": beams, "max_new_tokens": 12, **settings, **AS_DICT}
    with torch.autocast(device, dtype=torch.bfloat16):
        found = model.generate(**batch, **settings)
    assert found.sequences[:, :2].equal(batch["decoder_input_ids"])
    if beams > 1:
        expected = model.generate(**batch, **settings)
        assert_near(found.sequences_scores, expected.sequences_scores, 0.1)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [83, 5003])
def test_gpu_search_in_an_odd_vocabulary_is_that_of_the_cpu(
    device: str, size: int, bias: bool, beams: int
) -> None:
    """Its logits are rows apart, and of the larger one blocks are searched."""
    model = tiny_model(2, tie_word_embeddings=False, lm_head_bias=bias, vocab_size=size)
    settings = {"num_beams": beams, "max_new_tokens": 12}
    expected = model.generate(**source(LENGTHS), **settings)
    optimize_for_inference(model.to(device))
    assert (
        model.generate(**moved(source(LENGTHS), device), **settings).tolist() == expected.tolist()
    )


def test_gpu_search_refills_and_ensembles_as_on_the_cpu(device: str) -> None:
    def translate(where: str) -> tuple[list, list]:
        model, other = varied_model(seed=2).to(where), varied_model(seed=1).to(where)
        optimize_for_inference(model)
        bring = batches([4, 7, 2, 5], [])

        def next_batch(count: int) -> Any:
            brought = bring(count)
            return brought and tuple(each.to(where) for each in brought)

        refilled = model.generate(
            **moved(source([3, 6]), where), next_batch=next_batch, num_beams=4, max_new_tokens=12
        )
        together = with_ensemble([model, other]).generate(
            **moved(source(LENGTHS), where), num_beams=4, max_new_tokens=12
        )
        return refilled.tolist(), together.tolist()

    assert translate(device) == translate("cpu")


@needs_gpu
def test_gpu_search_rarely_synchronises() -> None:
    model, steps = varied_model(end=-1e4).to("cuda"), 64
    optimize_for_inference(model)
    batch = moved(source(LENGTHS), "cuda")
    settings: dict[str, Any] = {"num_beams": 4, "min_new_tokens": steps, "max_new_tokens": steps}
    model.generate(**batch, **settings)  # warm-up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as caught:
            model.generate(**batch, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchroniz" in str(each.message)]
    # one for each 16 steps, and before and after the search those of transformers, with copies of four token ids
    assert len(waits) <= steps / 16 + 12, [str(each.message) for each in waits]


def captured_steps(model: Any) -> CapturedSteps:
    return model.inference_engine.weights(model).steps


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("formula", ["gnmt", "power"])
@pytest.mark.parametrize("beams", [1, 4, 8])
def test_gpu_captured_steps_find_what_eager_steps_find(
    beams: int,
    formula: str,
    early_stopping: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With sentences that join and leave, and a batch that is compacted."""
    settings: dict[str, Any] = {"num_beams": beams, "early_stopping": early_stopping, **AS_DICT}
    if formula == "power":
        settings["length_penalty"] = 0.8

    def translate() -> tuple[Any, Any]:
        model = optimize_for_inference(varied_model().to("cuda", dtype))
        bring = batches([4, 30, 2, 6, 5, 3], [])

        def next_batch(count: int) -> Any:
            brought = bring(count)
            return brought and tuple(each.to("cuda") for each in brought)

        lengths = [3 + 5 * index % 9 for index in range(24)]
        found = model.generate(**moved(source(lengths), "cuda"), next_batch=next_batch, **settings)
        return model, found

    model, found = translate()
    assert captured_steps(model).idle
    monkeypatch.setattr(
        captured, "recorder_of", lambda device: Eager()
    )  # the same steps on the same memory
    _, expected = translate()
    assert found.sequences.tolist() == expected.sequences.tolist()
    if beams > 1:
        assert found.sequences_scores.equal(expected.sequences_scores)


@needs_gpu
def test_gpu_search_that_reads_ahead_finds_what_another_one_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = [1 + 7 * index % 11 for index in range(300)]

    def translate() -> list[list[int]]:
        model = optimize_for_inference(varied_model().to("cuda"))
        first = moved(source([6] * 16), "cuda")
        return model.generate(**first, next_batch=batches(later, []), num_beams=4).tolist()

    found = translate()
    monkeypatch.setattr(read_ahead, "side_stream_of", lambda device: None)
    assert found == translate()


@needs_gpu
def test_gpu_captured_step_is_one_launch() -> None:
    model = optimize_for_inference(varied_model(end=-1e4).to("cuda"))
    search = ContinuousSearch(model, num_beams=4, max_new_tokens=200)
    search.join([(0, [5, 7, 8], 1, []), (1, [9, 6], 1, [])])
    for _ in range(3):
        search.step()
    decoder: Any = search.search.decoder
    state, penalties = search.search.state, search.search.penalties
    assert decoder.captured is not None
    assert state is not None and penalties is not None
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.profiler.profile() as profile:
        decoder.step(state, search.search.config, penalties)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if "Launch" in event.name]
    assert [event.name for event in launches] == ["cudaGraphLaunch"]


@needs_gpu
def test_gpu_captured_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimize_for_inference(varied_model().to("cuda"))
    monkeypatch.setattr(captured, "MAX_STEPS", 2)
    for count in (1, 2, 4, 8):
        model.generate(**moved(source([5] * count), "cuda"), num_beams=2, max_new_tokens=20)
    gc.collect()
    assert len(captured_steps(model).idle) == 2
    assert captured_steps(model).in_use == 0


def on_gpu(model: Any, count: int) -> list[list[int]]:
    return model.generate(
        **moved(source([5] * count), model.device), num_beams=2, max_new_tokens=20
    ).tolist()


@needs_gpu
def test_gpu_steps_are_captured_again_after_all_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = varied_model().to("cuda"), optimize_for_inference(varied_model().to("cuda"))
    monkeypatch.setattr(captured, "MAX_STEPS", 1)
    for count in (1, 8, 2, 1):
        assert on_gpu(model, count) == on_gpu(plain, count)
        captured_steps(model).idle.clear()
        torch.cuda.empty_cache()


@needs_gpu
def test_gpu_models_of_two_threads_are_captured_one_after_the_other() -> None:
    expected = {count: on_gpu(varied_model().to("cuda"), count) for count in (1, 3, 9)}
    models = [optimize_for_inference(varied_model().to("cuda")) for _ in range(2)]

    def translate(model: Any) -> dict[int, list[list[int]]]:
        return {count: on_gpu(model, count) for count in (1, 3, 9)}

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(translate, models)) == [expected, expected]


@needs_gpu
def test_gpu_search_on_another_stream_is_not_captured() -> None:
    model = optimize_for_inference(varied_model().to("cuda"))
    expected = on_gpu(model, 4)
    captures = len(captured_steps(model).idle)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert on_gpu(model, 4) == expected
    assert len(captured_steps(model).idle) == captures


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_that_is_not_the_current_one_is_captured() -> None:
    expected = on_gpu(optimize_for_inference(varied_model().to("cuda:0")), 4)
    model = optimize_for_inference(varied_model().to("cuda:1"))
    assert on_gpu(model, 4) == expected
    assert captured_steps(model).idle


@needs_gpu
def test_gpu_capture_without_memory_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimize_for_inference(varied_model().to("cuda"))
    expected = on_gpu(varied_model().to("cuda"), 4)
    step = captured.CapturedStep._step

    def too_much(self: captured.CapturedStep, weights: Any) -> None:
        step(self, weights)
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(captured.CapturedStep, "_step", too_much)
    assert on_gpu(model, 4) == expected
    assert not captured_steps(model).idle
    monkeypatch.undo()
    assert on_gpu(model, 4) == expected
    assert captured_steps(model).idle


@needs_gpu
@pytest.mark.slow
def test_gpu_captured_step_of_the_base_size_is_fast() -> None:
    """64 sentences with 4 beams in bfloat16: 5.93 ms a step before steps were captured, on an H200."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.from_preset("base", vocab_size=37_000)
    model = VanillaTransformerForConditionalGeneration(config).eval().to("cuda", torch.bfloat16)
    optimize_for_inference(model)
    ids = torch.randint(10, 37_000, (64, 20), device="cuda")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def seconds(steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(**batch, num_beams=4, max_new_tokens=steps, eos_token_id=36_999)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for steps in (32, 96):
        seconds(steps)  # captures
    milliseconds = 1000 * (seconds(96) - seconds(32)) / 64
    assert milliseconds <= 3.0, (
        milliseconds
    )  # less than half of the eager step, on any card of its class


# Training


def trained(
    folder: Path, device: str, steps: int, resume: Path | None = None, **settings: Any
) -> Any:
    settings |= {
        "use_cpu": device == "cpu",
        "max_tokens_per_batch": 60,
        "max_steps": steps,
        "learning_rate": 0.01,
    }
    model = tiny_model(dropout=0.3, label_smoothing=0.1)
    return trainer_helpers.trained(
        folder, random_pairs(64), model, resume=resume, seed=3, **settings
    )


@pytest.mark.parametrize("objective", [{}, {"simcut_alpha": 3.0}])
def test_gpu_run_resumes_to_the_same_bytes(device: str, objective: dict, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "bf16": device == "cuda", **objective}
    trained(tmp_path / "whole", device, 4, **saving)
    trained(tmp_path / "resumed", device, 4, tmp_path / "whole" / "checkpoint-2", **saving)
    whole, resumed = (
        load_file(tmp_path / name / "checkpoint-4" / "model.safetensors")
        for name in ("whole", "resumed")
    )
    assert all(torch.equal(resumed[name], each) for name, each in whole.items())


def test_gpu_update_waits_for_the_device_in_the_log_only(device: str, tmp_path: Path) -> None:
    if device == "cpu":
        before = flat(tiny_model(dropout=0.3, label_smoothing=0.1))
        assert not torch.equal(flat(trained(tmp_path, device, 2, save_strategy="no").model), before)
        return
    model = tiny_model(dropout=0.3, label_smoothing=0.1).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = moved(translation_batch([9, 4], [5, 12]), device)
    tokens = batch["labels"].ne(-100).sum()

    def update() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            model(**batch, num_items_in_batch=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class ErrorsForWaits(TrainerCallback):
    """Lets torch raise an error for every wait for the device in the third and the fourth update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            torch.cuda.set_sync_debug_mode("error")
        if state.global_step == 4:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_updates_of_the_trainer_wait_for_nothing(compiled: bool, tmp_path: Path) -> None:
    compiling = None if compiled else False  # by default
    settings = {
        "save_strategy": "no",
        "logging_steps": 100,
        "bf16": True,
        "torch_compile": compiling,
    }
    try:
        trainer = trained(tmp_path, "cuda", 5, callbacks=[ErrorsForWaits()], **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 5
    assert trainer.state.epoch < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_gpu_compiled_training_step_has_the_gradients_of_the_plain_one() -> None:
    batch = moved(translation_batch([9, 4], [5, 12]), "cuda")
    model = tiny_model(label_smoothing=0.1).train().to("cuda")
    loss, expected = gradients(model, **batch)
    model.forward = torch.compile(model.forward)
    found, actual = gradients(model, **batch)
    assert found == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        assert_near(actual[name], gradient, 1e-4, name)
