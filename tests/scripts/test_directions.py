"""The subcommands translate with a model of many languages in the direction of each row, or of their flags."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import cross_attention, plot_attention
from hf_vanilla_transformer.inference.scoring import score_translations_of
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.text.language_tokens import language_tokens
from tests.model_helpers import save_model_of_languages

ROWS = [
    ("seven", "sieben", "de"),
    ("eight", "huit", "fr"),
    ("seven hundred", "siebenhundert", "de"),
]
TARGETS = [row[2] for row in ROWS]
SOURCES, REFERENCES = [row[0] for row in ROWS], [row[1] for row in ROWS]


@pytest.fixture(params=[True, False], ids=["source", "target"])
def folder(request: Any, tmp_path: Path) -> Path:
    return save_model_of_languages(tmp_path / "model", request.param, tie_word_embeddings=False)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    with open(tmp_path / "rows.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("source", "target", "target_lang"), *ROWS])
    return tmp_path / "rows.tsv"


def test_rows_of_a_table_have_their_own_directions(
    command: Any, folder: Path, table: Path, tmp_path: Path
) -> None:
    translator = Translator.from_pretrained(folder, device="cpu")
    hypotheses = list(
        translator.translate(SOURCES, target_lang=TARGETS, max_new_tokens=4, num_beams=2)
    )
    shared = ("--model", folder, "--device", "cpu")
    decoding = ("--max_new_tokens", 4, "--num_beams", 2)
    status, printed, errors = command("translate", *shared, *decoding, "--input", table)
    assert (status, printed.splitlines()) == (0, hypotheses), errors

    results = tmp_path / "results.json"
    files = ("--source", table, "--reference", table, "--output", results, "--by", "target_lang")
    status, _, errors = command("evaluate", *shared, *decoding, *files)
    assert status == 0, errors
    of_german = [hypotheses[0], hypotheses[2]], [REFERENCES[0], REFERENCES[2]]
    written = json.loads(results.read_text(encoding="utf-8"))
    (scores,) = written["groups"]["de"]["systems"].values()
    texts = (write(tmp_path / f"text{i}", lines) for i, lines in enumerate(of_german))
    command(
        "evaluate", "--hypothesis", next(texts), "--reference", next(texts), "--output", results
    )
    assert scores["chrf"] == json.loads(results.read_text(encoding="utf-8"))["chrf"]

    lines = table.read_text(encoding="utf-8").splitlines()
    lines.insert(2, "nine\t\tfr")  # an incomplete row is left out with its language
    write(table, lines)
    status, printed, errors = command("translate", *shared, "--input", table, "--score", table)
    assert status == 0, errors
    alone = [
        next(score_translations_of(translator.directed(None, target), [pair]))
        for *pair, target in ROWS
    ]
    found = [float(line.split("\t")[0]) for line in printed.splitlines()]
    assert found == pytest.approx([scored.log_probability for scored in alone], abs=2e-4)
    scored = list(
        score_translations_of(
            translator, zip(SOURCES, REFERENCES, strict=True), target_lang=TARGETS
        )
    )
    assert [row.tokens for row in scored] == [row.tokens for row in alone]


@pytest.mark.parametrize("to_file", [False, True])
def test_flag_chooses_the_rows_of_a_language(
    command: Any, folder: Path, tmp_path: Path, to_file: bool
) -> None:
    rows = [
        "source\ttarget\tsource_lang\ttarget_lang",
        "seven\tsept\ten\tfr",
        "eight\tacht\ten\tde",
    ]
    output = ("--output", tmp_path / "out") if to_file else ()
    flags = (
        "--model",
        folder,
        "--device",
        "cpu",
        "--max_new_tokens",
        4,
        "--target_lang",
        "de",
        *output,
    )
    status, printed, errors = command(
        "translate", *flags, "--input", write(tmp_path / "rows.tsv", rows)
    )
    assert status == 0, errors
    translator = Translator.from_pretrained(folder, device="cpu")
    (text,) = translator.translate(["eight"], source_lang="en", target_lang="de", max_new_tokens=4)
    assert (output[1].read_text(encoding="utf-8") if to_file else printed) == f"{text}\n"


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_attention_is_that_of_a_direction(command: Any, folder: Path, tmp_path: Path) -> None:
    translator = Translator.from_pretrained(folder, device="cpu")
    tokens, weights = {}, {}
    for target in ("de", "fr"):
        of_sentence = (translator.model, translator.source_tokenizer, None, "seven", "sieben")
        source, translation, weights[target] = cross_attention(*of_sentence, target_lang=target)
        tokens[target] = [*source, *translation]
        flags = (
            "--sentence",
            "seven",
            "--translation",
            "sieben",
            "--target_lang",
            target,
            "--device",
            "cpu",
        )
        drawn, expected = tmp_path / "drawn.png", tmp_path / "expected.png"
        status, _, errors = command("attention", "--model", folder, *flags, "--output", drawn)
        assert status == 0, errors
        plot_attention(source, translation, weights[target], expected)
        assert drawn.read_bytes() == expected.read_bytes()
    assert not weights["de"].equal(weights["fr"])
    assert (
        sum(target in token for target, row in tokens.items() for token in row) == 2
    )  # each has its mark
    flags = ("--sentence", "seven", "--device", "cpu", "--output", tmp_path / "no.png")
    status, _, errors = command("attention", "--model", folder, *flags)
    assert status != 0 and "target_lang" in errors


def test_attention_has_the_default_direction_of_a_model(command: Any, tmp_path: Path) -> None:
    folder = save_model_of_languages(tmp_path / "model", on_source=False)
    languages = language_tokens(load_tokenizers(folder)[1], "target")
    assert languages is not None
    settings = folder / "generation_config.json"
    forced = {"forced_bos_token_id": languages.ids["fr"]}
    settings.write_text(
        json.dumps(json.loads(settings.read_text(encoding="utf-8")) | forced), encoding="utf-8"
    )
    flags = ("--model", folder, "--sentence", "seven", "--device", "cpu")
    files = tmp_path / "default.png", tmp_path / "named.png"
    for file, more in zip(files, ([], ["--target_lang", "fr"]), strict=True):
        status, _, errors = command("attention", *flags, *more, "--output", file)
        assert status == 0, errors
    assert files[0].read_bytes() == files[1].read_bytes()
