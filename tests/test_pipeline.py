"""`TranslationPipeline`: the same text as `generate`, for every kind of input."""

import json
import shutil

import pytest
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoModelForTextEncoding, pipeline

from hf_vanilla_transformer import TranslationPipeline, Translator
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import tiny_marian, tiny_model

SENTENCES = ["one two three", "two", "three three one two", "one", "two one"]


def short_translations(**fields):
    """A model whose translations are short and differ from sentence to sentence."""
    model = tiny_model(seed=5, tie_word_embeddings=False, scale_embedding=False, **fields)
    model.generation_config.max_new_tokens = 6
    return model


def folder_of(where, separate):
    source = train_tokenizer(["one two three"] * 3, 265)
    target = source
    sizes = {"vocab_size": len(source)}
    if separate:
        target = train_tokenizer(["eins zwei drei"] * 3, 269)
        sizes["decoder_vocab_size"] = len(target)
        sizes["share_encoder_decoder_embeddings"] = False
    short_translations(**sizes).save_pretrained(where)
    save_tokenizers(where, source, target)
    return where


def entries_of(folder):
    """The pipelines that a configuration names."""
    return json.loads((folder / "config.json").read_text()).get("custom_pipelines")


@pytest.fixture(scope="module", params=[False, True], ids=["joint", "separate"])
def folder(request, tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def translate(folder):
    return pipeline(model=str(folder), pipeline_class=TranslationPipeline, device="cpu")


@pytest.fixture(scope="module")
def expected(folder):
    """The translation of each sentence alone by `Translator`."""
    return list(Translator.from_pretrained(folder, "cpu").translate(SENTENCES, batch_size=1))


def texts(results):
    return [each["translation_text"] for each in results]


def test_pipeline_equals_translator(translate, expected, folder):
    assert texts(translate(SENTENCES)) == expected
    assert len(set(expected)) > 1
    separate = (folder / "target_tokenizer").is_dir()
    assert (translate.target_tokenizer is not translate.tokenizer) == separate


def test_pipeline_accepts_a_sentence_a_stream_and_a_dataset(translate, expected):
    assert texts(translate(SENTENCES[0])) == expected[:1]
    read = []

    def stream():
        for sentence in SENTENCES:
            read.append(sentence)
            yield sentence

    results = translate(stream(), batch_size=2)
    assert len(read) <= 1  # the first, which transformers looks at
    first = next(iter(results))
    assert texts(first) == expected[:1]
    assert len(read) < len(SENTENCES)
    rows = (row["en"] for row in Dataset.from_dict({"en": SENTENCES}))
    for found, text in zip(translate(rows, batch_size=2), expected, strict=True):
        assert texts(found) == [text]


def test_no_sentence_has_no_translation(translate):
    assert translate([]) == []
    assert list(translate(text for text in ())) == []


def test_pipeline_returns_n_best_with_scores(translate):
    settings = {"num_beams": 4, "num_return_sequences": 3}
    found = translate(SENTENCES[:3], **settings, batch_size=3)
    assert [len(each) for each in found] == [3, 3, 3]
    batch = translate.tokenizer(SENTENCES[:3], padding=True, return_tensors="pt")
    output = translate.model.generate(**batch, **settings, return_dict_in_generate=True)
    expected = translate.target_tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
    assert [text for each in found for text in texts(each)] == expected
    scores = [result["score"] for each in found for result in each]
    assert scores == pytest.approx(output.sequences_scores.tolist(), abs=1e-6)
    for first, second, third in found:
        assert first["score"] >= second["score"] >= third["score"]


def test_generate_arguments_in_constructor_and_call(folder, translate):
    (greedy,) = translate(SENTENCES[0], num_beams=1)
    assert "score" not in greedy  # nothing was compared
    built = pipeline(
        model=str(folder), pipeline_class=TranslationPipeline, device="cpu", num_beams=1
    )
    assert built(SENTENCES[0]) == [greedy]
    short = translate(SENTENCES[0], max_new_tokens=2)
    batch = translate.tokenizer(SENTENCES[0], return_tensors="pt")
    ids = translate.model.generate(**batch, max_new_tokens=2)
    assert texts(short) == translate.target_tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_blank_sentence_stays_blank(translate, expected):
    found = translate(["", SENTENCES[0], " \t"], batch_size=3)
    assert texts(found) == ["", expected[0], ""]


@pytest.mark.parametrize("wrong", [3, ["one"]])
def test_input_that_is_no_string_is_refused(translate, wrong):
    with pytest.raises(ValueError, match="not text"):
        translate([wrong])


def test_saved_pipeline_loads_with_trust_remote_code(folder, translate, expected, tmp_path):
    saved = tmp_path / "again"
    translate.save_pretrained(saved)
    assert entries_of(saved) == entries_of(folder) is not None
    again = pipeline(model=str(saved), trust_remote_code=True, device="cpu")
    assert type(again).__name__ == "TranslationPipeline"
    assert type(again) is not TranslationPipeline
    assert texts(again(SENTENCES)) == expected
    # a model of `pipeline()` can be saved like any other
    third = tmp_path / "third"
    again.model.save_pretrained(third)
    assert entries_of(third) == entries_of(folder)


def test_custom_pipelines_entry_is_written_for_translation_models_only(folder, tmp_path):
    encoder = AutoModelForTextEncoding.from_pretrained(folder)
    assert "translation" in encoder.config.custom_pipelines  # as it was read
    encoder.save_pretrained(tmp_path / "encoder")
    assert entries_of(tmp_path / "encoder") is None
    translator = AutoModelForSeq2SeqLM.from_pretrained(folder)
    own = {
        "impl": "mine.Translation",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
    entries = {"translation": own, "other": own}
    translator.config.custom_pipelines = entries
    translator.save_pretrained(tmp_path / "own")
    assert entries_of(tmp_path / "own") == entries


def test_pipeline_from_model_and_tokenizer_objects(folder, translate, expected):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    for given in ({}, {"target_tokenizer": translate.target_tokenizer}):
        at_hand = TranslationPipeline(model, translate.tokenizer, device="cpu", **given)
        assert texts(at_hand(SENTENCES)) == expected
    with pytest.raises(ValueError, match="tokenizer=None"):
        TranslationPipeline(model, device="cpu")


def test_missing_target_tokenizer_is_refused(tmp_path):
    folder = folder_of(tmp_path, separate=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    shutil.rmtree(folder / "target_tokenizer")
    source = train_tokenizer(["one two three four five six"] * 3, 300)
    assert len(source) > model.config.decoder_vocab_size
    with pytest.raises(ValueError, match="target_tokenizer=None"):
        TranslationPipeline(model, source, device="cpu")
    small = train_tokenizer(["one"] * 3, 262)  # it would fit, but is that of the source
    assert len(small) < model.config.decoder_vocab_size
    model.config.vocab_size = len(small)
    with pytest.raises(ValueError, match="target_tokenizer=None"):
        TranslationPipeline(model, small, device="cpu")


def test_pipeline_supports_marian(translate):
    tokenizer = translate.tokenizer
    marian = tiny_marian(len(tokenizer))
    found = TranslationPipeline(marian, tokenizer, device="cpu")(SENTENCES[0], max_new_tokens=5)
    batch = tokenizer(SENTENCES[0], return_tensors="pt")
    ids = marian.generate(**batch, max_new_tokens=5)
    assert texts(found) == tokenizer.batch_decode(ids, skip_special_tokens=True)
