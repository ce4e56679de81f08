"""Two tokenizers with different special ids: those of the target end and pad translations, everywhere."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vanilla_transformer import Translator, VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from hf_vanilla_transformer.evaluation import translation_metrics
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.marian import from_marian
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import SPECIAL_TOKENS, slow, tiny_model, word_tokenizer
from tests.trainer_helpers import QUIET, run_tiny, write_pairs

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier"}
SOURCE = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
TARGET = ["null", *WORDS.values(), "<pad>", "</s>", "<s>", "<unk>"]  # ids 1 and 2, the source's, are words
LINES = ["four three", "two three four", "one", "one four two three one"]
EXPECTED = [" ".join(WORDS[word] for word in line.split()) for line in LINES]


def sentences(count, longest):
    """Different sentences of 1 to `longest` words."""
    words = list(WORDS)
    digits = [[number // 4**place % 4 for place in range(1 + number % longest)] for number in range(count)]
    return [" ".join(words[digit] for digit in sentence) for sentence in digits]


def translated(lines):
    """The pairs of these sources."""
    return [(line, " ".join(WORDS[word] for word in line.split())) for line in lines]


@pytest.fixture(scope="module")
def pair():
    return tuple(word_tokenizer(tokens, ends=True, **SPECIAL_TOKENS) for tokens in (SOURCE, TARGET))


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory):
    """The folder of a run of the command that has learned to translate word by word."""
    folder = tmp_path_factory.mktemp("two_tokenizers")
    save_tokenizers(folder / "pair", *pair)
    flags = {"tokenizer_name": folder / "pair", "vocab_size": 8, "d_model": 32, "dropout": 0, "learning_rate": 1e-2}
    flags |= {"max_steps": 300, "warmup_steps": 20, "save_strategy": "no", "seed": 1, "logging_steps": 100}
    flags |= {"per_device_train_batch_size": 32, "generation_max_length": 20, "bleu_tokenize": "none"}
    flags |= write_pairs(folder, translated(sentences(300, longest=5)))
    flags |= write_pairs(folder, translated(LINES), "validation", "test")
    run_tiny(folder / "run", **flags)
    return folder / "run"


def test_run_of_the_command_translates_with_the_tokens_of_the_target(run, pair):
    results = json.loads((run / "all_results.json").read_text())
    assert results["test_exact_match"] == results["eval_exact_match"] == 100
    config, decoding = (json.loads((run / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert (config["pad_token_id"], config["eos_token_id"]) == (1, 2)
    assert (config["decoder_pad_token_id"], config["decoder_eos_token_id"]) == (5, 6)
    assert (decoding["pad_token_id"], decoding["eos_token_id"]) == (5, 6)
    assert list(Translator.from_pretrained(run).translate(LINES)) == EXPECTED
    source, target = load_tokenizers(run)
    model = AutoModelForSeq2SeqLM.from_pretrained(run)
    batch = source(LINES, return_tensors="pt", padding=True)
    for search in ({}, {"num_beams": 1}, {"do_sample": True, "top_k": 1, "num_beams": 1}):
        assert target.batch_decode(model.generate(**batch, **search), skip_special_tokens=True) == EXPECTED
    without_mask = model.generate(batch["input_ids"])
    assert target.batch_decode(without_mask, skip_special_tokens=True) == EXPECTED


def test_exports_translate_with_the_tokens_of_the_target(run, pair, tmp_path):
    export("marian", run, tmp_path / "marian")
    batch = pair[0](LINES, return_tensors="pt", padding=True)
    marian = MarianMTModel.from_pretrained(tmp_path / "marian")
    assert pair[1].batch_decode(marian.generate(**batch), skip_special_tokens=True) == EXPECTED
    again = from_marian(tmp_path / "marian")
    assert again.model.config.pad_token_id == 1 and again.model.generation_config.pad_token_id == 5
    rows = again.model.generate(batch["input_ids"])
    assert pair[1].batch_decode(rows, skip_special_tokens=True) == EXPECTED


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
    data = [{"input_ids": [4, 2], "labels": [1, 6]}, {"input_ids": [5, 4, 2], "labels": [2, 1, 6]}]
    seen = []
    metrics = translation_metrics(pair[1])

    def compute(prediction):
        seen.append(metrics(prediction))
        return seen[-1]

    for _ in range(2):
        trainer_class, args_class = Seq2SeqTrainer, Seq2SeqTrainingArguments
        if own:
            trainer_class, args_class = VanillaTransformerTrainer, VanillaTransformerTrainingArguments
        args = args_class(
            output_dir=str(tmp_path / "run"), max_steps=1, predict_with_generate=True, learning_rate=0.0, **QUIET
        )
        trainer = trainer_class(
            model,
            args,
            train_dataset=data,
            eval_dataset=data,
            processing_class=pair[0],
            data_collator=DataCollatorForSeq2Seq(pair[0], model=model),
            compute_metrics=compute,
            **({"target_tokenizer": pair[1]} if own else {}),
        )
        trainer.train()
        trainer.evaluate()
        trainer.save_model(str(tmp_path / "saved"))
        rows = trainer.model.eval().generate(torch.tensor([[4, 2, 1], [5, 4, 2]]), num_beams=1)
        model = type(model).from_pretrained(tmp_path / "saved")
        assert (model.config.pad_token_id, model.config.eos_token_id) == (1, 2)
        assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (5, 6)
        assert model.generate(torch.tensor([[4, 2, 1], [5, 4, 2]]), num_beams=1).equal(rows)
        shifted = model.prepare_decoder_input_ids_from_labels(torch.tensor([[1, 6, -100, -100]]))
        assert shifted.tolist() == [[7, 1, 6, 5]]
    padded = [1] * 12  # of the source, which are words of the target
    assert metrics(_prediction([[7, 2, 6, *padded]], [[2, 6, *padded]]))["exact_match"] == 100
    assert metrics(_prediction([[6, 2, 6, *padded]], [[2, 6, -100]]))["exact_match"] == 100


def _prediction(ids, labels):
    import numpy as np
    from transformers import EvalPrediction

    return EvalPrediction(np.array(ids), np.array(labels))


def test_own_tokens_of_an_adapted_tokenizer_are_kept(pair):
    """A list of ends that the caller sets stays, and so does a new end in a shared vocabulary."""
    model = tiny_model(vocab_size=8, decoder_vocab_size=9, share_encoder_decoder_embeddings=False, eos_token_id=6)
    model.config.eos_token_id = 2
    model.generation_config.eos_token_id = [2, 6, 7]
    assert model.generation_config.eos_token_id == [6, 7]
    shared = tiny_model()
    shared.generation_config.eos_token_id = [25, 2]
    shared.config.eos_token_id = 25
    assert shared.generation_config.eos_token_id == [25, 2] and shared.config.decoder_eos_token_id is None


@pytest.mark.parametrize("kind", ["shared", "marian"])
def test_model_with_one_set_of_special_tokens_is_refused(pair, kind, tmp_path):
    model = tiny_model()
    if kind == "marian":
        sizes = {f"{stack}_{name}": 1 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        model = MarianMTModel(MarianConfig(vocab_size=10, d_model=8, pad_token_id=1, **sizes))
    args = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **QUIET)
    with pytest.raises(UserError, match="^target_tokenizer: "):
        VanillaTransformerTrainer(model, args, processing_class=pair[0], target_tokenizer=pair[1])


def test_new_padding_does_not_move_positions():
    """fairseq counts positions from its own padding, whatever a tokenizer pads with later."""
    model = tiny_model(position_encoding_type="sinusoidal_fairseq")
    batch = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    before = model(**batch, attention_mask=torch.ones(1, 3)).logits
    model.config.pad_token_id = 24
    assert model(**batch, attention_mask=torch.ones(1, 3)).logits.equal(before)
    again = type(model.config).from_dict(json.loads(model.config.to_json_string()))
    assert (again.pad_token_id, again.position_offset) == (24, 2)


def test_resumed_run_is_bit_identical_with_everything_on(pair, tmp_path):
    """Two tokenizers, a weighted mixture with held-out pairs, SimCut, an average of the weights and token batches."""
    save_tokenizers(tmp_path / "pair", *pair)
    files = []
    for name, size in (("a", 30), ("b", 12)):
        files += write_pairs(tmp_path, translated(sentences(size, longest=4)), name)[name]
    flags = {"train": files, "train_weights": [1, 2], "held_out_pairs": 3, "tokenizer_name": tmp_path / "pair"}
    flags |= {"simcut_alpha": 3.0, "ema_decay": 0.9, "max_tokens_per_batch": 60, "save_steps": 2, "dropout": 0.3}
    flags |= {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "vocab_size": 8}
    run_tiny(tmp_path / "whole", **flags)
    run_tiny(tmp_path / "new", **flags, resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    for name in ("model.safetensors", "checkpoint-4/model.safetensors", "checkpoint-4/ema.safetensors"):
        whole, resumed = (load_file(tmp_path / run / name) for run in ("whole", "new"))
        assert whole.keys() == resumed.keys() and all(whole[key].equal(resumed[key]) for key in whole), name
