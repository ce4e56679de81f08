"""Clients of LibreTranslate, as they install, against a server on a socket, and the requests of those that do not."""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

import uvicorn

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.serving import Limits
from hf_vanilla_transformer.serving.app import create_app
from hf_vanilla_transformer.serving.interface import Server
from tests.serving_helpers import CORPUS, client_of, echo_translator, language_pair
from tests.web.tools import require_npm

ENGLISH = "A man is riding a bike, and two dogs are running in the snow."


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


@pytest.fixture(scope="module")
def address(translator: Translator) -> Iterator[str]:
    """A server with a key."""
    app = create_app(Server([language_pair(translator)], Limits(api_key="sesame")))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def expected(translator: Translator) -> list[str]:
    return [hypothesis.text for hypothesis in next(translator.translate_nbest([CORPUS[0]], 4))]


def test_libretranslatepy(address: str, expected: list[str]) -> None:
    libretranslatepy = pytest.importorskip("libretranslatepy", reason="LibreTranslate's own client")
    client = libretranslatepy.LibreTranslateAPI(address, "sesame")
    assert (
        client.translate(CORPUS[0], "en", "de")
        == client.translate(CORPUS[0], "auto", "de")
        == expected[0]
    )
    assert client.languages()[0] == {
        "code": "en",
        "name": "English",
        "targets": ["de"],
    }
    assert client.detect(ENGLISH)[0]["language"] == "en"


def test_libretranslate_aio(address: str, expected: list[str], tmp_path: Path) -> None:
    aio = pytest.importorskip("libretranslate_aio", reason="a client of LibreTranslate")
    (tmp_path / "a.txt").write_text("seven")

    async def use() -> None:
        async with aio.AsyncLibreTranslate(f"{address}/", api_key="sesame") as client:
            found = await client.translate(CORPUS[0], "auto", "de", alternatives=3)
            assert [found.translated_text, *found.alternatives] == list(dict.fromkeys(expected))
            assert found.detected_language.language == "en"
            html = await client.translate(f"<p>{CORPUS[0]}</p>", "en", "de", format="html")
            assert html.translated_text == f"<p>{expected[0]}</p>"
            assert (await client.detect(ENGLISH))[0].language == "en"
            english, german = await client.languages()
            assert (english.targets, german.targets) == (["de"], [])
            settings = await client.frontend_settings()
            assert settings.key_required
            assert settings.char_limit == 10_000
            assert not settings.suggestions
            assert await client.health()
            for refused in (
                client.suggest("a", "b", "en", "de"),
                client.translate_file(tmp_path / "a.txt", "en", "de"),
            ):
                with pytest.raises(aio.ForbiddenError, match="disabled on this server"):
                    await refused
        with pytest.raises(aio.ForbiddenError, match="Invalid API key"):
            await aio.AsyncLibreTranslate(address, api_key="x").translate("seven", "en", "de")

    asyncio.run(use())


def test_deep_translator(address: str, expected: list[str]) -> None:
    deep_translator = pytest.importorskip("deep_translator", reason="a client of LibreTranslate")
    client = deep_translator.LibreTranslator("en", "de", api_key="sesame", custom_url=f"{address}/")
    assert client.translate(CORPUS[0]) == expected[0]
    assert client.translate_batch([CORPUS[0], CORPUS[0]]) == [expected[0]] * 2


def test_libretranslate_of_npm(address: str, expected: list[str]) -> None:
    root = require_npm()
    if not (root / "node_modules" / "libretranslate").is_dir():
        pytest.skip("needs npm's libretranslate")
    options = {
        "query": CORPUS[0],
        "target": "de",
        "apiurl": address,
        "apiKey": "sesame",
    }
    script = f'require("libretranslate").translate({json.dumps(options)}).then((text) => console.log(text))'
    done = subprocess.run(
        ["node", "-e", script],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == expected[0], done.stderr


# The requests of clients that do not install alone, with the fields that their source code has.


def test_requests_of_weblate(translator: Translator, expected: list[str]) -> None:
    # WeblateOrg/weblate, weblate/machinery/libretranslate.py: a form, and an empty key if there is none
    with client_of(language_pair(translator)) as client:
        assert "de" in [language["code"] for language in client.get("/languages").json()]
        fields = {"api_key": "", "q": CORPUS[0], "source": "en", "target": "de"}
        assert client.post("/translate", data=fields).json()["translatedText"] == expected[0]


@pytest.mark.parametrize("beams", [1, 4])
def test_requests_of_searxng(translator: Translator, beams: int) -> None:
    # searxng/searxng, searx/engines/libretranslate.py: three alternatives, whatever the model has
    with client_of(language_pair(translator, num_beams=beams)) as client:
        args = {
            "q": CORPUS[0],
            "source": "en",
            "target": "de",
            "alternatives": 3,
        }
        answer = client.post(
            "/translate",
            content=json.dumps(args),
            headers={"Content-Type": "application/json"},
        )
        assert answer.json()["translatedText"]
        assert len(answer.json()["alternatives"]) <= beams - 1


@pytest.mark.parametrize("source", ["en", "auto", "en-GB"])
def test_requests_of_mastodon(translator: Translator, expected: list[str], source: str) -> None:
    # mastodon/mastodon, app/lib/translation_service/libre_translate.rb: lists of HTML, no key is null
    with client_of(language_pair(translator)) as client:
        assert all(
            {"code", "targets"} <= language.keys() for language in client.get("/languages").json()
        )
        texts = [f"<p>{CORPUS[0]}</p>", ""]
        body = {
            "q": texts,
            "source": source,
            "target": "de",
            "format": "html",
            "api_key": None,
        }
        answer = client.post(
            "/translate",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        assert answer.json()["translatedText"] == [f"<p>{expected[0]}</p>", ""]
        assert source != "auto" or answer.json()["detectedLanguage"][0]["language"] == "en"


def test_requests_of_dialect(translator: Translator, expected: list[str]) -> None:
    # dialect-app/dialect, dialect/providers/modules/libretrans.py
    def translated(client: Any, **fields: Any) -> Any:
        return client.post(
            "/translate",
            json={"q": CORPUS[0], "source": "auto", "target": "de"} | fields,
        ).json()

    with client_of(language_pair(translator), api_key="sesame", max_characters=50) as client:
        assert client.get("/spec").json()["info"]["title"] == "LibreTranslate"
        settings = client.get("/frontend/settings").json()
        assert settings["apiKeys"]
        assert settings["keyRequired"]
        assert int(settings["charLimit"]) == 50
        assert (
            "confidence"
            in client.post("/detect", data={"q": "hello", "api_key": "sesame"}).json()[0]
        )
        answer = translated(client, api_key="sesame")
        assert answer["translatedText"] == expected[0]
        assert answer["detectedLanguage"]["language"] == "en"
        assert (
            translated(client)["error"] == "Please contact the server operator to obtain an API key"
        )
        assert translated(client, api_key="x")["error"] == "Invalid API key"
        assert "is not supported" in translated(client, api_key="sesame", target="xx")["error"]
        assert "exceeds text limit" in translated(client, api_key="sesame", q="x" * 51)["error"]
