"""Which requests a page or a name of another site may not send, and which path and method the endpoints see."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from fastapi import Request
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from hf_vanilla_transformer.serving.http_rules import HttpRules

HOSTS = ("127.0.0.1", "localhost", "::1", "translate.example.org")
NO_HOST = "this server is not known under this name (--allowed_host permits it)"
NO_ORIGIN = "pages of this site may not call this server (--cors_origin permits it)"


async def seen(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the method and the path that it gets."""
    request = Request(scope)
    answer = PlainTextResponse(f"{request.method} {scope['path']}")
    await answer(scope, receive, send)


def answer_of(
    method: str,
    url: str = "/",
    headers: Any = None,
    hosts: Any = (),
    origins: Any = (),
) -> Any:
    rules = HttpRules(seen, hosts, origins, ["", "/translate", "/languages"])
    return TestClient(rules).request(method, url, headers=headers)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/translate", "/translate"),
        ("/translate/", "/translate"),
        ("//translate//", "/translate"),
        ("/page/", "/page/"),
        ("/a//b///c", "/a/b/c"),
        ("/", ""),
        ("/http://host/x", "/http:/host/x"),
    ],
)
def test_slashes_do_not_matter(path: str, expected: str) -> None:
    assert answer_of("GET", f"http://testserver{path}").text == f"GET {expected}"


def test_whole_address_of_a_proxy_is_a_path() -> None:
    rules = HttpRules(seen, (), (), ["/translate"])

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        await rules({**scope, "path": "http://testserver/translate"}, receive, send)

    assert TestClient(proxied).get("/").text == "GET /translate"


@pytest.mark.parametrize("method", ["DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT"])
def test_methods_stay(method: str) -> None:
    assert answer_of(method).text.split()[0] == method


def test_head_is_get() -> None:
    assert answer_of("HEAD").headers["content-length"] == str(len("GET "))


def test_start_of_the_server_is_passed_on() -> None:
    started = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        started.append(scope["type"])
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

    with TestClient(HttpRules(application, HOSTS, (), ())):
        pass
    asyncio.run(HttpRules(application, HOSTS, (), ())({"type": "a"}, None, None))  # type: ignore[arg-type]
    assert started == ["lifespan", "a"]


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("127.0.0.1:5000", True),
        ("LOCALHOST", True),
        ("[::1]:5000", True),
        ("translate.example.org", True),
        ("", True),
        ("a.example", False),
        ("zz.example", False),
        ("127.0.0.1.evil.example", False),
        ("[::1", False),
    ],
)
def test_names_of_other_servers_are_refused(host: str, passes: bool) -> None:
    for method in ("GET", "POST"):
        answer = answer_of(method, headers={"Host": host}, hosts=HOSTS)
        assert answer.status_code == (200 if passes else 403)
        assert passes or answer.json() == {"error": f"Host {host}: {NO_HOST}"}
    assert answer_of("GET", headers={"Host": host}).status_code == 200


SITE = ("https://example.org",)


@pytest.mark.parametrize(
    ("origin", "host", "hosts", "origins", "passes"),
    [
        (None, "testserver", (), (), True),
        ("https://example.org", "testserver", (), (), False),
        ("http://a.example", "testserver", (), (), False),
        ("http://zz.example", "testserver", (), (), False),
        ("null", "testserver", (), (), False),
        ("http://testserver:81", "testserver", (), (), False),
        ("http://testserver", "testserver", (), (), True),  # the page of this server
        ("https://testserver:81", "testserver:81", (), (), True),
        ("moz-extension://0b1f", "testserver", (), (), True),  # no page has such an origin
        ("app://x", "testserver", (), (), True),
        ("safari-web-extension://x", "testserver", (), (), True),
        ("http:", "", (), (), False),
        ("https://example.org", "testserver", (), SITE, True),
        ("https://other.org", "testserver", (), SITE, False),
        ("https://other.org", "testserver", (), ("*",), True),
        ("https://translate.example.org", "127.0.0.1:5000", HOSTS, (), True),
        ("https://translate.example.org:8443", "127.0.0.1:5000", HOSTS, (), True),
        ("http://localhost:3000", "127.0.0.1:5000", HOSTS, (), False),
        ("http://[::1]:3000", "127.0.0.1:5000", HOSTS, (), False),
        ("http://localhost:3000", "translate.example.org", HOSTS[3:], (), False),
    ],
)
def test_pages_of_other_sites_are_refused(
    origin: Any, host: str, hosts: Any, origins: Any, passes: bool
) -> None:
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    for method in ("DELETE", "PATCH", "POST", "PUT"):
        answer = answer_of(method, headers=headers, hosts=hosts, origins=origins)
        assert answer.status_code == (200 if passes else 403)
        assert passes or answer.json() == {"error": f"Origin {origin}: {NO_ORIGIN}"}
    for method in ("GET", "HEAD", "OPTIONS"):
        assert answer_of(method, headers=headers, hosts=hosts, origins=origins).status_code == 200
