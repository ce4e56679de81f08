"""Every way to translate treats a cell alike: text, nothing, or something else. Numbers and addresses stay."""

import json

import datasets
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("pandas")

import pandas
import torch
from fastapi import HTTPException

from hf_vanilla_transformer import BatchTranslator, TranslationPipeline, Translator
from hf_vanilla_transformer.inference.file_translation import translated_lines
from hf_vanilla_transformer.inference.sentences import read_directed_sentences
from hf_vanilla_transformer.serving.request_body import validate
from hf_vanilla_transformer.serving.schemas import PredictRequest
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import save_model
from tests.serving_helpers import client_of, language_pair

SENTENCES = ["two hundred", "seven", "thirty four"]
TEXT = "two hundred"
TEXTS = ["seven", "", " "]
KEPT = ["12345", "https://example.org/a?b=1"]
OF_JSON = [None]
NOTHING = [None, float("nan"), np.float32("nan"), pandas.NA, pandas.NaT]
OTHERS = [3, 2.5, True, ["two"], {"text": "two"}]
NO_UNICODE = "two \ud800"
NOT_JSON = [b"two", np.array(["two"]), object()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), SENTENCES, vocab_size=300)


@pytest.fixture(scope="module")
def translator(folder):
    translator = Translator.from_pretrained(folder)
    translator.model.generation_config.update(num_beams=2, max_new_tokens=5)
    translator.model.save_pretrained(folder)
    return translator


@pytest.fixture(scope="module")
def doors(tmp_path_factory, folder, translator):
    """Name -> a function of cells that returns their translations, "" for nothing."""
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
        frame = pandas.DataFrame({"source": cells}, dtype="object")
        (translated,) = batches.map_in_pandas([frame])
        return ["" if pandas.isna(text) else text for text in translated["translation"]]

    def of_server(cells):
        with client_of(language_pair(translator)) as client:
            body = json.dumps({"q": cells, "source": "en", "target": "de"})
            answer = client.post(
                "/translate",
                content=body,
                headers={"Content-Type": "application/json"},
            )
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
OF_FILES = (
    "command",
    "datasets.map",
    "server",
    "server of sequences",
)  # JSON and Arrow have one missing value


@pytest.mark.parametrize("name", ROWS)
def test_cells_mean_the_same_at_every_door(doors, name: str) -> None:
    door = doors[name]
    expected = doors["python"]([TEXT])
    for text in TEXTS:
        assert door([TEXT, text]) == expected + doors["python"]([text])
    for nothing in OF_JSON if name in OF_FILES else NOTHING:
        assert door([TEXT, nothing]) == [*expected, ""]
    others = OTHERS if name in OF_FILES else OTHERS + NOT_JSON
    # Arrow and the server's parser of JSON have valid Unicode alone
    for other in others if name in ("datasets.map", "server") else [*others, NO_UNICODE]:
        # a column of Arrow has one type
        cells = [other, other] if name == "datasets.map" else [TEXT, other]
        with pytest.raises((ValueError, HTTPException), match=ROWS[name]):
            door(cells)


@pytest.mark.parametrize("name", ROWS)
def test_numbers_and_addresses_stay_at_every_door_with_the_package(doors, name: str) -> None:
    is_kept = doors[name](KEPT) == KEPT
    assert is_kept == (
        name != "pipeline"
    )  # a file that travels with a checkpoint, without the package


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        (TEXT, "one string"),
        ({"source": [TEXT]}, "a dict"),
        (pandas.DataFrame({"source": [TEXT]}), "a DataFrame"),
    ],
)
def test_items_are_texts_and_no_letters_or_names_of_columns(doors, items, kind: str) -> None:
    with pytest.raises(
        UserError, match=f"^sentences: an iterable of strings is needed, not {kind}"
    ):
        doors["python"](items)


def test_prefixes_are_cells_too(translator) -> None:
    free, forced = translator.translate([TEXT, TEXT], prefixes=[None, "seven"])
    assert free == next(translator.translate([TEXT]))
    assert forced.startswith("seven")
    for wrong, reason in [([3], "line 1 is 3 .int., not text"), ("seven", "not one string")]:
        with pytest.raises(UserError, match=f"^prefixes: .*{reason}"):
            list(translator.translate([TEXT], prefixes=wrong))


@pytest.mark.parametrize(
    "name", ["num_beams", "max_new_tokens", "batch_size", "max_tokens_per_batch"]
)
def test_count_is_a_whole_number_of_any_kind(translator, name: str) -> None:
    expected = list(translator.translate([TEXT], **{name: 3}))
    for right in (np.int64(3), torch.tensor(3)):
        assert list(translator.translate([TEXT], **{name: right})) == expected
    for wrong in ("3", 3.0):
        with pytest.raises(UserError, match=f"^{name}: must be a whole number, not "):
            list(translator.translate([TEXT], **{name: wrong}))
