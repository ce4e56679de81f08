"""Chunks of a file of plain text by its bytes: what reads one of them reads nothing of the others."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO

from ..corpora.readers import decode_line, require_line_feeds, require_plain_text
from ..utils.errors import UserError

MOST_CHUNKS = 10_000  # of a file
_BYTES_OF_LINE = 128  # on average, for the size of a chunk
_BLOCK = 1 << 20  # bytes that are searched at once
_END = 4096  # bytes of each end of a file, by which another file is recognised


@dataclass(frozen=True)
class TextChunks:
    """A file of plain text, cut every `size` bytes. A chunk has the lines that start in its bytes.

    Args:
        path: of the file, which is not compressed.
        total: bytes of the file.
        size: bytes of a chunk.
    """

    path: Path
    total: int
    size: int

    @classmethod
    def of(cls, path: Path, lines: int) -> "TextChunks":
        """Chunks of some `lines` lines, or of more, so that they are at most `MOST_CHUNKS`."""
        require_plain_text(path)
        total = path.stat().st_size
        return cls(path, total, max(lines * _BYTES_OF_LINE, -(-total // MOST_CHUNKS)))

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def read(self, number: int) -> bytes:
        """The lines of a chunk. Where a line is longer than a chunk, there are none."""
        end = min((number + 1) * self.size, self.total)
        with self.path.open("rb") as file:
            text = file.read(max(end - self._start(file, number), 0))
            if text and not text.endswith(b"\n"):
                text += file.readline()
        return text

    def decode(self, number: int, text: bytes) -> list[str]:
        """The lines of a chunk without their ends.

        Raises:
            UserError: a line is not UTF-8, with its number in the file.
        """
        lines = text.removesuffix(b"\n").split(b"\n") if text else []
        first = 1 if number == 0 else 2  # only the first line of a file may have a byte order mark
        try:
            decoded = [decode_line(line, self.path, first + at) for at, line in enumerate(lines)]
        except UserError:
            first = 1 + self.lines_before(number)
            return [decode_line(line, self.path, first + at) for at, line in enumerate(lines)]
        if len(decoded) == 1 and len(text) == self.total:
            require_line_feeds(decoded[0], self.path)
        return decoded

    def lines_before(self, number: int) -> int:
        """The number of lines before a chunk. All of the file before it is read."""
        with self.path.open("rb") as file:
            left = self._start(file, number)
            file.seek(0)
            feeds = 0
            while left > 0 and (block := file.read(min(left, _BLOCK))):
                feeds += block.count(b"\n")
                left -= len(block)
        return feeds

    def ends(self) -> str:
        """A digest of the first and the last bytes of the file."""
        with self.path.open("rb") as file:
            digest = blake2b(file.read(_END), digest_size=8)
            file.seek(max(self.total - _END, 0))
            digest.update(file.read(_END))
        return digest.hexdigest()

    def _start(self, file: IO[bytes], number: int) -> int:
        """Move to where the first line of a chunk starts, and return this position."""
        if number:
            file.seek(number * self.size - 1)
            file.readline()  # the end of a line that starts in a chunk before
        return file.tell()
