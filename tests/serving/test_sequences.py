"""Models of sequences in the server: `/predict`, unknown symbols, names, the page, and no word of languages."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.candidates import translate_candidates
from hf_vanilla_transformer.serving.options import Limits, ServeOptions
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


def predict(client: Any, q: Any, **fields: Any) -> dict[str, Any]:
    return client.post("/predict", json={"q": q} | fields).json()


def page_of(client: Any, text: str, **fields: Any) -> dict[str, Any]:
    return client.post("/page/translate", json={"text": text} | fields).json()


def model_of_characters(texts: list[str], max_new_tokens: int) -> Translator:
    """A random model whose vocabulary is closed."""
    tokenizer = train_symbol_tokenizer([(text, 1) for text in texts], "chars")
    model = randomise(tiny_model(vocab_size=len(tokenizer)))
    model.generation_config.max_new_tokens = max_new_tokens
    return Translator(model, tokenizer)


def test_predictions_are_the_candidates_of_the_translator(
    client: Any, translator: Translator
) -> None:
    beams = client.server.pairs[0].engine.num_beams
    words = ["world", "", "record"]
    found = predict(client, words, n_best=beams)
    assert found.keys() == {"predictions", "unknown"}
    assert found["unknown"] == [[], [], []]
    expected = translate_candidates(translator, words, beams)
    for predictions, candidates in zip(found["predictions"], expected, strict=True):
        assert [one["text"] for one in predictions] == [one.text for one in candidates]
        probabilities = [one["probability"] for one in predictions]
        assert probabilities == pytest.approx([one.probability for one in candidates], abs=1e-4)
        assert [one["score"] is None for one in predictions] == [
            one.score is None for one in candidates
        ]
    assert found["predictions"][1] == [{"text": "", "score": 0.0, "probability": 1.0}]
    (one,) = client.post("/predict", data={"q": "world"}).json()[
        "predictions"
    ]  # a form, and one text
    assert one["text"] == "W ER L D"
    assert one["score"] < 0
    assert one["probability"] == 1


def test_lines_are_given_as_they_are() -> None:
    texts = [
        "- cat",
        "1. cat",
        "cat. dog.",
        "https://cat.a",
        "{cat}",
        " cat",
    ]  # the space is a symbol of this model
    model = model_of_characters(texts, 6)
    expected = list(model.translate(texts, num_beams=4))
    with client_of(SequenceModel("chars", model, {"engine": "server"}, num_beams=4)) as client:
        found = predict(client, texts)["predictions"]
        assert [candidates[0]["text"] for candidates in found] == expected
        parts = page_of(client, "\n".join(texts))["parts"]
        sentences = [(part["source"], part["target"]) for part in parts if part["is_sentence"]]
        assert sentences == list(zip(texts, expected, strict=True))


def test_unknown_symbols_are_a_warning(client: Any) -> None:
    found = predict(client, ["cat", "c日t", "本"])
    assert len(found["predictions"]) == 3
    assert found["unknown"] == [[], ["日"], ["本"]]
    (warning,) = found["warnings"]
    assert warning.startswith("source: symbols that the model does not know")
    assert "'日' (2 lines: 2-3)" in warning
    assert predict(client, "c日t")["unknown"] == ["日"]
    assert "'日' (line 2)" in predict(client, ["", "c日t"])["warnings"][0]
    assert "'日' (line 3)" in page_of(client, "cat\n\nc日t")["note"]


def test_form_of_the_source_belongs_to_the_model(client: Any) -> None:
    found = predict(client, ["don’t", "don't", " don't "])
    assert found["unknown"] == [[], [], []]
    assert "warnings" not in found
    first, second, third = found["predictions"]
    assert first == second == third
    assert page_of(client, "don’t")["tokens"] == page_of(client, "don't")["tokens"]


def test_unknown_symbols_of_a_language_are_a_warning() -> None:
    model = model_of_characters(CORPUS, 4)
    model.source_tokenizer.init_kwargs["task"] = "language"
    with client_of(language_pair(Translator(model.model, model.source_tokenizer))) as client:
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
def test_requests_are_refused_in_one_line(
    client: Any, fields: dict, status: int, message: str
) -> None:
    answer = client.post("/predict", json=fields)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error
    assert "\n" not in error
    assert not WORDS_OF_LANGUAGES.search(error)


def test_nothing_speaks_of_languages(client: Any) -> None:
    described = re.sub(
        r"page/translate|\w*Translat\w*|page_translate\w*",
        "",
        client.get("/openapi.json").text,
    )
    shown = without_language_texts(client.get("/").text)
    assert not WORDS_OF_LANGUAGES.search(described)
    assert not WORDS_OF_LANGUAGES.search(shown)
    assert client.get("/languages").status_code == 404
    assert client.post("/translate", json={"q": "a"}).status_code == 404


def without_language_texts(html: str) -> str:
    """The visible text of the page as page.js shows it for sequences."""
    html = re.sub(r'(data-sequence="([^"]*)"[^>]*>)[^<]*', r"\1\2", html)
    visible = re.sub(r'(?s)<div id="languages" hidden>.*?</div>', "", html)
    assert visible != html
    attributes = re.findall(r'(?:aria-label|title|placeholder|content)="([^"]*)"', visible)
    return " ".join([re.sub(r"<[^>]*>", " ", visible), *attributes])


@pytest.mark.parametrize("decoded", [None, "same"])
def test_page_lists_what_predict_answers(
    client: Any, monkeypatch: pytest.MonkeyPatch, decoded: str | None
) -> None:
    site = client.get("/site.json").json()
    assert site["task"] == "sequence"
    assert site["pages"] == []
    if decoded is not None:  # hypotheses of the same text are one prediction
        monkeypatch.setattr(
            SequenceModel,
            "_decode_all",
            lambda self, found: [decoded] * len(found),
        )
    beams = client.server.pairs[0].engine.num_beams
    found = page_of(client, "record")["predictions"]
    expected = predict(client, "record", n_best=beams)["predictions"]
    assert len(found) == (beams if decoded is None else 1)
    assert [one["text"] for one in found] == [one["text"] for one in expected]
    for field in ("score", "probability"):
        assert [one[field] for one in found] == pytest.approx(
            [one[field] for one in expected], abs=1e-3
        )
    assert page_of(client, "")["predictions"] == []


def test_page_lists_predictions_after_a_chosen_start(client: Any) -> None:
    prefix = page_of(client, "record")["hypotheses"][1]["tokens"][:1]
    chosen = page_of(client, "record", prefix=prefix)["predictions"]
    assert sum(one["probability"] for one in chosen) == pytest.approx(1, abs=1e-3)
    (ended,) = page_of(client, "record", prefix=[*prefix, 2])["predictions"]
    assert (ended["score"], ended["probability"]) == (None, 1.0)


def test_server_takes_one_model_of_sequences(tmp_path: Path) -> None:
    for model, name in (
        (SHIPPED, "g2p_en"),
        (f"phonemes={SHIPPED}", "phonemes"),
    ):
        server = load_server(ServeOptions(models=[model], device="cpu", dtype="float32"))
        server.close()
        (pair,) = server.pairs
        assert (type(pair), pair.name) == (SequenceModel, name)
    languages = f"en-de={echo_folder(tmp_path / 'echo')}"
    error = error_of(load_server, ServeOptions([languages, SHIPPED]))
    assert f"{SHIPPED} is of sequences: serve it alone" in error
    for name, options in (
        ("lines", {"split_sentences": False}),
        ("pivot", {"pivot": "en"}),
        ("translate_files", {"limits": Limits(translate_files=True)}),
    ):
        error = error_of(load_server, ServeOptions([str(SHIPPED)], **options))
        assert error.startswith(f"{name}: it is for models of languages")
