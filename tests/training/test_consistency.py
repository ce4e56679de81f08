"""SimCut and R-Drop: the formulas in NumPy, their derivatives, and the same update however a batch is split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Seq2SeqTrainingArguments

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer import VanillaTransformerTrainingArguments as Arguments
from hf_vanilla_transformer import loss_vanilla_transformer as losses
from hf_vanilla_transformer.batches.packing import is_packed
from hf_vanilla_transformer.training.trainer.objectives import consistency
from hf_vanilla_transformer.training.trainer.objectives.consistency import (
    ConsistencyObjective,
    crossconst,
    r_drop,
    simcut,
)
from tests.model_helpers import (
    EOS,
    PAD,
    START,
    assert_same_gradients,
    error_of,
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

OBJECTIVES = {
    "simcut": simcut(),
    "r_drop": r_drop(),
    "other": ConsistencyObjective(0.7, 0.3, 0.2, 0.9),
}
PLAIN = ConsistencyObjective(0.0, 0.0, 0.0, 0.0)
each_objective = pytest.mark.parametrize("name", OBJECTIVES)
both = pytest.mark.parametrize("method", ["simcut", "r_drop"])


def log_probabilities(logits: Tensor) -> np.ndarray:
    return numpy_log_softmax(logits.detach().double().numpy())


def numpy_loss(
    logits: Tensor, labels: Tensor, smoothing: float, objective: ConsistencyObjective
) -> float:
    """The sum over positions, term by term as the papers write it, in float64."""
    words = logits.shape[-1]
    first, second = log_probabilities(logits).reshape(2, -1, words)
    total = 0.0
    for label, log_p, log_q in zip(labels.flatten().tolist(), first, second, strict=True):
        if label == -100:
            continue
        target = np.full(words, smoothing / words)
        target[label] += 1 - smoothing
        total -= target @ log_p
        total -= objective.second_cross_entropy * (target @ log_q)
        difference = log_p - log_q
        forward = np.exp(log_p) @ difference
        reverse = -np.exp(log_q) @ difference
        total += objective.alpha * objective.forward * forward
        total += objective.alpha * objective.reverse * reverse
    return total


class Positions:
    """Hidden states (6, 7, D) of two passes, an output layer, and the labels (3, 7) of each pass."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.hidden = torch.randn(6, 7, 8, dtype=dtype, requires_grad=True)
        self.labels = torch.randint(0, 13, (3, 7))
        self.labels[0, 3:] = -100
        self.labels[2, 0] = -100
        self.lm_head = torch.nn.Linear(8, 13, dtype=dtype)

    def loss(
        self,
        objective: ConsistencyObjective,
        smoothing: float = 0.1,
        items: int | None = None,
        fused: bool = True,
    ) -> tuple[Tensor, Tensor]:
        logits = None if fused else self.lm_head(self.hidden)
        labels = torch.cat([self.labels, self.labels])
        return objective(self.hidden, logits, self.lm_head, labels, smoothing, items)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four positions, differentiated three at a time: several chunks, the last one not full."""
    for name in ("CPU_CHUNK", "CPU_HALF_CHUNK"):
        monkeypatch.setattr(losses, name, 2 * 4 * 13 + 5)
    monkeypatch.setattr(consistency, "CPU_CACHE", 3 * 13)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@each_objective
@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("fused", [True, False])
def test_consistency_loss_matches_the_papers(
    name: str,
    smoothing: float,
    items: int | None,
    fused: bool,
) -> None:
    given = Positions()
    logits = given.lm_head(given.hidden)
    expected = numpy_loss(logits, given.labels, smoothing, OBJECTIVES[name])
    cross_entropy = numpy_loss(logits, given.labels, 0.0, PLAIN)
    tokens = items or int((given.labels != -100).sum())
    loss, plain = given.loss(OBJECTIVES[name], smoothing, items, fused)
    assert loss.item() == pytest.approx(expected / tokens, rel=1e-6)
    assert plain.item() == pytest.approx(cross_entropy / tokens, rel=1e-6)
    assert not plain.requires_grad


@pytest.mark.usefixtures("small_chunks")
@each_objective
def test_fused_consistency_loss_has_the_derivatives_of_the_formula(name: str) -> None:
    def derivatives(fused: bool) -> dict[str, Any]:
        given = Positions()
        loss, _ = given.loss(OBJECTIVES[name], fused=fused)
        loss.backward()
        return {
            "hidden": given.hidden.grad,
            "weight": given.lm_head.weight.grad,
            "bias": given.lm_head.bias.grad,
        }

    assert_same_gradients(derivatives(fused=True), derivatives(fused=False), tolerance=1e-6)


@each_objective
def test_consistency_loss_has_no_detached_term(name: str) -> None:
    """Along a random direction, against a finite difference, which has what a detached target lacks."""
    given = Positions(torch.float64)
    given.lm_head.requires_grad_(False)
    loss, _ = given.loss(OBJECTIVES[name], smoothing=0.0, items=1)
    (gradient,) = torch.autograd.grad(loss, given.hidden)
    direction = torch.randn_like(gradient)

    def at(step: float) -> float:
        logits = given.lm_head(given.hidden + step * direction)
        return numpy_loss(logits, given.labels, 0.0, OBJECTIVES[name])

    slope = (gradient * direction).sum().item()
    assert slope == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-5)


def test_fused_consistency_loss_in_bfloat16_is_near_float32() -> None:
    expected, _ = Positions().loss(simcut())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = Positions().loss(simcut())
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=2e-2)


def test_simcut_zeroes_embeddings_of_the_second_pass_only() -> None:
    model = tiny_model()
    batch = translation_batch([9, 4, 30], [5, 12, 30])
    inputs = simcut(probability=0.4).inputs(model, batch)
    assert inputs["input_ids"] is None
    assert inputs["decoder_input_ids"] is None
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    for name, ids, stack, end in (
        ("inputs_embeds", batch["input_ids"], model.model.encoder, EOS),
        ("decoder_inputs_embeds", target, model.model.decoder, START),
    ):
        first, second = inputs[name].chunk(2)
        assert torch.equal(first, stack.embed_tokens(ids))
        zeroed = second.eq(0).all(dim=-1)
        assert torch.equal(second[~zeroed], first[~zeroed])
        kept = ids.eq(end)
        assert not zeroed[kept].any()
        assert 0.2 < zeroed[~kept].float().mean() < 0.6
    for name in ("labels", "attention_mask"):
        for half in inputs[name].chunk(2):
            assert torch.equal(half, batch[name])


def test_r_drop_of_a_model_without_dropout_doubles_the_cross_entropy() -> None:
    model = tiny_model(label_smoothing=0.1).train()
    batch = translation_batch([9, 4], [5, 12])
    expected, by_weight = gradients(model, **batch)
    actual, actual_by_weight = gradients(model, **r_drop().inputs(model, batch))
    assert actual == pytest.approx(2 * expected, rel=1e-6)
    assert_same_gradients(actual_by_weight, {name: 2 * each for name, each in by_weight.items()})


@both
@pytest.mark.parametrize("skip_logits", [True, False])
def test_consistency_through_the_model_has_the_gradients_of_the_formula(
    method: str, skip_logits: bool
) -> None:
    model = tiny_model(label_smoothing=0.1, lm_head_bias=True).train()
    batch = translation_batch([9, 4], [5, 12])
    with fixed_second_pass(model, method):
        inputs = OBJECTIVES[method].inputs(model, batch)
        _, actual = gradients(model, **inputs, skip_logits=skip_logits)
        model.zero_grad()
        inputs = OBJECTIVES[method].inputs(model, batch)
        objective = inputs.pop("objective")
        del inputs["labels"]
        states = model.model(**inputs).last_hidden_state
    loss, _ = objective.from_logits(model.lm_head(states), batch["labels"], 0.1)
    mean = loss / batch["labels"].ne(-100).sum()
    mean.backward()
    assert_same_gradients(actual, {name: each.grad for name, each in model.named_parameters()})


@both
def test_consistency_update_is_the_same_in_1_or_8_batches(method: str, tmp_path: Path) -> None:
    whole = consistency_update(method, 32, 1, tmp_path)
    parts = consistency_update(method, 4, 8, tmp_path)
    assert whole.norm() > 0.1
    assert relative_error(parts, whole) <= 1e-5


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([9], [1]),
        ([9, 4], [1, 1]),
        ([9, 4, 7, 5, 6], [3, 2]),
    ],
)
def test_halves_have_the_loss_and_the_gradients_of_the_batch(
    lengths: list[int], sizes: list[int]
) -> None:
    model = tiny_model(label_smoothing=0.1).train()
    batch = translation_batch(lengths, lengths[::-1])
    batch["labels"][-1] = -100  # a pair that only fills up the batch
    tokens = batch["labels"].ne(-100).sum().clamp(min=1)
    parts = consistency.halves(batch)
    assert [len(part["input_ids"]) for part in parts] == sizes
    loss = 0.0
    with fixed_second_pass(model, "simcut"):
        inputs = simcut().inputs(model, batch)
        expected, by_weight = gradients(model, **inputs, num_items_in_batch=tokens)
        model.zero_grad()
        for part in parts:
            output = model(**simcut().inputs(model, part), num_items_in_batch=tokens)
            output.loss.backward()
            loss += output.loss.item()
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradients({name: each.grad for name, each in model.named_parameters()}, by_weight)


@both
def test_trainer_reads_a_batch_in_halves_once_consistency_starts(
    method: str, tmp_path: Path
) -> None:
    sizes: list[int] = []

    class Recording(VanillaTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {f"{method}_alpha": 3.0, "consistency_start": 1, "max_steps": 2}
    trained(tmp_path, random_pairs(16), kind=Recording, per_device_train_batch_size=8, **settings)
    assert sizes == [8, 4, 4]


@both
def test_consistency_starts_after_the_updates_that_it_is_told(method: str, tmp_path: Path) -> None:
    def weights(folder: str, alpha: float, **settings: Any) -> Tensor:
        model = tiny_model(dropout=0.1)
        settings |= {f"{method}_alpha": alpha, "max_steps": 2, **SAVING}
        trained(tmp_path / folder, random_pairs(16), model, **settings)
        return flat(model)

    plain = weights("plain", 0.0)
    late = weights("late", 3.0, consistency_start=1)
    assert weights("never", 4.0, consistency_start=2).equal(plain)
    assert not late.equal(plain)
    resumed = weights("resumed", 3.0, resume=tmp_path / "plain" / "checkpoint-1")
    assert resumed.equal(late), "as the plain run's first checkpoint resumed with it"


def test_consistency_is_off_in_evaluation(tmp_path: Path) -> None:
    found, expected = (
        make_trainer(tmp_path, eval_dataset=random_pairs(8), simcut_alpha=alpha).evaluate()[
            "eval_loss"
        ]
        for alpha in (3.0, 0.0)
    )
    assert found == expected


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
def test_consistency_settings_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Arguments(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_consistency_refuses_a_foreign_model(tmp_path: Path) -> None:
    foreign = torch.nn.Linear(2, 2)
    message = error_of(make_trainer, tmp_path, model=foreign, simcut_alpha=3.0)
    assert "simcut_alpha=3.0" in message


@pytest.fixture(autouse=True)
def one_precision() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    "objective",
    [
        simcut(probability=0.0),
        simcut(probability=0.5),
        r_drop(),
    ],
)
def test_consistency_masks_padding_without_an_attention_mask(
    objective: ConsistencyObjective,
) -> None:
    def loss(**batch: Tensor) -> float:
        torch.manual_seed(0)
        return model(**objective.inputs(model, batch)).loss.item()

    model = tiny_model().train()
    batch = translation_batch([5, 2], [6, 4])
    expected = loss(**batch)
    del batch["attention_mask"]
    assert loss(**batch) == pytest.approx(expected, rel=1e-6)


def test_simcut_keeps_each_of_several_end_tokens() -> None:
    model = tiny_model(eos_token_id=[EOS, 7])
    batch = {
        "input_ids": torch.tensor([[5, 7, EOS, PAD]]),
        "labels": torch.tensor([[5, EOS]]),
    }
    first, second = simcut(probability=0.999).inputs(model, batch)["inputs_embeds"]
    assert second[1:3].equal(first[1:3])
    assert not second[0].any()


def test_simcut_keeps_the_start_of_each_target_of_a_packed_row() -> None:
    model = tiny_model()
    batch = {
        "input_ids": torch.tensor([[5, EOS, 6, EOS, PAD]]),
        "decoder_input_ids": torch.tensor([[START, 5, 7, START, 9]]),
        "decoder_position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "labels": torch.tensor([[5, 7, EOS, 9, EOS]]),
        "segment_ids": torch.tensor([[1, 1, 2, 2, 0]]),
        "decoder_segment_ids": torch.tensor([[1, 1, 1, 2, 2]]),
    }
    assert is_packed(batch)
    inputs = simcut(probability=0.9999).inputs(model, batch)
    kept = inputs["decoder_inputs_embeds"][1].ne(0).any(dim=-1)
    assert kept.tolist() == [True, False, False, True, False]


def test_arguments_of_transformers_have_no_objective(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert consistency.consistency_objective(args) is None


def test_defaults_are_those_of_the_papers() -> None:
    cut = simcut()
    assert (cut.alpha, cut.cutoff) == (3.0, 0.05)
    assert r_drop().alpha == 5.0


@pytest.mark.parametrize("side", ["source", "target"])
def test_crossconst_translates_the_target_in_its_second_pass(side: str) -> None:
    def translated(source: list[int], target: list[int]) -> np.ndarray:
        """Logarithms of the probabilities (T, V) of one pair."""
        ids = torch.tensor([source])
        read = torch.tensor([[START, *target[:-1]]])
        return log_probabilities(model(input_ids=ids, decoder_input_ids=read).logits[0])

    model = tiny_model(dropout=0.0).train()
    mark = 22
    alpha = 0.7
    batch = translation_batch([4, 3], [5, 2] if side == "source" else [3, 7])
    batch["input_ids" if side == "source" else "labels"][:, 0] = mark
    expected = 0.0
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        source = ids[ids != PAD].tolist()
        target = labels[labels != -100].tolist()
        itself = [mark, *target] if side == "source" else target[1:]
        log_p = translated(source, target)
        log_q = translated(itself, target)
        expected -= log_p[range(len(target)), target].sum()
        expected += alpha * (np.exp(log_p) * (log_p - log_q)).sum()
    outputs = model(**crossconst(alpha, side).inputs(model, batch), num_items_in_batch=1)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-5)
