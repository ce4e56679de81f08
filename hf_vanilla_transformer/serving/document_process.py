"""Read and write uploaded documents in processes that can be ended.

A document of some kilobytes can need minutes and gigabytes, and a thread cannot be stopped. A process is ended when
the time of its request is up, and it may take only so much memory. The sentences are translated in the server.
"""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ..documents.document_files import translate_document
from ..inference.placement import TranslatedPart
from ..utils.errors import UserError
from ..utils.system_calls import limit_process, process_context

_AT_ONCE = 1  # documents: each takes the memory of its own process
_MOST_MEMORY = 350_000_000  # bytes that a document may take in its process
_MOST_UNPACKED = 30_000_000  # bytes of an uploaded archive when it is unpacked
_MOST_ANSWER = 64_000_000  # bytes of a translated document
_NICENESS = 10  # so that the answers to other requests come first
_SECONDS_TO_END = 2.0  # that documents have when the server ends
_FAILED = 1  # exit status of a process after an error of its own, which it has printed

_NO_MEMORY: dict[str, object] = {"error": "file: reading this document takes too much memory"}

#: Translates the texts of a document in the server.
TranslateInServer = Callable[[Sequence[str]], Awaitable[list[list[TranslatedPart]]]]


class ServerEnds(Exception):
    """A document was given up because the server ends."""


@dataclass(frozen=True)
class Upload:
    """A document and the limits of the process that reads it."""

    content: bytes
    suffix: str  #: of its name
    source: str  #: language
    target: str  #: language
    max_characters: int
    seconds: float  #: of computing
    memory: int = _MOST_MEMORY  #: bytes


class DocumentProcesses:
    """Translates uploaded documents, some at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._context = process_context(preload=__name__)
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._has_ended = False

    def start(self) -> None:
        """Start the process that the others are copies of, and wait until it has imported all that they need.

        The imports take seconds of a processor, which the first requests need.
        """
        process = self._context.Process(target=int)
        process.start()
        process.join()

    def end_soon(self) -> None:
        """Give the documents some seconds, then end their processes."""
        asyncio.get_running_loop().call_later(_SECONDS_TO_END, self._end)

    def _end(self) -> None:
        self._has_ended = True
        for task in self._tasks:
            task.cancel()

    async def translate(self, upload: Upload, translate: TranslateInServer) -> bytes:
        """Translate a document. Its process ends with this coroutine, also if that is cancelled.

        Raises:
            UserError: the document is in no known format, or needs too much memory or time.
            ServerEnds: the server ends.
        """
        task = asyncio.ensure_future(self._translate(upload, translate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._has_ended:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._has_ended:
                raise ServerEnds from None
            raise

    async def _translate(self, upload: Upload, translate: TranslateInServer) -> bytes:
        async with self._free:
            return await self._in_process(upload, translate)

    async def _in_process(self, upload: Upload, translate: TranslateInServer) -> bytes:
        own, other = self._context.Pipe()
        process = self._context.Process(target=_read_document, args=(other,), daemon=True)
        try:
            await asyncio.to_thread(process.start)
            other.close()
            await asyncio.to_thread(own.send, upload)
            while True:
                message = json.loads(await asyncio.to_thread(own.recv_bytes, _MOST_ANSWER))
                if "error" in message:
                    raise UserError(message["error"])
                if "texts" not in message:
                    return await asyncio.to_thread(own.recv_bytes, _MOST_ANSWER)
                translations = await translate(message["texts"])
                await asyncio.to_thread(own.send, translations)
        except (EOFError, OSError):
            await asyncio.to_thread(process.join, _SECONDS_TO_END)
            if process.exitcode == _FAILED:
                raise RuntimeError("the process of a document has failed") from None
            raise UserError("file: reading this document takes too much memory or time") from None
        finally:
            # a process that is starting ends when it finds the pipe closed
            try:
                if process.pid is not None:
                    process.kill()
                    await asyncio.to_thread(process.join)
            finally:
                own.close()


def _read_document(connection: Connection) -> None:
    """Read a document, ask the server for the translation of its texts, and send the translated document."""
    # Ctrl-C in a terminal reaches all processes. The server decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the server has ended the work
        upload: Upload = connection.recv()
        limit_process(upload.seconds, upload.memory, _NICENESS)
        content = b""
        answer = _NO_MEMORY
        try:
            content = _translated(upload, connection)
            answer = {}
        except MemoryError:
            pass  # its frames hold the memory that an answer needs, until this block ends
        except UserError as error:
            answer = {"error": str(error)}
        _send(connection, answer)
        if not answer:
            connection.send_bytes(content)


def _translated(upload: Upload, connection: Connection) -> bytes:
    def translate(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        count = sum(map(len, texts))
        if count > upload.max_characters:
            raise UserError(f"file: request ({count}) exceeds text limit ({upload.max_characters})")
        _send(connection, {"texts": list(texts)})
        return connection.recv()

    return translate_document(
        upload.content,
        upload.suffix,
        translate,
        upload.source,
        upload.target,
        max_unpacked=_MOST_UNPACKED,
    )


def _send(connection: Connection, message: dict[str, object]) -> None:
    """Send a message as JSON: a process that reads documents of strangers sends no pickles."""
    connection.send_bytes(json.dumps(message).encode())
