"""Two tokenizers with different special ids: those of the target end and pad translations, everywhere."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    MarianMTModel,
    Seq2SeqTrainer,
)

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import translation_metrics
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.marian import from_marian
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers
from hf_vanilla_transformer.training.trainer.resumable_trainer import ResumableTrainer
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import SPECIAL_TOKENS, slow, tiny_marian, tiny_model, word_tokenizer
from tests.trainer_helpers import make_trainer, run_tiny, write_pairs

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier"}
SOURCE = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
# ids 1 and 2, the source's, are words
TARGET = [
    "null",
    *WORDS.values(),
    "<pad>",
    "</s>",
    "<s>",
    "<unk>",
]
LINES = ["four three", "two three four", "one", "one four two three one"]


def translation(line):
    return " ".join(WORDS[word] for word in line.split())


EXPECTED = list(map(translation, LINES))


def pairs_of(lines):
    return [(line, translation(line)) for line in lines]


def sentences(count, longest):
    """Different sentences of 1 to `longest` words."""
    words = list(WORDS)
    lines = []
    for number in range(count):
        length = 1 + number % longest
        lines.append(" ".join(words[number // 4**place % 4] for place in range(length)))
    return lines


@pytest.fixture(scope="module")
def pair():
    return tuple(word_tokenizer(tokens, ends=True, **SPECIAL_TOKENS) for tokens in (SOURCE, TARGET))


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory):
    """The folder of a run of the command that has learned to translate word by word."""
    folder = tmp_path_factory.mktemp("two_tokenizers")
    save_tokenizers(folder / "pair", *pair)
    run_tiny(
        folder / "run",
        **write_pairs(folder, pairs_of(sentences(300, longest=5))),
        **write_pairs(folder, pairs_of(LINES), "validation", "test"),
        tokenizer_name=folder / "pair",
        vocab_size=8,
        d_model=32,
        dropout=0,
        learning_rate=1e-2,
        max_steps=300,
        warmup_steps=20,
        save_strategy="no",
        seed=1,
        logging_steps=100,
        per_device_train_batch_size=32,
        generation_max_length=20,
        bleu_tokenize="none",
    )
    return folder / "run"


def ids(pad, end, prefix=""):
    names = f"{prefix}pad_token_id", f"{prefix}eos_token_id"
    return SimpleNamespace(**dict(zip(names, (pad, end), strict=True)))


def set_target_tokens(size, source, target, prefix="decoder_"):
    """The tokens of a configuration and of `generate` after the target's were set, from 1 and 2."""
    config = ids(1, 2, prefix)
    config.decoder_vocab_size = size
    model = SimpleNamespace(config=config, generation_config=ids(1, 2))
    trainer = SimpleNamespace(_base_model=lambda: model, processing_class=source)
    ResumableTrainer._set_target_tokens(trainer, target)
    found = vars(model.config)
    of_config = found[f"{prefix}pad_token_id"], found[f"{prefix}eos_token_id"]
    return of_config, tuple(vars(model.generation_config).values())


@pytest.mark.parametrize(
    ("size", "source", "target", "expected"),
    [
        (8, ids(1, 2), ids(5, 6), (5, 6)),
        (8, ids(1, 2), ids(None, 6), (1, 6)),
        (None, ids(1, 2), ids(1, 2), (1, 2)),
        (None, None, ids(5, 6), (1, 2)),  # nothing to compare with
    ],
)
def test_model_of_two_vocabularies_has_the_tokens_of_the_target(size, source, target, expected):
    assert set_target_tokens(size, source, target) == (expected, expected)


@pytest.mark.parametrize(("size", "prefix"), [(None, "decoder_"), (8, "")])
@pytest.mark.parametrize(
    ("target", "name"), [(ids(5, 2), "pad_token_id is 5"), (ids(None, 6), "eos_token_id is 6")]
)
def test_model_of_one_vocabulary_refuses_other_tokens(size, prefix, target, name):
    with pytest.raises(UserError, match=name):
        set_target_tokens(size, ids(1, 2), target, prefix)


def special_ids(config):
    return config["pad_token_id"], config["eos_token_id"]


@pytest.mark.slow
def test_run_of_the_command_translates_with_the_tokens_of_the_target(run, pair):
    results = json.loads((run / "all_results.json").read_text())
    assert results["test_exact_match"] == results["eval_exact_match"] == 100
    config = json.loads((run / "config.json").read_text())
    assert special_ids(config) == (1, 2)
    assert (config["decoder_pad_token_id"], config["decoder_eos_token_id"]) == (5, 6)
    assert special_ids(json.loads((run / "generation_config.json").read_text())) == (5, 6)
    assert list(Translator.from_pretrained(run).translate(LINES)) == EXPECTED
    source, target = load_tokenizers(run)
    model = AutoModelForSeq2SeqLM.from_pretrained(run)
    batch = source(LINES, return_tensors="pt", padding=True)
    without_mask = {"input_ids": batch["input_ids"]}
    for inputs in (batch, without_mask):
        for search in ({}, {"num_beams": 1}, {"do_sample": True, "top_k": 1, "num_beams": 1}):
            rows = model.generate(**inputs, **search)
            assert target.batch_decode(rows, skip_special_tokens=True) == EXPECTED


def test_exports_translate_with_the_tokens_of_the_target(run, pair, tmp_path):
    source, target = pair
    export("marian", run, tmp_path / "marian")
    batch = source(LINES, return_tensors="pt", padding=True)
    marian = MarianMTModel.from_pretrained(tmp_path / "marian")
    again = from_marian(tmp_path / "marian").model
    assert again.config.pad_token_id == 1
    assert again.generation_config.pad_token_id == 5
    for rows in (marian.generate(**batch), again.generate(batch["input_ids"])):
        assert target.batch_decode(rows, skip_special_tokens=True) == EXPECTED


@pytest.mark.slow
def test_ctranslate2_ends_with_the_tokens_of_the_target(run, pair, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    with pytest.raises(UserError, match="'</s>' has different ids"):  # one tokenizer for both sides
        export("onnx", run, tmp_path / "onnx")
    export("ctranslate2", run, tmp_path / "ct2")
    engine = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu")
    tokens = [pair[0].convert_ids_to_tokens(pair[0](line)["input_ids"]) for line in LINES]
    found = [result.hypotheses[0] for result in engine.translate_batch(tokens)]
    assert [" ".join(each) for each in found] == EXPECTED


@pytest.mark.parametrize("own", [True, *slow(False)])
@pytest.mark.parametrize("target_size", [len(TARGET), len(SOURCE), 20])
def test_training_keeps_the_tokens_of_the_target(pair, target_size, own, tmp_path):
    """With the alignment of `Trainer` to `processing_class`, twice, and after saving and loading."""
    model = tiny_model(
        vocab_size=len(SOURCE),
        decoder_vocab_size=max(target_size, 8),
        share_encoder_decoder_embeddings=False,
        pad_token_id=5,
        eos_token_id=6,
        decoder_start_token_id=7,
    )
    data = [
        {"input_ids": [4, 2], "labels": [1, 6]},
        {"input_ids": [5, 4, 2], "labels": [2, 1, 6]},
    ]
    source, target = pair
    metrics = translation_metrics(target)
    settings = {"kind": Seq2SeqTrainer}
    if own:
        settings = {"target_tokenizer": target}
    sources = torch.tensor([[4, 2, 1], [5, 4, 2]])
    for _ in range(2):
        trainer = make_trainer(
            tmp_path / "run",
            data,
            model,
            max_steps=1,
            predict_with_generate=True,
            learning_rate=0.0,
            eval_dataset=data,
            processing_class=source,
            data_collator=DataCollatorForSeq2Seq(source, model=model),
            compute_metrics=metrics,
            **settings,
        )
        trainer.train()
        trainer.evaluate()
        trainer.save_model(str(tmp_path / "saved"))
        rows = trainer.model.eval().generate(sources, num_beams=1)
        model = type(model).from_pretrained(tmp_path / "saved")
        assert special_ids(model.config.to_dict()) == (1, 2)
        assert special_ids(model.generation_config.to_dict()) == (5, 6)
        assert model.generate(sources, num_beams=1).equal(rows)
        shifted = model.prepare_decoder_input_ids_from_labels(torch.tensor([[1, 6, -100, -100]]))
        assert shifted.tolist() == [[7, 1, 6, 5]]
    padded = [1] * 12  # of the source, which are words of the target
    for ids, labels in (
        ([7, 2, 6, *padded], [2, 6, *padded]),
        ([6, 2, 6, *padded], [2, 6, -100]),
    ):
        prediction = EvalPrediction(np.array([ids]), np.array([labels]))
        assert metrics(prediction)["exact_match"] == 100


def test_own_tokens_of_an_adapted_tokenizer_are_kept():
    """A list of ends that the caller sets stays, and so does a new end in a shared vocabulary."""
    model = tiny_model(
        vocab_size=8,
        decoder_vocab_size=9,
        share_encoder_decoder_embeddings=False,
        eos_token_id=6,
    )
    model.config.eos_token_id = 2
    model.generation_config.eos_token_id = [2, 6, 7]
    assert model.generation_config.eos_token_id == [6, 7]
    shared = tiny_model()
    shared.generation_config.eos_token_id = [25, 2]
    shared.config.eos_token_id = 25
    assert shared.generation_config.eos_token_id == [25, 2]
    assert shared.config.decoder_eos_token_id is None


@pytest.mark.parametrize(
    "make_model", [tiny_model, lambda: tiny_marian(10)], ids=["shared", "marian"]
)
def test_model_with_one_set_of_special_tokens_is_refused(pair, make_model, tmp_path):
    model = make_model()
    source, target = pair
    with pytest.raises(UserError, match="^target_tokenizer: "):
        make_trainer(tmp_path, model=model, processing_class=source, target_tokenizer=target)


def test_new_padding_does_not_move_positions():
    """fairseq counts positions from its own padding, whatever a tokenizer pads with later."""
    model = tiny_model(position_encoding_type="sinusoidal_fairseq")
    batch = {
        "input_ids": torch.tensor([[5, 6, 2]]),
        "attention_mask": torch.ones(1, 3),
        "decoder_input_ids": torch.tensor([[0, 7]]),
    }
    before = model(**batch).logits
    model.config.pad_token_id = 24
    assert model(**batch).logits.equal(before)
    again = type(model.config).from_dict(json.loads(model.config.to_json_string()))
    assert (again.pad_token_id, again.position_offset) == (24, 2)


def test_resumed_run_is_bit_identical_with_everything_on(pair, tmp_path):
    """Two tokenizers, a weighted mixture with held-out pairs, SimCut, an average of the weights and token batches."""
    save_tokenizers(tmp_path / "pair", *pair)
    first = write_pairs(tmp_path, pairs_of(sentences(30, longest=4)), "a")["a"]
    second = write_pairs(tmp_path, pairs_of(sentences(12, longest=4)), "b")["b"]
    flags = {
        "train": [*first, *second],
        "train_weights": [1, 2],
        "held_out_pairs": 3,
        "tokenizer_name": tmp_path / "pair",
        "simcut_alpha": 3.0,
        "ema_decay": 0.9,
        "max_tokens_per_batch": 60,
        "save_steps": 2,
        "dropout": 0.3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 4,
        "vocab_size": 8,
    }
    run_tiny(tmp_path / "whole", **flags)
    run_tiny(
        tmp_path / "new",
        **flags,
        resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2",
    )
    for name in (
        "model.safetensors",
        "checkpoint-4/model.safetensors",
        "checkpoint-4/ema.safetensors",
    ):
        whole = load_file(tmp_path / "whole" / name)
        torch.testing.assert_close(load_file(tmp_path / "new" / name), whole, rtol=0, atol=0)
