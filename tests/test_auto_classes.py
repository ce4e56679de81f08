"""The Auto classes of transformers, and the encoder's second life as a classifier."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    Trainer,
    TrainingArguments,
)

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
)
from tests.model_helpers import FIRST_WORD, PAD, assert_near, padded, randomise, sentences, tiny_config, tiny_model
from tests.trainer_helpers import QUIET

AUTO_CLASSES = {
    AutoModel: VanillaTransformerModel,
    AutoModelForSeq2SeqLM: VanillaTransformerForConditionalGeneration,
    AutoModelForTextEncoding: VanillaTransformerEncoderModel,
    AutoModelForSequenceClassification: VanillaTransformerForSequenceClassification,
}


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_auto_classes_build_the_registered_models(auto_class: type) -> None:
    assert type(AutoConfig.for_model("vanilla_transformer")) is VanillaTransformerConfig
    assert type(auto_class.from_config(tiny_config())) is AUTO_CLASSES[auto_class]


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_auto_classes_load_a_saved_folder(auto_class: type, tmp_path: Path) -> None:
    model = randomise(auto_class.from_config(tiny_config())).eval()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is VanillaTransformerConfig
    loaded = auto_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is AUTO_CLASSES[auto_class]
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("saved", [AutoModelForSeq2SeqLM, AutoModelForTextEncoding])
def test_auto_model_embeds_the_source(saved: type, tmp_path: Path) -> None:
    """`AutoModel` gives the encoder's states of a call without a target, and loads a saved encoder as an encoder."""
    model = randomise(saved.from_config(tiny_config())).eval()
    model.save_pretrained(tmp_path)
    embedder = AutoModel.from_pretrained(tmp_path).eval()
    ids = padded(sentences([5, 3]))
    mask = ids.ne(PAD).long()
    outputs = embedder(ids, mask, output_hidden_states=True)
    expected = model.get_encoder()(ids, mask) if saved is AutoModelForSeq2SeqLM else model(ids, mask)
    assert torch.equal(outputs.last_hidden_state, expected.last_hidden_state) and len(outputs.hidden_states) == 3
    assert hasattr(embedder, "decoder") == (saved is AutoModelForSeq2SeqLM)


# From a translator to an encoder


def expected_states(model: VanillaTransformerForConditionalGeneration, ids: Tensor) -> Tensor:
    return model.model.encoder(ids).last_hidden_state


@pytest.mark.parametrize("share", [True, False])
@torch.no_grad()
def test_encoder_loads_from_a_translation_checkpoint(share: bool, tmp_path: Path) -> None:
    translator = tiny_model(share_encoder_decoder_embeddings=share)
    translator.save_pretrained(tmp_path / "translator")
    ids = padded(sentences([6, 3]))
    encoder, info = AutoModelForTextEncoding.from_pretrained(tmp_path / "translator", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert encoder.eval()(ids).last_hidden_state.equal(expected_states(translator, ids))
    # and from its own checkpoint
    encoder.save_pretrained(tmp_path / "encoder")
    again = AutoModelForTextEncoding.from_pretrained(tmp_path / "encoder").eval()
    assert again(input_ids=ids).last_hidden_state.equal(expected_states(translator, ids))


@torch.no_grad()
def test_classifier_loads_from_a_translation_checkpoint(tmp_path: Path) -> None:
    translator = tiny_model()
    translator.save_pretrained(tmp_path / "translator")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "translator", num_labels=3, output_loading_info=True
    )
    assert sorted(info["missing_keys"]) == ["classifier.bias", "classifier.weight"]
    assert not info["unexpected_keys"]
    ids = padded(sentences([6, 3]))
    mask = ids.ne(PAD).float()[..., None]
    mean = (expected_states(translator, ids) * mask).sum(dim=1) / mask.sum(dim=1)
    logits = classifier.eval()(ids).logits
    assert_near(logits, mean @ classifier.classifier.weight.T + classifier.classifier.bias, 1e-6)
    # saved and loaded under its own name, nothing is missing
    classifier.save_pretrained(tmp_path / "classifier")
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "classifier", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert loaded.config.num_labels == 3
    assert loaded.eval()(ids).logits.equal(logits)


@torch.no_grad()
def test_classifier_does_not_depend_on_the_rest_of_the_batch() -> None:
    classifier = randomise(VanillaTransformerForSequenceClassification(tiny_config(num_labels=3))).eval()
    rows = sentences([9, 2, 5])
    for left in (False, True):
        ids = padded(rows, left=left)
        together = classifier(ids).logits
        given = classifier(ids, attention_mask=ids.ne(PAD).long()).logits
        assert given.equal(together)
        for row, logits in zip(rows, together, strict=True):
            assert_near(classifier(torch.tensor([row])).logits[0], logits)


def test_classification_losses_match_their_definitions() -> None:
    ids = padded(sentences([4, 7]))
    classifier = randomise(VanillaTransformerForSequenceClassification(tiny_config(num_labels=3))).eval()
    output = classifier(ids, labels=torch.tensor([2, 0]))
    log_p = output.logits.log_softmax(dim=-1)
    assert output.loss.item() == pytest.approx(-(log_p[0, 2] + log_p[1, 0]).item() / 2, rel=1e-5)
    regression = randomise(VanillaTransformerForSequenceClassification(tiny_config(num_labels=1))).eval()
    wanted = torch.tensor([0.5, -1.0])
    output = regression(ids, labels=wanted)
    assert output.loss.item() == pytest.approx(((output.logits[:, 0] - wanted) ** 2).mean().item(), rel=1e-5)


def marked_sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of 3 to 9 tokens. The class is whether a certain token is among them."""
    rows, sign = [], FIRST_WORD + 1
    lengths = torch.randint(3, 10, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    for index, ids in enumerate(sentences(lengths, seed=seed)):
        ids = [token if token != sign else token + 1 for token in ids]
        if index % 2:
            ids[(index // 2) % (len(ids) - 1)] = sign
        rows.append({"input_ids": ids + [PAD] * (10 - len(ids)), "labels": index % 2})
    return rows


def test_pretrained_encoder_learns_to_classify_with_the_trainer_of_transformers(tmp_path: Path) -> None:
    tiny_model(final_layer_norm=True, lm_head_bias=True).save_pretrained(tmp_path / "translator")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "translator", num_labels=2)
    settings = {**QUIET, "max_steps": 80, "per_device_train_batch_size": 16, "learning_rate": 3e-3, "seed": 3}
    trainer = Trainer(
        model=classifier,
        args=TrainingArguments(str(tmp_path / "out"), **settings),
        train_dataset=marked_sentences(400, seed=1),
        eval_dataset=marked_sentences(100, seed=2),
        compute_metrics=lambda each: {"accuracy": float((each.predictions.argmax(-1) == each.label_ids).mean())},
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    assert before < 0.7 and trainer.evaluate()["eval_accuracy"] >= 0.95
    trainer.save_model(str(tmp_path / "classifier"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    ids = torch.tensor([row["input_ids"] for row in trainer.eval_dataset[:5]])
    with torch.no_grad():
        assert again(ids).logits.equal(classifier.eval()(ids).logits)
