"""Uploads of documents: their limits, and the end of their processes."""

import asyncio
import dataclasses
import io
import json
import multiprocessing
import signal
import time
import zipfile
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from fastapi import HTTPException

from hf_vanilla_transformer.inference.placement import TranslatedPart
from hf_vanilla_transformer.serving import Limits, document_process, interface
from hf_vanilla_transformer.serving.document_process import DocumentProcesses, ServerEnds, Upload
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, slow
from tests.serving_helpers import client_of, echo_translator, language_pair

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
HTML = b"<p>one <b>two</b></p>"
#: It takes a minute to read.
ENDLESS = b"<b>" * 3_000_000


async def upper(texts: Sequence[str]) -> list[list[TranslatedPart]]:
    return [[TranslatedPart(text, text.upper())] for text in texts]


async def never(texts: Sequence[str]) -> list[list[TranslatedPart]]:
    await asyncio.sleep(600)
    return []


def upload(content: bytes, suffix: str = ".html", **limits: Any) -> Upload:
    limits = {"max_characters": 1000, "seconds": 60.0} | limits
    return Upload(content, suffix, "en", "de", **limits)


def docx(content: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", content)
    return data.getvalue()


def docx_of(content: bytes) -> bytes:
    return docx(
        f'<w:document xmlns:w="{WORD}"><w:body>'.encode() + content + b"</w:body></w:document>"
    )


async def assert_no_process() -> None:
    """A process whose work was given up while it started ends when it finds the pipe closed."""
    end = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert multiprocessing.active_children() == []


def translated(document: Upload, translate: Any = upper) -> bytes:
    return asyncio.run(DocumentProcesses().translate(document, translate))


@pytest.mark.parametrize("methods", [["fork", "spawn", "forkserver"], *slow(["spawn"])])
def test_texts_are_translated_in_the_server(
    methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    assert translated(upload(HTML)) == b"<p>ONE <b>TWO</b></p>"
    assert multiprocessing.active_children() == []


def test_errors_of_documents_and_of_the_server_arrive() -> None:
    async def failing(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        raise HTTPException(418)

    assert "no document of a word processor" in error_of(
        lambda: translated(upload(b"no archive", ".docx"))
    )
    with pytest.raises(UserError, match=r"request \(12\) exceeds text limit \(10\)"):
        translated(upload(b"<p>twelve lette</p>", max_characters=10))
    with pytest.raises(HTTPException, match="418"):
        translated(upload(HTML), failing)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".docx", docx_of(b"<w:p/>" * 1_000_000)), (".html", b"<p>1</p>" * 300_000)],
)
@pytest.mark.slow
def test_memory_of_a_document_is_limited(suffix: str, content: bytes) -> None:
    assert "too much memory" in error_of(
        lambda: translated(upload(content, suffix, memory=40_000_000))
    )


@pytest.mark.slow
def test_computing_of_a_document_is_limited() -> None:
    assert "too much memory or time" in error_of(lambda: translated(upload(ENDLESS, seconds=0.5)))


class Server:
    """The server's end of a pipe, which answers texts with capitals."""

    def __init__(self, document: Upload, is_there: bool = True) -> None:
        self.answers: list[Any] = [document]
        self.is_there = is_there
        self.sent: list[bytes] = []

    def recv(self) -> Any:
        return self.answers.pop()

    def send_bytes(self, content: bytes) -> None:
        if not self.is_there:
            raise BrokenPipeError
        self.sent.append(content)
        if content.startswith(b'{"texts"'):
            texts = json.loads(content)["texts"]
            self.answers.append([[TranslatedPart(text, text.upper())] for text in texts])


def test_process_limits_itself_and_answers_in_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited = []
    ignored = []
    monkeypatch.setattr(
        document_process,
        "limit_process",
        lambda *limits: limited.append(limits),
    )
    monkeypatch.setattr(signal, "signal", lambda *handler: ignored.append(handler))

    def sent(document: Upload, is_there: bool = True) -> list[bytes]:
        server = Server(document, is_there)
        document_process._read_document(server)  # type: ignore[arg-type]
        return server.sent

    texts = b'{"texts": ["one two"]}'
    assert sent(upload(HTML, max_characters=7)) == [
        texts,
        b"{}",
        b"<p>ONE <b>TWO</b></p>",
    ]
    assert limited == [(60.0, 350_000_000, 10)]
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]
    too_long = b'{"error": "file: request (7) exceeds text limit (6)"}'
    assert sent(upload(HTML, max_characters=6)) == [too_long]
    assert sent(upload(HTML), is_there=False) == []

    unpacked = []

    def without_memory(*arguments: Any, max_unpacked: int) -> bytes:
        unpacked.append(max_unpacked)
        raise MemoryError

    monkeypatch.setattr(document_process, "translate_document", without_memory)
    assert sent(upload(HTML)) == [b'{"error": "file: reading this document takes too much memory"}']
    assert unpacked == [30_000_000]


def test_documents_are_read_one_at_a_time() -> None:
    running = []

    async def slow_upper(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        processes = multiprocessing.active_children()
        running.append((len(processes), all(process.daemon for process in processes)))
        await asyncio.sleep(0.05)
        return await upper(texts)

    async def run() -> list[bytes]:
        processes = DocumentProcesses()
        return await asyncio.gather(
            *(processes.translate(upload(HTML), slow_upper) for _ in range(2))
        )

    assert asyncio.run(run()) == [b"<p>ONE <b>TWO</b></p>"] * 2
    assert running == [(1, True)] * 2


def test_documents_have_two_seconds_after_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        asked = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda *arguments: asked.append(arguments))
        processes = DocumentProcesses()
        processes.end_soon()
        assert asked == [(2.0, processes._end)]

    asyncio.run(run())
    with pytest.raises(dataclasses.FrozenInstanceError):
        upload(HTML).seconds = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("content", "translate"), [(ENDLESS, upper), (HTML, never)])
@pytest.mark.slow
def test_work_ends_with_its_request(content: bytes, translate: Any) -> None:
    async def run() -> bytes:
        processes = DocumentProcesses()
        for _ in range(3):  # more than have a place at a time
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(processes.translate(upload(content), translate), 0.3)
            await assert_no_process()
        return await processes.translate(upload(HTML), upper)

    assert b"TWO" in asyncio.run(run())


@pytest.mark.parametrize(("content", "translate"), [(ENDLESS, upper), (HTML, never)])
def test_work_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, content: bytes, translate: Any
) -> None:
    monkeypatch.setattr(document_process, "_SECONDS_TO_END", 0.3)

    async def run() -> None:
        processes = DocumentProcesses()
        work = [
            asyncio.ensure_future(processes.translate(upload(content), translate)) for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        start = time.perf_counter()
        processes.end_soon()
        answers = await asyncio.gather(*work, return_exceptions=True)
        answers += await asyncio.gather(
            processes.translate(upload(HTML), upper), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [ServerEnds] * 4
        assert multiprocessing.active_children() == []
        assert time.perf_counter() - start < 5

    asyncio.run(run())


@pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="needs a forkserver"
)
def test_server_starts_after_the_imports_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take seconds of a processor, and a server that ended meanwhile would wait for them."""
    (tmp_path / "imported_slowly.py").write_text(
        "import time\ntime.sleep(0.5)\nopen(__file__ + 'done', 'w')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(document_process, "__name__", "imported_slowly")
    own = forkserver.ForkServer()  # that of other tests has imported what it needs
    for name in ("set_forkserver_preload", "connect_to_new_process"):
        monkeypatch.setattr(forkserver, name, getattr(own, name))
    DocumentProcesses().start()
    assert (tmp_path / "imported_slowly.pydone").exists()
    own._stop()


def test_unpacked_uploads_are_limited() -> None:
    files = {"file": ("a.docx", docx(b" " * 30_000_001))}
    fields = {"source": "en", "target": "de"}
    with client_of(language_pair(), translate_files=True) as client:
        answer = client.post("/translate_file", data=fields, files=files)
        assert answer.status_code == 400
        assert "at most 30000000" in answer.json()["error"]
        content = docx_of(b"<w:p><w:r><w:t>seven</w:t></w:r></w:p>")
        answer = client.post("/translate_file", data=fields, files={"file": ("a.docx", content)})
        assert answer.status_code == 200
        assert answer.json().keys() == {"translatedFileUrl"}


def test_sentences_of_documents_that_are_cut_are_reported() -> None:
    files = {"file": ("a.html", b"<p>" + b"a b " * 100 + b"</p>")}
    with client_of(
        language_pair(echo_translator(trained_source_length=16)),
        translate_files=True,
    ) as client:
        answer = client.post(
            "/translate_file",
            data={"source": "en", "target": "de"},
            files=files,
        )
        assert "longer than any in training" in answer.json()["warnings"][0]


def test_only_forms_may_be_as_large_as_a_file() -> None:
    with client_of(language_pair(), translate_files=True) as client:
        answer = client.post(
            "/translate_file",
            json={"source": "en", "target": "de", "file": [1] * 100_000},
        )
        assert answer.status_code == 413


def test_failed_process_is_500_without_details(
    capfd: pytest.CaptureFixture,
) -> None:
    async def wrong(texts: Sequence[str]) -> Any:
        return ["secret"]

    with client_of(language_pair(), translate_files=True) as client:
        client.server.documents.translate = lambda document, _: DocumentProcesses().translate(
            document, wrong
        )
        files = {"file": ("a.html", HTML)}
        answer = client.post(
            "/translate_file",
            data={"source": "en", "target": "de"},
            files=files,
        )
        assert answer.status_code == 500
        assert "secret" not in answer.text


def test_kept_documents_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_KEPT_BYTES", 10)
    server = interface.Server([], Limits())
    keys = [server._keep(name, bytes(4)) for name in "abc"]
    assert list(server.files) == keys[1:]
    large = server._keep("d", bytes(100))
    assert list(server.files) == [large]
    many = [server._keep(str(number), b"") for number in range(40)]
    assert list(server.files) == many[-32:]
