"""Lines in and out, byte for byte."""

import gzip
import io
import os
import sys
import threading

import pytest

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.inference.text_io import line_writer, read_lines

# U+2028, U+0085, form feed and a lone carriage return end lines for Python's str.splitlines, not for `wc -l`
TEXT = "eins\n\nzwei\u2028drei\x85vier\x0cfünf\rsechs\r\n日本 🙂"
LINES = ["eins", "", "zwei\u2028drei\x85vier\x0cfünf\rsechs", "日本 🙂"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_end_with_line_feeds_only(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT.encode()) if name.endswith(".gz") else TEXT.encode())
    assert list(read_lines(path)) == LINES


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfeins\nzwei\n")
    assert list(read_lines(tmp_path / "a")) == ["eins", "zwei"]


def test_latin_1_is_refused_with_its_line(tmp_path, monkeypatch):
    text = "gut\nfür\n".encode("latin-1")
    (tmp_path / "a").write_bytes(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    for path in (tmp_path / "a", "-"):
        with pytest.raises(UserError, match=r"line 2, byte 2 \(0xfc\).*UTF-8.*iconv"):
            list(read_lines(path))


def test_standard_input_is_read_as_it_arrives(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb", buffering=0) as other_end:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        lines = read_lines()
        for line in LINES:
            other_end.write(line.encode() + b"\n")
            assert next(lines) == line


def test_named_pipe_is_read_from_its_first_byte(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(TEXT.encode(),))
    writer.start()
    assert list(read_lines(tmp_path / "pipe")) == LINES
    writer.join()


def test_damaged_gzip_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text\n" * 1000)[:-12])
    with pytest.raises(UserError, match="gzip"):
        list(read_lines(tmp_path / "a.gz"))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_written_lines_are_read_back(tmp_path, name):
    with line_writer(tmp_path / name) as write:
        for line in LINES:
            write(line)
    assert list(read_lines(tmp_path / name)) == LINES
    assert os.listdir(tmp_path) == [name]


def test_interrupted_writer_keeps_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old\n")
    with pytest.raises(KeyboardInterrupt), line_writer(tmp_path / "a") as write:
        write("new")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old\n"
    assert os.listdir(tmp_path) == ["a"]


def test_file_may_be_read_while_it_is_rewritten(tmp_path):
    (tmp_path / "a").write_text("b\nc\n")
    (tmp_path / "link").symlink_to("a")
    with line_writer(tmp_path / "link") as write:
        for line in read_lines(tmp_path / "a"):
            write(line.upper())
    assert (tmp_path / "a").read_text() == "B\nC\n" and (tmp_path / "link").is_symlink()


def test_device_is_written_to_and_not_replaced():
    with line_writer("/dev/null") as write:
        write("gone")
    assert not os.path.isfile("/dev/null")


def test_folder_is_refused_as_output(tmp_path):
    with pytest.raises(UserError, match="is a folder"), line_writer(tmp_path):
        pass


def test_standard_output_gets_lines_but_no_prints(monkeypatch):
    output, errors = io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    with line_writer() as write:
        print("advice")
        write("日本")
    assert output.buffer.getvalue() == "日本\n".encode()
    assert errors.getvalue() == "advice\n" and sys.stdout is output
