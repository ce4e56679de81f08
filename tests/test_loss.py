"""The training loss (§5.4) against its definition in NumPy, whole and in chunks."""

from dataclasses import dataclass
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer import loss_vanilla_transformer as losses
from hf_vanilla_transformer.loss_vanilla_transformer import fused_translation_loss, translation_loss
from tests.model_helpers import (
    assert_near,
    assert_same_gradients,
    gradients,
    tiny_model,
    translation_batch,
)

SMOOTHING = [0.0, 0.1, 0.4]


def numpy_loss(logits: np.ndarray, labels: np.ndarray, smoothing: float) -> float:
    """The sum over tokens of -Σ_v q(v) log p(v), with q = (1 - ε) [v is the label] + ε / V."""
    total = 0.0
    for scores, label in zip(logits.astype(np.float64), labels, strict=True):
        if label == -100:
            continue
        scores -= scores.max()
        log_p = scores - np.log(np.exp(scores).sum())
        q = np.full(len(scores), smoothing / len(scores))
        q[label] += 1 - smoothing
        total -= float(q @ log_p)
    return total


def assert_loss(actual: Tensor, expected: Tensor | float, rel: float = 1e-6) -> None:
    wanted = expected.item() if isinstance(expected, Tensor) else expected
    assert actual.item() == pytest.approx(wanted, rel=rel)


@dataclass
class Positions:
    """An output layer, and what it reads."""

    hidden: Tensor  # (3, N / 3, D)
    weight: Tensor
    bias: Tensor | None
    labels: Tensor  # some are -100

    @property
    def leaves(self) -> list[Tensor]:
        return (
            [self.hidden, self.weight]
            if self.bias is None
            else [self.hidden, self.weight, self.bias]
        )

    @property
    def logits(self) -> Tensor:
        logits = self.hidden @ self.weight.T
        return logits if self.bias is None else logits + self.bias

    def plain(self, *settings: Any) -> Tensor:
        return translation_loss(self.logits, self.labels, *settings)

    def fused(self, *settings: Any) -> tuple[Tensor, Tensor]:
        return fused_translation_loss(
            self.hidden,
            self.weight,
            self.bias,
            self.labels,
            *settings,
        )


def positions(tokens: int = 21, d_model: int = 8, vocab_size: int = 13) -> Positions:
    labels = torch.randint(0, vocab_size, (3, tokens // 3))
    labels[0, 3:] = -100
    labels[2, 0] = -100
    return Positions(
        hidden=torch.randn(3, tokens // 3, d_model, requires_grad=True),
        weight=torch.randn(vocab_size, d_model, requires_grad=True),
        bias=torch.randn(vocab_size, requires_grad=True),
        labels=labels,
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four positions, differentiated three at a time: several chunks, the last one not full."""
    for name in ("CPU_CHUNK", "CPU_HALF_CHUNK"):
        monkeypatch.setattr(losses, name, 4 * 13 + 5)
    monkeypatch.setattr(losses, "CPU_CACHE", 3 * 13)


@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_translation_loss_matches_its_definition(smoothing: float) -> None:
    given = positions()
    logits = given.logits.detach().flatten(0, 1).numpy()
    labels = given.labels.flatten()
    total = numpy_loss(logits, labels.numpy(), smoothing)
    counts = {None: labels.ne(-100).sum().item(), 7: 7, torch.tensor(7): 7}
    for items, tokens in counts.items():
        assert_loss(given.plain(smoothing, items), total / tokens)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_fused_loss_equals_translation_loss(
    smoothing: float,
    items: int | None,
    with_bias: bool,
) -> None:
    given = positions()
    if not with_bias:
        given.bias = None
    plain = given.plain(smoothing, items)
    fused, nll = given.fused(smoothing, items)
    assert_loss(fused, plain)
    assert_loss(nll, given.plain(0.0, items))
    assert not nll.requires_grad
    # A factor, as a gradient scaler applies.
    expected = torch.autograd.grad(3 * plain, given.leaves)
    found = torch.autograd.grad(3 * fused, given.leaves)
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted, 1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fused_loss_under_bfloat16_autocast(smoothing: float) -> None:
    given = positions(tokens=300, d_model=16)
    plain = given.plain(smoothing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, nll = given.fused(smoothing)
    assert fused.dtype == torch.float32
    assert_loss(fused, plain, rel=5e-3)
    assert_loss(nll, given.plain(), rel=5e-3)
    expected = torch.autograd.grad(plain, given.leaves)
    found = torch.autograd.grad(fused, given.leaves)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.usefixtures("small_chunks")
def test_fused_loss_of_extreme_logits_is_finite() -> None:
    given = positions()
    given.hidden = 500 * given.hidden
    given.bias = None
    plain = given.plain(0.1)
    fused, nll = given.fused(0.1)
    assert_loss(fused, plain)
    assert_loss(nll, given.plain())
    (expected,) = torch.autograd.grad(plain, given.weight)
    (found,) = torch.autograd.grad(fused, given.weight)
    assert_near(found, expected, 1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("fused", [True, False])
def test_loss_without_labels_is_zero(fused: bool) -> None:
    given = positions()
    given.labels.fill_(-100)
    loss = given.fused(0.1)[0] if fused else given.plain(0.1)
    loss.backward()
    assert loss.item() == 0
    assert given.hidden.grad.abs().max() == 0
    assert given.weight.grad.abs().max() == 0


def test_fused_loss_refuses_second_derivatives() -> None:
    given = positions()
    hidden = given.hidden.detach()

    def loss_of(states: Tensor) -> Tensor:
        given.hidden = states
        return given.fused(0.1)[0]

    def slope(states: Tensor) -> Tensor:
        return torch.func.grad(loss_of)(states).norm()

    given.weight = given.weight.detach()
    given.bias = given.bias.detach()
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        torch.func.grad(slope)(hidden)
    loss = loss_of(hidden.requires_grad_())
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        (loss + gradient.norm()).backward()  # a gradient penalty


# The loss of the model

BATCH = translation_batch([5, 3], [6, 4])


@pytest.mark.parametrize("places", [4, 8])
@pytest.mark.parametrize("training", [True, False])
def test_labels_and_inputs_of_different_lengths_are_refused(training: bool, places: int) -> None:
    """Places counted in one flat row would give each label the state of another one."""
    ids = torch.full((3, 6), 5)
    labels = torch.full((3, places), 6)
    labels[:, 4:] = -100
    with pytest.raises(ValueError, match=str(3 * places)):
        tiny_model().train(training)(
            input_ids=ids,
            decoder_input_ids=ids,
            labels=labels,
        )


@pytest.mark.parametrize("training", [True, False])
def test_labels_of_32_bits_have_the_loss_of_64(training: bool) -> None:
    model = tiny_model().train(training)
    labels = torch.tensor([[5, 6, 2], [7, 2, -100]])
    ids = torch.tensor([[8, 9], [9, 2]])
    expected = model(input_ids=ids, labels=labels).loss
    assert model(input_ids=ids.int(), labels=labels.int()).loss.equal(expected)


@pytest.mark.parametrize("skip_logits", [True, False])
def test_torch_func_grad_of_the_model_equals_backward(skip_logits: bool) -> None:
    model = tiny_model(label_smoothing=0.1, lm_head_bias=True).train()
    batch = {**BATCH, "skip_logits": skip_logits}

    def loss_with(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (), batch).loss

    actual = torch.func.grad(loss_with)(dict(model.named_parameters()))
    _, expected = gradients(model, **batch)
    assert_same_gradients(actual, expected, 1e-6)


@pytest.mark.parametrize(("training", "smoothing"), [(True, 0.3), (False, 0.0)])
@torch.no_grad()
def test_label_smoothing_is_active_in_training_only(training: bool, smoothing: float) -> None:
    model = tiny_model(label_smoothing=0.3, lm_head_bias=True)
    logits = model(**BATCH).logits.flatten(0, 1).numpy()
    expected = numpy_loss(logits, BATCH["labels"].flatten().numpy(), smoothing)
    assert_loss(model.train(training)(**BATCH).loss, expected / 10, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("skip_logits", [True, False])
def test_nll_loss_is_returned_in_training_only(smoothing: float, skip_logits: bool) -> None:
    model = tiny_model(label_smoothing=smoothing)
    evaluated = model(**BATCH)
    assert evaluated.nll_loss is None
    trained = model.train()(**BATCH, skip_logits=skip_logits)
    kept = trained.nll_loss.item()
    assert_loss(trained.nll_loss, evaluated.loss)
    assert not trained.nll_loss.requires_grad
    trained.loss.mul_(2)  # as `Trainer` does in two processes
    assert trained.nll_loss.item() == kept


def test_skip_logits_decides_whether_logits_are_returned() -> None:
    model = tiny_model().train()
    with_logits = model(**BATCH, skip_logits=False)
    assert with_logits.logits.shape == (2, 6, 40)
    assert_loss(model(**BATCH).loss, with_logits.loss)
    assert model(**BATCH, skip_logits=True).logits is None
    assert model.eval()(**BATCH).logits is not None
    assert model(**BATCH, skip_logits=True).logits is None


def test_output_layer_of_an_adapter_is_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = tiny_model(tie_word_embeddings=False)
    adapted = Doubled(32, 40, bias=False)
    adapted.weight = model.lm_head.weight
    model.lm_head = adapted
    trained = model.train()(**BATCH).loss
    assert_loss(trained, model.eval()(**BATCH).loss)


def test_output_layer_that_is_offloaded_is_called() -> None:
    model = tiny_model(tie_word_embeddings=False).train()
    expected = model(**BATCH).loss
    accelerate.cpu_offload(model.lm_head, execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert_loss(model(**BATCH).loss, expected)
