"""Models of sequences in the server: `/predict`, unknown symbols, names, the page, and no word of languages."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.candidates import translate_candidates
from hf_vanilla_transformer.serving.options import ServeOptions
from hf_vanilla_transformer.serving.sequences import SequenceModel
from hf_vanilla_transformer.serving.server import load_server
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.utils.shipped_models import model_folder
from tests.model_helpers import error_of, randomise, tiny_model
from tests.serving_helpers import CORPUS, client_of, echo_folder, language_pair

WORDS_OF_LANGUAGES = re.compile(r"bleu|translat|languag|sentence", re.IGNORECASE)
SHIPPED = str(model_folder("g2p_en"))


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.from_pretrained(SHIPPED, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def client(translator: Translator) -> Iterator[Any]:
    site = {"engine": "server", "title": "g2p_en", "task": "sequence"}
    with client_of(SequenceModel("g2p_en", translator, site), max_characters=12_000) as client:
        yield client


def test_predictions_are_the_candidates_of_the_translator(client: Any, translator: Translator) -> None:
    beams = client.server.pairs[0].engine.num_beams
    words = ["world", "", "record"]
    found = client.post("/predict", json={"q": words, "n_best": beams}).json()
    assert found.keys() == {"predictions", "unknown"} and found["unknown"] == [[], [], []]
    expected = list(translate_candidates(translator, words, beams))
    assert [[one["text"] for one in each] for each in found["predictions"]] == [
        [one.text for one in candidates] for candidates in expected
    ]
    for each, candidates in zip(found["predictions"], expected, strict=True):
        assert [one["probability"] for one in each] == pytest.approx([one.probability for one in candidates], abs=1e-4)
        assert [one["score"] is None for one in each] == [one.score is None for one in candidates]
    one = client.post("/predict", data={"q": "world"}).json()["predictions"]  # a form, and one text
    assert [each["text"] for each in one] == ["W ER L D"]
    assert one[0]["score"] < 0 and one[0]["probability"] == 1


def test_seconds_of_predictions_are_counted(client: Any) -> None:
    def counted(name: str) -> float:
        found = re.search(
            rf'request_seconds_{name}{{path="/predict",status="200"}} (\S+)', client.get("/metrics").text
        )
        return float(found[1]) if found else 0.0

    requests, seconds = counted("count"), counted("sum")
    start = time.perf_counter()
    assert client.post("/predict", json={"q": "world"}).status_code == 200
    assert counted("count") == requests + 1
    assert 0 < counted("sum") - seconds < time.perf_counter() - start


def test_lines_are_given_as_they_are(translator: Translator) -> None:
    texts = ["- cat", "1. cat", "cat. dog.", "https://cat.a", "{cat}", " cat"]  # the space is a symbol of this model
    tokenizer = train_symbol_tokenizer([(text, 1) for text in texts], "chars")
    model = Translator(randomise(tiny_model(vocab_size=len(tokenizer))), tokenizer)
    model.model.generation_config.max_new_tokens = 6
    expected = list(model.translate(texts, num_beams=4))
    with client_of(SequenceModel("chars", model, {"engine": "server"}, num_beams=4)) as client:
        found = client.post("/predict", json={"q": texts}).json()["predictions"]
        assert [candidates[0]["text"] for candidates in found] == expected
        page = client.post("/page/translate", json={"text": "\n".join(texts)}).json()
        assert [part["source"] for part in page["parts"] if part["is_sentence"]] == texts
        assert [part["target"] for part in page["parts"] if part["is_sentence"]] == expected


def test_unknown_symbols_are_a_warning(client: Any) -> None:
    found = client.post("/predict", json={"q": ["cat", "c日t", "本"]}).json()
    assert len(found["predictions"]) == 3 and found["unknown"] == [[], ["日"], ["本"]]
    assert client.post("/predict", json={"q": "c日t"}).json()["unknown"] == ["日"]
    (warning,) = found["warnings"]
    assert warning.startswith("source: symbols that the model does not know") and "'日' (2 lines: 2-3)" in warning


def test_form_of_the_source_belongs_to_the_model(client: Any) -> None:
    found = client.post("/predict", json={"q": ["don’t", "don't", " don't "]}).json()
    assert found["unknown"] == [[], [], []] and "warnings" not in found
    assert found["predictions"][0] == found["predictions"][1] == found["predictions"][2]
    pages = [client.post("/page/translate", json={"text": text}).json()["tokens"] for text in ("don’t", "don't")]
    assert pages[0] == pages[1]


def test_unknown_symbols_are_in_lines_with_their_numbers(client: Any) -> None:
    found = client.post("/predict", json={"q": ["", "c日t"]}).json()
    assert "'日' (line 2)" in found["warnings"][0]
    assert "'日' (line 3)" in client.post("/page/translate", json={"text": "cat\n\nc日t"}).json()["note"]


def test_unknown_symbols_of_a_language_are_a_warning() -> None:
    tokenizer = train_symbol_tokenizer([(text, 1) for text in CORPUS], "chars")
    tokenizer.init_kwargs["task"] = "language"
    model = Translator(randomise(tiny_model(vocab_size=len(tokenizer))), tokenizer)
    model.model.generation_config.max_new_tokens = 4
    with client_of(language_pair(model)) as client:
        for q in ("seven\n\nseven 日", ["seven", "", "seven 日"]):
            answer = client.post("/translate", json={"q": q, "source": "en", "target": "de"}).json()
            assert "'日' (line 3)" in answer["warnings"][0]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"q": "cat", "n_best": 99}, 400, "n_best: at most"),
        ({"q": "cat", "n_best": 0}, 400, "n_best"),
        ({"q": "a" * 10_000}, 413, "a sequence of 10001 tokens, but the limit is 1024"),
        ({"q": "a" * 13_000}, 400, "text limit"),
        ({"q": ["a"] * 1025}, 413, "1025 sequences, but the limit is 1024"),
        ({}, 400, "missing q parameter"),
    ],
)
def test_requests_are_refused_in_one_line(client: Any, fields: dict, status: int, message: str) -> None:
    answer = client.post("/predict", json=fields)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error and "\n" not in error and not WORDS_OF_LANGUAGES.search(error)


def test_nothing_speaks_of_languages(client: Any) -> None:
    for path in ("/openapi.json", "/"):
        text = client.get(path).text
        seen = re.sub(r"page/translate|\w*Translat\w*|page_translate\w*", "", text)
        if path == "/":
            seen = without_language_texts(text)
        assert not WORDS_OF_LANGUAGES.search(seen), path
    assert client.get("/languages").status_code == 404
    assert client.post("/translate", json={"q": "a"}).status_code == 404


def without_language_texts(html: str) -> str:
    """The visible text of the page as page.js shows it for sequences."""
    html = re.sub(r'(data-sequence="([^"]*)"[^>]*>)[^<]*', r"\1\2", html)
    labels = " ".join(re.findall(r'(?:aria-label|title|placeholder|content)="([^"]*)"', html))
    hidden = re.sub(r'(?s)<div id="languages" hidden>.*?</div>', "", html)
    shown = " ".join(re.findall(r'(?:aria-label|title|placeholder|content)="([^"]*)"', hidden))
    assert len(shown) < len(labels)
    return re.sub(r"<[^>]*>", " ", hidden) + shown


@pytest.mark.parametrize("decoded", [None, "same"])
def test_page_lists_what_predict_answers(client: Any, monkeypatch: pytest.MonkeyPatch, decoded: str | None) -> None:
    site = json.loads(client.get("/site.json").text)
    assert site["task"] == "sequence" and site["pages"] == []
    if decoded is not None:  # hypotheses of the same text are one prediction
        monkeypatch.setattr(SequenceModel, "_decode_all", lambda self, found: [decoded] * len(found))
    beams = client.server.pairs[0].engine.num_beams
    page = client.post("/page/translate", json={"text": "record"}).json()
    expected = client.post("/predict", json={"q": "record", "n_best": beams}).json()["predictions"]
    assert len(expected) == (beams if decoded is None else 1)
    assert [one["text"] for one in page["predictions"]] == [one["text"] for one in expected]
    for field in ("score", "probability"):
        values = [one[field] for one in page["predictions"]]
        assert values == pytest.approx([one[field] for one in expected], abs=1e-3)
    assert client.post("/page/translate", json={"text": ""}).json()["predictions"] == []


def test_page_lists_predictions_after_a_chosen_start(client: Any) -> None:
    page = client.post("/page/translate", json={"text": "record"}).json()
    prefix = [page["hypotheses"][1]["tokens"][0]]
    chosen = client.post("/page/translate", json={"text": "record", "prefix": prefix}).json()["predictions"]
    assert sum(one["probability"] for one in chosen) == pytest.approx(1, abs=1e-3)
    ended = client.post("/page/translate", json={"text": "record", "prefix": [*prefix, 2]}).json()["predictions"]
    assert [(one["score"], one["probability"]) for one in ended] == [(None, 1.0)]


def test_server_takes_one_model_of_sequences(tmp_path: Path) -> None:
    for model, name in ((SHIPPED, "g2p_en"), (f"phonemes={SHIPPED}", "phonemes")):
        server = load_server(ServeOptions(models=[model], device="cpu", dtype="float32"))
        server.close()
        assert [(type(pair), pair.name) for pair in server.pairs] == [(SequenceModel, name)]
    languages = f"en-de={echo_folder(tmp_path / 'echo')}"
    for others in ([languages, SHIPPED], [SHIPPED, SHIPPED]):
        assert f"{SHIPPED} is of sequences: serve it alone" in error_of(load_server, ServeOptions(others))
