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
    source, target = train_tokenizer(["one two three"] * 3, 265), train_tokenizer(["eins zwei drei"] * 3, 269)
    sizes = {"vocab_size": len(source)}
    if separate:
        sizes |= {"decoder_vocab_size": len(target), "share_encoder_decoder_embeddings": False}
    short_translations(**sizes).save_pretrained(where)
    save_tokenizers(where, source, target if separate else source)
    return where


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
    assert texts(first) == expected[:1] and len(read) < len(SENTENCES)
    data = Dataset.from_dict({"en": SENTENCES})
    assert [texts(each)[0] for each in translate((row["en"] for row in data), batch_size=2)] == expected


def test_pipeline_returns_n_best_with_scores(translate):
    found = translate(SENTENCES[:3], num_beams=4, num_return_sequences=3, batch_size=3)
    assert [len(each) for each in found] == [3, 3, 3]
    batch = translate.tokenizer(SENTENCES[:3], padding=True, return_tensors="pt")
    settings = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True}
    output = translate.model.generate(**batch, **settings)
    expected = translate.target_tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
    assert [text for each in found for text in texts(each)] == expected
    scores = [result["score"] for each in found for result in each]
    assert scores == pytest.approx(output.sequences_scores.tolist(), abs=1e-6)
    assert all(each[0]["score"] >= each[1]["score"] >= each[2]["score"] for each in found)


def test_generate_arguments_in_constructor_and_call(folder, translate):
    (greedy,) = translate(SENTENCES[0], num_beams=1)
    assert "score" not in greedy  # nothing was compared
    built = pipeline(model=str(folder), pipeline_class=TranslationPipeline, device="cpu", num_beams=1)
    assert built(SENTENCES[0]) == [greedy]
    (short,) = translate(SENTENCES[0], max_new_tokens=2)
    ids = translate.model.generate(**translate.tokenizer(SENTENCES[0], return_tensors="pt"), max_new_tokens=2)
    assert short["translation_text"] == translate.target_tokenizer.decode(ids[0], skip_special_tokens=True)


def test_blank_sentence_stays_blank(translate, expected):
    assert texts(translate(["", SENTENCES[0], " \t"], batch_size=3)) == ["", expected[0], ""]


@pytest.mark.parametrize("wrong", [3, ["one"]])
def test_input_that_is_no_string_is_refused(translate, wrong):
    with pytest.raises(ValueError, match="not text"):
        translate([wrong])


def test_saved_pipeline_loads_with_trust_remote_code(folder, translate, expected, tmp_path):
    translate.save_pretrained(tmp_path / "again")
    entry = json.loads((tmp_path / "again" / "config.json").read_text())["custom_pipelines"]
    assert entry == json.loads((folder / "config.json").read_text())["custom_pipelines"]
    again = pipeline(model=str(tmp_path / "again"), trust_remote_code=True, device="cpu")
    assert type(again).__name__ == "TranslationPipeline" and type(again) is not TranslationPipeline
    assert texts(again(SENTENCES)) == expected
    # a model of `pipeline()` can be saved like any other
    again.model.save_pretrained(tmp_path / "third")
    assert json.loads((tmp_path / "third" / "config.json").read_text())["custom_pipelines"] == entry


def test_custom_pipelines_entry_is_written_for_translation_models_only(folder, tmp_path):
    encoder = AutoModelForTextEncoding.from_pretrained(folder)
    assert "translation" in encoder.config.custom_pipelines  # as it was read
    encoder.save_pretrained(tmp_path / "encoder")
    assert "custom_pipelines" not in json.loads((tmp_path / "encoder" / "config.json").read_text())
    translator = AutoModelForSeq2SeqLM.from_pretrained(folder)
    own = {"impl": "mine.Translation", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    translator.config.custom_pipelines = {"translation": own, "other": own}
    translator.save_pretrained(tmp_path / "own")
    entries = json.loads((tmp_path / "own" / "config.json").read_text())["custom_pipelines"]
    assert entries == {"translation": own, "other": own}


def test_pipeline_from_model_and_tokenizer_objects(folder, translate, expected):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    at_hand = TranslationPipeline(model, translate.tokenizer, device="cpu")
    assert texts(at_hand(SENTENCES)) == expected
    at_hand = TranslationPipeline(
        model, translate.tokenizer, target_tokenizer=translate.target_tokenizer, device="cpu"
    )
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


def test_pipeline_supports_marian(translate):
    marian = tiny_marian(len(translate.tokenizer))
    found = TranslationPipeline(marian, translate.tokenizer, device="cpu")(SENTENCES[0], max_new_tokens=5)
    ids = marian.generate(**translate.tokenizer(SENTENCES[0], return_tensors="pt"), max_new_tokens=5)
    assert texts(found) == translate.tokenizer.batch_decode(ids, skip_special_tokens=True)
