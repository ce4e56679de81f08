"""SimCut and R-Drop: the formulas in NumPy, their derivatives, and the same update however a batch is split."""

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
from hf_vanilla_transformer.training.trainer.objectives import consistency
from hf_vanilla_transformer.training.trainer.objectives.consistency import (
    ConsistencyObjective,
    crossconst,
    r_drop,
    simcut,
)
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
    consistency_update,
    fixed_second_pass,
    flat,
    make_trainer,
    numpy_log_softmax,
    random_pairs,
    relative_error,
    trained,
)

OBJECTIVES = {"simcut": simcut(), "r_drop": r_drop(), "other": ConsistencyObjective(0.7, 0.3, 0.2, 0.9)}
both = pytest.mark.parametrize("method", ["simcut", "r_drop"])


def numpy_loss(logits: Tensor, labels: Tensor, smoothing: float, objective: ConsistencyObjective) -> float:
    """The sum over positions, term by term as the papers write it, in float64."""
    log_p, log_q = numpy_log_softmax(logits.detach().double().numpy()).reshape(2, -1, logits.shape[-1])
    p, q, total = np.exp(log_p), np.exp(log_q), 0.0
    for i, label in enumerate(labels.flatten().tolist()):
        if label == -100:
            continue
        target = np.full(logits.shape[-1], smoothing / logits.shape[-1])
        target[label] += 1 - smoothing
        total -= target @ log_p[i] + objective.second_cross_entropy * (target @ log_q[i])
        total += objective.alpha * objective.forward * (p[i] @ (log_p[i] - log_q[i]))
        total += objective.alpha * objective.reverse * (q[i] @ (log_q[i] - log_p[i]))
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
    monkeypatch.setattr(consistency, "CPU_CACHE", 3 * 13)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("items", [None, 50])
def test_consistency_loss_matches_the_papers(name: str, smoothing: float, items: int | None) -> None:
    hidden, lm_head, labels = positions()
    logits, objective = lm_head(hidden), OBJECTIVES[name]
    tokens = items or int((labels[:3] != -100).sum())
    expected = numpy_loss(logits, labels[:3], smoothing, objective) / tokens
    for given in (logits, None):
        loss, plain = objective(hidden, given, lm_head, labels, smoothing, items)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        cross_entropy = numpy_loss(logits, labels[:3], 0.0, ConsistencyObjective(0.0, 0.0, 0.0, 0.0)) / tokens
        assert plain.item() == pytest.approx(cross_entropy, rel=1e-6)
        assert not plain.requires_grad


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_fused_consistency_loss_has_the_derivatives_of_the_formula(name: str) -> None:
    results = []
    for fused in (True, False):
        hidden, lm_head, labels = positions()
        logits = None if fused else lm_head(hidden)
        loss, _ = OBJECTIVES[name](hidden, logits, lm_head, labels, 0.1, None)
        loss.backward()
        results.append({"hidden": hidden.grad, "weight": lm_head.weight.grad, "bias": lm_head.bias.grad})
    assert_same_gradients(*results, tolerance=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_consistency_loss_has_no_detached_term(name: str) -> None:
    # against finite differences: a detached target would be missing in the derivative
    hidden, lm_head, labels = positions(torch.float64)
    lm_head.requires_grad_(False)

    def loss(states: Tensor) -> Tensor:
        logits = lm_head(states)
        log_p, log_q = logits.chunk(2)[0].log_softmax(-1), logits.chunk(2)[1].log_softmax(-1)
        objective, counted = OBJECTIVES[name], labels[:3] != -100
        chosen = [each[counted].gather(1, labels[:3][counted][:, None]).sum() for each in (log_p, log_q)]
        kl = (
            (log_p.exp() * (log_p - log_q)).sum(-1)[counted].sum(),
            (log_q.exp() * (log_q - log_p)).sum(-1)[counted].sum(),
        )
        return objective.alpha * (objective.forward * kl[0] + objective.reverse * kl[1]) - (
            chosen[0] + objective.second_cross_entropy * chosen[1]
        )

    (expected,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.autograd.gradcheck(loss, hidden)
    result, _ = OBJECTIVES[name](hidden, None, lm_head, labels, 0.0, 1)
    (actual,) = torch.autograd.grad(result, hidden)
    assert_near(actual, expected, 1e-5)


def test_fused_consistency_loss_in_bfloat16_is_near_float32() -> None:
    hidden, lm_head, labels = positions()
    expected, _ = simcut()(hidden, None, lm_head, labels, 0.1, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = simcut()(hidden, None, lm_head, labels, 0.1, None)
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=2e-2)


def test_simcut_zeroes_embeddings_of_the_second_pass_only() -> None:
    model, batch = tiny_model(), translation_batch([9, 4, 30], [5, 12, 30])
    inputs = simcut(probability=0.4).inputs(model, batch)
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


def test_r_drop_of_a_model_without_dropout_doubles_the_cross_entropy() -> None:
    model, batch = tiny_model(label_smoothing=0.1).train(), translation_batch([9, 4], [5, 12])
    expected, expected_gradients = gradients(model, **batch)
    actual, actual_gradients = gradients(model, **r_drop().inputs(model, batch))
    assert actual == pytest.approx(2 * expected, rel=1e-6)
    assert_same_gradients(actual_gradients, {name: 2 * each for name, each in expected_gradients.items()})


@both
@pytest.mark.parametrize("skip_logits", [True, False])
def test_consistency_through_the_model_has_the_gradients_of_the_formula(method: str, skip_logits: bool) -> None:
    model, batch = tiny_model(label_smoothing=0.1, lm_head_bias=True).train(), translation_batch([9, 4], [5, 12])
    with fixed_second_pass(model, method):
        inputs = OBJECTIVES[method].inputs(model, batch)
        objective = inputs.pop("objective")
        model.zero_grad()
        states = model.model(**{name: each for name, each in inputs.items() if name != "labels"}).last_hidden_state
        loss, _ = objective.from_logits(model.lm_head(states), batch["labels"], 0.1)
        (loss / batch["labels"].ne(-100).sum()).backward()
        expected = {name: each.grad.clone() for name, each in model.named_parameters()}
        _, actual = gradients(model, **OBJECTIVES[method].inputs(model, batch), skip_logits=skip_logits)
    assert_same_gradients(actual, expected)


@both
def test_consistency_update_is_the_same_in_1_or_8_batches(method: str, tmp_path: Path) -> None:
    whole = consistency_update(method, 32, 1, tmp_path)
    assert whole.norm() > 0.1
    assert relative_error(consistency_update(method, 4, 8, tmp_path), whole) <= 1e-5


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_halves_have_the_loss_and_the_gradients_of_the_batch(pairs: int) -> None:
    model, batch = (
        tiny_model(label_smoothing=0.1).train(),
        translation_batch([9, 4, 7, 5, 6][:pairs], [4, 8, 6, 5, 3][:pairs]),
    )
    batch["labels"][pairs - 1 :] = -100  # a pair that only fills up the batch
    tokens = batch["labels"].ne(-100).sum().clamp(min=1)
    with fixed_second_pass(model, "simcut"):
        expected = gradients(model, **simcut().inputs(model, batch), num_items_in_batch=tokens)
        loss = 0.0
        model.zero_grad()
        parts = consistency.halves(batch)
        for part in parts:
            output = model(**simcut().inputs(model, part), num_items_in_batch=tokens)
            output.loss.backward()
            loss += output.loss.item()
    assert [len(part["input_ids"]) for part in parts] == {1: [1], 2: [1, 1], 5: [3, 2]}[pairs]
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert_same_gradients({name: each.grad for name, each in model.named_parameters()}, expected[1])


@both
def test_trainer_reads_a_batch_in_halves_once_consistency_starts(method: str, tmp_path: Path) -> None:
    sizes: list[int] = []

    class Recording(VanillaTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {f"{method}_alpha": 3.0, "consistency_start": 1, "max_steps": 2, "per_device_train_batch_size": 8}
    trained(tmp_path, random_pairs(16), kind=Recording, **settings)
    assert sizes == [8, 4, 4]


@both
def test_consistency_starts_after_the_updates_that_it_is_told(method: str, tmp_path: Path) -> None:
    def weights(steps: int, alpha: float, resume: str | None = None, **settings: Any) -> Tensor:
        settings |= {f"{method}_alpha": alpha, "max_steps": steps, **SAVING}
        folder = tmp_path / f"{steps}-{alpha}{resume or ''}"
        checkpoint = str(tmp_path / resume / "checkpoint-1") if resume else None
        return flat(trained(folder, random_pairs(16), tiny_model(dropout=0.1), resume=checkpoint, **settings).model)

    plain, late = weights(2, 0.0), weights(2, 3.0, consistency_start=1)
    assert weights(2, 4.0, consistency_start=2).equal(plain)
    assert not late.equal(plain)
    assert weights(2, 3.0, resume="2-0.0").equal(late), "as the plain run's first checkpoint resumed with it"


def test_consistency_is_off_in_evaluation(tmp_path: Path) -> None:
    settings = ({"simcut_alpha": 3.0}, {})
    trainers = [make_trainer(tmp_path, eval_dataset=random_pairs(8), **each) for each in settings]
    assert trainers[0].evaluate()["eval_loss"] == trainers[1].evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"simcut_alpha": 3.0, "r_drop_alpha": 5.0}, "simcut_alpha.*r_drop_alpha"),
        ({"simcut_alpha": -1.0}, "simcut_alpha: must be"),
        ({"r_drop_alpha": float("nan")}, "r_drop_alpha: must be"),
        ({"simcut_alpha": 3.0, "label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"simcut_alpha": 3.0, "consistency_start": -1}, "consistency_start: must be"),
        ({"consistency_start": 100}, "consistency_start=100"),
    ],
)
def test_consistency_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arguments(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_consistency_refuses_a_foreign_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="simcut_alpha=3.0"):
        make_trainer(tmp_path, model=torch.nn.Linear(2, 2), simcut_alpha=3.0)


@pytest.fixture(autouse=True)
def one_precision() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("probability", [0.0, 0.5])
@both
def test_consistency_masks_padding_without_an_attention_mask(method: str, probability: float) -> None:
    model = tiny_model().train()
    batch = translation_batch([5, 2], [6, 4])
    objective = simcut(probability=probability) if method == "simcut" else r_drop()
    losses_found = []
    for given in (batch, {name: each for name, each in batch.items() if name != "attention_mask"}):
        torch.manual_seed(0)
        losses_found.append(model(**objective.inputs(model, given)).loss.item())
    assert losses_found[0] == pytest.approx(losses_found[1], rel=1e-6)


def test_simcut_keeps_each_of_several_end_tokens() -> None:
    model = tiny_model(eos_token_id=[EOS, 7])
    batch = {"input_ids": torch.tensor([[5, 7, EOS, 1]]), "labels": torch.tensor([[5, EOS]])}
    embeddings = simcut(probability=0.999).inputs(model, batch)["inputs_embeds"]
    assert embeddings[1, 1:3].equal(embeddings[0, 1:3]) and not embeddings[1, 0].any()


@pytest.mark.parametrize("side", ["source", "target"])
def test_crossconst_translates_the_target_in_its_second_pass(side: str) -> None:
    model, mark, alpha = tiny_model(dropout=0.0).train(), 22, 0.7
    batch = translation_batch([4, 3], [5, 2] if side == "source" else [3, 7])
    batch["input_ids" if side == "source" else "labels"][:, 0] = mark
    outputs = model(**crossconst(alpha, side).inputs(model, batch), num_items_in_batch=1)
    expected = 0.0
    for source, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        source, labels = ([i for i in row if i not in (1, -100)] for row in (source, labels))
        itself = [mark, *labels] if side == "source" else labels[1:]
        inputs = torch.tensor([[START, *labels[:-1]]])
        rows = [model(input_ids=torch.tensor([ids]), decoder_input_ids=inputs).logits for ids in (source, itself)]
        log_p, log_q = (numpy_log_softmax(row[0].detach().double().numpy()) for row in rows)
        expected -= log_p[range(len(labels)), labels].sum()
        expected += alpha * (np.exp(log_p) * (log_p - log_q)).sum()
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-5)
