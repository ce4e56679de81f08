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
from hf_vanilla_transformer.serving import service
from hf_vanilla_transformer.serving.engine import Engine
from tests.model_helpers import slow
from tests.paper_inside import assert_is_inside
from tests.serving_helpers import CORPUS, client_of, echo_translator, language_pair

GOOD = {"q": CORPUS[0], "source": "en", "target": "de"}
MAX_CHARACTERS = 500


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


@pytest.fixture(scope="module")
def client(translator: Translator) -> Iterator[Any]:
    pair = language_pair(translator, split=sentence_splitter("en"))
    with client_of(pair, max_characters=MAX_CHARACTERS) as client:
        yield client


def best(translator: Translator, *lines: str) -> list[str]:
    return list(translator.translate(lines))


def answer_to(client: Any, **fields: Any) -> dict[str, Any]:
    """The answer to a translation request."""
    return client.post("/translate", json=GOOD | fields).json()


def translated(client: Any, q: Any, **fields: Any) -> Any:
    return answer_to(client, q=q, **fields)["translatedText"]


def page_of(client: Any, text: str = CORPUS[0], **fields: Any) -> dict[str, Any]:
    """The answer to the page."""
    return client.post("/page/translate", json={"text": text} | fields).json()


def test_string_list_and_form_are_translated(client: Any, translator: Translator) -> None:
    *first, house, red_house = best(translator, *CORPUS[:3], "a house.", "the big red house!")
    assert answer_to(client) == {"translatedText": first[0]}
    answer = client.post("/translate", json=GOOD | {"q": CORPUS})
    assert answer.status_code == 200
    assert answer.json() == {"translatedText": [*first, f"{house} {red_house}"]}
    assert client.post("/translate", data=GOOD).json() == {"translatedText": first[0]}  # a form


def test_layout_is_kept(client: Any, translator: Translator) -> None:
    first, second, third = best(translator, CORPUS[0], f"{CORPUS[1]}.", CORPUS[2])
    text = f" - {CORPUS[0]}\n\n  {CORPUS[1]}. {CORPUS[2]}\r\n"
    assert translated(client, text) == f" - {first}\n\n  {second} {third}\r\n"


@pytest.mark.parametrize("q", ["", "   ", "\n\n", []])
def test_blank_text_stays_blank(client: Any, q: Any) -> None:
    assert answer_to(client, q=q) == {"translatedText": q}


@pytest.mark.parametrize("escaped", [False, True])
def test_sentence_of_moses_is_translated_as_by_the_translator(translator, monkeypatch, escaped):
    monkeypatch.setattr(translator, "escaped", escaped)
    q = "one man &apos;s {hat} &quot; seven"
    with client_of(language_pair(translator)) as client:
        assert [translated(client, q)] == list(translator.translate([q], protect=True))


def test_alternatives_are_the_next_hypotheses(client: Any, translator: Translator) -> None:
    (hypotheses,) = translator.translate_nbest([CORPUS[0]], 4)
    first, *others = (each.text for each in hypotheses)
    for asked in (3, 1000):  # as many as there are beams
        answer = answer_to(client, alternatives=asked)
        assert answer == {"translatedText": first, "alternatives": others}
    answer = answer_to(client, q=[CORPUS[0], ""], alternatives=1)
    assert answer["alternatives"] == [others[:1], []]


@pytest.mark.parametrize("q", ["a b " * 40, ["a", "a b " * 40]])
@pytest.mark.parametrize("limit", [2, None])
def test_sentences_that_are_cut_or_do_not_end_are_reported(
    q: str | list[str], limit: int | None
) -> None:
    translator = echo_translator(trained_source_length=16)
    translator.model.lm_head.bias.data[translator.source_tokenizer.eos_token_id] = -1e4
    translator.model.generation_config.max_new_tokens = limit
    with client_of(language_pair(translator)) as client:
        assert "warnings" not in answer_to(client, q="---")
        for form in ("text", "html"):
            warnings = answer_to(client, q=q, format=form)["warnings"]
            assert sum("training" in warning for warning in warnings) == 1
            assert any("did not end" in warning for warning in warnings) is (limit is None)
        if isinstance(q, str):
            assert page_of(client, q)["note"].count("training") == 1


def test_html_keeps_its_tags(client: Any, translator: Translator) -> None:
    first, second, third = best(translator, CORPUS[1], CORPUS[0], CORPUS[2])
    text = f"<p class=x>{CORPUS[1]}</p><ul><li>{CORPUS[0]}<li><b>{CORPUS[2]}</b></ul>"
    expected = f"<p class=x>{first}</p><ul><li>{second}<li><b>{third}</b></ul>"
    assert translated(client, text, format="html") == expected
    mixed = translated(client, "two <b>hundred</b> and one", format="html")
    assert mixed.count("<b>") == mixed.count("</b>") == 1
    assert re.sub("</?b>", "", mixed) == second


def test_languages_are_listed(translator: Translator) -> None:
    pairs = [
        language_pair(translator, *codes) for codes in (("en", "de"), ("de", "en"), ("en", "xx"))
    ]
    with client_of(*pairs) as client:
        assert client.get("/languages").json() == [
            {"code": "en", "name": "English", "targets": ["de", "xx"]},
            {"code": "de", "name": "German", "targets": ["en"]},
            {"code": "xx", "name": "xx", "targets": []},
        ]
        assert client.post("/translate", json=GOOD | {"source": "auto"}).status_code == 200
        assert client.get("/", follow_redirects=False).headers["location"] == "en-de/"
        pages = client.get("/de-en/site.json").json()["pages"]
        assert pages == [
            {"source": "en", "target": "de", "path": "../en-de/"},
            {"source": "de", "target": "en", "path": "../de-en/"},
            {"source": "en", "target": "xx", "path": "../en-xx/"},
        ]
        assert client.post("/en-xx/page/translate", json={"text": "seven"}).json()["text"]
        described = client.get("/openapi.json").json()["paths"]
        assert "/" not in described
        assert "/de-en/page/translate" in described
    with client_of(*pairs[:2]) as client:
        assert len(client.get("/de-en/site.json").json()["pages"]) == 2


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
def test_variants_of_languages_are_matched(
    translator: Translator, source: str, target: str, pair: str | None
) -> None:
    pairs = [language_pair(translator, "en", code) for code in ("de", "pt", "pt-BR", "zh")]
    for each in pairs:

        async def translate(
            texts: list[str], _: list[str], name: str = each.name, **__: Any
        ) -> list[list[str]]:
            return [[name] for _ in texts]

        each.translate = translate
    with client_of(*pairs) as client:
        assert translated(client, "seven", source=source, target=target) == (pair or "seven")


ENGLISH = "A man is riding a bike, and two dogs are running in the snow."
GERMAN = "Ein Mann fährt auf einem Fahrrad, und zwei Hunde rennen im Schnee."
FRENCH = "Un homme fait du vélo, et deux chiens courent dans la neige."


def test_language_of_a_text_is_detected(translator: Translator) -> None:
    pytest.importorskip("py3langid", reason="needs the extra `detect`")
    with client_of(language_pair(translator), language_pair(translator, "fr", "de")) as client:
        for text, language in ((ENGLISH, "en"), (GERMAN, "de"), (FRENCH, "fr")):
            found = client.post("/detect", json={"q": text}).json()
            assert found[0]["language"] == language
            assert found[0]["confidence"] > 90
        answer = answer_to(client, q=[ENGLISH, FRENCH, GERMAN], source="auto", alternatives=1)
        detected = [each["language"] for each in answer["detectedLanguage"]]
        assert detected == ["en", "fr", "de"]
        assert answer["translatedText"][2] == GERMAN
        assert answer["alternatives"][2] == []
    with client_of(language_pair(translator)) as client:
        short = answer_to(client, q="seven", source="auto")
        assert short["detectedLanguage"] == {
            "language": "en",
            "confidence": 100.0,
        }
        assert short["translatedText"] == best(translator, "seven")[0]


NO_TARGET = "English (en) is not available as a target"


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        # the first words are those by which LibreTranslate's clients know an error
        ("/translate", GOOD | {"source": "de", "target": "en"}, 400, NO_TARGET),
        ("/translate", GOOD | {"target": "<script>"}, 400, "<script> is not supported"),
        ("/translate", GOOD | {"source": "auto", "target": "fr"}, 400, "fr is not supported"),
        ("/translate", GOOD | {"source": "auto", "target": "en"}, 400, NO_TARGET),
        ("/translate", GOOD | {"source": "fr", "q": []}, 400, "fr is not supported"),
        ("/translate", GOOD | {"source": ""}, 400, "Invalid request: missing source parameter"),
        ("/translate", GOOD | {"format": "a\nb"}, 400, "format: a\\nb format is not supported"),
        *[
            ("/translate", GOOD | {"alternatives": n}, 400, "alternatives: ")
            for n in (-1, 1.5, "²", "9" * 5000, [])
        ],
        ("/translate", GOOD | {"q": "\ud800"}, 400, "the request"),
        ("/translate", GOOD | {"q": "x" * 501}, 400, "q: request (501) exceeds text limit (500)"),
        ("/detect", {}, 400, "Invalid request: missing q parameter"),
        ("/suggest", GOOD | {"s": "x"}, 403, "Suggestions are disabled on this server."),
        ("/translate_file", GOOD, 403, "Files translation are disabled on this server."),
        ("/translate", "[" * 5000, 400, "the request"),
        ("/page/translate", {}, 400, "Invalid request: missing text parameter"),
        (
            "/page/translate",
            {"text": "x" * 501},
            400,
            "text: request (501) exceeds text limit (500)",
        ),
        ("/page/translate", {"text": "seven", "prefix": "x"}, 400, "prefix: "),
        ("/page/translate", {"text": "seven", "prefix": [10**6]}, 400, "prefix: "),
        ("/page/translate", {"text": "seven", "num_beams": 0}, 400, "num_beams: "),
    ],
)
def test_wrong_requests_are_one_line(
    client: Any, path: str, fields: Any, status: int, message: str
) -> None:
    body = fields if isinstance(fields, str) else json.dumps(fields)
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert answer.json()["error"].startswith(message)


FIELDS = (
    12 * MAX_CHARACTERS + 4096
)  # bytes of a body without a file: two JSON escapes for each character
FILE = FIELDS + 10_000_000


@pytest.mark.parametrize(
    ("path", "content_type", "limit"),
    [
        ("/translate", "application/json", FIELDS),
        ("/suggest", "application/json", FIELDS),
        ("/translate", "multipart/form-data; boundary=x", FIELDS),
        ("/translate_file", "application/json", FIELDS),
        ("/translate_file", "multipart/form-data; boundary=x", FILE),
    ],
)
def test_bodies_have_limits(client: Any, path: str, content_type: str, limit: int) -> None:
    """By the length that a request declares, so that nothing large is sent."""
    for length in (limit, limit + 1):
        headers = {"content-type": content_type, "content-length": str(length)}
        answer = client.post(path, content=b"", headers=headers)
        assert (answer.status_code == 413) == (length > limit)
    assert answer.json() == {"error": f"the body has {length} bytes, but the limit is {limit}"}


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
        ("GET", "/redoc", 404, None),
        ("GET", "/page/none", 404, None),
        ("GET", "/download_file/x", 404, None),
    ],
)
def test_unknown_paths_and_methods_are_refused(client, method, path, status, allow):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert "error" in answer.json()
    allowed = answer.headers.get("allow")
    assert allowed == allow or allow in allowed


@pytest.mark.parametrize("path", ["/", "/health", "/languages", "/page.js", "/spec", "/metrics"])
def test_head_has_the_headers_of_get(client: Any, path: str) -> None:
    head = client.head(path)
    get = client.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 200)])
def test_compressed_body_is_not_called_broken_json(client: Any, encoding: str, status: int) -> None:
    body = json.dumps(GOOD).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    content = gzip.compress(body) if encoding == "gzip" else body
    answer = client.post("/translate", content=content, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.json() == {"error": "Content-Encoding: gzip: send the body as it is"}


def test_interface_is_described(client: Any, translator: Translator) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    health = {"/health", "/health/live", "/health/ready"}
    endpoints = {"/translate", "/detect", "/languages", "/page/translate"}
    assert set(paths) == endpoints | health | {"/metrics"}
    translate = paths["/translate"]["post"]
    body = translate["requestBody"]
    forms = {"application/x-www-form-urlencoded", "multipart/form-data"}
    assert body["required"] is True
    assert set(body["content"]) == {"application/json"} | forms
    schema = body["content"]["application/json"]["schema"]
    assert schema["required"] == ["q", "source", "target"]
    assert {"200", "4XX", "5XX"} <= set(translate["responses"])
    with client_of(language_pair(translator), translate_files=True) as other:
        assert other.get("/openapi.json").json()["paths"].keys() == paths.keys()


def test_long_sentences_are_refused(translator: Translator) -> None:
    with client_of(language_pair(translator), max_characters=100_000) as client:
        answer = client.post("/translate", json=GOOD | {"q": "xq" * 3000})
        assert answer.status_code == 413
        assert "1024" in answer.json()["error"]


def test_nothing_is_translated_for_a_request_that_is_refused(
    translator: Translator, held: threading.Event
) -> None:
    pair = language_pair(translator, max_queue=2, batch_size=1)
    with client_of(pair) as client:
        answer = client.post("/translate", json=GOOD | {"q": ["a", "b", "c"]})
        assert answer.status_code == 413
        assert "limit is 2" in answer.json()["error"]
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
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(refused) == 3 - 1 - len(pair.engine._threads)
        assert refused[0].headers["retry-after"] == "1"
        assert set(refused[0].json()) == {"error"}
        held.set()
        for thread in threads:
            thread.join()
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * (3 - len(refused)) + [503] * len(refused)


def test_server_without_a_thread_is_dead(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(language_pair(translator)) as client:
        probes = ["/health", "/health/live", "/health/ready"]
        assert [client.get(path).json() for path in probes] == [{"status": "ok"}] * 3
        monkeypatch.setattr(Engine, "alive", False)
        statuses = [client.get(path).status_code for path in probes]
        assert statuses == [200, 500, 503]
        assert client.get("/health/live").json() == {"error": "a thread of an engine has ended"}


@pytest.mark.parametrize("path", ["/translate", *slow("/translate_file")])
def test_timeout_is_504_and_gives_the_sentence_up(
    translator: Translator, held: threading.Event, path: str
) -> None:
    pair = language_pair(translator)
    files = {"file": ("a.html", b"<p>seven</p>")}
    with client_of(pair, timeout=0.3, translate_files=True) as client:
        answer = client.post(path, data=GOOD, files=files)
        assert answer.status_code == 504
        assert "no answer in time" in answer.json()["error"]
        held.set()
    assert pair.engine.translated == 0


def test_failed_translation_is_500_without_details(translator, monkeypatch, caplog):
    def step(self: ContinuousSearch) -> list:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(ContinuousSearch, "step", step)
    with client_of(language_pair(translator)) as client:
        answer = client.post("/translate", json=GOOD)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "secret detail" in caplog.text
        monkeypatch.undo()
        assert client.post("/translate", json=GOOD).status_code == 200


KEY = {"api_key": "sesame"}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"json": GOOD}, 403),
        ({"json": GOOD | {"api_key": "x"}}, 403),
        ({"json": GOOD | KEY}, 200),
        ({"json": GOOD | {"apiKey": "sesame"}}, 200),  # LibreTranslate's client of npm
        ({"data": GOOD | KEY}, 200),
        ({"params": GOOD | KEY}, 200),
        *[
            ({"json": GOOD | key, "headers": {"Authorization": bearer}}, status)
            for key in ({}, {"api_key": ""})
            for bearer, status in (
                ("Bearer sesame", 200),
                ("bearer sesame", 200),
                ("Basic sesame", 403),
            )
        ],
    ],
)
def test_api_key_guards_translations(translator: Translator, request_: dict, status: int) -> None:
    with client_of(language_pair(translator), **KEY) as client:
        assert client.post("/translate", **request_).status_code == status


def test_api_key_guards_every_post(translator: Translator) -> None:
    with client_of(language_pair(translator), **KEY) as client:
        for path in ("/page/translate", "/detect", "/suggest"):
            answer = client.post(path, json={"text": "seven", "q": "seven"})
            assert answer.status_code == 403
            assert answer.json()["error"].startswith("Please contact")
        assert client.get("/site.json").json()["key_required"] is True
        assert client.get("/languages").status_code == client.get("/health").status_code == 200


SITE = "https://example.org"


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        ((), SITE, 403),
        ((), "http://testserver", 200),  # the page of this server
        ((SITE,), SITE, 200),
        ((SITE,), "https://other.org", 403),
        (("*",), SITE, 200),
    ],
)
def test_pages_of_other_sites_are_refused(
    translator: Translator, origins: tuple[str, ...], origin: str, status: int
) -> None:
    headers = {"Origin": origin}
    allowed = status == 200 and bool(origins)
    with client_of(language_pair(translator), cors_origins=origins) as client:
        answer = client.post("/translate", data=GOOD, headers=headers)
        assert answer.status_code == status
        may_read = answer.headers.get("access-control-allow-origin")
        assert (may_read in (origin, "*")) == allowed
        assert client.get("/languages", headers=headers).status_code == 200
        preflight = headers | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-y",
        }
        answer = client.options("/translate", headers=preflight)
        assert ("access-control-allow-origin" in answer.headers) == allowed


def test_names_of_other_servers_are_refused(translator: Translator) -> None:
    with client_of(language_pair(translator), allowed_hosts=("127.0.0.1",)) as client:
        for host, status in (("127.0.0.1:5000", 200), ("evil.example", 403)):
            assert (
                client.post("/translate", json=GOOD, headers={"Host": host}).status_code == status
            )
            assert client.get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("source", ["en", "auto", "de"])
def test_files_are_translated_if_asked(translator: Translator, source: str) -> None:
    with client_of(language_pair(translator), translate_files=True, **KEY) as client:
        form = {"source": source, "target": "de"} | KEY

        def expected(text: str, format: str) -> str:
            return text if source == "de" else translated(client, text, format=format, **KEY)

        def answer_to_file(*file: Any) -> Any:
            return client.post(
                "/translate_file",
                data=form,
                files={"file": file} if file else {},
            )

        html = f'<p class="x">{CORPUS[0]} <b>{CORPUS[1]}</b></p>'
        address = answer_to_file("../50%#bü x.html", html.encode()).json()["translatedFileUrl"]
        assert address.startswith("http://testserver/download_file/")
        assert address.isascii()
        assert " " not in address
        found = client.get(address)
        assert found.content.decode() == expected(html, "html")
        disposition = "attachment; filename*=UTF-8''50%25%23b%C3%BC%20x.html"
        assert found.headers["content-disposition"] == disposition
        text = f"{CORPUS[0]}\n\n- {CORPUS[1]}\n"
        address = answer_to_file("a.txt", text.encode()).json()["translatedFileUrl"]
        assert client.get(address).content.decode() == expected(text, "text")
        assert client.post("/translate_file", data={**form, "api_key": ""}).status_code == 403
        for file, message in (
            ((), "missing file"),
            (("x.exe", b"MZ"), "file format not supported"),
        ):
            answer = answer_to_file(*file)
            assert answer.status_code == 400
            assert message in answer.json()["error"]
        assert client.get("/download_file/other").status_code == 404


@pytest.mark.parametrize("step", ["split", "encode", "decode", "join"])
def test_work_on_texts_leaves_the_server_free(
    translator: Translator, monkeypatch: Any, step: str
) -> None:
    pair = language_pair(translator)
    answered = threading.Event()
    seen = []
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
        thread = threading.Thread(target=answer_to, args=(client,))
        thread.start()
        time.sleep(0.3)
        assert client.get("/health").status_code == 200
        answered.set()
        thread.join()
    assert seen == [True]


def test_texts_and_html_have_one_thread_each(translator: Translator) -> None:
    """Tokenizers are not thread-safe."""
    pair = language_pair(translator)
    threads = set()

    def work(item: int) -> int:
        threads.add(threading.current_thread().name)
        time.sleep(0.01)
        return item

    async def together() -> None:
        of_texts = [pair._map(work, [number]) for number in range(4)]
        of_html = [pair._map(work, [number], pair._html_thread) for number in range(4)]
        await asyncio.gather(*of_texts, *of_html)

    asyncio.run(together())
    pair.close()
    assert threads == {"text_0", "html_0"}


def test_small_request_does_not_wait_for_all_of_a_large_one(
    translator: Translator,
) -> None:
    order: list[str] = []
    pair = language_pair(translator, split=lambda line: order.append(line) or [line])

    async def both() -> None:
        await asyncio.gather(pair.translate(["seven\n" * 300], []), pair.translate(["one"], []))

    asyncio.run(both())
    pair.close()
    assert order.index("one") < 100
    assert len(order) == 301


def test_metrics_are_prometheus_text(translator: Translator) -> None:
    with client_of(language_pair(translator)) as client:
        answer_to(client)
        answer_to(client, q=["seven", "one"])
        answer_to(client, q=None)
        client.get("/none")
        answer = client.get("/metrics")
        client.server.close()
        assert client.get("/health/ready").status_code == 503  # while connections end
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    requests = "vanilla_transformer_request_seconds_count"
    for line in (
        f'{requests}{{path="/translate",status="200"}} 2.0',
        f'{requests}{{path="/translate",status="400"}} 1.0',
        f'{requests}{{path="other",status="404"}} 1.0',
        'vanilla_transformer_sentences_translated_total{pair="en-de"} 3.0',
        'vanilla_transformer_sentences_waiting{pair="en-de"} 0.0',
        'vanilla_transformer_sentences_running{pair="en-de"} 0.0',
        'vanilla_transformer_queue_capacity{pair="en-de"} 1024.0',
    ):
        assert line in answer.text.splitlines()


def test_body_that_does_not_arrive_is_408(translator: Translator) -> None:
    answers = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        answers.append(message)

    request = {
        "type": "http",
        "method": "POST",
        "path": "/translate",
        "query_string": b"",
        "headers": [
            (b"host", b"testserver"),
            (b"content-type", b"application/json"),
            (b"content-length", b"9"),
        ],
    }
    with client_of(language_pair(translator), timeout=0.05) as client:
        asyncio.run(client.app(request, receive, send))
    assert answers[0]["status"] == 408
    error = "the body did not arrive within 0.05 seconds"
    assert json.loads(answers[1]["body"]) == {"error": error}


def test_page_and_what_it_loads_are_sent_with_a_policy(client: Any) -> None:
    index = client.get("/")
    assert index.headers["content-type"].startswith("text/html")
    assert "<script" in index.text
    for name in re.findall(r'(?:src|href)="([\w.]+)"', index.text):
        assert client.get(f"/{name}").status_code == 200, name
    site = client.get("/site.json")
    assert site.json() == {
        "engine": "server",
        "title": "test",
        "search": {"num_beams": 4},
        "key_required": False,
        "max_characters": MAX_CHARACTERS,
        "pages": [],
    }
    assert "default-src 'self'" in site.headers["content-security-policy"]
    assert (
        client.get("/server_engine.js").headers["content-type"] == "text/javascript; charset=utf-8"
    )


def test_page_translation_has_every_field(client: Any, translator: Translator) -> None:
    found = page_of(client, alternatives=3, num_beams=2)
    (expected,) = translator.translate_nbest([CORPUS[0]], 2, num_beams=2)
    assert [each["text"] for each in found["hypotheses"]] == [each.text for each in expected]
    assert found["text"] == expected[0].text
    assert found["source"][-1]["text"] == "</s>"
    assert [each["id"] for each in found["source"]] == translator.encode(CORPUS[0], 1)
    tokens = [each["text"] for each in found["tokens"]]
    assert "".join(tokens).removesuffix("</s>").strip() == found["text"]
    assert len(found["probabilities"]) == len(found["alternatives"]) == len(tokens)
    assert all(len(each) == 3 for each in found["alternatives"])
    config = translator.model.config
    assert len(found["attention"]) == config.decoder_layers
    for layer in found["attention"]:
        assert len(layer) == config.decoder_attention_heads
        for head in layer:
            assert len(head) == len(tokens)
            for row in head:
                assert len(row) == len(found["source"])
                assert sum(row) == pytest.approx(1, abs=0.01)


def test_page_translation_shows_the_inside_as_the_paper_has_it(
    client: Any, translator: Translator
) -> None:
    found = page_of(client, inside=True)
    ids = [[token["id"] for token in found[side]] for side in ("source", "tokens")]
    assert_is_inside(found["inside"], copy.deepcopy(translator.model), *ids)
    assert "inside" not in page_of(client)


def test_tokens_of_one_character_are_shown_together(client: Any) -> None:
    tokens = page_of(client, "a 東ö house")["source"][:-1]
    texts = [token["text"] for token in tokens]
    assert "".join(texts).strip() == "a 東ö house"
    assert "東" in texts
    assert "" in texts
    assert "\ufffd" not in "".join(texts)


def test_page_translation_begins_with_its_prefix(client: Any) -> None:
    other = page_of(client)["alternatives"][0][1]
    found = page_of(client, prefix=[other["id"]])
    assert found["tokens"][0]["id"] == other["id"]
    assert found["probabilities"][0] == pytest.approx(other["probability"], abs=2e-4)


def test_page_translation_ends_where_the_end_is_chosen(client: Any, translator: Translator) -> None:
    first = page_of(client)["tokens"][0]
    prefix = [first["id"], translator.model.generation_config.eos_token_id]
    found = page_of(client, prefix=prefix)
    assert [token["id"] for token in found["tokens"]] == prefix
    assert len(found["hypotheses"]) == 1
    assert found["parts"][0]["target"] == found["text"] == first["text"].strip()


@pytest.mark.parametrize("text", ["", " ", "\n", "---"])
def test_page_translation_of_nothing_is_empty(client: Any, text: str) -> None:
    found = page_of(client, text)
    assert found["text"] == ""
    assert found["tokens"] == found["hypotheses"] == []
    assert found["sentence"] is None
    assert "".join(part["target"] for part in found["parts"]) == text


def test_page_translates_all_sentences_and_shows_the_one_at_the_caret(
    client: Any, translator: Translator
) -> None:
    text = f" \n{CORPUS[1]}\n{CORPUS[3]}\n\n {CORPUS[2]} {{name}}\n"
    sentences = [
        CORPUS[1],
        "a house.",
        "the big red house!",
        f"{CORPUS[2]} {{name}}",
    ]
    whole = translated(client, text)
    starts = [text.index(sentence) for sentence in sentences]
    between = [starts[2] - 1, starts[3] + 9]
    for caret in (0, *starts, *between, len(text), 10**6, None):
        found = page_of(client, text, caret=caret)
        assert "".join(part["source"] for part in found["parts"]) == text
        assert "".join(part["target"] for part in found["parts"]) == whole
        number = max(sum(caret is None or start <= caret for start in starts) - 1, 0)
        shown = found["parts"][found["sentence"]]
        assert shown["source"] == sentences[number]
        assert shown["is_sentence"]
        without_name = sentences[number].replace(" {name}", "")
        assert "".join(token["text"] for token in found["source"][:-1]).strip() == without_name
        assert found["text"] == best(translator, without_name)[0]


def test_page_translates_a_sentence_that_is_too_long_for_a_picture(
    client: Any, translator: Translator
) -> None:
    text = "xq" * 200
    found = page_of(client, text)
    assert found["tokens"] == []
    assert "128" in found["note"]
    assert found["parts"] == [
        {
            "source": text,
            "target": best(translator, text)[0],
            "is_sentence": True,
        }
    ]


def test_page_searches_with_the_beams_of_the_server(
    translator: Translator,
) -> None:
    with client_of(language_pair(translator, num_beams=2)) as client:
        assert client.get("/site.json").json()["search"] == {"num_beams": 2}
        assert len(page_of(client)["hypotheses"]) == 2
