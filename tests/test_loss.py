"""The training loss (§5.4) against its definition in NumPy, whole and in chunks."""

import accelerate
import numpy as np
import pytest
import torch

from hf_vanilla_transformer import loss_vanilla_transformer as losses
from hf_vanilla_transformer.loss_vanilla_transformer import fused_translation_loss, translation_loss
from tests.model_helpers import assert_near, assert_same_gradients, gradients, tiny_model, translation_batch

SMOOTHING = [0.0, 0.1, 0.4]


def numpy_loss(logits: np.ndarray, labels: np.ndarray, smoothing: float) -> float:
    """The sum over tokens of -Σ_v q(v) log p(v), with q = (1 - ε) [v is the label] + ε / V."""
    total = 0.0
    for scores, label in zip(logits.astype(np.float64), labels, strict=True):
        if label == -100:
            continue
        log_p = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        q = np.full(len(scores), smoothing / len(scores))
        q[label] += 1 - smoothing
        total -= float(q @ log_p)
    return total


def positions(tokens: int = 21, d_model: int = 8, vocab_size: int = 13) -> tuple[torch.Tensor, ...]:
    """Hidden states (3, tokens / 3, D), output matrix, bias, labels with some -100."""
    hidden = torch.randn(3, tokens // 3, d_model, requires_grad=True)
    weight = torch.randn(vocab_size, d_model, requires_grad=True)
    bias = torch.randn(vocab_size, requires_grad=True)
    labels = torch.randint(0, vocab_size, (3, tokens // 3))
    labels[0, 3:] = -100
    labels[2, 0] = -100
    return hidden, weight, bias, labels


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four positions, differentiated three at a time: several chunks, the last one not full."""
    for name in ("CPU_CHUNK", "CPU_HALF_CHUNK"):
        monkeypatch.setattr(losses, name, 4 * 13 + 5)
    monkeypatch.setattr(losses, "CPU_CACHE", 3 * 13)


@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_translation_loss_matches_its_definition(smoothing: float) -> None:
    hidden, weight, bias, labels = positions()
    logits = hidden @ weight.T + bias
    tokens = int((labels != -100).sum())
    expected = numpy_loss(logits.detach().flatten(0, 1).numpy(), labels.flatten().numpy(), smoothing)
    assert translation_loss(logits, labels, smoothing).item() == pytest.approx(expected / tokens, rel=1e-6)
    assert translation_loss(logits, labels, smoothing, 7).item() == pytest.approx(expected / 7, rel=1e-6)
    assert translation_loss(logits, labels, smoothing, torch.tensor(7)).item() == pytest.approx(expected / 7, rel=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_fused_loss_equals_translation_loss(smoothing: float, items: int | None, with_bias: bool) -> None:
    hidden, weight, bias, labels = positions()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    logits = hidden @ weight.T + (bias if with_bias else 0)
    plain = translation_loss(logits, labels, smoothing, items)
    fused, nll = fused_translation_loss(hidden, weight, bias if with_bias else None, labels, smoothing, items)
    assert fused.item() == pytest.approx(plain.item(), rel=1e-6)
    assert nll.item() == pytest.approx(translation_loss(logits, labels, 0.0, items).item(), rel=1e-6)
    assert not nll.requires_grad
    # A factor, as a gradient scaler applies.
    expected = torch.autograd.grad(3 * plain, leaves)
    for actual, wanted in zip(torch.autograd.grad(3 * fused, leaves), expected, strict=True):
        assert_near(actual, wanted, 1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fused_loss_under_bfloat16_autocast(smoothing: float) -> None:
    hidden, weight, bias, labels = positions(tokens=300, d_model=16)
    leaves = [hidden, weight, bias]
    expected = translation_loss(hidden @ weight.T + bias, labels, smoothing)
    expected_gradients = torch.autograd.grad(expected, leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, nll = fused_translation_loss(hidden, weight, bias, labels, smoothing)
    assert fused.dtype == torch.float32
    assert fused.item() == pytest.approx(expected.item(), rel=5e-3)
    assert nll.item() == pytest.approx(translation_loss(hidden @ weight.T + bias, labels).item(), rel=5e-3)
    for actual, wanted in zip(torch.autograd.grad(fused, leaves), expected_gradients, strict=True):
        assert actual.dtype == torch.float32
        assert ((actual - wanted).norm() / wanted.norm()).item() < 1e-2


@pytest.mark.parametrize("fused", [True, False])
def test_loss_without_labels_is_zero(fused: bool) -> None:
    hidden, weight, bias, labels = positions()
    labels = torch.full_like(labels, -100)
    if fused:
        loss, _ = fused_translation_loss(hidden, weight, bias, labels, 0.1)
    else:
        loss = translation_loss(hidden @ weight.T + bias, labels, 0.1)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("places", [4, 8])
@pytest.mark.parametrize("training", [True, False])
def test_labels_and_inputs_of_different_lengths_are_refused(training: bool, places: int) -> None:
    """Places counted in one flat row would give each label the state of another one."""
    ids = torch.full((3, 6), 5)
    labels = torch.full((3, places), 6)
    labels[:, 4:] = -100
    with pytest.raises(ValueError, match=str(3 * places)):
        tiny_model().train(training)(input_ids=ids, decoder_input_ids=ids, labels=labels)


@pytest.mark.parametrize("training", [True, False])
def test_labels_of_32_bits_have_the_loss_of_64(training: bool) -> None:
    model = tiny_model().train(training)
    labels = torch.tensor([[5, 6, 2], [7, 2, -100]])
    ids = torch.tensor([[8, 9], [9, 2]])
    losses = [model(input_ids=ids.to(dtype), labels=labels.to(dtype)).loss for dtype in (torch.int32, torch.int64)]
    assert losses[0].equal(losses[1])


@pytest.mark.parametrize("skip_logits", [True, False])
def test_torch_func_grad_of_the_model_equals_backward(skip_logits: bool) -> None:
    model = tiny_model(label_smoothing=0.1, lm_head_bias=True).train()
    batch = {**translation_batch([5, 3], [6, 4]), "skip_logits": skip_logits}
    weights = dict(model.named_parameters())
    actual = torch.func.grad(lambda given: torch.func.functional_call(model, given, (), batch).loss)(weights)
    assert_same_gradients(actual, gradients(model, **batch)[1], 1e-6)


def test_fused_loss_refuses_second_derivatives() -> None:
    hidden, weight, bias, labels = (each.detach() for each in positions())

    def first(hidden: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda h: fused_translation_loss(h, weight, bias, labels, 0.1)[0])(hidden).norm()

    with pytest.raises(RuntimeError, match="skip_logits=False"):
        torch.func.grad(first)(hidden)
    hidden.requires_grad_()
    loss, _ = fused_translation_loss(hidden, weight, bias, labels, 0.1)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        (loss + gradient.norm()).backward()  # a gradient penalty


def test_label_smoothing_is_active_in_training_only() -> None:
    model = tiny_model(label_smoothing=0.3, lm_head_bias=True)
    batch = translation_batch([5, 3], [6, 4])
    with torch.no_grad():
        logits = model(**batch).logits
        losses_by_mode = {training: model.train(training)(**batch).loss.item() for training in (True, False)}
    flat, labels = logits.flatten(0, 1).numpy(), batch["labels"].flatten().numpy()
    assert losses_by_mode[True] == pytest.approx(numpy_loss(flat, labels, 0.3) / 10, rel=1e-5)
    assert losses_by_mode[False] == pytest.approx(numpy_loss(flat, labels, 0.0) / 10, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("skip_logits", [True, False])
def test_nll_loss_is_returned_in_training_only(smoothing: float, skip_logits: bool) -> None:
    model = tiny_model(label_smoothing=smoothing)
    batch = translation_batch([5, 3], [6, 4])
    evaluated = model(**batch)
    trained = model.train()(**batch, skip_logits=skip_logits)
    assert evaluated.nll_loss is None
    assert trained.nll_loss.item() == pytest.approx(evaluated.loss.item(), rel=1e-6)
    assert not trained.nll_loss.requires_grad
    kept = trained.nll_loss.item()
    trained.loss.mul_(2)  # as `Trainer` does in two processes
    assert trained.nll_loss.item() == kept


@pytest.mark.usefixtures("small_chunks")
def test_fused_loss_of_extreme_logits_is_finite() -> None:
    hidden, weight, _, labels = positions()
    plain = translation_loss(500 * hidden @ weight.T, labels, 0.1)
    fused, nll = fused_translation_loss(500 * hidden, weight, None, labels, 0.1)
    assert fused.item() == pytest.approx(plain.item(), rel=1e-6)
    assert nll.item() == pytest.approx(translation_loss(500 * hidden @ weight.T, labels).item(), rel=1e-6)
    expected = torch.autograd.grad(plain, weight)[0]
    assert_near(torch.autograd.grad(fused, weight)[0], expected, 1e-5 * expected.abs().max().item())


def test_skip_logits_decides_whether_logits_are_returned() -> None:
    model = tiny_model().train()
    batch = translation_batch([5, 3], [6, 4])
    with_logits = model(**batch, skip_logits=False)
    assert with_logits.logits.shape == (2, 6, 40)
    assert model(**batch).loss.item() == pytest.approx(with_logits.loss.item(), rel=1e-6)
    assert model(**batch, skip_logits=True).logits is None
    assert model.eval()(**batch).logits is not None
    assert model(**batch, skip_logits=True).logits is None


def test_output_layer_of_an_adapter_is_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny_model(tie_word_embeddings=False)
    batch = translation_batch([5, 3], [6, 4])
    adapted = Doubled(32, 40, bias=False)
    adapted.weight = model.lm_head.weight
    model.lm_head = adapted
    trained, evaluated = model.train()(**batch).loss.item(), model.eval()(**batch).loss.item()
    assert trained == pytest.approx(evaluated, rel=1e-6)


def test_output_layer_that_is_offloaded_is_called() -> None:
    model = tiny_model(tie_word_embeddings=False).train()
    batch = translation_batch([5, 3], [6, 4])
    expected = model(**batch).loss.item()
    accelerate.cpu_offload(model.lm_head, execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
