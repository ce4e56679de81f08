"""The HTTP interface, by FastAPI's own client: LibreTranslate's answers, the page, limits, and refusals."""

import asyncio
import copy
import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.documents.documents import sentence_splitter
from hf_vanilla_transformer.engine.continuous import ContinuousSearch
from hf_vanilla_transformer.serving import interface, service
from tests.paper_inside import assert_is_inside
from tests.serving_helpers import CORPUS, client_of, echo_translator, language_pair

GOOD = {"q": CORPUS[0], "source": "en", "target": "de"}


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


@pytest.fixture(scope="module")
def client(translator: Translator) -> Iterator[Any]:
    with client_of(language_pair(translator, split=sentence_splitter("en")), max_characters=500) as client:
        yield client


def best(translator: Translator, *lines: str) -> list[str]:
    return list(translator.translate(lines))


def test_string_list_and_form_are_translated(client: Any, translator: Translator) -> None:
    assert client.post("/translate", json=GOOD).json() == {"translatedText": best(translator, CORPUS[0])[0]}
    answer = client.post("/translate", json=GOOD | {"q": CORPUS})
    expected = best(translator, *CORPUS[:3], "a house.", "the big red house!")  # the last line has two sentences
    assert answer.status_code == 200
    assert answer.json() == {"translatedText": [*expected[:3], " ".join(expected[3:])]}
    assert client.post("/translate", data=GOOD).json() == {"translatedText": expected[0]}  # a form


def test_layout_is_kept(client: Any, translator: Translator) -> None:
    text = f" - {CORPUS[0]}\n\n  {CORPUS[1]}. {CORPUS[2]}\r\n"
    found = client.post("/translate", json=GOOD | {"q": text}).json()["translatedText"]
    first, second, third = best(translator, CORPUS[0], f"{CORPUS[1]}.", CORPUS[2])
    assert found == f" - {first}\n\n  {second} {third}\r\n"


@pytest.mark.parametrize("text", ["", "   ", "\n\n"])
def test_blank_text_stays_blank(client: Any, text: str) -> None:
    assert client.post("/translate", json=GOOD | {"q": text}).json() == {"translatedText": text}
    assert client.post("/translate", json=GOOD | {"q": []}).json() == {"translatedText": []}


@pytest.mark.parametrize("escaped", [False, True])
def test_sentence_of_moses_is_translated_as_by_the_translator(translator, monkeypatch, escaped):
    monkeypatch.setattr(translator, "escaped", escaped)
    q = "one man &apos;s {hat} &quot; seven"
    with client_of(language_pair(translator)) as client:
        answer = client.post("/translate", json={**GOOD, "q": q}).json()["translatedText"]
    assert [answer] == list(translator.translate([q], protect=True))


def test_alternatives_are_the_next_hypotheses(client: Any, translator: Translator) -> None:
    found = client.post("/translate", json=GOOD | {"alternatives": 3}).json()
    (expected,) = translator.translate_nbest([CORPUS[0]], 4)
    assert [found["translatedText"], *found["alternatives"]] == [each.text for each in expected]
    found = client.post("/translate", json=GOOD | {"q": [CORPUS[0], ""], "alternatives": 1}).json()
    assert found["alternatives"] == [[expected[1].text], []]
    found = client.post("/translate", json=GOOD | {"alternatives": 1000}).json()
    assert found["alternatives"] == [each.text for each in expected[1:]]  # as many as there are beams


@pytest.mark.parametrize("q", ["a b " * 40, ["a", "a b " * 40]])
def test_sentences_that_are_cut_or_do_not_end_are_reported(q: str | list[str]) -> None:
    translator = echo_translator(trained_source_length=16)
    translator.model.lm_head.bias.data[translator.source_tokenizer.eos_token_id] = -1e4
    for limit in (2, None):
        translator.model.generation_config.max_new_tokens = limit
        with client_of(language_pair(translator)) as client:
            assert "warnings" not in client.post("/translate", json=GOOD | {"q": "---"}).json()
            for form in ("text", "html"):
                warnings = client.post("/translate", json=GOOD | {"q": q, "format": form}).json()["warnings"]
                assert sum("training" in warning for warning in warnings) == 1
                assert any("did not end" in warning for warning in warnings) is (limit is None)
            if isinstance(q, str):
                note = client.post("/page/translate", json={"text": q}).json()["note"]
                assert note.count("training") == 1


def test_html_keeps_its_tags(client: Any, translator: Translator) -> None:
    text = f"<p class=x>{CORPUS[1]}</p><ul><li>{CORPUS[0]}<li><b>{CORPUS[2]}</b></ul>"
    found = client.post("/translate", json=GOOD | {"q": text, "format": "html"}).json()["translatedText"]
    first, second, third = best(translator, CORPUS[1], CORPUS[0], CORPUS[2])
    assert found == f"<p class=x>{first}</p><ul><li>{second}<li><b>{third}</b></ul>"
    mixed = client.post("/translate", json=GOOD | {"q": "two <b>hundred</b> and one", "format": "html"}).json()
    text = mixed["translatedText"]
    assert text.count("<b>") == text.count("</b>") == 1
    assert text.replace("<b>", "").replace("</b>", "") == best(translator, "two hundred and one")[0]


def test_languages_are_listed(translator: Translator) -> None:
    with client_of(
        language_pair(translator), language_pair(translator, "de", "en"), language_pair(translator, "en", "xx")
    ) as client:
        assert client.get("/languages").json() == [
            {"code": "en", "name": "English", "targets": ["de", "xx"]},
            {"code": "de", "name": "German", "targets": ["en"]},
            {"code": "xx", "name": "xx", "targets": []},
        ]
        assert client.post("/translate", json=GOOD | {"source": "auto"}).status_code == 200
        assert client.get("/", follow_redirects=False).headers["location"] == "en-de/"
        assert [page["path"] for page in client.get("/de-en/site.json").json()["pages"]] == [
            "../en-de/",
            "../de-en/",
            "../en-xx/",
        ]
        assert client.post("/en-xx/page/translate", json={"text": "seven"}).json()["text"]
        language = client.get("/frontend/settings").json()["language"]
        assert [language[side]["code"] for side in ("source", "target")] == ["en", "de"]


@pytest.mark.parametrize(
    ("source", "target", "pair"),
    [
        ("EN", "DE", "en-de"),
        ("en-US", "de_AT", "en-de"),
        ("en", "pt", "en-pt"),
        ("en", "PT-br", "en-pt-BR"),
        ("en", "pt-PT", "en-pt"),
        ("en", "zh-Hans", "en-zh"),
        ("en", "zh_TW", "en-zh"),
        ("en", "en", None),
        ("en-GB", "EN_us", None),
        ("zh-Hant", "zh", None),
    ],
)
def test_variants_of_languages_are_matched(translator: Translator, source: str, target: str, pair: str | None) -> None:
    pairs = [language_pair(translator, "en", code) for code in ("de", "pt", "pt-BR", "zh")]
    for each in pairs:

        async def translate(texts: list[str], _: list[str], name: str = each.name, **__: Any) -> list[list[str]]:
            return [[name] for _ in texts]

        each.translate = translate
    with client_of(*pairs) as client:
        answer = client.post("/translate", json={"q": "seven", "source": source, "target": target})
        assert answer.json() == {"translatedText": pair or "seven"}


ENGLISH = "A man is riding a bike, and two dogs are running in the snow."
GERMAN = "Ein Mann fährt auf einem Fahrrad, und zwei Hunde rennen im Schnee."
FRENCH = "Un homme fait du vélo, et deux chiens courent dans la neige."


def test_language_of_a_text_is_detected(translator: Translator) -> None:
    pytest.importorskip("py3langid", reason="needs the extra `detect`")
    with client_of(language_pair(translator), language_pair(translator, "fr", "de")) as client:
        for text, language in ((ENGLISH, "en"), (GERMAN, "de"), (FRENCH, "fr")):
            found = client.post("/detect", data={"q": text}).json()
            assert found[0]["language"] == language and found[0]["confidence"] > 90
            assert sum(each["confidence"] for each in found) == pytest.approx(100, abs=0.2)
            answer = client.post("/translate", data={"q": text, "source": "auto", "target": "de"}).json()
            assert answer["detectedLanguage"] == found[0]
            assert (answer["translatedText"] == text) == (language == "de")  # German text stays
        texts = {"q": [ENGLISH, FRENCH, GERMAN], "source": "auto", "target": "de", "alternatives": 1}
        answer = client.post("/translate", json=texts).json()
        assert [each["language"] for each in answer["detectedLanguage"]] == ["en", "fr", "de"]
        assert answer["translatedText"][2] == GERMAN and answer["alternatives"][2] == []
    with client_of(language_pair(translator)) as client:
        short = client.post("/translate", json={"q": "seven", "source": "auto", "target": "de"}).json()
        assert short["detectedLanguage"] == {"language": "en", "confidence": 100.0}
        assert short["translatedText"] == best(translator, "seven")[0]


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        # the first words are those by which LibreTranslate's clients know an error
        ("/translate", GOOD | {"source": "de", "target": "en"}, 400, "English (en) is not available as a target"),
        ("/translate", GOOD | {"target": "<script>"}, 400, "<script> is not supported"),
        ("/translate", GOOD | {"source": "auto", "target": "fr"}, 400, "fr is not supported"),
        ("/translate", GOOD | {"source": "auto", "target": "en"}, 400, "English (en) is not available as a target"),
        ("/translate", GOOD | {"source": "fr", "q": []}, 400, "fr is not supported"),
        ("/translate", GOOD | {"source": ""}, 400, "Invalid request: missing source parameter"),
        ("/translate", {"source": "en", "target": "de"}, 400, "Invalid request: missing q parameter"),
        ("/translate", GOOD | {"format": "pdf"}, 400, "format: pdf format is not supported"),
        ("/translate", GOOD | {"format": "a\nb"}, 400, "format: a\\nb format is not supported"),
        ("/translate", GOOD | {"q": 7}, 400, "q: "),
        *[("/translate", GOOD | {"alternatives": n}, 400, "alternatives: ") for n in (-1, 1.5, "²", "9" * 5000, [])],
        ("/translate", GOOD | {"q": "\ud800"}, 400, "the request"),
        ("/translate", GOOD | {"q": "x" * 501}, 400, "q: request (501) exceeds text limit (500)"),
        ("/translate", GOOD | {"q": ["x" * 300] * 2}, 400, "q: request (600) exceeds text limit (500)"),
        ("/detect", {}, 400, "Invalid request: missing q parameter"),
        ("/detect", {"q": "x" * 501}, 400, "q: request (501) exceeds text limit (500)"),
        ("/suggest", GOOD | {"s": "x"}, 403, "Suggestions are disabled on this server."),
        ("/translate_file", GOOD, 403, "Files translation are disabled on this server."),
        ("/translate", "[" * 5000, 400, "the request"),
        *[(path, " " * 20_000, 413, "the body") for path in ("/translate", "/suggest", "/translate_file")],
        ("/page/translate", {}, 400, "Invalid request: missing text parameter"),
        ("/page/translate", {"text": "x" * 501}, 400, "text: request (501) exceeds text limit (500)"),
        ("/page/translate", {"text": "seven", "prefix": "x"}, 400, "prefix: "),
        ("/page/translate", {"text": "seven", "prefix": [10**6]}, 400, "prefix: "),
        ("/page/translate", {"text": "seven", "prefix": [-1]}, 400, "prefix: "),
        ("/page/translate", {"text": "seven", "num_beams": 0}, 400, "num_beams: "),
        ("/page/translate", {"text": "seven", "num_beams": 1000}, 400, "num_beams: "),
    ],
)
def test_wrong_requests_are_one_line(client: Any, path: str, fields: Any, status: int, message: str) -> None:
    body = fields if isinstance(fields, str) else json.dumps(fields)
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and set(answer.json()) == {"error"}
    assert answer.json()["error"].startswith(message)


def test_language_of_short_texts_is_detected_once(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    detected = []

    def detect(text: str, languages: list[str]) -> list[tuple[str, float]]:
        detected.append(text)
        return [(language, 0.5) for language in languages]

    monkeypatch.setattr(interface, "detect_languages", detect)
    pairs = [language_pair(translator, "en", "de"), language_pair(translator, "fr", "de")]
    texts = ["ab"] * 40 + ["one million three hundred thousand and more houses"]
    with client_of(*pairs) as client:
        answer = client.post("/translate", json={"q": texts, "source": "auto", "target": "de"}).json()
    assert [one["language"] for one in answer["detectedLanguage"]] == ["en"] * 41
    assert sorted(map(len, detected)) == [len(texts[-1]), len("\n".join(texts))]


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/translate", 405, "POST"),
        ("DELETE", "/translate/", 405, "POST"),
        ("POST", "/languages", 405, "GET"),
        ("POST", "/page.js", 405, "GET"),
        ("POST", "/unknown", 404, None),
        ("GET", "/../etc/passwd", 404, None),
        ("GET", "/docs", 404, None),
        ("GET", "/page/none", 404, None),
    ],
)
def test_unknown_paths_and_methods_are_refused(client, method, path, status, allow):
    answer = client.request(method, path)
    assert answer.status_code == status and "error" in answer.json()
    assert (allow is None) == ("allow" not in answer.headers) and (allow or "") in answer.headers.get("allow", "")


@pytest.mark.parametrize("path", ["/", "/health", "/languages", "/page.js", "/spec", "/metrics"])
def test_head_has_the_headers_of_get(client: Any, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_compressed_body_is_not_called_broken_json(client: Any) -> None:
    body = gzip.compress(json.dumps(GOOD).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = client.post("/translate", content=body, headers=headers)
    assert answer.status_code == 415 and answer.json() == {"error": "Content-Encoding: gzip: send the body as it is"}


def test_slashes_do_not_matter(client: Any) -> None:
    for path in ("//translate", "/translate/", "//translate//"):
        answer = client.post(f"http://testserver{path}", json=GOOD, follow_redirects=False)
        assert answer.status_code == 200


def test_interface_is_described(client: Any) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    health = {"/health", "/health/live", "/health/ready"}
    assert set(paths) == {"/translate", "/detect", "/languages", "/metrics", "/page/translate"} | health
    translate = paths["/translate"]["post"]
    bodies = translate["requestBody"]["content"]
    assert set(bodies) == {"application/json", "application/x-www-form-urlencoded", "multipart/form-data"}
    assert bodies["application/json"]["schema"]["required"] == ["q", "source", "target"]
    assert {"200", "4XX", "5XX"} <= set(translate["responses"])


def test_long_sentences_and_many_are_refused(translator: Translator) -> None:
    pair = language_pair(translator, max_queue=2)
    with client_of(pair, max_characters=100_000) as client:
        answer = client.post("/translate", json=GOOD | {"q": "xq" * 3000})
        assert answer.status_code == 413 and "1024" in answer.json()["error"]
        answer = client.post("/translate", json=GOOD | {"q": ["a", "b", "c"]})
        assert answer.status_code == 413 and "limit is 2" in answer.json()["error"]


def test_nothing_is_translated_for_a_request_that_is_refused(translator: Translator, held: threading.Event) -> None:
    pair = language_pair(translator, max_queue=2, batch_size=1)
    with client_of(pair) as client:
        answer = client.post("/translate", json=GOOD | {"q": ["a", "b", "c"]})
        assert answer.status_code == 413 and "limit is 2" in answer.json()["error"]
        assert pair.engine.waiting == 0
        held.set()
    assert pair.engine.translated <= 1


def test_full_queue_is_503_with_retry_after(translator: Translator, held: threading.Event) -> None:
    pair = language_pair(translator, max_queue=1, batch_size=1)
    with client_of(pair) as client:
        answers: list[Any] = []

        def ask(line: str) -> None:
            answers.append(client.post("/translate", json=GOOD | {"q": line}))

        threads = [threading.Thread(target=ask, args=(line,)) for line in CORPUS[:3]]
        for thread in threads:  # each worker takes one, and one waits
            thread.start()
            time.sleep(0.2)
        assert client.get("/health/ready").status_code == 503 and client.get("/health/live").status_code == 200
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(refused) == 3 - 1 - len(pair.engine._threads)
        assert refused[0].headers["retry-after"] == "1" and set(refused[0].json()) == {"error"}
        held.set()
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [200] * (3 - len(refused)) + [503] * len(refused)


@pytest.mark.parametrize("path", ["/translate", "/translate_file"])
def test_timeout_is_504_and_gives_the_sentence_up(translator: Translator, held: threading.Event, path: str) -> None:
    pair, files = language_pair(translator), {"file": ("a.html", b"<p>seven</p>")}
    with client_of(pair, timeout=0.3, translate_files=True) as client:
        answer = client.post(path, data=GOOD, files=files)
        assert answer.status_code == 504 and "no answer in time" in answer.json()["error"]
        held.set()
    assert pair.engine.translated == 0


def test_failed_translation_is_500_without_details(translator, monkeypatch, caplog):
    def step(self: ContinuousSearch) -> list:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(ContinuousSearch, "step", step)
    with client_of(language_pair(translator)) as client:
        answer = client.post("/translate", json=GOOD)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert "secret detail" in caplog.text
        monkeypatch.undo()
        assert client.post("/translate", json=GOOD).status_code == 200


def test_api_key_guards_translations(translator: Translator) -> None:
    with client_of(language_pair(translator), api_key="sesame") as client:
        assert client.post("/translate", json=GOOD).status_code == 403
        assert client.post("/page/translate", json={"text": "seven"}).status_code == 403
        assert client.post("/translate", json=GOOD | {"api_key": "sesame"}).status_code == 200
        assert client.post("/translate", data=GOOD | {"api_key": "sesame"}).status_code == 200
        for bearer, status in (("Bearer sesame", 200), ("bearer sesame", 200), ("Basic sesame", 403)):
            headers = {"Authorization": bearer}
            assert client.post("/translate", json=GOOD, headers=headers).status_code == status
            assert client.post("/translate", json=GOOD | {"api_key": ""}, headers=headers).status_code == status
        assert client.post("/translate", params=GOOD | {"api_key": "sesame"}).status_code == 200
        assert client.post("/detect", json={"q": "seven"}).json()["error"].startswith("Please contact")
        assert client.post("/translate", json=GOOD | {"api_key": "x"}).json() == {"error": "Invalid API key"}
        assert client.get("/site.json").json()["key_required"] is True
        assert client.get("/languages").status_code == client.get("/health").status_code == 200


ALLOWED = {"cors_origins": ("https://example.org",)}
PROXIED = {"allowed_hosts": ("127.0.0.1", "localhost", "translate.example.org")}


@pytest.mark.parametrize(
    ("limits", "origin", "status"),
    [
        ({}, "https://example.org", 403),
        ({}, "null", 403),
        ({}, "http://testserver:81", 403),
        ({}, "http://testserver", 200),  # the page of this server
        ({}, "moz-extension://0b1f", 200),  # no page has such an origin
        (ALLOWED, "https://example.org", 200),
        (ALLOWED, "https://other.org", 403),
        ({"cors_origins": ("*",)}, "https://example.org", 200),
    ],
)
def test_pages_of_other_sites_are_refused(translator: Translator, limits: dict, origin: str, status: int) -> None:
    with client_of(language_pair(translator), **limits) as client:
        answer = client.post("/translate", data=GOOD, headers={"Origin": origin})
        assert answer.status_code == status
        may_read = answer.headers.get("access-control-allow-origin")
        assert (may_read in (origin, "*")) == (status == 200 and bool(limits))
        assert client.get("/languages", headers={"Origin": origin}).status_code == 200
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        allows = "access-control-allow-origin" in client.options("/translate", headers=preflight).headers
        assert allows == (status == 200 and bool(limits))


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:5000", None, 200),
        ("LOCALHOST", None, 200),
        ("evil.example", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("[::1", None, 403),
        ("translate.example.org", "https://translate.example.org", 200),
        ("127.0.0.1:5000", "https://translate.example.org", 200),
        ("127.0.0.1:5000", "http://localhost:3000", 403),
    ],
)
def test_names_of_other_servers_are_refused(translator, host, origin, status):
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    with client_of(language_pair(translator), **PROXIED) as client:
        assert client.post("/translate", json=GOOD, headers=headers).status_code == status
        if origin is None:
            assert client.get("/", headers=headers).status_code == status


@pytest.mark.parametrize(("source", "kept"), [("en", False), ("auto", False), ("de", True)])
def test_files_are_translated_if_asked(translator: Translator, source: str, kept: bool) -> None:
    html = f'<p class="x">{CORPUS[0]} <b>{CORPUS[1]}</b></p>'
    expected = html
    with client_of(language_pair(translator), translate_files=True, api_key="sesame") as client:
        if not kept:
            fields = GOOD | {"q": html, "format": "html", "source": "en", "api_key": "sesame"}
            expected = client.post("/translate", json=fields).json()["translatedText"]
        form = {"source": source, "target": "de", "api_key": "sesame"}
        answer = client.post("/translate_file", data=form, files={"file": ("../50%#bü x.html", html.encode())})
        address = answer.json()["translatedFileUrl"]
        assert address.startswith("http://testserver/download_file/") and address.isascii() and " " not in address
        found = client.get(address)
        assert found.content.decode() == expected and found.headers["content-disposition"].endswith(
            "50%25%23b%C3%BC%20x.html"
        )
        settings = client.get("/frontend/settings").json()
        assert settings["filesTranslation"] is True and ".txt" in settings["supportedFilesFormat"]
        text = f"{CORPUS[0]}\n\n- {CORPUS[1]}\n"
        plain = text
        if not kept:
            fields = GOOD | {"q": text, "source": "en", "api_key": "sesame"}
            plain = client.post("/translate", json=fields).json()["translatedText"]
        answer = client.post("/translate_file", data=form, files={"file": ("a.txt", text.encode())}).json()
        assert client.get(answer["translatedFileUrl"]).content.decode() == plain
        assert client.post("/translate_file", data={**form, "api_key": ""}).status_code == 403
        for files, message in (({}, "missing file"), ({"file": ("x.exe", b"MZ")}, "file format not supported")):
            answer = client.post("/translate_file", data=form, files=files)
            assert answer.status_code == 400 and message in answer.json()["error"]
        assert client.get("/download_file/other").status_code == 404


@pytest.mark.parametrize("step", ["split", "encode", "decode", "join"])
def test_work_on_texts_leaves_the_server_free(translator: Translator, monkeypatch: Any, step: str) -> None:
    pair, answered, seen = language_pair(translator), threading.Event(), []
    owner, name = {
        "split": (pair, "split"),
        "encode": (translator, "encode"),
        "decode": (translator.target_tokenizer, "batch_decode"),
        "join": (service, "join_text"),
    }[step]
    original = getattr(owner, name)

    def slow(*arguments: Any, **settings: Any) -> Any:
        seen.append(answered.wait(10))
        return original(*arguments, **settings)

    monkeypatch.setattr(owner, name, slow)
    with client_of(pair) as client:
        thread = threading.Thread(target=client.post, args=("/translate",), kwargs={"json": GOOD})
        thread.start()
        time.sleep(0.3)
        assert client.get("/health").status_code == 200
        answered.set()
        thread.join()
    assert seen == [True]


def test_small_request_does_not_wait_for_all_of_a_large_one(translator: Translator) -> None:
    order: list[str] = []
    pair = language_pair(translator, split=lambda line: order.append(line) or [line])

    async def both() -> None:
        await asyncio.gather(pair.translate(["seven\n" * 300], []), pair.translate(["one"], []))

    asyncio.run(both())
    pair.close()
    assert order.index("one") < 100 and len(order) == 301


def test_metrics_are_prometheus_text(translator: Translator) -> None:
    with client_of(language_pair(translator)) as client:
        client.post("/translate", json=GOOD)
        client.post("/translate", json=GOOD | {"q": ["seven", "one"]})
        client.post("/translate", json={})
        client.get("/none")
        answer = client.get("/metrics")
        assert [client.get(f"/health{path}").status_code for path in ("", "/live", "/ready")] == [200] * 3
        client.server.close()
        assert client.get("/health/ready").status_code == 503  # while connections end
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    requests = "vanilla_transformer_request_seconds_count"
    assert lines[f'{requests}{{path="/translate",status="200"}}'] == "2.0"
    assert lines[f'{requests}{{path="/translate",status="400"}}'] == "1.0"
    assert lines[f'{requests}{{path="other",status="404"}}'] == "1.0"
    assert lines['vanilla_transformer_sentences_translated_total{pair="en-de"}'] == "3.0"
    assert lines['vanilla_transformer_sentences_waiting{pair="en-de"}'] == "0.0"
    assert lines['vanilla_transformer_sentences_running{pair="en-de"}'] == "0.0"
    assert lines['vanilla_transformer_queue_capacity{pair="en-de"}'] == "1024.0"


def test_start_and_end_of_the_server_are_no_requests(client: Any) -> None:
    async def application(*of_asgi: Any) -> None:
        pass

    asyncio.run(client.server.metrics.counted(application)({"type": "lifespan"}, None, None))


def test_body_that_does_not_arrive_is_408(translator: Translator) -> None:
    answers = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        answers.append(message)

    headers = [(b"host", b"testserver"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    request = {"type": "http", "method": "POST", "path": "/translate", "query_string": b"", "headers": headers}
    with client_of(language_pair(translator), timeout=0.05) as client:
        asyncio.run(client.app(request, receive, send))
    assert answers[0]["status"] == 408
    assert "did not arrive within 0.05 seconds" in json.loads(answers[1]["body"])["error"]


def test_page_and_what_it_loads_are_sent_with_a_policy(client: Any) -> None:
    index = client.get("/")
    assert index.headers["content-type"].startswith("text/html") and "<script" in index.text
    for name in re.findall(r'(?:src|href)="([\w.]+)"', index.text):
        assert client.get(f"/{name}").status_code == 200, name
    site = client.get("/site.json")
    assert site.json() == {
        **{"engine": "server", "title": "test", "search": {"num_beams": 4}},
        **{"key_required": False, "max_characters": 500, "pages": []},
    }
    assert "default-src 'self'" in site.headers["content-security-policy"]
    assert client.get("/server_engine.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_page_translation_has_every_field(client: Any, translator: Translator) -> None:
    found = client.post("/page/translate", json={"text": CORPUS[0], "alternatives": 3, "num_beams": 2}).json()
    (expected,) = translator.translate_nbest([CORPUS[0]], 2, num_beams=2)
    assert [each["text"] for each in found["hypotheses"]] == [each.text for each in expected]
    assert [each["score"] for each in found["hypotheses"]] == pytest.approx(
        [each.score for each in expected], abs=1e-4
    )
    assert found["text"] == expected[0].text and found["source"][-1]["text"] == "</s>"
    assert [each["id"] for each in found["source"]] == translator.encode(CORPUS[0], 1)
    assert "".join(each["text"] for each in found["tokens"]).removesuffix("</s>").strip() == found["text"]
    size = len(found["tokens"])
    assert len(found["probabilities"]) == len(found["alternatives"]) == size
    assert all(len(each) == 3 for each in found["alternatives"])
    config = translator.model.config
    assert len(found["attention"]) == config.decoder_layers
    assert all(len(layer) == config.decoder_attention_heads for layer in found["attention"])
    rows = [row for layer in found["attention"] for head in layer for row in head]
    assert len(rows) == size * config.decoder_layers * config.decoder_attention_heads
    assert all(sum(row) == pytest.approx(1, abs=0.01) and len(row) == len(found["source"]) for row in rows)


def test_page_translation_shows_the_inside_as_the_paper_has_it(client: Any, translator: Translator) -> None:
    found = client.post("/page/translate", json={"text": CORPUS[0], "inside": True}).json()
    ids = [[token["id"] for token in found[side]] for side in ("source", "tokens")]
    assert_is_inside(found["inside"], copy.deepcopy(translator.model), *ids)
    assert "inside" not in client.post("/page/translate", json={"text": CORPUS[0]}).json()
    assert "inside" not in client.post("/page/translate", json={"text": "xq" * 35, "inside": True}).json()


def test_tokens_of_one_character_are_shown_together(client: Any, translator: Translator) -> None:
    found = client.post("/page/translate", json={"text": "a 東ö house"}).json()["source"]
    texts = [token["text"] for token in found[:-1]]
    assert "".join(texts).strip() == "a 東ö house" and "東" in texts and "" in texts and "\ufffd" not in "".join(texts)


def test_page_translation_begins_with_its_prefix(client: Any, translator: Translator) -> None:
    first = client.post("/page/translate", json={"text": CORPUS[0]}).json()
    other = first["alternatives"][0][1]
    found = client.post("/page/translate", json={"text": CORPUS[0], "prefix": [other["id"]]}).json()
    assert found["tokens"][0]["id"] == other["id"]
    assert found["probabilities"][0] == pytest.approx(other["probability"], abs=2e-4)


def test_page_translation_ends_where_the_end_is_chosen(client: Any, translator: Translator) -> None:
    first = client.post("/page/translate", json={"text": CORPUS[0]}).json()
    prefix = [first["tokens"][0]["id"], translator.model.generation_config.eos_token_id]
    found = client.post("/page/translate", json={"text": CORPUS[0], "prefix": prefix}).json()
    assert [token["id"] for token in found["tokens"]] == prefix and len(found["hypotheses"]) == 1
    assert found["parts"][0]["target"] == found["text"] == first["tokens"][0]["text"].strip()


@pytest.mark.parametrize("text", ["", " ", "\n", "---"])
def test_page_translation_of_nothing_is_empty(client: Any, text: str) -> None:
    found = client.post("/page/translate", json={"text": text}).json()
    assert found["text"] == "" and found["tokens"] == found["hypotheses"] == [] and found["sentence"] is None
    assert "".join(part["target"] for part in found["parts"]) == text


def test_page_translates_all_sentences_and_shows_the_one_at_the_caret(client: Any, translator: Translator) -> None:
    text = f" \n{CORPUS[1]}\n{CORPUS[3]}\n\n {CORPUS[2]} {{name}}\n"
    whole = client.post("/translate", json=GOOD | {"q": text}).json()["translatedText"]
    for caret in (0, *map(text.index, (CORPUS[1], "house", "the big", "million")), len(text), 10**6, None):
        found = client.post("/page/translate", json={"text": text, "caret": caret}).json()
        assert "".join(part["source"] for part in found["parts"]) == text
        assert "".join(part["target"] for part in found["parts"]) == whole
        sentence = found["parts"][found["sentence"]]["source"]
        start = sum(len(part["source"]) for part in found["parts"][: found["sentence"]])
        assert caret is None or caret > len(text) or start <= caret <= start + len(sentence) + 2 or caret == 0
        assert "".join(token["text"] for token in found["source"][:-1]).strip() == sentence.replace(" {name}", "")
        assert found["text"] == best(translator, sentence.replace(" {name}", ""))[0]


def test_page_translates_a_sentence_that_is_too_long_for_a_picture(client: Any, translator: Translator) -> None:
    text = "xq" * 200
    found = client.post("/page/translate", json={"text": text}).json()
    assert found["tokens"] == [] and "128" in found["note"]
    assert found["parts"] == [{"source": text, "target": best(translator, text)[0], "is_sentence": True}]


def test_page_searches_with_the_beams_of_the_server(translator: Translator) -> None:
    with client_of(language_pair(translator, num_beams=2)) as client:
        assert client.get("/site.json").json()["search"] == {"num_beams": 2}
        assert len(client.post("/page/translate", json={"text": CORPUS[0]}).json()["hypotheses"]) == 2
