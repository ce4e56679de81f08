"""Word-level distillation: the formula in NumPy, its derivatives, and a student that learns from its teacher."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerTrainingArguments as Arguments
from hf_vanilla_transformer import loss_vanilla_transformer as losses
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.trainer.objectives import distillation
from hf_vanilla_transformer.training.trainer.objectives.distillation import (
    DistillationObjective,
    FullDistributions,
    Teacher,
    TopDistributions,
    TopOfCorpus,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import (
    assert_same_gradients,
    error_of,
    gradients,
    tiny_model,
    translation_batch,
)
from tests.trainer_helpers import (
    DESCENT,
    collate,
    flat,
    make_trainer,
    numpy_log_softmax,
    random_pairs,
    relative_error,
    trained,
)


def numpy_loss(
    student: Any,
    teachers: Any,
    labels: Any,
    smoothing: float,
    weight: float,
    top: int | None = None,
) -> float:
    """The sum over positions, term by term, in float64."""
    total = 0.0
    for scores, label, *taught in zip(student, labels, *teachers, strict=True):
        if label == -100:
            continue
        log_p = numpy_log_softmax(scores)
        t = np.mean([np.exp(numpy_log_softmax(each)) for each in taught], axis=0)
        if top is not None:
            t[np.argsort(t)[:-top]] = 0
            t /= t.sum()
        target = np.full(len(scores), smoothing / len(scores))
        target[label] += 1 - smoothing
        divergence = sum(
            each * (np.log(each) - log_p[token]) for token, each in enumerate(t) if each
        )
        total += -(1 - weight) * (target @ log_p) + weight * divergence
    return total


def as_rows(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().flatten(0, 1).numpy()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four positions, differentiated three at a time: several chunks, the last one not full."""
    for name in ("CPU_CHUNK", "CPU_HALF_CHUNK"):
        monkeypatch.setattr(losses, name, 4 * 13 + 5)
    monkeypatch.setattr(distillation, "CPU_CACHE", 3 * 13)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("sizes", "top"), [((6,), None), ((6, 5), None), ((6, 5), 4)])
def test_distillation_loss_matches_its_definition(weight, smoothing, sizes, top):
    torch.manual_seed(0)
    states = torch.randn(3, 7, 8)
    lm_head = torch.nn.Linear(8, 13)
    labels = torch.randint(0, 13, (3, 7))
    labels[0, 3:] = labels[2, 0] = -100
    teachers = [
        (torch.randn(3, 7, size), torch.nn.Linear(size, 13).requires_grad_(False)) for size in sizes
    ]
    distributions = FullDistributions(teachers)
    if top is not None:
        t = distributions.at(torch.arange(21), torch.float32).rows(slice(None)).t  # (21, 13)
        best = t.topk(top)
        distributions = TopDistributions(
            best.indices, best.values / best.values.sum(dim=1, keepdim=True)
        )
    objective = DistillationObjective(distributions, weight)
    rows = (
        as_rows(lm_head(states)),
        [as_rows(head(each)) for each, head in teachers],
        labels.flatten().numpy(),
    )
    expected = numpy_loss(*rows, smoothing, weight, top)
    plain = numpy_loss(*rows, smoothing=0.0, weight=0.0)
    collected = []
    for with_logits in (True, False):
        hidden = states.clone().requires_grad_()
        logits = lm_head(hidden) if with_logits else None
        loss, logged = objective(hidden, logits, lm_head, labels, smoothing, 50)
        assert loss.item() == pytest.approx(expected / 50, rel=1e-6)
        assert logged.item() == pytest.approx(plain / 50, rel=1e-6)
        derivatives = torch.autograd.grad(loss, (hidden, lm_head.weight, lm_head.bias))
        collected.append(dict(zip(("hidden", "weight", "bias"), derivatives, strict=True)))
    assert_same_gradients(*collected, tolerance=1e-6)


def test_teacher_that_equals_its_student_leaves_only_the_cross_entropy(tmp_path: Path) -> None:
    student, batch = tiny_model().train(), translation_batch([9, 4], [5, 12])
    student.save_pretrained(tmp_path)
    teacher = Teacher([tmp_path], 0.5, student)
    loss, actual = gradients(student, **teacher.inputs(batch))
    plain, expected = gradients(student, **batch)
    assert loss == pytest.approx(plain / 2, rel=1e-5)  # KL(t ‖ t) = 0, and so are its gradients
    assert_same_gradients(actual, {name: each / 2 for name, each in expected.items()})


@pytest.mark.parametrize("top", [0, 3])
def test_distillation_update_is_the_same_in_1_or_8_batches(tmp_path: Path, top: int) -> None:
    tiny_model(5, d_model=16).save_pretrained(tmp_path / "teacher")
    before = flat(tiny_model(label_smoothing=0.1))

    def change(size: int, steps: int, weight: float) -> torch.Tensor:
        trainer = trained(
            tmp_path,
            model=tiny_model(label_smoothing=0.1),
            teacher=[str(tmp_path / "teacher")],
            teacher_weight=weight,
            teacher_top=top,
            max_steps=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            **DESCENT | {"learning_rate": 0.5},
        )
        return flat(trainer.model) - before

    whole = change(32, 1, weight=0.5)
    assert whole.norm() > 0.01
    assert relative_error(change(4, 8, weight=0.5), whole) <= 1e-5
    assert relative_error(change(32, 1, weight=0.6), whole) > 1e-2


def test_teacher_top_finds_the_distributions_of_each_pair() -> None:
    model = tiny_model(5)
    pairs = random_pairs(300)
    for number, place in ((41, 0), (42, 1), (43, 0)):
        pairs[number]["labels"] = [5, 6, 7, 2]
        pairs[number]["labels"][place] = -100
    teacher = Teacher.__new__(Teacher)
    teacher.models = [model]
    kept = TopOfCorpus(3, pairs, collate, teacher._distributions)
    unlabelled = {
        **pairs[7],
        "labels": [-100] * len(pairs[7]["labels"]),
    }  # as token batches add to round a shape
    batch = collate([*pairs[40:60], unlabelled])
    found = kept.of(batch)
    with torch.no_grad():
        expected = model(**batch).logits.softmax(-1).topk(3)  # (B, T, 3)
    counted = batch["labels"].ne(-100).flatten()
    assert counted.sum() > 20
    assert torch.equal(found.tokens[counted], expected.indices.flatten(0, 1)[counted])
    chosen = expected.values / expected.values.sum(-1, keepdim=True)
    torch.testing.assert_close(
        found.probabilities[counted],
        chosen.flatten(0, 1)[counted],
        rtol=1e-3,
        atol=1e-3,
    )


def test_teacher_keeps_no_more_tokens_than_there_are(tmp_path: Path) -> None:
    student = tiny_model()
    student.save_pretrained(tmp_path)
    teacher = Teacher([tmp_path], 0.5, student)
    assert not any(weight.requires_grad for weight in teacher.models[0].parameters())
    for count, kept in ((1, 1), (99, 40)):
        teacher.keep_top(count, random_pairs(3), collate)
        assert teacher.top is not None
        assert teacher.top.tokens.shape[1] == kept


def test_teacher_of_another_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "load_model", lambda *_: torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"^teacher .* is a Linear: convert it, or use `distil`"):
        Teacher([tmp_path], 0.5, tiny_model())


def test_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_model(vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="vocab_size=50.* 40"):
        Teacher([tmp_path], 0.5, tiny_model())
    assert "missing" in error_of(lambda: Teacher([tmp_path / "missing"], 0.5, tiny_model()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "a", "teacher_weight": 1.5}, r"teacher_weight=1\.5"),
        ({"teacher": "a", "teacher_top": -1}, "teacher_top: must be"),
        ({"teacher_top": 16}, "teacher_top=16"),
        ({"teacher": ["a", "b"], "simcut_alpha": 3.0}, r"simcut_alpha=3\.0.*teacher=a b"),
        ({"teacher": "a", "label_smoothing_factor": 0.1}, "label_smoothing"),
    ],
)
def test_distillation_settings_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Arguments(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_teacher_with_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    """The same ids mean other words: of the two runs' tokenizers, either side is compared."""
    texts = ["one two three four", "eins zwei drei vier"]
    first, second = (train_tokenizer([text] * 9, 270, min_frequency=1) for text in texts)
    save_tokenizers(tmp_path, first, second)
    sizes = {
        "vocab_size": 270,
        "decoder_vocab_size": 270,
        "share_encoder_decoder_embeddings": False,
    }
    student = tiny_model(1, **sizes)
    student.save_pretrained(tmp_path)

    def trainer(source: Any, target: Any) -> Any:
        return make_trainer(
            tmp_path / "run",
            model=student,
            processing_class=source,
            target_tokenizer=target,
            teacher=[str(tmp_path)],
            teacher_top=0,
        )

    again = (train_tokenizer([text] * 9, 270, min_frequency=1) for text in texts)
    trainer(*again)  # other objects with the same effect
    for pair in ((first, first), (second, second), (second, first)):
        with pytest.raises(UserError, match="^teacher .* tokenizer"):
            trainer(*pair)
    with pytest.raises(UserError, match="^teacher .* tokenizer"):
        Teacher([tmp_path], 0.5, student, (second, second))
