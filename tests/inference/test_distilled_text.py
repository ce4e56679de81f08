"""Sequence-level distillation: the teacher's translations become training text, with references and n-best lists."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.inference import distilled_text
from hf_vanilla_transformer.inference.distilled_text import SOURCE, TARGET, TRANSLATIONS, distil
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, tiny_marian, tiny_model, word_tokenizer

ALONE = SimpleNamespace(process_index=0, num_processes=1, wait_for_everyone=lambda: None)
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
    return " ".join(text.split()) if {"\n", "\r"} & set(text) else text


def pairs(folder: Path) -> list[tuple[str, str]]:
    sides = ((folder / name).read_bytes().decode("utf-8").split("\n")[:-1] for name in (SOURCE, TARGET))
    return list(zip(*sides, strict=True))


def test_distilled_text_pairs_each_line_with_its_translation(teacher, source, tmp_path):
    count = distil(teacher, source, tmp_path / "out", ALONE, num_beams=2)
    expected = [(line, text) for line, text in zip(LINES, teacher.translate(LINES, num_beams=2), strict=True) if line]
    assert pairs(tmp_path / "out") == [pair for pair in expected if pair[1].strip()]
    assert count == len(pairs(tmp_path / "out")) > 0


def test_distilled_text_has_n_best_lists_and_references(teacher: Translator, source: Path, tmp_path: Path) -> None:
    references = tmp_path / "references.txt"
    references.write_text("eins zwei drei\n\nzwei zwei\ndrei eins eins zwei\n", encoding="utf-8")
    distil(teacher, source, tmp_path / "out", ALONE, n_best=3, num_beams=3, references=references)
    found = pairs(tmp_path / "out")
    human = [
        ("one two three", "eins zwei drei"),
        ("two two", "zwei zwei"),
        ("three one one two", "drei eins eins zwei"),
    ]
    assert found[-3:] == human
    lists = list(teacher.translate_nbest(LINES, 3, num_beams=3))
    expected = [(line, each.text) for line, best in zip(LINES, lists, strict=True) for each in best if line]
    assert found[:-3] == [(line, text.replace("\n", " ")) for line, text in expected if text.strip()]


def test_distilled_text_of_an_n_best_list_keeps_bars_in_a_translation(teacher, source, tmp_path):
    settings = {"n_best": 2, "num_beams": 2}
    distil(teacher, source, tmp_path / "out", ALONE, **settings)
    (tmp_path / "out" / TRANSLATIONS).write_text("0 ||| a ||| b ||| -1.5\n2 ||| c ||| \n")
    distil(teacher, source, tmp_path / "out", ALONE, **settings)
    assert pairs(tmp_path / "out") == [(LINES[0], "a ||| b"), (LINES[2], "c")]


def test_distilled_text_of_a_finished_translation_is_not_translated_again(teacher, source, tmp_path, monkeypatch):
    distil(teacher, source, tmp_path / "out", ALONE, num_beams=1)
    before = pairs(tmp_path / "out")
    (tmp_path / "out" / SOURCE).unlink()
    monkeypatch.setattr(distilled_text, "translate_file", None)
    distil(teacher, source, tmp_path / "out", ALONE, num_beams=1)
    assert pairs(tmp_path / "out") == before
    assert "output_dir" in error_of(distil, teacher, source, tmp_path / "out", ALONE, num_beams=2)


def test_distilled_text_of_back_translation_has_the_translations_as_source(teacher, source, tmp_path):
    for name, back_translation in (("there", False), ("back", True)):
        distil(teacher, source, tmp_path / name, ALONE, back_translation=back_translation, num_beams=1)
    assert pairs(tmp_path / "back") == [(target, line) for line, target in pairs(tmp_path / "there")] != []


def test_distilled_text_of_mbr_is_the_translation_nearest_to_the_others(teacher, source, tmp_path):
    distil(teacher, source, tmp_path / "out", ALONE, n_best=4, num_beams=4, mbr=True)
    expected = []
    for line, best in zip(LINES, teacher.translate_nbest(LINES, 4, num_beams=4), strict=True):
        texts = [each.text.replace("\n", " ") for each in best]
        gains = [sum(sacrebleu.sentence_chrf(text, [other]).score for other in texts) for text in texts]
        expected += [(line, texts[gains.index(max(gains))])] if line else []
    assert pairs(tmp_path / "out") == [pair for pair in expected if pair[1].strip()] != []
    assert "n_best" in error_of(distil, teacher, source, tmp_path / "other", ALONE, mbr=True)


def test_distilled_text_of_sampling_has_several_translations(teacher, source, tmp_path):
    torch.manual_seed(1)
    distil(teacher, source, tmp_path / "out", ALONE, n_best=3, temperature=1.5)
    torch.manual_seed(1)
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 0, "num_beams": 1}
    lists = list(teacher.translate_nbest(LINES, 3, scores=False, **sampling))
    samples = [(line, on_one_line(one.text)) for line, best in zip(LINES, lists, strict=True) for one in best]
    assert pairs(tmp_path / "out") == list(dict.fromkeys(pair for pair in samples if all(map(str.strip, pair)))) != []
    assert len({text for _, text in samples}) > len(LINES)
    assert "temperature" in error_of(distil, teacher, source, tmp_path / "other", ALONE, temperature=-1)


def test_distilled_text_of_tagged_back_translation_starts_with_the_tag(teacher, source, tmp_path):
    for name, tag in (("plain", ""), ("tagged", "<BT>")):
        distil(teacher, source, tmp_path / name, ALONE, back_translation=True, tag=tag, num_beams=1)
    plain = [(text, line) for text, line in pairs(tmp_path / "plain") if text.strip()]
    assert pairs(tmp_path / "tagged")[: len(plain)] == [(f"<BT> {text}", line) for text, line in plain] != []
    assert "back_translation" in error_of(distil, teacher, source, tmp_path / "other", ALONE, tag="<BT>")


def test_distilled_text_takes_a_foreign_teacher(source: Path, tmp_path: Path) -> None:
    tokenizer: Any = train_tokenizer(["one two three"] * 3, 290)
    model = tiny_marian(len(tokenizer))
    model.generation_config.update(num_beams=2, bad_words_ids=[[1]])
    assert distil(Translator(model, tokenizer), source, tmp_path / "out", ALONE) <= 3
    assert (tmp_path / "out" / TRANSLATIONS).read_text(encoding="utf-8").count("\n") == len(LINES)


def test_distilled_text_refuses_references_of_another_length(teacher, source, tmp_path):
    references = tmp_path / "references.txt"
    references.write_text("eins\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"source\.txt.* 4 .*references\.txt.* 1"):
        distil(teacher, source, tmp_path / "out", ALONE, references=references)
    assert "is a file" in error_of(distil, teacher, source, references, ALONE)


def test_language_model_without_an_encoder_is_refused_in_one_line(source, tmp_path, command):
    config = GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    word_tokenizer(["<unk>", "one", "two", "three"]).save_pretrained(tmp_path / "model")
    flags = ["--teacher", tmp_path / "model", "--source_file", source, "--output_dir", tmp_path / "out"]
    status, _, errors = command("distil", *flags)
    assert status == 2
    assert str(tmp_path / "model") in errors
    assert errors.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()
