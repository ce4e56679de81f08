"""SimCut: the formula in NumPy, its derivatives, and the same update however a batch is split."""

from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer import VanillaTransformerTrainingArguments as Arguments
from hf_vanilla_transformer import loss_vanilla_transformer as losses
from hf_vanilla_transformer.training.objectives import simcut
from hf_vanilla_transformer.training.objectives.simcut import SimCut
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import (
    EOS,
    START,
    assert_near,
    assert_same_gradients,
    gradients,
    tiny_model,
    translation_batch,
)
from tests.trainer_helpers import (
    SAVING,
    fixed_second_pass,
    flat,
    make_trainer,
    numpy_log_softmax,
    random_pairs,
    relative_error,
    simcut_update,
    trained,
)


def numpy_loss(logits: Tensor, labels: Tensor, smoothing: float, alpha: float) -> float:
    """The sum over positions, term by term as the paper writes it, in float64."""
    log_p, log_q = numpy_log_softmax(logits.detach().double().numpy()).reshape(2, -1, logits.shape[-1])
    total = 0.0
    for i, label in enumerate(labels.flatten().tolist()):
        if label == -100:
            continue
        target = np.full(logits.shape[-1], smoothing / logits.shape[-1])
        target[label] += 1 - smoothing
        total -= target @ log_p[i]
        total += alpha * (np.exp(log_p[i]) @ (log_p[i] - log_q[i]))
    return total


def positions(dtype: torch.dtype = torch.float32) -> tuple[Tensor, torch.nn.Linear, Tensor]:
    """Hidden states (6, 7, D) of two passes, an output layer, and labels (6, 7), equal in both halves."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 7, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 13, (3, 7))
    labels[0, 3:] = labels[2, 0] = -100
    return hidden, torch.nn.Linear(8, 13, dtype=dtype), torch.cat([labels, labels])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four positions, differentiated three at a time: several chunks, the last one not full."""
    for name in ("CPU_CHUNK", "CPU_HALF_CHUNK"):
        monkeypatch.setattr(losses, name, 2 * 4 * 13 + 5)
    monkeypatch.setattr(simcut, "CPU_CACHE", 3 * 13)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [3.0, 0.7])
@pytest.mark.parametrize("items", [None, 50])
def test_loss_matches_the_paper(alpha: float, smoothing: float, items: int | None) -> None:
    hidden, lm_head, labels = positions()
    logits = lm_head(hidden)
    tokens = items or int((labels[:3] != -100).sum())
    expected = numpy_loss(logits, labels[:3], smoothing, alpha) / tokens
    cross_entropy = numpy_loss(logits, labels[:3], 0.0, alpha=0.0) / tokens
    for given in (logits, None):
        loss, plain = SimCut(alpha)(hidden, given, lm_head, labels, smoothing, items)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert plain.item() == pytest.approx(cross_entropy, rel=1e-6)
        assert not plain.requires_grad


@pytest.mark.usefixtures("small_chunks")
def test_fused_loss_has_the_derivatives_of_the_formula() -> None:
    results = []
    for fused in (True, False):
        hidden, lm_head, labels = positions()
        logits = None if fused else lm_head(hidden)
        loss, _ = SimCut()(hidden, logits, lm_head, labels, 0.1, None)
        loss.backward()
        results.append({"hidden": hidden.grad, "weight": lm_head.weight.grad, "bias": lm_head.bias.grad})
    assert_same_gradients(*results, tolerance=1e-6)


def test_loss_has_no_detached_term() -> None:
    # against finite differences: a detached target would be missing in the derivative
    hidden, lm_head, labels = positions(torch.float64)
    lm_head.requires_grad_(False)
    counted = labels[:3] != -100

    def loss(states: Tensor) -> Tensor:
        log_p, log_q = (half.log_softmax(-1) for half in lm_head(states).chunk(2))
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)[counted].sum()
        return 3.0 * divergence - log_p[counted].gather(1, labels[:3][counted][:, None]).sum()

    (expected,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.autograd.gradcheck(loss, hidden)
    result, _ = SimCut()(hidden, None, lm_head, labels, 0.0, 1)
    (actual,) = torch.autograd.grad(result, hidden)
    assert_near(actual, expected, 1e-5)


def test_fused_loss_in_bfloat16_is_near_float32() -> None:
    hidden, lm_head, labels = positions()
    expected, _ = SimCut()(hidden, None, lm_head, labels, 0.1, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = SimCut()(hidden, None, lm_head, labels, 0.1, None)
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=2e-2)


def test_embeddings_of_the_second_pass_only_are_zeroed() -> None:
    model, batch = tiny_model(), translation_batch([9, 4, 30], [5, 12, 30])
    inputs = SimCut(probability=0.4).inputs(model, batch)
    assert inputs["input_ids"] is None and inputs["decoder_input_ids"] is None
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    for name, ids, stack in (
        ("inputs_embeds", batch["input_ids"], model.model.encoder),
        ("decoder_inputs_embeds", target, model.model.decoder),
    ):
        first, second = inputs[name].chunk(2)
        assert torch.equal(first, stack.embed_tokens(ids))
        zeroed = second.eq(0).all(dim=-1)
        assert torch.equal(second[~zeroed], first[~zeroed])
        kept = ids.eq(EOS) if name == "inputs_embeds" else ids.eq(START)
        assert not zeroed[kept].any()
        assert 0.2 < zeroed[~kept].float().mean() < 0.6
    assert torch.equal(inputs["labels"], torch.cat([batch["labels"]] * 2))
    assert torch.equal(inputs["attention_mask"], torch.cat([batch["attention_mask"]] * 2))


@pytest.mark.parametrize("skip_logits", [True, False])
def test_loss_through_the_model_has_the_gradients_of_the_formula(skip_logits: bool) -> None:
    model, batch = tiny_model(label_smoothing=0.1, lm_head_bias=True).train(), translation_batch([9, 4], [5, 12])
    with fixed_second_pass():
        inputs = SimCut().inputs(model, batch)
        objective = inputs.pop("objective")
        model.zero_grad()
        states = model.model(**{name: each for name, each in inputs.items() if name != "labels"}).last_hidden_state
        loss, _ = objective.from_logits(model.lm_head(states), batch["labels"], 0.1)
        (loss / batch["labels"].ne(-100).sum()).backward()
        expected = {name: each.grad.clone() for name, each in model.named_parameters()}
        _, actual = gradients(model, **SimCut().inputs(model, batch), skip_logits=skip_logits)
    assert_same_gradients(actual, expected)


def test_update_is_the_same_in_1_or_8_batches(tmp_path: Path) -> None:
    whole = simcut_update(32, 1, tmp_path)
    assert whole.norm() > 0.1
    assert relative_error(simcut_update(4, 8, tmp_path), whole) <= 1e-5


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_halves_have_the_loss_and_the_gradients_of_the_batch(pairs: int) -> None:
    model, batch = (
        tiny_model(label_smoothing=0.1).train(),
        translation_batch([9, 4, 7, 5, 6][:pairs], [4, 8, 6, 5, 3][:pairs]),
    )
    batch["labels"][pairs - 1 :] = -100  # a pair that only fills up the batch
    tokens = batch["labels"].ne(-100).sum().clamp(min=1)
    with fixed_second_pass():
        expected = gradients(model, **SimCut().inputs(model, batch), num_items_in_batch=tokens)
        loss = 0.0
        model.zero_grad()
        parts = simcut.halves(batch)
        for part in parts:
            output = model(**SimCut().inputs(model, part), num_items_in_batch=tokens)
            output.loss.backward()
            loss += output.loss.item()
    assert [len(part["input_ids"]) for part in parts] == {1: [1], 2: [1, 1], 5: [3, 2]}[pairs]
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert_same_gradients({name: each.grad for name, each in model.named_parameters()}, expected[1])


def test_trainer_reads_a_batch_in_halves_once_simcut_starts(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Recording(VanillaTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {"simcut_alpha": 3.0, "consistency_start": 1, "max_steps": 2, "per_device_train_batch_size": 8}
    trained(tmp_path, random_pairs(16), kind=Recording, **settings)
    assert sizes == [8, 4, 4]


def test_simcut_starts_after_the_updates_that_it_is_told(tmp_path: Path) -> None:
    def weights(steps: int, alpha: float, resume: str | None = None, **settings: Any) -> Tensor:
        settings |= {"simcut_alpha": alpha, "max_steps": steps, **SAVING}
        folder = tmp_path / f"{steps}-{alpha}{resume or ''}"
        checkpoint = str(tmp_path / resume / "checkpoint-1") if resume else None
        return flat(trained(folder, random_pairs(16), tiny_model(dropout=0.1), resume=checkpoint, **settings).model)

    plain, late = weights(2, 0.0), weights(2, 3.0, consistency_start=1)
    assert weights(2, 4.0, consistency_start=2).equal(plain)
    assert not late.equal(plain)
    assert weights(2, 3.0, resume="2-0.0").equal(late), "as the plain run's first checkpoint resumed with it"


def test_simcut_is_off_in_evaluation(tmp_path: Path) -> None:
    settings = ({"simcut_alpha": 3.0}, {})
    trainers = [make_trainer(tmp_path, eval_dataset=random_pairs(8), **each) for each in settings]
    assert trainers[0].evaluate()["eval_loss"] == trainers[1].evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"simcut_alpha": 3.0, "teacher": ["x"]}, "simcut_alpha.*teacher=x"),
        ({"simcut_alpha": -1.0}, "simcut_alpha: must be"),
        ({"simcut_alpha": float("nan")}, "simcut_alpha: must be"),
        ({"simcut_alpha": 3.0, "label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"simcut_alpha": 3.0, "consistency_start": -1}, "consistency_start: must be"),
        ({"consistency_start": 100}, "consistency_start=100"),
    ],
)
def test_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arguments(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_simcut_refuses_a_foreign_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="simcut_alpha=3.0"):
        make_trainer(tmp_path, model=torch.nn.Linear(2, 2), simcut_alpha=3.0)


@pytest.fixture(autouse=True)
def one_precision() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_padding_is_masked_without_an_attention_mask(probability: float) -> None:
    model = tiny_model().train()
    batch = translation_batch([5, 2], [6, 4])
    found = []
    for given in (batch, {name: each for name, each in batch.items() if name != "attention_mask"}):
        torch.manual_seed(0)
        found.append(model(**SimCut(probability=probability).inputs(model, given)).loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_simcut_keeps_each_of_several_end_tokens() -> None:
    model = tiny_model(eos_token_id=[EOS, 7])
    batch = {"input_ids": torch.tensor([[5, 7, EOS, 1]]), "labels": torch.tensor([[5, EOS]])}
    embeddings = SimCut(probability=0.999).inputs(model, batch)["inputs_embeds"]
    assert embeddings[1, 1:3].equal(embeddings[0, 1:3]) and not embeddings[1, 0].any()
