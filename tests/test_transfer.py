"""An encoder that learnt to translate, in a classifier that plain `Trainer` fine-tunes."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_vanilla_transformer import VanillaTransformerForSequenceClassification
from tests.model_helpers import FIRST_WORD, sentences, tiny_model

SIGN = FIRST_WORD + 1


@pytest.fixture
def translator(tmp_path):
    model = tiny_model(position_encoding_type="sinusoidal", final_layer_norm=True, lm_head_bias=True)
    model.save_pretrained(tmp_path / "translator")
    return model, tmp_path / "translator"


def rows(count, seed):
    """Sentences of 3 to 9 tokens; the class is whether a certain token is among them."""
    found = []
    lengths = torch.randint(3, 10, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    for index, ids in enumerate(sentences(lengths, seed=seed)):
        ids = [token if token != SIGN else token + 1 for token in ids]
        if index % 2:
            ids[(index // 2) % (len(ids) - 1)] = SIGN
        found.append({"input_ids": ids + [1] * (10 - len(ids)), "labels": index % 2})
    return found


def test_pretrained_encoder_learns_to_classify(translator, tmp_path):
    model, folder = translator
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, output_loading_info=True
    )
    assert type(classifier) is VanillaTransformerForSequenceClassification
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"} and not info["unexpected_keys"]
    encoder = dict(model.get_encoder().named_parameters())
    taken = dict(classifier.model.encoder.named_parameters())
    assert taken.keys() == encoder.keys()
    assert all(taken[name].equal(parameter) for name, parameter in encoder.items())

    train, held_out = rows(400, seed=1), rows(100, seed=2)
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=80, per_device_train_batch_size=16, learning_rate=3e-3, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    trainer = Trainer(
        model=classifier,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        compute_metrics=lambda each: {"accuracy": float((each.predictions.argmax(-1) == each.label_ids).mean())},
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    assert before < 0.7 and after >= 0.95

    trainer.save_model(str(tmp_path / "classifier"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    ids = torch.tensor([row["input_ids"] for row in held_out[:5]])
    with torch.no_grad():
        assert again(ids).logits.equal(classifier.eval()(ids).logits)
