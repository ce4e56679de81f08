"""`BatchTranslator` gives the translations of `Translator` in `datasets.map` and on pandas frames."""

import pickle

import datasets
import numpy as np
import pytest

from hf_vanilla_transformer import BatchTranslator, Translator
from tests.model_helpers import error_of, save_model

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


NOTHING = [None, float("nan"), np.float32("nan")]


@pytest.mark.parametrize("kind", ["list", "pandas", "arrow"])
def test_missing_values_have_no_translation(folder, kind):
    """A missing value of each library stays one, and its neighbours keep their translations."""
    pandas = pytest.importorskip("pandas")
    texts = ["two hundred", "seven"]
    expected = list(Translator.from_pretrained(folder).translate(texts, protect=True, **SETTINGS))
    nothing = {"list": NOTHING, "pandas": [*NOTHING, pandas.NA, pandas.NaT], "arrow": [None]}[kind]
    column = [texts[0], *nothing, texts[1]]
    translate = BatchTranslator(folder, **SETTINGS)
    if kind == "list":
        translations = translate({"source": column})["translation"]
    elif kind == "pandas":
        frame = pandas.DataFrame({"source": pandas.Series(column, dtype="object")})
        translations = next(iter(translate.map_in_pandas([frame])))["translation"].tolist()
    else:
        rows = datasets.Dataset.from_dict({"source": column})
        translations = rows.map(translate, batched=True, batch_size=2)["translation"]
    assert [translations[0], translations[-1]] == expected
    # pandas has a missing value of its own for text
    assert len(translations) == len(column) and pandas.isna(translations[1:-1]).all()


@pytest.mark.parametrize("cell", [3, 2.5, b"two", ["two"], {"text": "two"}, True])
def test_cells_that_are_no_text_are_refused_with_their_row(folder, cell):
    message = error_of(BatchTranslator(folder, **SETTINGS), {"source": ["two", cell]})
    assert message.startswith("source: row 1 ")


def test_numbers_and_addresses_are_kept_as_by_the_command(folder):
    kept = ["12345", "https://example.org/a?b=1"]
    assert BatchTranslator(folder, **SETTINGS)({"source": kept})["translation"] == kept
    model_only = list(Translator.from_pretrained(folder).translate(kept, **SETTINGS))
    assert BatchTranslator(folder, protect=False, **SETTINGS)({"source": kept})["translation"] == model_only != kept


@pytest.mark.slow
def test_two_processes_translate_as_one(folder):
    dataset = datasets.Dataset.from_dict({"source": SENTENCES * 10})
    rows = dataset.map(BatchTranslator(folder, **SETTINGS), batched=True, batch_size=5, num_proc=2)
    assert rows["translation"] == list(Translator.from_pretrained(folder).translate(SENTENCES * 10, **SETTINGS))
