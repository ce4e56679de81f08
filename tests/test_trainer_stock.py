"""The model with transformers' `Seq2SeqTrainer` and `DataCollatorForSeq2Seq`, without the package's trainer."""

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

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, generation_vanilla_transformer
from hf_vanilla_transformer.evaluation import translation_metrics
from hf_vanilla_transformer.generation_vanilla_transformer import beam_search
from hf_vanilla_transformer.loss_vanilla_transformer import translation_loss
from tests.model_helpers import (
    EOS,
    FIRST_WORD,
    PAD,
    SPECIAL_TOKENS,
    sentences,
    tiny_model,
    word_tokenizer,
)
from tests.trainer_helpers import DESCENT, QUIET, Rows, assert_same_model, flat, random_pairs, relative_error


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary of forty tokens, four of them special."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(FIRST_WORD, 40))]
    return word_tokenizer(tokens, **SPECIAL_TOKENS)


def trainer_of(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    train: Rows | None = None,
    evaluation: Rows | None = None,
    collator_with_model: bool = True,
    compute_metrics: Any = None,
    **settings: Any,
) -> Seq2SeqTrainer:
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(output_dir=str(folder), **{**QUIET, **settings}),
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model if collator_with_model else None),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )


def logged(trainer: Seq2SeqTrainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# Training is exact


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_update_does_not_depend_on_gradient_accumulation(smoothing, tokenizer, tmp_path):
    rows, results = random_pairs(32), {}
    for size, steps in ((32, 1), (4, 8), (8, 4)):
        model = tiny_model(label_smoothing=smoothing)
        before = flat(model)
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 2}
        trainer = trainer_of(model, tokenizer, tmp_path, rows, **settings, **DESCENT)
        trainer.train()
        results[size] = (flat(model) - before, logged(trainer))
    expected, losses = results.pop(32)
    assert expected.norm() > 0.1
    for update, other_losses in results.values():
        assert relative_error(update, expected) <= 1e-5
        assert other_losses == pytest.approx(losses, rel=1e-4)


def test_logged_loss_is_the_mean_over_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows, model = random_pairs(12), tiny_model()
    with torch.no_grad():
        total = sum(
            model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.item()
            * len(row["labels"])
            for row in rows
        )
    expected = total / sum(len(row["labels"]) for row in rows)
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_steps": 1}
    trainer = trainer_of(model, tokenizer, tmp_path, rows, rows, per_device_eval_batch_size=12, **settings)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-4)


# the argument name that every version 5 of transformers accepts
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_saves_and_resumes(checkpointing: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
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

    def run(folder: Path, resume: Path | None = None) -> Seq2SeqTrainer:
        torch.manual_seed(5 if resume else 6)
        model = tiny_model(seed=1 if resume else 0, dropout=0.1, label_smoothing=0.1)
        trainer = trainer_of(model, tokenizer, folder, rows, **settings)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return trainer

    uninterrupted = run(tmp_path / "uninterrupted")
    checkpoint = tmp_path / "uninterrupted" / "checkpoint-3"
    assert {"model.safetensors", "config.json", "generation_config.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    resumed = run(tmp_path / "resumed", checkpoint)
    assert len(logged(uninterrupted)) == 6
    assert logged(resumed) == logged(uninterrupted)
    assert_same_model(tmp_path / "uninterrupted" / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6", atol=1e-7)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "resumed" / "checkpoint-6")
    assert all(p.equal(dict(resumed.model.named_parameters())[name]) for name, p in loaded.named_parameters())


def test_label_smoothing_of_the_trainer_is_exact(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows, model = random_pairs(4), tiny_model()
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)([dict(row) for row in rows])
    with torch.no_grad():
        expected = translation_loss(model(**batch).logits, batch["labels"], 0.1).item()
    trainer = trainer_of(
        model, tokenizer, tmp_path, rows, label_smoothing_factor=0.1, max_steps=1, per_device_train_batch_size=4
    )
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-4)


def test_label_smoothing_of_the_trainer_needs_a_collator_with_the_model(tokenizer, tmp_path):
    settings = {"label_smoothing_factor": 0.1, "max_steps": 1, "collator_with_model": False}
    trainer = trainer_of(tiny_model(), tokenizer, tmp_path, random_pairs(4), **settings)
    with pytest.raises(ValueError, match=r"DataCollatorForSeq2Seq\(tokenizer, model=model\)"):
        trainer.train()


# Evaluation by decoding


def longest_translation(predictions: np.ndarray) -> int:
    """Tokens of the longest translation, including the start token, without the trainer's padding."""
    return int(np.isin(predictions, (PAD, -100), invert=True).sum(axis=1).max())


def test_evaluation_does_not_truncate_translations(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = tiny_model(lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[[PAD, EOS]] = -1e4  # it never generates the end token
    lengths: list[int] = []

    def measure(prediction: EvalPrediction) -> dict[str, float]:
        lengths.append(longest_translation(prediction.predictions))
        return {}

    source = sentences([9])[0]
    rows = [{"input_ids": source, "labels": sentences([5])[0]}]
    trainer = trainer_of(
        model, tokenizer, tmp_path, evaluation=rows, predict_with_generate=True, compute_metrics=measure
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
def test_predict_with_generate_uses_the_search_of_this_package(settings, tokenizer, tmp_path, monkeypatch):
    # The trainer passes whole batches, labels included, to `generate`.
    searches: list[int] = []

    def counted(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        searches.append(len(input_ids))
        return beam_search(model, input_ids, *args, **kwargs)

    monkeypatch.setattr(generation_vanilla_transformer, "beam_search", counted)
    model = tiny_model(tie_word_embeddings=False)
    rows = [{"input_ids": source, "labels": sentences([4])[0]} for source in sentences([3, 9, 6, 2], seed=3)]
    arguments = {"predict_with_generate": True, "per_device_eval_batch_size": 2, **settings}
    trainer = trainer_of(model, tokenizer, tmp_path, evaluation=rows, **arguments)
    predictions = trainer.predict(rows).predictions
    beams = settings.get("generation_num_beams", 4)
    assert searches == [2 * beams] * 2
    for row, predicted in zip(rows, predictions, strict=True):
        expected = model.generate(torch.tensor([row["input_ids"]]), num_beams=beams)[0].tolist()
        assert predicted[: len(expected)].tolist() == expected
        assert np.isin(predicted[len(expected) :], (PAD, -100)).all()


def test_stock_trainer_scores_with_the_metrics_of_this_package(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pairs = random_pairs(6)
    model = tiny_model(vocab_size=40, decoder_start_token_id=0)
    trainer = trainer_of(
        model,
        tokenizer,
        tmp_path,
        pairs,
        pairs,
        compute_metrics=translation_metrics(tokenizer, tokenize="none"),
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=1,
    )
    scores = trainer.evaluate()
    prediction = trainer.predict(pairs)
    predicted = np.where(prediction.predictions == -100, PAD, prediction.predictions)
    labels = np.where(prediction.label_ids == -100, PAD, prediction.label_ids)
    hypotheses = tokenizer.batch_decode(predicted, skip_special_tokens=True)
    references = tokenizer.batch_decode(labels, skip_special_tokens=True)
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True)
    assert scores["eval_bleu"] == pytest.approx(expected.score, abs=1e-6)
    assert scores["eval_chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-6)
