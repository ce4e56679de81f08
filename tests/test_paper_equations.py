"""The model against the paper's equations, as tests/paper.py restates them."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import get_scheduler

from hf_vanilla_transformer.attention_vanilla_transformer import (
    VanillaTransformerAttention,
    eager_attention_forward,
)
from hf_vanilla_transformer.configuration_vanilla_transformer import (
    LAYER_NORM_POSITIONS,
    POSITION_ENCODING_TYPES,
)
from hf_vanilla_transformer.layers_vanilla_transformer import (
    VanillaTransformerEncoderLayer,
    dropout,
    sinusoidal_positions,
)
from hf_vanilla_transformer.loss_vanilla_transformer import shift_right
from hf_vanilla_transformer.masks_vanilla_transformer import token_positions
from tests.model_helpers import (
    assert_near,
    gradients,
    padded,
    randomise,
    sentences,
    tiny_config,
    tiny_model,
)
from tests.paper import (
    paper_add_and_norm,
    paper_attention,
    paper_ffn,
    paper_multi_head,
    paper_position,
    paper_translation,
    weights_of,
)

LAYOUTS = [name for name in POSITION_ENCODING_TYPES if name.startswith("sinusoidal")]
FAIRSEQ = "sinusoidal_fairseq"


def assert_as_paper(
    actual: Tensor,
    expected: np.ndarray,
    tolerance: float = 1e-6,
) -> None:
    assert_near(actual, torch.from_numpy(expected), tolerance)


# §3.5, positions


@pytest.mark.parametrize(
    ("layout", "d_model"),
    [
        (layout, size)
        for layout in LAYOUTS
        for size in (1, 2, 4, 5, 8, 9, 512)
        if layout != FAIRSEQ or size > 2
    ],
)
def test_sinusoidal_positions_match_the_paper(layout: str, d_model: int) -> None:
    positions = [0, 1, 2, 17, 999, 5000, 1_000_000]
    actual = sinusoidal_positions(torch.tensor([positions]), d_model, layout)
    expected = np.stack([paper_position(pos, d_model, layout) for pos in positions])
    assert actual.dtype == torch.float32
    assert_as_paper(actual[0], expected, 1e-7)


@pytest.mark.parametrize(("d_model", "expected"), [(1, [0.0]), (2, [math.sin(3), math.cos(3)])])
def test_small_positions_of_fairseq(d_model: int, expected: list[float]) -> None:
    """An odd index has no pair of a sine and a cosine."""
    actual = sinusoidal_positions(torch.tensor([[3]]), d_model, FAIRSEQ)
    assert_near(actual[0, 0], torch.tensor(expected), 1e-7)


@pytest.mark.parametrize("pad", [1, 4])
def test_positions_of_fairseq_count_on_from_its_padding(pad: int) -> None:
    model = tiny_model(
        position_encoding_type=FAIRSEQ,
        d_model=36,
        pad_token_id=pad,
    )
    embedding = model.model.encoder.embed(torch.zeros(1, 5, 36), torch.arange(3, 8)[None])
    expected = np.stack([paper_position(pad + 1 + number, 36, FAIRSEQ) for number in range(3, 8)])
    assert_as_paper(embedding[0], expected)


def test_token_positions_skip_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    numbers = token_positions(torch.zeros(4, 4, 8), mask)
    assert numbers[0].tolist() == [0, 1, 2, 3]
    assert numbers[1, 2:].tolist() == [0, 1]
    assert numbers[2, :2].tolist() == [0, 1]
    assert numbers.min() == 0


# §3.2, attention


@pytest.mark.parametrize("masked", [False, True])
def test_eager_attention_matches_equation_1(masked: bool) -> None:
    q = torch.randn(2, 3, 4, 6)  # batch, heads, queries, d_k
    k = torch.randn(2, 3, 5, 6)  # batch, heads, keys, d_k
    v = torch.randn(2, 3, 5, 7)  # batch, heads, keys, d_v
    visible = torch.rand(2, 1, 4, 5) > 0.4
    visible[..., 0] = True
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    output, weights = eager_attention_forward(
        torch.nn.Module().eval(),
        q,
        k,
        v,
        mask if masked else None,
        scaling=6**-0.5,
    )
    assert output.shape == (2, 4, 3, 7)
    assert_near(weights.sum(dim=-1), torch.ones(2, 3, 4), 1e-6)
    for b in range(2):
        for h in range(3):
            expected = paper_attention(
                q[b, h].double().numpy(),
                k[b, h].double().numpy(),
                v[b, h].double().numpy(),
                visible[b, 0].numpy() if masked else None,
            )
            assert_as_paper(output[b, :, h], expected)


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(None, None), (3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_multi_head_attention_matches_the_paper(backend, bias, head_dim, value_head_dim):
    config = tiny_config(
        attention_bias=bias,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
    )
    config._attn_implementation = backend
    attention = randomise(
        VanillaTransformerAttention(config, 4, is_causal=False, layer_idx=0)
    ).eval()
    assert (attention.q_proj.bias is not None) == bias
    w = {f"a.{name}": value for name, value in weights_of(attention).items()}
    x = torch.randn(2, 3, 32)
    y = torch.randn(2, 5, 32)
    for source in (None, y):
        output, _ = attention(x, key_value_states=source)
        keys = x if source is None else source
        for actual, queries, read in zip(output, x, keys, strict=True):
            expected = paper_multi_head(
                w,
                "a",
                queries.double().numpy(),
                read.double().numpy(),
                heads=4,
            )
            assert_as_paper(actual, expected)


# §3.1, §3.3 and §3.4, layers and the model


@pytest.mark.parametrize("position", LAYER_NORM_POSITIONS)
def test_encoder_layer_matches_the_paper(position: str) -> None:
    config = tiny_config(encoder_ffn_dim=19, layer_norm_position=position)
    layer = randomise(VanillaTransformerEncoderLayer(config, 0)).eval()
    w = {f"l.{name}": value for name, value in weights_of(layer).items()}
    x = torch.randn(2, 3, 32)
    numbers = x.double().numpy()
    assert_as_paper(layer.feed_forward(x), paper_ffn(w, "l", numbers))
    expected = paper_add_and_norm(
        w,
        "l.self_attn_layer_norm",
        numbers,
        lambda inner: paper_ffn(w, "l", inner),
        config,
    )
    actual = layer.add_and_norm(
        x,
        layer.feed_forward,
        layer.self_attn_layer_norm,
    )
    assert_as_paper(actual, expected, 2e-6)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "encoder_layers": 1,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "position_encoding_type": "sinusoidal_split",
            "attention_bias": False,
        },
        {
            "decoder_vocab_size": 31,
            "share_encoder_decoder_embeddings": False,
            "tie_word_embeddings": False,
            "lm_head_bias": True,
            "head_dim": 5,
            "value_head_dim": 11,
            "d_model": 33,
        },
        {
            "position_encoding_type": FAIRSEQ,
            "activation_function": "gelu",
            "scale_embedding": False,
            "final_layer_norm": True,
            "layer_norm_eps": 1e-3,
        },
        {
            "layer_norm_position": "pre",
            "encoder_layers": 3,
            "decoder_layers": 1,
            "layer_norm_eps": 1e-3,
        },
    ],
)
def test_model_matches_the_paper(backend: str, fields: dict) -> None:
    model = tiny_model(attn_implementation=backend, **fields).double()
    sources = sentences([7, 3, 5])
    targets = sentences(
        [4, 6, 1],
        vocab_size=model.config.target_vocab_size,
        seed=1,
    )
    with torch.no_grad():
        output = model(
            input_ids=padded(sources),
            labels=padded(targets, -100),
            num_items_in_batch=1,
        )
    loss = 0.0
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        paper = paper_translation(model, source, target)
        assert_as_paper(output.encoder_last_hidden_state[i, : len(source)], paper.memory)
        assert_as_paper(output.logits[i, : len(target)], paper.logits, 2e-6)
        loss += paper.loss
    # the model takes its loss in float32
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("position", LAYER_NORM_POSITIONS)
def test_gradients_match_finite_differences_of_the_paper(position: str) -> None:
    model = tiny_model(
        encoder_layers=1,
        decoder_layers=1,
        lm_head_bias=True,
        layer_norm_position=position,
    ).double()
    source, target = sentences([5, 4])
    _, derivatives = gradients(
        model,
        input_ids=torch.tensor([source]),
        labels=torch.tensor([target]),
        num_items_in_batch=1,
    )

    def loss_beside(weight: Tensor, step: Tensor) -> float:
        with torch.no_grad():
            weight += step
            loss = paper_translation(model, source, target).loss
            weight -= step
        return loss

    for name, weight in model.named_parameters():
        direction = torch.randn_like(weight)
        direction /= direction.norm()
        change = loss_beside(weight, 1e-5 * direction) - loss_beside(weight, -1e-5 * direction)
        expected = (derivatives[name] * direction).sum().item()
        assert change / 2e-5 == pytest.approx(expected, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("scaled", "factor"), [(True, math.sqrt(32)), (False, 1.0)])
def test_embedding_scale_is_sqrt_d_model(scaled: bool, factor: float) -> None:
    ids = torch.tensor([[5, 6, 7]])
    positions = torch.arange(3)[None]
    encoder = tiny_model(scale_embedding=scaled).model.encoder
    embedded = encoder.embed(encoder.look_up(ids, None), positions)
    expected = encoder.embed_tokens.weight[ids].double() * factor + sinusoidal_positions(
        positions, 32
    )
    assert_near(embedded, expected, 1e-6)


def test_shift_right_moves_labels_by_one_position() -> None:
    labels = torch.tensor([[5, 6, 2, -100], [7, 8, 9, 2]])
    before = labels.clone()
    assert shift_right(labels, 0, 1).tolist() == [[0, 5, 6, 2], [0, 7, 8, 9]]
    assert shift_right(torch.tensor([[5, -100, -100]]), 0, 1).tolist() == [[0, 5, 1]]
    assert labels.equal(before)


# §5.3, the schedule


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (128, 60)])
def test_schedule_of_the_paper_is_inverse_sqrt(d_model: int, warmup: int) -> None:
    peak = d_model**-0.5 * warmup**-0.5
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = get_scheduler(
        "inverse_sqrt",
        optimizer,
        num_warmup_steps=warmup,
    )
    for step in range(1, 3 * warmup):
        optimizer.step()
        scheduler.step()
        # Eq. 3
        expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert scheduler.get_last_lr() == [pytest.approx(expected, rel=1e-12)]


# §5.4, dropout, with random numbers of our own


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_drops_its_share_and_scales_the_rest(p: float, dtype: torch.dtype) -> None:
    n = 400_003  # no multiple of anything
    y = dropout(torch.full((n,), 2.0, dtype=dtype), p, training=True)
    assert y.dtype == dtype
    dropped = (y == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n))
    (kept,) = y[y != 0].double().unique().tolist()
    assert kept == pytest.approx(2 / (1 - p), rel=1e-2 if dtype is torch.bfloat16 else 2e-4)
    assert y.double().mean().item() == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("distance", [1, 2, 3, 4])
def test_dropout_draws_are_independent_of_their_neighbours(distance: int) -> None:
    # Four 16-bit draws come from one random int64.
    kept = dropout(torch.ones(400_000), 0.5, training=True).ne(0).double()
    together = (kept[:-distance] * kept[distance:]).mean().item()
    assert together == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 400_000))


def test_dropout_follows_the_seed() -> None:
    def draws(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [dropout(torch.ones(3, 5, 7), 0.4, training=True) for _ in range(2)]

    first, second = draws(1)
    assert not first.equal(second)
    assert first.equal(draws(1)[0])
    assert not first.equal(draws(2)[0])


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(5, 9, 3, requires_grad=True)
    y = dropout(x.transpose(0, 1), 0.4, training=True)
    y.sum().backward()
    by_mask = (x.detach() * x.grad).transpose(0, 1)
    assert_near(by_mask, y.detach(), 1e-6)
    assert 0 < (x.grad == 0).sum() < x.numel()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.1)])
def test_dropout_with_a_residual_equals_their_sum(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(4, 6, 5, requires_grad=True)
    y = torch.randn(4, 6, 5).to(dtype).requires_grad_()
    torch.manual_seed(3)
    expected = x + dropout(y.float(), 0.3, training=True)
    torch.manual_seed(3)
    actual = dropout(y, 0.3, training=True, residual=x)
    assert_near(actual, expected, 1e-6)
    found, wanted = (torch.autograd.grad((sums**2).sum(), [x, y]) for sums in (actual, expected))
    for gradient, other in zip(found, wanted, strict=True):
        assert_near(gradient.float(), other.float(), tolerance)
    assert dropout(y, 0.3, training=False, residual=x).equal(x + y)


def test_dropout_is_applied_where_the_paper_applies_it() -> None:
    # §5.4: on the sums of embeddings and positions, and on the output of each sub-layer before it is added.
    encoder = tiny_model(dropout=0.5, encoder_layers=1).train().model.encoder
    ids = padded(sentences([6, 6]))
    sums = encoder.embed(encoder.look_up(ids, None), torch.arange(6)[None])
    assert (sums == 0).double().mean().item() == pytest.approx(0.5, abs=0.15)
    (layer,) = encoder.layers
    x = torch.randn(2, 6, 32)
    sub = torch.full((2, 6, 32), 1000.0)
    for layer.pre_norm in (False, True):
        total = layer.add_and_norm(
            x,
            lambda _: sub,
            torch.nn.Identity(),
        )  # type: ignore[arg-type]
        assert sorted((total - x).round().unique().tolist()) == [0.0, 2000.0]
