"""How a server is loaded and started: options, addresses, what it prints, and when it closes connections."""

import asyncio
import dataclasses
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

import uvicorn
from uvicorn.server import ServerState

from hf_vanilla_transformer.serving import Limits, ServeOptions, server
from hf_vanilla_transformer.serving import languages as languages_module
from tests.model_helpers import error_of, save_model_of_languages
from tests.serving_helpers import echo_folder

THIS_HOST = ("127.0.0.1", "localhost", "::1")


def test_options_have_the_defaults_of_libretranslate() -> None:
    options = ServeOptions(["x"])
    assert (options.host, options.port, options.dtype) == ("127.0.0.1", 5000, "fastest")
    assert options.split_sentences is True
    assert options.limits == Limits()
    assert Limits().translate_files is False
    for fixed, field in ((options, "port"), (Limits(), "timeout")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(fixed, field, 1)


@pytest.mark.parametrize(
    ("host", "allowed", "expected"),
    [
        ("127.0.0.1", (), THIS_HOST),
        ("localhost", ("Translate.Example.org",), (*THIS_HOST, "translate.example.org")),
        ("::1", (), THIS_HOST),
        ("0.0.0.0", (), ()),
        ("a.example", (), ()),
        ("0.0.0.0", ("Translate.Example.org",), (*THIS_HOST, "translate.example.org")),
    ],
)
def test_names_of_the_server(
    host: str, allowed: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    limits = Limits(max_characters=7, allowed_hosts=allowed)
    found = server._named_hosts(ServeOptions([], host=host, limits=limits))
    assert found == dataclasses.replace(limits, allowed_hosts=expected)


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        ({"max_characters": 0}, {}, "max_characters"),
        ({"timeout": 0.0}, {}, "timeout: must be a finite number of seconds above 0, not 0"),
        (
            {"timeout": float("inf")},
            {},
            "timeout: must be a finite number of seconds above 0, not inf",
        ),
        ({"api_key": ""}, {}, "api_key: is empty, so that anybody could guess it"),
        ({"api_key": "one\ntwo"}, {}, "api_key: has several lines"),
        ({}, {"shortlist": "s"}, "shortlist: s is for one model, not for 2"),
        *(
            ({"cors_origins": ("*", site)}, {}, f"cors_origin: {site}: give scheme and host alone")
            for site in ("https://Example.org", "https://example.org/", "example.org", "foo:")
        ),
        *(
            ({"allowed_hosts": (host,)}, {}, f"allowed_host: {host}: give a name alone")
            for host in ("http://example.org", "example.org:80", "example.org/", "[::1]")
        ),
        (
            {"cors_origins": ("https://a.org:8080", "null"), "allowed_hosts": ("A.org", "::1")},
            {},
            "missing1: ",
        ),
        ({"max_characters": 1, "timeout": 0.5, "api_key": "a"}, {}, "missing1: "),
        ({"api_key": "~"}, {"models": ["en-de=missing1"], "shortlist": "s"}, "missing1: "),
        ({}, {"models": [], "pivot": "en"}, "pivot: en: no model translates into it"),
    ],
)
def test_wrong_options_are_refused(limits: dict, options: dict, message: str) -> None:
    models = ["en-de=missing1", "de-en=missing2"]
    chosen = ServeOptions(**({"models": models, "limits": Limits(**limits)} | options))
    assert error_of(server.load_server, chosen).startswith(message)


def test_model_of_one_direction_is_named_once(tmp_path: Path) -> None:
    folder = echo_folder(tmp_path / "one")
    options = ServeOptions([f"en-de={folder}", f"en-fr={folder}"])
    assert error_of(server.load_server, options) == (
        f"--model: en-fr={folder}: this model has one direction, and is named for en-de already"
    )


def test_models_are_loaded_with_their_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = save_model_of_languages(tmp_path / "several", False, tie_word_embeddings=False)
    other = echo_folder(tmp_path / "other")
    models = [f"en-de={several}", f"en-fr={several}", f"de-en={other}"]
    monkeypatch.setattr(server, "sentence_splitter", lambda language: lambda line: [language, line])
    for split in (True, False):
        options = ServeOptions(
            models,
            dtype="float32",
            workers=2,
            split_sentences=split,
            pivot="en",
            engine={"num_beams": 3},
        )
        loaded = server.load_server(options)
        loaded.close()
        assert [pair.name for pair in loaded.pairs] == ["en-de", "en-fr", "de-en"]
        lines = [["x"], ["x"], ["x"]]
        if split:
            lines = [["en", "x"], ["en", "x"], ["de", "x"]]
        assert [pair.split("x") for pair in loaded.pairs] == lines
        first, second, third = loaded.pairs
        assert first.engine is second.engine
        assert first.engine is not third.engine
        assert [pair.engine.num_beams for pair in loaded.pairs] == [3] * 3
        assert len(first.engine._threads) == 2
        assert first.translator.directions.default == ("en", "de")
        assert second.translator.directions.default == ("en", "fr")
        routes = {codes: [pair.name for pair in route] for codes, route in loaded.routes.items()}
        assert routes[("de", "fr")] == ["de-en", "en-fr"]
        assert second.site["engine"] == "server"
        assert second.site["dtype"] == "float32"
        assert second.site["target_language"] == "fr"
        assert first.site["target_language"] == "de"
        assert first.site["bytes"] == first.translator.model.get_memory_footprint()


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["language"], None),
        (["missing"], None),
        (["en-de=missing"], None),
        (["en-de=language", "de-en=language"], None),
        (["sequence"], ("sequence", "sequence")),
        (["name=sequence"], ("name", "sequence")),
        (["odd=name"], ("odd=name", "odd=name")),
        (
            ["en-de=language", "sequence"],
            "--model: sequence is of sequences: serve it alone, at a port of its own",
        ),
        (
            ["a=sequence", "missing"],
            "--model: a=sequence is of sequences: serve it alone, at a port of its own",
        ),
    ],
)
def test_a_model_of_sequences_is_found(
    models: list[str], expected: Any, in_tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("language", "sequence", "odd=name"):
        (in_tmp_path / name).mkdir()
    monkeypatch.setattr(server, "load_tokenizers", lambda folder: [folder.name])
    tasks = {"language": "language", "sequence": "chars", "odd=name": "words"}
    monkeypatch.setattr(server, "tokenizer_task", lambda name: tasks[name])
    if isinstance(expected, str):
        assert error_of(server._sequence_folder, models) == expected
        return
    found = server._sequence_folder(models)
    assert found == (expected and (expected[0], Path(expected[1])))


def test_pairs_in_names_and_directions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directions = [
        ("eng_Latn", "de"),
        ("nonsense_x", "en"),
        ("en", "nonsense_x"),
        ("fr", "en"),
    ]
    codes = {"eng_Latn": "en", "nonsense_x": None}
    monkeypatch.setattr(languages_module, "model_directions", lambda folder: directions)
    monkeypatch.setattr(languages_module, "language_code", lambda name: codes.get(name, name))
    for argument in (str(tmp_path), "nonsense_x-en=runs", "en-nonsense_x=runs"):
        found = languages_module.model_folders([argument])
        assert found == {("en", "de"): Path(argument), ("fr", "en"): Path(argument)}
    found = languages_module.model_folders(["en-de=runs=3"])
    assert found == {("en", "de"): Path("runs=3")}


class Listening:
    """A socket with an address."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_closed = False

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def getsockname(self) -> tuple:
        return self.host, 5001, 0, 0


class Loaded(SimpleNamespace):
    """A server with two pairs of one model."""

    def __init__(self) -> None:
        translator = SimpleNamespace(describe=lambda: {"dtype": "float16"})
        first = SimpleNamespace(name="en-de", translator=translator)
        second = SimpleNamespace(name="de-en", translator=translator)
        self.events: list[str] = []
        documents = SimpleNamespace(
            start=lambda: self.events.append("documents"),
            end_soon=lambda: self.events.append("documents end soon"),
        )
        super().__init__(pairs=[first, second], models=[first], documents=documents)

    def close(self) -> None:
        self.events.append("closed")


ANYONE = "anyone who reaches this address can use the models; --api_key_file restricts that"


@pytest.mark.parametrize(
    ("host", "limits", "address", "lines"),
    [
        ("127.0.0.1", {}, "http://127.0.0.1:5001/", []),
        ("localhost", {"api_key": "x"}, "http://localhost:5001/", []),
        ("::1", {"translate_files": True, "timeout": 9.9}, "http://[::1]:5001/", []),
        ("0.0.0.0", {}, "http://0.0.0.0:5001/", [ANYONE]),
        ("a.example", {}, "http://a.example:5001/", [ANYONE]),
        ("0.0.0.0", {"api_key": "x"}, "http://0.0.0.0:5001/", []),
    ],
)
def test_server_runs_until_a_signal(
    host: str,
    limits: dict,
    address: str,
    lines: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening = Listening(host)
    loaded = Loaded()
    configs = []
    printed = []

    def show(line: str, flush: bool) -> None:
        assert flush  # at once, also into the pipe of a supervisor
        printed.append(line)

    previous = signal.getsignal(signal.SIGTERM)

    def run(self: uvicorn.Server, sockets: list) -> None:
        configs.append(self.config)
        assert sockets == [listening]
        handler = signal.getsignal(signal.SIGTERM)
        assert handler is not previous
        assert callable(handler)
        assert handler(signal.SIGTERM, None) is None
        loaded.events.append("ran")
        raise KeyboardInterrupt

    bound = []
    monkeypatch.setattr(
        server, "_bound_socket", lambda *address: bound.append(address) or listening
    )
    monkeypatch.setattr(server, "print", show, raising=False)
    monkeypatch.setattr(server, "load_server", lambda options: loaded)
    monkeypatch.setattr(server, "create_app", lambda loaded: loaded)
    monkeypatch.setattr(server._HttpServer, "run", run)
    options = ServeOptions(["x"], host=host, port=5002, limits=Limits(**limits))
    with pytest.raises(KeyboardInterrupt):
        server.run(options)
    assert signal.getsignal(signal.SIGTERM) is previous
    assert bound == [(host, 5002)]
    assert listening.is_closed
    started = ["documents"] if options.limits.translate_files else []
    assert loaded.events == [*started, "ran", "closed"]
    assert printed == [
        f"serving en-de, de-en on {address} (Ctrl-C ends it)",
        "en-de computes in float16 (--dtype changes it)",
        *lines,
    ]
    assert logging.getLogger("python_multipart").level == logging.CRITICAL
    (config,) = configs
    assert config.app is loaded
    assert config.lifespan == "on"
    assert config.ws == "none"
    assert config.log_level == "error"
    assert config.access_log is False
    assert config.server_header is False
    assert config.h11_max_incomplete_event_size == 64 * 1024
    assert config.timeout_graceful_shutdown == (14 if "timeout" in limits else 65)
    assert config.headers == [
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
    ]


def test_documents_end_soon_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded()

    async def shutdown(self: uvicorn.Server, sockets: Any) -> None:
        loaded.events.append(f"shut down {sockets}")

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    http_server = server._HttpServer(uvicorn.Config(None), loaded)  # type: ignore[arg-type]
    asyncio.run(http_server.shutdown(["socket"]))  # type: ignore[list-item]
    assert loaded.events == ["documents end soon", "shut down ['socket']"]


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_socket_is_bound(host: str, family: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        socket, "create_server", lambda *args, **options: asked.append((args, options))
    )
    server._bound_socket(host, 7)
    assert asked == [(((host, 7),), {"family": family, "backlog": 2048})]


@pytest.mark.parametrize(
    ("most", "is_open", "expected"),
    [(10_240, 40, 10_136), (256, 100, 92), (100, 20, 16), (96, 16, 16)],
)
def test_connections_leave_files_to_the_process(
    most: int, is_open: int, expected: int, monkeypatch: Any
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(server, "raise_open_files", lambda wanted: asked.append(wanted) or most)
    monkeypatch.setattr(server, "open_files", lambda: is_open)
    assert server._connection_limit() == expected
    assert asked == [10_240]


class Timer:
    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds = seconds
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The timers that a connection asks for."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Callable, *arguments: object) -> Timer:
        self.timers.append(Timer(seconds, lambda: call(*arguments)))
        return self.timers[-1]


class Transport:
    def __init__(self) -> None:
        self.events: list[str] = []

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return bool(self.events)

    def abort(self) -> None:
        self.events.append("aborted")

    def close(self) -> None:
        self.events.append("closed")

    def write(self, data: bytes) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def connections(most: int) -> Callable[[], Any]:
    """A function that makes connections of one server."""
    protocol = server._protocol(most)
    config = uvicorn.Config(lambda *_: None)
    state = ServerState()
    loop = Loop()

    def connect() -> Any:
        connection = protocol(config, state, {}, _loop=loop)
        connection.connection_made(Transport())
        return connection

    return connect


def test_silent_connections_make_room() -> None:
    connect = connections(2)
    first = connect()
    second = connect()
    assert first.transport.events == second.transport.events == []
    first.cycle = second.cycle = SimpleNamespace(
        response_complete=False
    )  # both have sent a request
    third = connect()
    assert third.transport.events == ["aborted"], "no other is silent"
    assert first.transport.events == second.transport.events == []
    third.connection_lost(ConnectionResetError())
    second.cycle = None
    fourth = connect()
    assert second.transport.events == ["aborted"], "silent for longer than the new one"
    assert first.transport.events == fourth.transport.events == []


def test_new_connection_is_not_ended_for_silent_ones() -> None:
    for _ in range(20):  # a set has no order
        connect = connections(3)
        others = [connect(), connect(), connect()]
        assert connect().transport.events == []
        assert sum((other.transport.events for other in others), []) == ["aborted"]


def test_connection_without_a_head_is_closed() -> None:
    connection = connections(9)()
    (first,) = connection.loop.timers
    assert first.seconds == 10
    assert not first.cancelled
    first.call()
    assert connection.transport.events == ["closed"]
    first.call()
    assert connection.transport.events == ["closed"], "once"
    connection.connection_lost(None)
    assert first.cancelled


def test_connection_that_asks_again_stays_open() -> None:
    connection = connections(9)()
    (first,) = connection.loop.timers
    connection.cycle = SimpleNamespace(response_complete=True, message_event=asyncio.Event())
    first.call()
    assert connection.transport.events == [], "its head has come"
    connection.on_response_complete()
    heads = [timer for timer in connection.loop.timers if timer.seconds == 10]
    assert heads[0] is first
    assert first.cancelled
    assert len(heads) == 2
    assert not heads[1].cancelled
    heads[1].call()
    assert connection.transport.events == ["closed"], "no head has come since the answer"
