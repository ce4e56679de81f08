"""The model with transformers' `Seq2SeqTrainer` and `DataCollatorForSeq2Seq`, without the package's trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    generation_vanilla_transformer,
)
from hf_vanilla_transformer.evaluation import translation_metrics
from hf_vanilla_transformer.generation_vanilla_transformer import beam_search
from hf_vanilla_transformer.loss_vanilla_transformer import translation_loss
from tests.model_helpers import (
    EOS,
    FIRST_WORD,
    PAD,
    SPECIAL_TOKENS,
    sentences,
    tiny_config,
    tiny_model,
    word_tokenizer,
)
from tests.trainer_helpers import (
    DESCENT,
    QUIET,
    Rows,
    assert_same_model,
    flat,
    random_pairs,
    relative_error,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary of forty tokens, four of them special."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(FIRST_WORD, 40))]
    return word_tokenizer(tokens, **SPECIAL_TOKENS)


@pytest.fixture
def trainer_of(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., Seq2SeqTrainer]:
    """Makes the stock trainer of a model, whose files are in a folder of this name."""

    def make(
        model: VanillaTransformerForConditionalGeneration,
        train: Rows | None = None,
        evaluation: Rows | None = None,
        folder: str = "run",
        collator_with_model: bool = True,
        compute_metrics: Any = None,
        **settings: Any,
    ) -> Seq2SeqTrainer:
        collator = DataCollatorForSeq2Seq(tokenizer, model=model if collator_with_model else None)
        return Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(str(tmp_path / folder), **{**QUIET, **settings}),
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=collator,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
        )

    return make


def logged(trainer: Seq2SeqTrainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# Training is exact


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_update_does_not_depend_on_gradient_accumulation(smoothing, trainer_of):
    rows = random_pairs(32)

    def trained(steps: int) -> tuple[torch.Tensor, list[float]]:
        model = tiny_model(label_smoothing=smoothing)
        before = flat(model)
        trainer = trainer_of(
            model,
            rows,
            per_device_train_batch_size=32 // steps,
            gradient_accumulation_steps=steps,
            max_steps=2,
            **DESCENT,
        )
        trainer.train()
        return flat(model) - before, logged(trainer)

    expected, losses = trained(1)
    assert expected.norm() > 0.1
    for steps in (4, 8):
        update, other_losses = trained(steps)
        assert relative_error(update, expected) <= 1e-5
        assert other_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("decoder_alone", [False, True])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)], ids=["of the batch", "0", "tensor"])
def test_update_without_labels_has_no_loss_and_no_gradient(items, decoder_alone):
    model = VanillaTransformerForCausalLM(tiny_config()) if decoder_alone else tiny_model()
    ids = torch.tensor([[5, 6, 7, EOS]])
    loss = model.train()(
        input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=items
    ).loss
    loss.backward()
    assert loss == 0
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_pair_without_labels_leaves_the_weights_finite(trainer_of):
    rows = random_pairs(4)
    rows[1] = {**rows[1], "labels": [-100] * 3}
    model = tiny_model()
    trainer_of(model, rows, per_device_train_batch_size=1, max_steps=4, **DESCENT).train()
    assert flat(model).isfinite().all()


def test_logged_loss_is_the_mean_over_tokens(trainer_of: Any) -> None:
    rows = random_pairs(12)
    model = tiny_model()
    total = 0.0
    tokens = 0
    for row in rows:
        source, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        total += model(source, labels=labels).loss.item() * labels.numel()
        tokens += labels.numel()
    expected = total / tokens
    trainer = trainer_of(
        model,
        rows,
        rows,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        max_steps=1,
        per_device_eval_batch_size=12,
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-4)


# the argument name that every version 5 of transformers accepts
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_saves_and_resumes(checkpointing: bool, trainer_of: Any, tmp_path: Path) -> None:
    rows = random_pairs(24)
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 1e-3,
        "gradient_checkpointing": checkpointing,
    }

    def run(folder: str, seed: int, resume: Path | None = None) -> Seq2SeqTrainer:
        torch.manual_seed(seed)
        model = tiny_model(seed, dropout=0.1, label_smoothing=0.1)
        trainer = trainer_of(model, rows, folder=folder, **settings)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return trainer

    whole = tmp_path / "whole"
    uninterrupted = run("whole", 0)
    checkpoint = whole / "checkpoint-3"
    files = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json"} <= files
    resumed = run("resumed", 1, checkpoint)
    assert len(logged(uninterrupted)) == 6
    assert logged(resumed) == logged(uninterrupted)
    last = tmp_path / "resumed" / "checkpoint-6"
    assert_same_model(whole / "checkpoint-6", last, atol=1e-7)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(last)
    assert flat(loaded).equal(flat(resumed.model))


def test_label_smoothing_of_the_trainer_is_exact(trainer_of: Any) -> None:
    rows = random_pairs(4)
    model = tiny_model()
    trainer = trainer_of(
        model,
        rows,
        label_smoothing_factor=0.1,
        max_steps=1,
        per_device_train_batch_size=4,
    )
    batch = trainer.data_collator([dict(row) for row in rows])
    expected = translation_loss(model(**batch).logits, batch["labels"], 0.1).item()
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-4)


def test_label_smoothing_of_the_trainer_needs_a_collator_with_the_model(trainer_of):
    settings = {"label_smoothing_factor": 0.1, "max_steps": 1}
    trainer = trainer_of(tiny_model(), random_pairs(4), collator_with_model=False, **settings)
    with pytest.raises(ValueError, match=r"DataCollatorForSeq2Seq\(tokenizer, model=model\)"):
        trainer.train()


# Evaluation by decoding


def is_padding(predictions: np.ndarray) -> np.ndarray:
    return np.isin(predictions, (PAD, -100))


def test_evaluation_does_not_truncate_translations(trainer_of: Any, tmp_path: Path) -> None:
    model = tiny_model(lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[[PAD, EOS]] = -1e4  # it never generates the end token
    lengths: list[int] = []

    def measure(prediction: EvalPrediction) -> dict[str, float]:
        tokens = ~is_padding(prediction.predictions)  # with the start token
        lengths.append(int(tokens.sum(axis=1).max()))
        return {}

    source = sentences([9])[0]
    rows = [{"input_ids": source, "labels": sentences([5])[0]}]
    trainer = trainer_of(
        model,
        evaluation=rows,
        predict_with_generate=True,
        compute_metrics=measure,
    )
    for _ in range(3):
        trainer.evaluate()
    trainer.predict(rows)
    over = model.generation_config.max_length_over_source
    assert lengths == [1 + len(source) + over] * 4
    trainer.evaluate(max_new_tokens=7, num_beams=2)
    assert lengths[-1] == 8
    # the settings of the trainer are not saved in the checkpoint
    trainer.save_model(str(tmp_path / "saved"))
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "saved").eval()
    assert loaded.generate(torch.tensor([source])).shape[1] == lengths[0]


@pytest.mark.parametrize("settings", [{}, {"generation_num_beams": 1}])
def test_predict_with_generate_uses_the_search_of_this_package(settings, trainer_of, monkeypatch):
    # The trainer passes whole batches, labels included, to `generate`.
    searches: list[int] = []

    def counted(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        searches.append(len(input_ids))
        return beam_search(model, input_ids, *args, **kwargs)

    monkeypatch.setattr(generation_vanilla_transformer, "beam_search", counted)
    model = tiny_model(tie_word_embeddings=False)
    (labels,) = sentences([4])
    rows = [{"input_ids": source, "labels": labels} for source in sentences([3, 9, 6, 2], seed=3)]
    trainer = trainer_of(
        model,
        evaluation=rows,
        predict_with_generate=True,
        per_device_eval_batch_size=2,
        **settings,
    )
    predictions = trainer.predict(rows).predictions
    beams = settings.get("generation_num_beams", 4)
    assert searches == [2 * beams] * 2
    for row, predicted in zip(rows, predictions, strict=True):
        source = torch.tensor([row["input_ids"]])
        expected = model.generate(source, num_beams=beams)[0].tolist()
        assert predicted[: len(expected)].tolist() == expected
        assert is_padding(predicted[len(expected) :]).all()


def test_stock_trainer_scores_with_the_metrics_of_this_package(
    trainer_of: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    pairs = random_pairs(6)
    trainer = trainer_of(
        tiny_model(),
        evaluation=pairs,
        compute_metrics=translation_metrics(tokenizer, tokenize="none"),
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=1,
    )
    scores = trainer.evaluate()
    prediction = trainer.predict(pairs)
    hypotheses, references = (
        tokenizer.batch_decode(np.where(ids == -100, PAD, ids), skip_special_tokens=True)
        for ids in (prediction.predictions, prediction.label_ids)
    )
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True)
    chrf = sacrebleu.corpus_chrf(hypotheses, [references])
    assert scores["eval_bleu"] == pytest.approx(bleu.score, abs=1e-6)
    assert scores["eval_chrf"] == pytest.approx(chrf.score, abs=1e-6)
