"""Int8 translations: the passes between products against torch's operators, and whole models against their modules."""

import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_vanilla_transformer.decoding_vanilla_transformer import EncodedSource
from hf_vanilla_transformer.engine import c_compiler, c_kernels
from hf_vanilla_transformer.engine.c_kernels import Rows, attend, best, finish, write_cache
from hf_vanilla_transformer.engine.int8_model import Int8Decoder, Int8Weights
from hf_vanilla_transformer.engine.linear import (
    INT8,
    int8_error,
    multiplies_like_onednn,
    packed_linear,
)
from hf_vanilla_transformer.engine.packed_decoder import PackedDecoder
from hf_vanilla_transformer.engine.packed_weights import PackedWeights
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.engine.test_c_kernels import (
    SCALE,
    Widths,
    assert_best,
    attention_by_torch,
    random_visible,
    view_of,
)
from tests.engine.test_packed_decoder import Walk, encoded, every_kind, sources
from tests.model_helpers import PAD, assert_near, tiny_model
from tests.search_helpers import AS_DICT, source, varied_model

pytestmark = pytest.mark.skipif(
    int8_error(torch.device("cpu"), torch.float32) is not None or c_kernels.library() is None,
    reason="int8 needs an x86 CPU and the C functions",
)


def scaled(
    product: Tensor,
    scales: Tensor,
    bias: Tensor | None,
) -> Tensor:
    return product * scales[:, None] + (0 if bias is None else bias)


def assert_quantized(rows: Rows, expected: Tensor) -> None:
    step = rows.scales[:, None]
    found = (rows.bytes.float() - 128) * step
    assert rows.bytes.min() >= 1
    assert (found - expected).abs().le(0.51 * step + 1e-6).all()


@pytest.mark.parametrize("width", [1, 7, 64, 200])
@pytest.mark.parametrize("norm", [None, "affine", "without bias"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_row_is_scaled_added_normalised_and_quantised(
    width: int,
    norm: str | None,
    norm_first: bool,
) -> None:
    x, residual = torch.randn(2, 5, width)
    scales = torch.rand(5) + 0.1
    bias = torch.randn(width)
    layer = None
    if norm is not None:
        layer = nn.LayerNorm(width, eps=1e-3, bias=norm == "affine").requires_grad_(False)
        for parameter in layer.parameters():
            parameter.normal_()
    total = scaled(x, scales, bias).relu() + residual
    normed = layer(total) if layer else total
    rows: Any = finish(x, scales, bias, True, residual, layer, norm_first)
    assert_quantized(rows, normed)
    assert_near(x, total if norm_first else normed, 1e-5)
    plain = torch.zeros(2, width)
    assert finish(plain, bias=bias, quantized=False) is None
    assert plain.equal(bias.expand(2, -1))


def test_products_of_many_row_counts_share_compiled_kernels() -> None:
    linear = packed_linear([nn.Linear(8, 16)], torch.float32, INT8)
    counts = set()
    for count in range(64, 129):
        rows = finish(torch.randn(count, 8))
        assert rows.times(linear).equal(linear.product(rows.bytes[:count].clone()))
        counts.add(len(rows.bytes))
    assert len(counts) <= 6


@pytest.mark.skipif(
    not multiplies_like_onednn(), reason="this CPU has products in C with other bits, or none"
)
@pytest.mark.parametrize("size", [(1, 1), (17, 33), (40, 5), (192, 768)], ids=str)
def test_few_rows_are_multiplied_in_c_with_the_bits_of_onednn(size: tuple[int, int]) -> None:
    linear = packed_linear([nn.Linear(*size)], torch.float32, INT8)
    assert linear.plain_rows >= 9
    for count in range(1, 10):
        rows = finish(torch.randn(count, size[0]))
        assert rows.times(linear).equal(linear.product(rows.bytes)[:count])


@every_kind
@torch.no_grad()
def test_a_stack_for_few_rows_has_the_bits_of_its_passes(fields: dict[str, Any]) -> None:
    weights = Int8Weights(tiny_model(3, **fields))
    ids, mask = sources(5, 2, 7)
    found = []
    for at_once in (True, False):
        if not at_once:
            weights.encoder.in_c.most_rows = -1
            weights.decoder.in_c.most_rows = -1
        states = weights.encode(ids, mask).last_hidden_state
        logits = Walk(
            Int8Decoder(weights, EncodedSource(states, mask)),
            3,
            beams=4,
            prefix=2,
        ).steps(5)
        found.append(torch.cat([states.flatten(), *(step.flatten() for step in logits)]))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("widths", [(8, 64, 64), (2, 6, 10), (3, 16, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_reads_what_a_row_sees(widths: tuple[int, int, int], bias: bool) -> None:
    batch = 3
    beams = 2
    size = 21
    sizes = Widths(*widths)
    columns = sizes.query_columns + sizes.cache_columns
    product = torch.randn(batch * beams, columns)
    scales = torch.rand(batch * beams) + 0.1
    shift = torch.randn(columns) if bias else None
    cache = torch.randn(batch, size, sizes.cache_columns).bfloat16()
    rows = torch.arange(batch * beams)
    places = rows // beams * size + rows % beams
    write_cache(product, sizes.query_columns, scales, shift, places, cache)
    query, written = scaled(product, scales, shift).split(
        [sizes.query_columns, sizes.cache_columns], dim=1
    )
    rounded = cache.flatten(0, 1)[places]
    assert (rounded - written).abs().le(2**-8 * written.abs() + 1e-6).all()
    visible = random_visible(batch, beams, size, share=0.5)
    found = attend(
        product,
        widths,
        SCALE,
        cache,
        view_of(visible, size),
        scales=scales,
        bias=shift,
        quantized=True,
    )
    assert_quantized(found, attention_by_torch(query, cache, visible, sizes))


@pytest.mark.parametrize("size", [3, 64, 1000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("some", [False, True])
def test_best_tokens_are_those_of_a_sorted_log_softmax(
    size: int,
    bias: bool,
    normalize: bool,
    some: bool,
) -> None:
    product = torch.randn(40, size)
    product[1] = 0
    product[2, :-1] = -1e4
    scales = torch.rand(40) + 0.1
    shift = torch.randn(size) if bias else None
    logits = scaled(product, scales, shift)
    hidden = None
    if some:
        hidden = (
            torch.arange(8)[:, None, None] + torch.arange(size)
        ) % 3 == 0  # (B, 1, V), of 5 rows each
        hidden[..., -1] = False
        logits = logits.masked_fill(hidden.repeat_interleave(5, 0)[:, 0], -torch.inf)
    expected = logits.log_softmax(dim=1) if normalize else logits
    count = min(8, size - size // 3)
    values, tokens = best(
        product,
        count,
        normalize,
        scales=scales,
        bias=shift,
        hidden=hidden,
    )
    assert_best(values, tokens, expected, count)
    if not bias and not some:
        assert tokens[1].tolist() == list(range(count)), "the first of equals"


@every_kind
@torch.no_grad()
def test_int8_computes_every_kind_of_model(fields: dict[str, Any]) -> None:
    model = tiny_model(3, **fields)
    weights = Int8Weights(model)
    ids, mask = sources(5, 2, 7)
    exact = model.get_encoder()(ids, mask).last_hidden_state * mask[..., None]
    states = weights.encode(ids, mask).last_hidden_state
    assert (states - exact).norm() < 0.05 * exact.norm()
    assert not states[mask == 0].count_nonzero()
    found = []
    for decoder in (
        Int8Decoder(weights, EncodedSource(exact, mask)),
        PackedDecoder(PackedWeights(model, torch.float32, None), EncodedSource(exact, mask)),
    ):
        walk = Walk(decoder, 3, beams=4, prefix=2)
        logits = walk.steps(5)
        walk.select([2, 0])
        logits += walk.steps(3)
        later = type(decoder)(decoder.weights, encoded(model, [9], 1))
        walk.replace([1], Walk(later, 1, beams=4, prefix=2, seed=1))
        logits += walk.steps(4)
        found.append(torch.cat([step.flatten() for step in logits]))
    ours, theirs = found
    assert (ours - theirs).norm() < 0.06 * theirs.norm()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_int8_gives_a_sentence_the_same_numbers_in_every_batch(
    beams: int, dtype: torch.dtype
) -> None:
    model = optimize_for_inference(varied_model(d_model=64).to(dtype), "int8")
    lengths = [6, 1, 8, 3, 5, 31, 4]
    settings = {"max_new_tokens": 12, "num_beams": beams, **AS_DICT}
    inputs = source(lengths)
    together = model.generate(**inputs, **settings)
    for left in (False, True):
        for row, length in enumerate(lengths):
            tokens = inputs["input_ids"][row : row + 1, : length + 1]  # with its end token
            ids = F.pad(tokens, (3, 0) if left else (0, 2), value=PAD)
            alone = model.generate(
                input_ids=ids,
                attention_mask=ids.ne(PAD).long(),
                **settings,
            )
            width = alone.sequences.shape[1]
            assert alone.sequences[0].equal(together.sequences[row, :width])
            if beams > 1:
                assert alone.sequences_scores[0].item() == together.sequences_scores[row].item()


@torch.no_grad()
def test_int8_searches_with_more_candidates_than_tokens() -> None:
    settings = {
        "max_new_tokens": 6,
        "num_beams": 30,
        "num_return_sequences": 30,
        **AS_DICT,
    }
    model = optimize_for_inference(varied_model(), "int8")
    assert 2 * settings["num_beams"] >= model.config.target_vocab_size
    all_tokens = model.generate(**source([5, 3]), **settings)
    (weights,) = model.inference_engine.packed.values()
    weights.target_vocab_size = 10**6  # the candidates of each beam are sorted first
    sorted_first = model.generate(**source([5, 3]), **settings)
    assert all_tokens.sequences.equal(sorted_first.sequences)
    assert_near(all_tokens.sequences_scores, sorted_first.sequences_scores, 1e-6)


def forget_library() -> None:
    c_kernels.library.cache_clear()
    c_kernels._functions.cache_clear()


@pytest.mark.parametrize("lack", ["no compiler", "a compiler that fails"])
@torch.no_grad()
def test_int8_without_a_compiler_computes_with_torch(
    lack: str,
    decoders: list[type],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="no such flag")

    def scores() -> Tensor:
        model = optimize_for_inference(varied_model(), "int8")
        return model.generate(
            **source([5, 3]),
            max_new_tokens=8,
            num_beams=2,
            **AS_DICT,
        ).sequences_scores

    compiled = scores()
    with monkeypatch.context() as patch:
        forget_library()
        patch.setattr(c_kernels, "library_name", lambda: "none.so")
        if lack == "no compiler":
            patch.setattr(c_compiler.shutil, "which", lambda name: None)
        else:
            patch.setattr(c_compiler.subprocess, "run", fail)
        plain = scores()
    forget_library()
    assert decoders == [Int8Decoder, PackedDecoder]
    assert_near(compiled, plain, 0.1)


@torch.no_grad()
def test_int8_translates_sources_without_tokens() -> None:
    model = optimize_for_inference(varied_model(), "int8")
    ids = torch.full((2, 3), PAD + 4)
    for second in ([0, 0, 0], [0, 1, 1]):
        mask = torch.tensor([[0, 0, 0], second])
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=4,
            **AS_DICT,
        )
        assert output.sequences_scores.isfinite().all()


@torch.no_grad()
def test_default_dtype_changes_no_int8_logits() -> None:
    model = tiny_model(3)
    ids, mask = sources(5, 2, 7)

    def states() -> Tensor:
        return Int8Weights(model).encode(ids, mask).last_hidden_state

    before = torch.get_default_dtype()
    expected = states()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert states().equal(expected)
    finally:
        torch.set_default_dtype(before)
