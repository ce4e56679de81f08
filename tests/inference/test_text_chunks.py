"""Chunks of a file by its bytes have all of its lines once, and are read without the rest of the file."""

import random
from pathlib import Path

import pytest

from hf_vanilla_transformer.inference.text_chunks import MOST_CHUNKS, TextChunks
from hf_vanilla_transformer.inference.text_io import input_lines
from hf_vanilla_transformer.utils.errors import UserError


def lines_of(text: TextChunks, chunks: int | None = None) -> list[str]:
    """Of all chunks, or of the first ones."""
    lines: list[str] = []
    for number in range(len(text) if chunks is None else chunks):
        lines += text.decode(number, text.read(number))
    return lines


def test_chunks_have_the_lines_of_the_file(tmp_path: Path) -> None:
    dice = random.Random(1)
    path = tmp_path / "text"
    for _ in range(300):
        pieces = ["a", "é", "語", "\r", "\n", "\n\n", "\ufeff", "\u2028", "long " * 9]
        lines = "".join(dice.choices(pieces, k=dice.randrange(40)))
        path.write_bytes(
            f"{lines}\nend".encode()
        )  # several carriage returns in a single line are refused
        size = dice.randrange(1, 60)
        text = TextChunks(path, path.stat().st_size, size)
        assert lines_of(text) == list(input_lines(path))
        for number in range(len(text)):
            if text.read(number):
                assert text.lines_before(number) == len(lines_of(text, number))


def test_chunk_reads_little_else(tmp_path: Path) -> None:
    io = Path("/proc/self/io")
    if not io.is_file():
        pytest.skip("only Linux counts the bytes that a process reads")
    path = tmp_path / "text"
    path.write_text("".join(f"{number} words of a line\n" for number in range(200_000)))
    text = TextChunks.of(path, lines=512)

    def read() -> int:
        return int(io.read_text().split()[1])

    overhead = -read() + read()
    before = read()
    text.ends()
    own = len(text.read(len(text) // 2))
    assert read() - before - overhead <= 2 * own


def test_chunks_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with path.open("wb") as file:
        file.truncate(40_000_000_000)  # of no blocks
    assert MOST_CHUNKS - 1 <= len(TextChunks.of(path, lines=512)) <= MOST_CHUNKS


def test_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one\n" * 100 + b"\xe9\n")
    text = TextChunks(path, path.stat().st_size, size=40)
    with pytest.raises(UserError, match=r"line 101, byte 1 \(0xe9\) is not UTF-8"):
        lines_of(text)
