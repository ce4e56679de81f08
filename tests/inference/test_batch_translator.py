"""`BatchTranslator` gives the translations of `Translator` in `datasets.map` and on pandas frames."""

import pickle

import datasets
import numpy as np
import pytest

from hf_vanilla_transformer import BatchTranslator, Translator
from tests.model_helpers import save_model

SENTENCES = ["two hundred", "", "seven", "thirty four"]
SETTINGS = {"num_beams": 2, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), SENTENCES, vocab_size=300)


def translations(folder, sentences=SENTENCES):
    return list(Translator.from_pretrained(folder).translate(sentences, **SETTINGS))


def test_columns_are_kept_and_translations_added(folder):
    pandas = pytest.importorskip("pandas")
    expected = translations(folder)
    translate = BatchTranslator(
        folder,
        source="en",
        target="de",
        **SETTINGS,
    )
    rows = {"id": [3, 1, 2, 0], "en": SENTENCES}
    assert translate(rows) == rows | {"de": expected}
    as_from_ray = {name: np.array(values) for name, values in rows.items()}
    assert translate(as_from_ray)["de"] == expected
    copied = pickle.loads(pickle.dumps(translate))
    frame = pandas.DataFrame(rows)
    whole, first = copied.map_in_pandas([frame, frame.iloc[:1]])
    assert whole["de"].tolist() == expected
    assert first["de"].tolist() == expected[:1]
    assert whole["id"].tolist() == rows["id"]


def translated(dataset, folder, **settings):
    translate = BatchTranslator(folder, **SETTINGS)
    return dataset.map(
        translate,
        batched=True,
        batch_size=2,
        **settings,
    )["translation"]


def test_datasets_map_does_not_reuse_the_rows_of_a_retrained_model(folder, tmp_path):
    dataset = datasets.Dataset.from_dict({"source": SENTENCES})
    dataset.save_to_disk(tmp_path / "data")
    dataset = datasets.load_from_disk(tmp_path / "data")
    first = translated(dataset, folder)
    assert first == translations(folder)
    retrained = Translator.from_pretrained(folder).model
    retrained.lm_head.weight.data.neg_()
    retrained.save_pretrained(folder)
    again = translated(dataset, folder)
    assert again == translations(folder)
    assert again != first


@pytest.mark.slow
def test_two_processes_translate_as_one(folder):
    dataset = datasets.Dataset.from_dict({"source": SENTENCES * 10})
    assert translated(dataset, folder, num_proc=2) == translations(folder, SENTENCES * 10)
