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


def test_columns_are_kept_and_translations_added(folder):
    pandas = pytest.importorskip("pandas")
    translations = list(Translator.from_pretrained(folder).translate(SENTENCES, **SETTINGS))
    translate = BatchTranslator(folder, source="en", target="de", **SETTINGS)
    rows = {"id": [3, 1, 2, 0], "en": SENTENCES}
    assert translate(rows) == rows | {"de": translations}
    assert translate({name: np.array(values) for name, values in rows.items()})["de"] == translations  # as from Ray
    copied = pickle.loads(pickle.dumps(translate))
    frames = list(copied.map_in_pandas([pandas.DataFrame(rows), pandas.DataFrame(rows).iloc[:1]]))
    assert [frame["de"].tolist() for frame in frames] == [translations, translations[:1]]
    assert frames[0]["id"].tolist() == rows["id"]


def test_datasets_map_does_not_reuse_the_rows_of_a_retrained_model(folder, tmp_path):
    dataset = datasets.Dataset.from_dict({"source": SENTENCES})
    dataset.save_to_disk(tmp_path / "data")
    dataset = datasets.load_from_disk(tmp_path / "data")
    first = dataset.map(BatchTranslator(folder, **SETTINGS), batched=True, batch_size=2)
    assert first["translation"] == list(Translator.from_pretrained(folder).translate(SENTENCES, **SETTINGS))
    retrained = Translator.from_pretrained(folder).model
    retrained.lm_head.weight.data.neg_()
    retrained.save_pretrained(folder)
    again = dataset.map(BatchTranslator(folder, **SETTINGS), batched=True, batch_size=2)
    assert again["translation"] == list(Translator.from_pretrained(folder).translate(SENTENCES, **SETTINGS))
    assert again["translation"] != first["translation"]


@pytest.mark.slow
def test_two_processes_translate_as_one(folder):
    dataset = datasets.Dataset.from_dict({"source": SENTENCES * 10})
    rows = dataset.map(BatchTranslator(folder, **SETTINGS), batched=True, batch_size=5, num_proc=2)
    assert rows["translation"] == list(Translator.from_pretrained(folder).translate(SENTENCES * 10, **SETTINGS))
