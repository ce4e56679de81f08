"""Lines in and out, byte for byte."""

import bz2
import gzip
import io
import lzma
import os
import struct
import sys
import threading
from pathlib import Path

import pytest

from hf_vanilla_transformer.inference.text_chunks import TextChunks
from hf_vanilla_transformer.inference.text_io import input_lines, line_writer
from hf_vanilla_transformer.utils.untrusted import require_file
from tests.model_helpers import error_of

# U+2028, U+0085, form feed and a lone carriage return end lines for Python's str.splitlines, not for `wc -l`
TEXT = "eins\n\nzwei\u2028drei\x85vier\x0cfünf\rsechs\r\n日本 🙂"


def read(*path):
    return list(input_lines(*path))


LINES = ["eins", "", "zwei\u2028drei\x85vier\x0cfünf\rsechs", "日本 🙂"]


@pytest.mark.parametrize(("name", "compress"), [("a.txt", bytes), ("a.txt.gz", gzip.compress)])
def test_lines_end_with_line_feeds_only(tmp_path, name, compress):
    path = tmp_path / name
    path.write_bytes(compress(TEXT.encode()))
    assert read(path) == LINES


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfeins\nzwei\n")
    assert read(tmp_path / "a") == ["eins", "zwei"]


def test_standard_input_is_read_as_it_arrives(monkeypatch):
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as pipe,
        os.fdopen(writing, "wb", buffering=0) as other_end,
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        lines = input_lines()
        for line in LINES:
            other_end.write(line.encode() + b"\n")
            assert next(lines) == line


def test_named_pipe_is_read_from_its_first_byte(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[TEXT.encode()])
    writer.start()
    assert read(pipe) == LINES
    writer.join()


def test_device_where_a_file_is_needed_is_not_called_missing():
    assert error_of(require_file, Path(os.devnull)).startswith(
        f"{os.devnull}: a pipe or a device: "
    )


def test_damaged_gzip_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text\n" * 1000)[:-12])
    assert "gzip" in error_of(read, tmp_path / "a.gz")


def test_file_may_be_read_while_it_is_rewritten(tmp_path):
    (tmp_path / "a").write_text("b\nc\n")
    (tmp_path / "link").symlink_to("a")
    with line_writer(tmp_path / "link") as write:
        for line in input_lines(tmp_path / "a"):
            write(line.upper())
    assert (tmp_path / "a").read_text() == "B\nC\n"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_text_is_named_where_it_cannot_be_read(compress, tmp_path, monkeypatch):
    content = compress(b"one\ntwo\n" * 100)
    (tmp_path / "a.txt").write_bytes(content)
    program = {
        gzip.compress: "gzip -d",
        bz2.compress: "bzip2 -d",
        lzma.compress: "xz -d",
    }[compress]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert error_of(read) == f"standard input is compressed: decompress it with {program}"
    if compress is not gzip.compress:  # which is decompressed
        assert error_of(read, tmp_path / "a.txt").endswith(program)


def test_carriage_returns_in_the_place_of_line_ends_are_refused_by_every_reader(
    tmp_path, monkeypatch
):
    content = b"one\rtwo\rthree\r"
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    for call in ((read, file), (read,), (read_chunk, file)):
        assert "is one line with 2 carriage returns" in error_of(*call)
    for text in (b"one\rtwo\n", b"one\rtwo\rthree\nfour\n"):  # a lone one is a part of its line
        file.write_bytes(text)
        expected = text.decode().removesuffix("\n").split("\n")
        assert read(file) == read_chunk(file) == expected


def read_chunk(path):
    chunks = TextChunks.of(path, 1)
    return chunks.decode(0, chunks.read(0))


@pytest.mark.parametrize("name", ["a.gz", "A.GZ"])
def test_output_is_compressed_by_its_suffix_in_any_case(name, tmp_path):
    with line_writer(tmp_path / name) as write:
        write("one")
    assert gzip.decompress((tmp_path / name).read_bytes()) == b"one\n"
    flags, time = struct.unpack_from(
        "<xxxBI", (tmp_path / name).read_bytes()
    )  # RFC 1952, section 2.3
    assert flags == time == 0, "no name of a temporary file"
