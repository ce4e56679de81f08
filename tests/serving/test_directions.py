"""A server translates all directions of a model together, and other pairs through a pivot."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from fastapi.testclient import TestClient

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.serving import Limits, ServeOptions
from hf_vanilla_transformer.serving.app import create_app
from hf_vanilla_transformer.serving.interface import Server
from hf_vanilla_transformer.serving.server import load_server
from tests.interop.foreign import SOURCES, write_m2m100_folder
from tests.model_helpers import DIRECTIONS, save_model_of_languages
from tests.serving_helpers import client_of, echo_translator, language_pair

TEXTS = ["seven hundred and one", "eight", "huit cent", "siebenhundertacht"]
OPTIONS = {"dtype": "float32", "workers": 1, "split_sentences": False}


def translated(client: Any, q: Any, source: str, target: str, **fields: Any) -> Any:
    body = {"q": q, "source": source, "target": target} | fields
    return client.post("/translate", json=body).json()["translatedText"]


def targets(client: Any) -> dict[str, list[str]]:
    return {language["code"]: language["targets"] for language in client.get("/languages").json()}


@pytest.mark.parametrize("on_source", [True, False], ids=["source", "target"])
def test_directions_of_a_model_are_translated_together(tmp_path: Path, on_source: bool) -> None:
    folder = save_model_of_languages(tmp_path / "model", on_source, tie_word_embeddings=False)
    translator = Translator.from_pretrained(folder, workers=1)
    requests = [(text, *codes) for text in TEXTS for codes in DIRECTIONS]
    server = load_server(ServeOptions([str(folder)], engine={"max_new_tokens": 9}, **OPTIONS))
    with client_of(*server.pairs) as client, ThreadPoolExecutor(6) as threads:
        assert len({pair.engine for pair in server.pairs}) == 1
        assert targets(client) == {"en": ["de", "fr"], "de": ["en"], "fr": []}
        answers = threads.map(lambda request: translated(client, *request), requests)
        for (text, *codes), answer in zip(requests, answers, strict=True):
            (expected,) = translator.directed(*codes).translate([text], max_new_tokens=9)
            assert answer == expected.replace("\n", " ").strip()
        mark = translator.directions.prefix(("en", "de"))
        page = client.post(
            "/en-de/page/translate", json={"text": TEXTS[0], "alternatives": 2}
        ).json()
        ids = [token["id"] for token in page["tokens"]]
        assert ids[: len(mark)] == mark
        assert len(ids) == len(page["probabilities"]) == len(page["alternatives"])


def test_page_shows_no_token_of_a_language(tmp_path: Path) -> None:
    """M2M-100 decodes it as text."""
    write_m2m100_folder(tmp_path / "m2m")
    convert("m2m100", tmp_path / "m2m", tmp_path / "model", target_language="de")
    server = load_server(ServeOptions([f"en-de={tmp_path / 'model'}"], **OPTIONS))
    with client_of(*server.pairs) as client:
        page = client.post("/page/translate", json={"text": SOURCES[0]}).json()
        answer = translated(client, SOURCES[0], "en", "de")
    assert page["text"].strip() == answer.strip()
    assert page["tokens"][0]["text"] == "__de__"


def test_pivot_translates_in_two_steps() -> None:
    first = echo_translator()
    second = echo_translator(encoder_ffn_dim=24)
    pairs = [
        language_pair(first, "de", "en"),
        language_pair(second, "en", "fr"),
    ]
    server = Server(pairs, Limits(translate_files=True), pivot="en")
    middle = [text.strip() for text in first.translate(TEXTS)]
    with TestClient(create_app(server)) as client:
        assert targets(client) == {"de": ["en", "fr"], "en": ["fr"], "fr": []}
        answer = translated(client, TEXTS, "de", "fr")
        assert answer == [text.strip() for text in second.translate(middle)]
        body = {
            "q": TEXTS[0],
            "source": "de",
            "target": "fr",
            "alternatives": 2,
        }
        found = client.post("/translate", json=body).json()
        (expected,) = second.translate_nbest(middle[:1], 3)
        assert [found["translatedText"], *found["alternatives"]] == [one.text for one in expected]
        assert translated(client, "<p>seven</p>", "de", "fr", format="html").startswith("<p>")
        files = {"file": ("a.html", b"<p>seven</p><p>eight</p>")}
        fields = {"source": "de", "target": "fr"}
        url = client.post("/translate_file", data=fields, files=files).json()["translatedFileUrl"]
        assert client.get(url).text.count("<p>") == 2
