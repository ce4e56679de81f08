"""The Auto classes of transformers: the encoder alone, as a classifier too, and the decoder alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    MarianForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
)
from hf_vanilla_transformer.interop.marian import to_marian
from tests.model_helpers import (
    FIRST_WORD,
    PAD,
    START,
    TYING_MODES,
    assert_near,
    assert_same_gradients,
    gradients,
    padded,
    randomise,
    sentences,
    tiny_config,
    tiny_model,
    tying,
)
from tests.trainer_helpers import DESCENT, QUIET, collate

AUTO_CLASSES = {
    AutoModel: VanillaTransformerModel,
    AutoModelForSeq2SeqLM: VanillaTransformerForConditionalGeneration,
    AutoModelForCausalLM: VanillaTransformerForCausalLM,
    AutoModelForTextEncoding: VanillaTransformerEncoderModel,
    AutoModelForSequenceClassification: VanillaTransformerForSequenceClassification,
}


def batch_of(rows: list[list[int]], left: bool = False) -> dict[str, Tensor]:
    ids = padded(rows, left=left)
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


SOURCE = batch_of(sentences([6, 3]))


@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES.items())
def test_auto_classes_build_and_load_the_registered_models(auto_class, model_class, tmp_path):
    model = randomise(auto_class.from_config(tiny_config())).eval()
    assert type(model) is model_class
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is VanillaTransformerConfig
    loaded = auto_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is model_class
    expected = model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("saved", [AutoModelForSeq2SeqLM, AutoModelForTextEncoding])
def test_auto_model_embeds_the_source(saved: type, tmp_path: Path) -> None:
    """`AutoModel` gives the encoder's states of a call without a target, and loads a saved encoder as an encoder."""
    model = randomise(saved.from_config(tiny_config())).eval()
    model.save_pretrained(tmp_path)
    embedder = AutoModel.from_pretrained(tmp_path).eval()
    outputs = embedder(**SOURCE, output_hidden_states=True)
    is_translator = saved is AutoModelForSeq2SeqLM
    encoder = model.get_encoder() if is_translator else model
    assert outputs.last_hidden_state.equal(encoder(**SOURCE).last_hidden_state)
    assert len(outputs.hidden_states) == 3
    assert hasattr(embedder, "decoder") == is_translator


# From a translator to an encoder


@pytest.mark.parametrize("share", [True, False])
@torch.no_grad()
def test_encoder_loads_from_a_translation_checkpoint(share: bool, tmp_path: Path) -> None:
    translator = tiny_model(share_encoder_decoder_embeddings=share)
    translator.save_pretrained(tmp_path / "translator")
    expected = translator.get_encoder()(**SOURCE).last_hidden_state
    encoder, info = AutoModelForTextEncoding.from_pretrained(
        tmp_path / "translator",
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    encoder.save_pretrained(tmp_path / "encoder")
    again = AutoModelForTextEncoding.from_pretrained(tmp_path / "encoder")
    for each in (encoder, again):
        assert each.eval()(**SOURCE).last_hidden_state.equal(expected)


@torch.no_grad()
def test_classifier_loads_from_a_translation_checkpoint(tmp_path: Path) -> None:
    translator = tiny_model()
    translator.save_pretrained(tmp_path / "translator")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "translator",
        num_labels=3,
        output_loading_info=True,
    )
    assert sorted(info["missing_keys"]) == ["classifier.bias", "classifier.weight"]
    assert not info["unexpected_keys"]
    states = translator.get_encoder()(**SOURCE).last_hidden_state
    mask = SOURCE["attention_mask"].float()[..., None]
    mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
    logits = classifier.eval()(**SOURCE).logits
    weight, bias = classifier.classifier.parameters()
    assert_near(logits, mean @ weight.T + bias, 1e-6)
    # saved and loaded under its own name, nothing is missing
    classifier.save_pretrained(tmp_path / "classifier")
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "classifier",
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert loaded.config.num_labels == 3
    assert loaded.eval()(**SOURCE).logits.equal(logits)


def random_classifier(num_labels: int) -> VanillaTransformerForSequenceClassification:
    config = tiny_config(num_labels=num_labels)
    return randomise(VanillaTransformerForSequenceClassification(config)).eval()


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_classifier_does_not_depend_on_the_rest_of_the_batch(left: bool) -> None:
    classifier = random_classifier(3)
    rows = sentences([9, 2, 5])
    batch = batch_of(rows, left)
    together = classifier(**batch).logits
    assert classifier(batch["input_ids"]).logits.equal(together)
    for row, logits in zip(rows, together, strict=True):
        assert_near(classifier(torch.tensor([row])).logits[0], logits)


def test_classification_losses_match_their_definitions() -> None:
    output = random_classifier(3)(**SOURCE, labels=torch.tensor([2, 0]))
    log_p = output.logits.log_softmax(dim=-1)
    expected = -(log_p[0, 2] + log_p[1, 0]).item() / 2
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    wanted = torch.tensor([0.5, -1.0])
    output = random_classifier(1)(**SOURCE, labels=wanted)
    squares = (output.logits[:, 0] - wanted) ** 2
    assert output.loss.item() == pytest.approx(squares.mean().item(), rel=1e-5)


def marked_sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of 3 to 9 tokens, of six words. The class is whether the first of these is among them."""
    lengths = [3 + index % 7 for index in range(count)]
    rows = []
    for ids in sentences(lengths, vocab_size=FIRST_WORD + 6, seed=seed):
        padding = [PAD] * (10 - len(ids))
        rows.append({"input_ids": ids + padding, "labels": int(FIRST_WORD in ids)})
    return rows


def accuracy(found: Any) -> dict[str, float]:
    right = found.predictions.argmax(-1) == found.label_ids
    return {"accuracy": float(right.mean())}


def test_pretrained_encoder_learns_to_classify_with_the_trainer_of_transformers(
    tmp_path: Path,
) -> None:
    tiny_model(final_layer_norm=True, lm_head_bias=True).save_pretrained(tmp_path / "translator")
    classifier = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "translator", num_labels=2
    )
    settings = {
        **QUIET,
        "max_steps": 80,
        "per_device_train_batch_size": 16,
        "learning_rate": 3e-3,
        "seed": 3,
    }
    trainer = Trainer(
        model=classifier,
        args=TrainingArguments(str(tmp_path / "out"), **settings),
        train_dataset=marked_sentences(400, seed=1),
        eval_dataset=marked_sentences(100, seed=2),
        compute_metrics=accuracy,
    )
    assert trainer.evaluate()["eval_accuracy"] < 0.7
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] >= 0.95
    trainer.save_model(str(tmp_path / "classifier"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    with torch.no_grad():
        assert again(**SOURCE).logits.equal(classifier.eval()(**SOURCE).logits)


# From a translator to a decoder

TARGET = torch.tensor(sentences([6, 6], vocab_size=31, seed=1))


def marian_decoder(translator: VanillaTransformerForConditionalGeneration) -> MarianForCausalLM:
    """`MarianForCausalLM` with the weights of the translator's decoder."""
    marian = to_marian(translator)
    config = marian.config
    config.vocab_size = config.decoder_vocab_size
    config.encoder_layers = config.decoder_layers  # from which it takes the depth of its cache
    peer = MarianForCausalLM(config)
    missing, surplus = peer.load_state_dict(marian.state_dict(), strict=False)
    assert set(missing) <= {"model.decoder.embed_positions.weight"}
    assert not [name for name in surplus if name.startswith(("model.decoder.", "lm_head."))]
    return peer.eval()


def loaded_decoder(translator: VanillaTransformerForConditionalGeneration, folder: Path) -> Any:
    translator.save_pretrained(folder)
    decoder, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return decoder.eval()


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
@pytest.mark.parametrize("reads_source", [False, True])
def test_decoder_alone_matches_marian(
    reads_source: bool,
    share: bool,
    tie: bool,
    tmp_path: Path,
) -> None:
    """Logits, loss, gradients, and greedy, beam and sampled tokens, from the checkpoint of a translator."""
    fields = tying(
        share,
        tie,
        position_encoding_type="sinusoidal_split",
        decoder_layers=3,
        decoder_attention_heads=2,
    )
    translator = tiny_model(**fields)
    decoder = loaded_decoder(translator, tmp_path)
    peer = marian_decoder(translator)
    source: dict[str, Tensor] = {}
    if reads_source:
        with torch.no_grad():
            states = translator.get_encoder()(**SOURCE).last_hidden_state
        source = {
            "encoder_hidden_states": states,
            "encoder_attention_mask": SOURCE["attention_mask"],
        }

    inputs = {
        "input_ids": TARGET,
        "labels": TARGET.masked_fill(TARGET[0, 2] == TARGET, -100),
        **source,
    }
    assert_near(decoder(**inputs).logits, peer(**inputs).logits, what="logits")
    loss, ours = gradients(decoder, **inputs)
    expected_loss, theirs = gradients(peer, **inputs)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    renamed = {
        name.replace("encoder_attn", "cross_attn"): gradient for name, gradient in theirs.items()
    }
    renamed.pop("model.decoder.embed_positions.weight", None)
    assert_same_gradients(ours, renamed)
    assert any("cross_attn" in name for name in ours) == reads_source

    for mode in ({"num_beams": 1}, {"num_beams": 3}, {"num_beams": 1, "do_sample": True}):
        written = []
        for model in (decoder, peer):
            torch.manual_seed(0)
            tokens = model.generate(
                TARGET[:, :2],
                max_new_tokens=8,
                top_k=0,
                # Marian's cache of a decoder alone mixes the keys of source and target.
                use_cache=model is decoder or not reads_source,
                **source,
                **mode,
            )
            written.append(tokens.tolist())
        assert written[0] == written[1], mode


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
@torch.no_grad()
def test_decoder_alone_is_saved_and_resized(
    share: bool,
    tie: bool,
    tmp_path: Path,
) -> None:
    fields = tying(
        share,
        tie,
        position_encoding_type="learned",
        lm_head_bias=True,
        decoder_layers=3,
    )
    translator = tiny_model(**fields)
    decoder = loaded_decoder(translator, tmp_path / "translator")
    assert translator.config.is_encoder_decoder
    expected = decoder(TARGET).logits
    decoder.resize_token_embeddings(53)
    decoder.save_pretrained(tmp_path / "decoder")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "decoder", output_loading_info=True
    )
    assert not any(info.values()), info
    logits = again.eval()(TARGET).logits
    assert logits.shape[-1] == 53
    assert again.get_input_embeddings().num_embeddings == 53
    assert again.config.vocab_size == 53
    assert_near(logits[..., : expected.shape[-1]], expected, 1e-6)
    assert (again.lm_head.weight is again.model.decoder.embed_tokens.weight) == tie


@torch.no_grad()
def test_decoder_alone_does_not_depend_on_padding_or_cache() -> None:
    decoder = randomise(VanillaTransformerForCausalLM(tiny_config())).eval()
    rows = sentences([6, 3])
    ids, mask = batch_of(rows, left=True).values()
    together = decoder(ids, mask).logits
    for row, logits in zip(rows, together, strict=True):
        alone = decoder(torch.tensor([row])).logits[0]
        assert_near(logits[-len(row) :], alone)
    first = decoder(ids[:, :4], mask[:, :4], use_cache=True)
    rest = decoder(
        ids[:, 4:],
        mask,
        past_key_values=first.past_key_values,
        logits_to_keep=1,
    )
    assert_near(rest.logits, together[:, -1:])
    with_cache, without = (
        decoder.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=5,
            use_cache=use_cache,
        )
        for use_cache in (True, False)
    )
    assert with_cache.equal(without)


def test_loss_of_a_decoder_alone_is_the_mean_over_its_labels_in_the_trainer_of_transformers(
    tmp_path: Path,
) -> None:
    """`Trainer` leaves the first label of each row out of its count, where it expects the model to shift them."""
    torch.manual_seed(0)
    decoder = VanillaTransformerForCausalLM(tiny_config())
    rows = [{"input_ids": [START, *ids[:-1]], "labels": ids} for ids in sentences([3, 4, 5, 4])]
    losses = []
    for row in rows:
        logits = decoder(torch.tensor([row["input_ids"]])).logits[0]
        losses += F.cross_entropy(logits, torch.tensor(row["labels"]), reduction="none").tolist()
    expected = pytest.approx(sum(losses) / len(losses), rel=1e-5)
    settings = {
        **QUIET,
        **DESCENT,
        "learning_rate": 0.0,
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
    }
    trainer = Trainer(
        model=decoder,
        args=TrainingArguments(str(tmp_path), **settings),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == expected
    assert trainer.evaluate()["eval_loss"] == expected


def test_decoder_of_a_translator_refuses_to_go_without_a_source() -> None:
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        tiny_model().get_decoder()(TARGET)
