"""A server translates all directions of a model together, and other pairs through a pivot."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.serving import ServeOptions
from tests.interop.foreign import SOURCES, write_m2m100_folder
from tests.model_helpers import DIRECTIONS, error_of, save_model_of_languages
from tests.serving_helpers import client_of, echo_translator, language_pair

TEXTS = ["seven hundred and one", "eight", "huit cent", "siebenhundertacht"]


@pytest.fixture(scope="module", params=[True, False], ids=["source", "target"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_of_languages(tmp_path_factory.mktemp("model"), request.param, tie_word_embeddings=False)


def test_directions_of_a_model_are_translated_together(folder: Path) -> None:
    from hf_vanilla_transformer.serving.server import load_server

    server = load_server(
        ServeOptions([str(folder)], dtype="float32", workers=1, engine={"max_new_tokens": 9}, split_sentences=False)
    )
    with client_of(*server.pairs) as client:
        assert len({pair.engine for pair in server.pairs}) == 1
        listed = {language["code"]: language["targets"] for language in client.get("/languages").json()}
        assert listed == {"en": ["de", "fr"], "de": ["en"], "fr": []}
        requests = [(text, *codes) for text in TEXTS for codes in DIRECTIONS]

        def answer(request: tuple[str, str, str]) -> str:
            body = dict(zip(("q", "source", "target"), request, strict=True))
            return client.post("/translate", json=body).json()["translatedText"]

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(answer, requests))
        translator = Translator.from_pretrained(folder, workers=1)
        expected = [
            next(translator.directed(source, target).translate([text], max_new_tokens=9))
            for text, source, target in requests
        ]
        assert answers == [text.replace("\n", " ").strip() for text in expected]
        page = client.post("/en-de/page/translate", json={"text": TEXTS[0], "alternatives": 2}).json()
        ids, mark = [token["id"] for token in page["tokens"]], translator.directions.prefix(("en", "de"))
        assert ids[: len(mark)] == mark
        again = client.post("/en-de/page/translate", json={"text": TEXTS[0], "prefix": ids[:3]}).json()
        assert [token["id"] for token in again["tokens"]][:3] == ids[:3]
        assert len(page["tokens"]) == len(page["probabilities"]) == len(page["alternatives"])


def test_page_shows_no_token_of_a_language(tmp_path: Path) -> None:
    """M2M-100 decodes it as text."""
    from hf_vanilla_transformer.serving.server import load_server

    write_m2m100_folder(tmp_path / "m2m")
    convert("m2m100", tmp_path / "m2m", tmp_path / "model", target_language="de")
    options = {"dtype": "float32", "workers": 1, "split_sentences": False}
    server = load_server(ServeOptions([f"en-de={tmp_path / 'model'}"], **options))
    with client_of(*server.pairs) as client:
        page = client.post("/page/translate", json={"text": SOURCES[0]}).json()
        answer = client.post("/translate", json={"q": SOURCES[0], "source": "en", "target": "de"}).json()
    assert page["text"].strip() == answer["translatedText"].strip() and page["tokens"][0]["text"] == "__de__"


def test_pivot_translates_in_two_steps() -> None:
    first, second = echo_translator(), echo_translator(encoder_ffn_dim=24)
    pairs = [language_pair(first, "de", "en"), language_pair(second, "en", "fr")]
    from fastapi.testclient import TestClient

    from hf_vanilla_transformer.serving import Limits
    from hf_vanilla_transformer.serving.app import create_app
    from hf_vanilla_transformer.serving.interface import Server

    with TestClient(create_app(Server(pairs, Limits(translate_files=True), pivot="en"))) as client:
        listed = {language["code"]: language["targets"] for language in client.get("/languages").json()}
        assert listed == {"de": ["en", "fr"], "en": ["fr"], "fr": []}
        answer = client.post("/translate", json={"q": TEXTS, "source": "de", "target": "fr"}).json()["translatedText"]
        middle = [text.strip() for text in first.translate(TEXTS)]
        assert answer == [text.strip() for text in second.translate(middle)]
        body = {"q": TEXTS[0], "source": "de", "target": "fr", "alternatives": 2}
        found = client.post("/translate", json=body).json()
        (expected,) = second.translate_nbest(middle[:1], 3)
        assert [found["translatedText"], *found["alternatives"]] == [one.text for one in expected]
        html = {"q": "<p>seven</p>", "source": "de", "target": "fr", "format": "html"}
        assert client.post("/translate", json=html).json()["translatedText"].startswith("<p>")
        files = {"file": ("a.html", b"<p>seven</p><p>eight</p>")}
        fields = {"source": "de", "target": "fr"}
        url = client.post("/translate_file", data=fields, files=files).json()["translatedFileUrl"]
        assert client.get(url).text.count("<p>") == 2
        wrong = client.post("/translate", json={"q": "x", "source": "fr", "target": "de"})
        assert wrong.status_code == 400


def test_archive_needs_its_language_where_two_models_have_its_target() -> None:
    files = {"file": ("a.docx", b"PK")}
    fields = {"source": "auto", "target": "fr"}
    pairs = [language_pair(echo_translator(), source, "fr") for source in ("de", "en")]
    with client_of(*pairs, translate_files=True) as client:
        answer = client.post("/translate_file", data=fields, files=files)
    assert answer.status_code == 400 and "source: auto" in answer.json()["error"]


def test_pivot_without_a_model_is_refused(folder: Path) -> None:
    from hf_vanilla_transformer.serving.server import load_server

    assert "pivot" in error_of(lambda: load_server(ServeOptions([str(folder)], dtype="float32", pivot="xx")))
