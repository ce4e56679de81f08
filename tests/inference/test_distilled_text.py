"""Sequence-level distillation: the teacher's translations become training text."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference import distilled_text
from hf_vanilla_transformer.inference.distilled_text import SOURCE, TARGET, TRANSLATIONS, distil
from hf_vanilla_transformer.text import train_tokenizer
from tests.model_helpers import error_of, tiny_marian, tiny_model, word_tokenizer

LINES = ["one two three", "", "two two", "three one one two"]


@pytest.fixture
def teacher() -> Translator:
    tokenizer = train_tokenizer(["one two three"] * 3, 290)
    return Translator(tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.txt"
    file.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return file


def on_one_line(text: str) -> str:
    has_several = "\n" in text or "\r" in text
    return " ".join(text.split()) if has_several else text


def pairs(folder: Path) -> list[tuple[str, str]]:
    sides = []
    for name in (SOURCE, TARGET):
        *lines, _ = (folder / name).read_bytes().decode("utf-8").split("\n")
        sides.append(lines)
    return list(zip(*sides, strict=True))


def complete(translations: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs with `LINES` without those of which a side is blank."""
    return [pair for pair in zip(LINES, translations, strict=True) if all(map(str.strip, pair))]


def test_distilled_text_pairs_each_line_with_its_translation(teacher, source, tmp_path):
    output = tmp_path / "a" / "new" / "folder"
    count = distil(teacher, source, output, num_beams=2)
    found = pairs(output)
    assert found == complete(teacher.translate(LINES, num_beams=2))
    assert count == len(found) > 0


def test_distilled_text_of_a_finished_translation_is_not_translated_again(
    teacher, source, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    distil(teacher, source, output, num_beams=1)
    before = pairs(output)
    (output / SOURCE).unlink()
    monkeypatch.setattr(distilled_text, "translate_file", None)
    distil(teacher, source, output, num_beams=1)
    assert pairs(output) == before
    assert "output_dir" in error_of(distil, teacher, source, output, num_beams=2)
    assert "is a file" in error_of(distil, teacher, source, source)


def test_distilled_text_of_back_translation_has_the_translations_as_source(
    teacher, source, tmp_path
):
    for name, back_translation in (("there", False), ("back", True)):
        distil(
            teacher,
            source,
            tmp_path / name,
            back_translation=back_translation,
            num_beams=1,
        )
    there = pairs(tmp_path / "there")
    assert there
    assert pairs(tmp_path / "back") == [(target, line) for line, target in there]


def test_distilled_text_of_sampling_has_its_translations(teacher, source, tmp_path):
    torch.manual_seed(1)
    distil(teacher, source, tmp_path / "out", temperature=1.5)
    torch.manual_seed(1)
    sampling = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 0,
        "num_beams": 1,
    }
    texts = list(map(on_one_line, teacher.translate(LINES, **sampling)))
    assert pairs(tmp_path / "out") == complete(texts)
    assert texts != list(teacher.translate(LINES, num_beams=1))
    assert "temperature" in error_of(distil, teacher, source, tmp_path / "other", temperature=-1)


def test_distilled_text_takes_a_foreign_teacher(source: Path, tmp_path: Path) -> None:
    tokenizer: Any = train_tokenizer(["one two three"] * 3, 290)
    model = tiny_marian(len(tokenizer))
    model.generation_config.update(num_beams=2, bad_words_ids=[[1]])
    assert distil(Translator(model, tokenizer), source, tmp_path / "out") <= 3
    written = (tmp_path / "out" / TRANSLATIONS).read_text(encoding="utf-8")
    assert written.count("\n") == len(LINES)


def test_language_model_without_an_encoder_is_refused_in_one_line(source, tmp_path, command):
    config = GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    word_tokenizer(["<unk>", "one", "two", "three"]).save_pretrained(tmp_path / "model")
    flags = [
        "--teacher",
        tmp_path / "model",
        "--source_file",
        source,
        "--output_dir",
        tmp_path / "out",
    ]
    status, _, errors = command("distil", *flags)
    assert status == 2
    assert str(tmp_path / "model") in errors
    assert errors.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()
