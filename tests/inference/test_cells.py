"""Every way to translate treats a cell alike: text, nothing, or something else. Numbers and addresses stay."""

import json

import datasets
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("pandas")

import pandas
from fastapi import HTTPException

from hf_vanilla_transformer import BatchTranslator, TranslationPipeline, Translator
from hf_vanilla_transformer.inference.file_translation import translated_lines
from hf_vanilla_transformer.inference.sentences import read_directed_sentences
from hf_vanilla_transformer.serving.request_body import validate
from hf_vanilla_transformer.serving.schemas import PredictRequest
from tests.model_helpers import save_model
from tests.serving_helpers import client_of, language_pair

SENTENCES = ["two hundred", "seven", "thirty four"]
TEXT = "two hundred"
TEXTS = ["seven", "", " "]
KEPT = ["12345", "https://example.org/a?b=1"]
OF_JSON = [None]
NOTHING = [None, float("nan"), np.float32("nan"), pandas.NA, pandas.NaT]
OTHERS = [3, 2.5, True, ["two"], {"text": "two"}]
NOT_JSON = [b"two", np.array(["two"]), object()]


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    """Name -> a function of cells that returns their translations, "" for nothing."""
    folder = save_model(tmp_path_factory.mktemp("model"), SENTENCES, vocab_size=300)
    translator = Translator.from_pretrained(folder)
    translator.model.generation_config.update(num_beams=2, max_new_tokens=5)
    translator.model.save_pretrained(folder)
    pipeline = TranslationPipeline(model=translator.model, tokenizer=translator.source_tokenizer)
    batches = BatchTranslator(folder)

    def translate(cells):
        return list(translator.translate(cells))

    def of_table(cells):
        table = tmp_path_factory.mktemp("table") / "table.jsonl"
        table.write_text("".join(json.dumps({"source": cell}) + "\n" for cell in cells))
        return list(translated_lines(translator, read_directed_sentences(table)[0]))

    def of_data_set(cells):
        rows = datasets.Dataset.from_list([{"source": cell} for cell in cells])
        return [text or "" for text in rows.map(batches, batched=True)["translation"]]

    def of_spark(cells):
        frame = pandas.DataFrame({"source": pandas.Series(cells, dtype="object")})
        (translated,) = batches.map_in_pandas([frame])
        return ["" if pandas.isna(text) else text for text in translated["translation"]]

    def of_server(cells):
        with client_of(language_pair(translator)) as client:
            answer = client.post("/translate", json={"q": cells, "source": "en", "target": "de"})
        if answer.status_code == 400:
            raise ValueError(answer.json()["error"])
        return [text.strip() for text in answer.json()["translatedText"]]  # which keeps the layout

    return {
        "python": translate,
        "command": of_table,
        "batch": lambda cells: [text or "" for text in batches({"source": cells})["translation"]],
        "datasets.map": of_data_set,
        "spark": of_spark,
        "pipeline": lambda cells: [result["translation_text"] for result in pipeline(cells)],
        "server": of_server,
        "server of sequences": lambda cells: translate(validate(PredictRequest, {"q": cells}).q),
    }


ROWS = {
    "python": "line 2",
    "command": "line 2",
    "batch": "row 1",
    "datasets.map": "row 0",
    "spark": "row 1",
    "pipeline": "item 1",
    "server": "item 1",
    "server of sequences": "item 1",
}
OF_FILES = "command", "datasets.map", "server", "server of sequences"  # JSON and Arrow have one missing value


@pytest.mark.parametrize("name", ROWS)
def test_cells_mean_the_same_at_every_door(doors, name: str) -> None:
    door = doors[name]
    expected = doors["python"]([TEXT])
    for text in TEXTS:
        assert door([TEXT, text]) == expected + doors["python"]([text])
    for nothing in OF_JSON if name in OF_FILES else NOTHING:
        assert door([TEXT, nothing]) == [*expected, ""]
    others = OTHERS if name in OF_FILES else OTHERS + NOT_JSON
    for other in others:
        # a column of Arrow has one type
        cells = [other, other] if name == "datasets.map" else [TEXT, other]
        with pytest.raises((ValueError, HTTPException), match=ROWS[name]):
            door(cells)


@pytest.mark.parametrize("name", ROWS)
def test_numbers_and_addresses_stay_at_every_door_with_the_package(doors, name: str) -> None:
    is_kept = doors[name](KEPT) == KEPT
    assert is_kept == (name != "pipeline")  # a file that travels with a checkpoint, without the package
