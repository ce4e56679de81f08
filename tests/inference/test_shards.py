"""Shards of a translation, on one machine or several, join to the translation of one run."""

import copy
import gzip
import os
import random
import shutil

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.data.readers import read_rows
from hf_vanilla_transformer.inference.file_translation import merge_shards, translate_file
from hf_vanilla_transformer.utils.errors import UserError
from tests.inference.test_file_translation import LINES, SETTINGS, expected, process
from tests.model_helpers import error_of, save_model


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return Translator.from_pretrained(
        save_model(tmp_path_factory.mktemp("model"), LINES, vocab_size=300, tie_word_embeddings=False), device="cpu"
    )


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return tmp_path / "source"


@pytest.mark.parametrize(("shards", "processes"), [(1, 1), (3, 1), (2, 2), (64, 1)])
def test_shards_in_any_order_are_one_translation(translator, source, shards, processes):
    output, order = source.with_name("out.gz"), list(range(1, shards + 1))
    random.Random(shards).shuffle(order)
    assert "output" in error_of(merge_shards, output)
    for shard in order:
        for rank in range(processes):
            translate_file(translator, source, output, process(rank, processes), shard=(shard, shards), **SETTINGS)
    merge_shards(output)
    assert gzip.decompress(output.read_bytes()).decode() == expected(translator)
    assert sorted(path.name for path in source.parent.iterdir()) == ["out.gz", "source"]


def test_killed_shard_is_repeated_or_left_to_the_whole(translator, source, monkeypatch):
    output, original = source.with_name("out"), Translator.translate

    def killed(self, lines, **settings):
        yield next(iter(original(self, lines, **settings)))
        raise KeyboardInterrupt

    translate_file(translator, source, output, process(), shard=(2, 2), **SETTINGS)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Translator, "translate", killed)
        translate_file(translator, source, output, process(), shard=(1, 2), **SETTINGS)
    assert "2 of 4" in error_of(merge_shards, output)
    done = []
    translate_file(translator, source, output, process(), progress=lambda _, s: done.append(s > 0), **SETTINGS)
    assert done == [True, False, True, False], "the finished shard is not translated again"
    assert output.read_text(encoding="utf-8") == expected(translator)


@pytest.mark.slow
def test_many_shards_with_killed_ones_and_one_of_another_model(translator, tmp_path, monkeypatch):
    """64 shards in random order, three killed and repeated, one copied from a run of another model."""
    lines, rng = [f"{i} two hundred and {i}" for i in range(64 * 8 + 3)], random.Random(3)
    settings = SETTINGS | {"max_new_tokens": 2}
    shards, output, elsewhere = list(range(1, 65)), tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    rng.shuffle(shards)
    translate = Translator.translate

    def killed(self, lines, **settings):
        yield next(iter(translate(self, lines, **settings)))
        raise KeyboardInterrupt

    for shard in shards[:3]:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Translator, "translate", killed)
            translate_file(translator, lines, output, process(), shard=(shard, 64), **settings)
    for shard in rng.sample(shards[1:], 63):
        translate_file(translator, lines, output, process(), shard=(shard, 64), **settings)
    other = Translator(copy.deepcopy(translator.model), translator.source_tokenizer)
    other.model.lm_head.weight.data.neg_()
    with pytest.raises(UserError, match="different model"):
        translate_file(other, lines, output, process(), shard=(shards[0], 64), **settings)
    translate_file(other, lines, elsewhere / "out", process(), shard=(shards[0], 64), **settings)
    foreign = [shutil.copy(part, tmp_path / ".out.parts") for part in (elsewhere / ".out.parts").glob("0*")]
    assert "missing" in error_of(merge_shards, output)
    translate_file(translator, lines, output, process(), shard=(shards[0], 64), **settings)
    assert "other text, model or settings" in error_of(merge_shards, output)
    for part in foreign:
        os.remove(part)
    merge_shards(output)
    whole = translator.translate(lines, **settings)
    assert output.read_text(encoding="utf-8") == "".join(line.replace("\n", " ") + "\n" for line in whole)


@pytest.mark.parametrize("change", ["text", "settings", "batch_size"])
@pytest.mark.parametrize("copied", [False, True])
def test_foreign_shard_is_refused(translator, source, tmp_path, change, copied):
    """In the same folder it is refused at once, copied from a different machine it is refused by `merge_shards`."""
    output, foreign = source.with_name("out"), tmp_path / "elsewhere"
    foreign.mkdir()
    translate_file(translator, source, output, process(), shard=(1, 2), **SETTINGS)
    settings = SETTINGS | ({"text": {}, "settings": {"max_new_tokens": 3}, "batch_size": {"batch_size": 2}}[change])
    if change == "text":
        source.write_text("seven\n" * 28, encoding="utf-8")
    if copied:
        translate_file(translator, source, foreign / "out", process(), shard=(2, 2), **settings)
        for part in (foreign / ".out.parts").glob("0*"):
            shutil.copy(part, tmp_path / ".out.parts")
    else:
        with pytest.raises(UserError, match="output"):
            translate_file(translator, source, output, process(), shard=(2, 2), **settings)
    assert "output" in error_of(merge_shards, output)
    assert not output.exists()


def test_shards_by_command(translator, source, tmp_path, capfd):
    from vanilla_transformer_cli.main import main

    translator.model.save_pretrained(tmp_path / "model")
    translator.source_tokenizer.save_pretrained(tmp_path / "model")
    files = ["--input", str(source), "--output", str(tmp_path / "out")]
    command = ["translate", "--model", str(tmp_path / "model"), *files, "--batch_size", "1", "--max_new_tokens", "4"]
    for arguments in (*([*command, "--num_beams", "1", "--shard", f"{i}/2"] for i in (2, 1)), ["merge", *files[2:]]):
        with pytest.raises(SystemExit) as status:
            main(arguments)
        assert not status.value.code, capfd.readouterr().err
    assert (tmp_path / "out").read_text(encoding="utf-8") == expected(translator)
    for wrong in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2"):
        with pytest.raises(SystemExit) as status:
            main([*command, f"--shard={wrong}"])
        assert status.value.code == 2 and wrong in capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_tables_have_a_row_for_each_line(translator, source, suffix):
    output = source.with_name(f"out.{suffix}")
    for shard in (2, 1):
        translate_file(translator, source, output, process(), shard=(shard, 2), **SETTINGS)
    merge_shards(output)
    rows = [(row["line"], row["source"], row["translation"]) for _, row in read_rows(output, {})]
    assert rows == list(zip(range(1, len(LINES) + 1), LINES, expected(translator).split("\n"), strict=False))
    with pytest.raises(UserError, match="alignment"):
        translate_file(translator, source, output, process(), alignment=True, **SETTINGS)
