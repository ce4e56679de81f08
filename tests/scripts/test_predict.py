"""`predict` with the shipped model: a first success without any training or network."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.corpora.readers import read_rows
from hf_vanilla_transformer.inference import file_translation
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.training.run.arguments import RunArguments
from hf_vanilla_transformer.training.run.fine_tuning import base_folder, load_base_model
from hf_vanilla_transformer.utils.shipped_models import model_folder, shipped_models
from tests.model_helpers import randomise, tiny_model
from vanilla_transformer_cli.main import main

WORDS = {"cat": "K AE T", "world": "W ER L D", "kitten": "K IH T AH N"}


def predict(capsys, *flags):
    with pytest.raises(SystemExit) as end:
        main(["predict", "--model", "g2p_en", *flags])
    return end.value.code, *capsys.readouterr()


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("\n".join(WORDS) + "\n")
    return str(file)


def test_shipped_model_predicts_phonemes(capsys, words):
    status, output, errors = predict(capsys, "--input", words)
    assert status == 0 and output.splitlines() == list(WORDS.values())
    assert "BLEU" not in output + errors and "language" not in output + errors


def test_capitals_of_words_are_read_as_small_letters(capsys, caplog, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("Hello\nHELLO\nhello\nKitten\nWORLD\n")
    status, output, _ = predict(capsys, "--input", str(file))
    assert status == 0 and not caplog.records
    *hello, kitten, world = output.splitlines()
    assert len(set(hello)) == 1 and hello[0] in ("HH AH L OW", "HH EH L OW")
    assert (kitten, world) == (WORDS["kitten"], WORDS["world"])
    tokenizer = AutoTokenizer.from_pretrained(model_folder("g2p_en"))
    assert tokenizer.backend_tokenizer.decode(tokenizer("Hello")["input_ids"]) == "hello"
    target = AutoTokenizer.from_pretrained(model_folder("g2p_en"), subfolder="target_tokenizer")
    assert target.unk_token_id in target("hh")["input_ids"]


def test_hyphen_is_standard_output(capsys, words, in_tmp_path):
    status, output, _ = predict(capsys, "--input", words, "--output", "-", "--num_beams", "1")
    assert status == 0 and output.splitlines()[0] == WORDS["cat"]
    assert not Path("-").exists()


def test_n_best_and_scores(capsys, words, tmp_path):
    _, output, _ = predict(capsys, "--input", words, "--n_best", "3")
    rows = [line.split(" ||| ") for line in output.splitlines()]
    assert [row[1] for row in rows[::3]] == list(WORDS.values())
    assert all(len(row) == 3 and float(row[2]) < 0 for row in rows)
    targets = tmp_path / "targets.txt"
    targets.write_text("\n".join(WORDS.values()) + "\n")
    _, output, _ = predict(capsys, "--input", words, "--score", str(targets))
    assert [len(line.split("\t")[1].split()) for line in output.splitlines()] == [4, 5, 6]  # and the end
    status, _, errors = predict(capsys, "--input", words, "--score", str(targets), "--n_best", "2")
    assert status == 2 and errors.startswith("error: --score")


def test_formats_of_n_best_lists(capsys, caplog, words, own_modules):
    (own_modules / "phoneme_normalizer.py").write_text(
        "def first_phoneme(text):\n    return text.split()[0] if text != 'K AE T' else None\n", encoding="utf-8"
    )
    flags = ["--input", words, "--n_best", "4", "--num_beams", "4"]
    status, output, errors = predict(capsys, *flags, "--format", "tsv")
    assert status == 0, errors
    rows = [line.split("\t") for line in output.splitlines()]
    assert [row[2] for row in rows if row[1] == "1"] == list(WORDS.values())
    for number in ("1", "2", "3"):
        scores, shares = ([float(row[column]) for row in rows if row[0] == number] for column in (3, 4))
        assert sum(shares) == pytest.approx(1, abs=1e-4)
        assert scores == sorted(scores, reverse=True)

    normalize = ["--format", "jsonl", "--normalize", "phoneme_normalizer:first_phoneme"]
    _, output, _ = predict(capsys, *flags, *normalize)
    cat, world, _ = [json.loads(line)["candidates"] for line in output.splitlines()]
    assert cat[0]["text"] == "K AE T" and not cat[0]["valid"]
    assert "1 of 12 hypotheses" in caplog.text
    expected = {}  # the probability of each first phoneme, added here
    for row in rows:
        if row[0] == "2":
            first = row[2].split()[0]
            expected[first] = expected.get(first, 0) + float(row[4])
    assert {one["text"]: one["probability"] for one in world} == pytest.approx(expected, abs=1e-4)


def test_spellings_of_one_input_are_one_list(capsys, tmp_path):
    file = tmp_path / "spellings.txt"
    file.write_text("cat\nkat\nworld\nwurld\n")
    flags = ["--input", str(file), "--n_best", "3", "--format", "jsonl", "--spellings", "2"]
    _, output, _ = predict(capsys, *flags)
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["line"] for row in rows] == [1, 2]
    assert [row["candidates"][0]["text"] for row in rows] == ["K AE T", "W ER L D"]
    written = tmp_path / "written.jsonl"
    assert predict(capsys, *flags, "--output", str(written))[0] == 0
    assert [json.loads(line)["line"] for line in written.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "argument"),
    [
        (["--format", "tsv"], "n_best_format"),
        (["--n_best", "2", "--spellings", "2"], "n_best_format"),
        (["--n_best", "2", "--format", "tsv", "--normalize", "no_module:f"], "normalize"),
        (["--score", "targets.txt", "--format", "tsv"], "--score"),
        (["--score", "targets.txt", "--num_beams", "2"], "--score is for existing outputs, --num_beams"),
        (["--source_column", "word"], "--source_column has no effect"),
    ],
)
def test_flags_of_n_best_lists_without_effect_are_refused(capsys, words, flags, argument):
    status, _, errors = predict(capsys, "--input", words, *flags)
    assert status == 2 and errors.startswith(f"error: {argument}") and errors.count("\n") == 1


def test_lines_and_odd_input(capsys, tmp_path):
    file = tmp_path / "odd.txt"
    file.write_text("cat\n\nc日t\n" + "a" * 300 + "\ncat\n", encoding="utf-8")
    status, output, _ = predict(capsys, "--input", str(file), "--num_beams", "1")
    lines = output.splitlines()
    assert status == 0 and len(lines) == 5
    assert lines[0] == lines[4] == "K AE T" and lines[1] == ""


@pytest.mark.parametrize("written", [False, True])
def test_unknown_symbols_are_one_warning(capsys, caplog, tmp_path, monkeypatch, written):
    monkeypatch.setattr(file_translation, "BATCHES_PER_CHUNK", 1)
    file = tmp_path / "odd.txt"
    file.write_text("cat\n" * 3 + "c日t本\n" + "cat\n" * 3 + "c本t\n", encoding="utf-8")
    output = ["--output", str(tmp_path / "written.txt")] if written else []
    flags = ["--input", str(file), "--num_beams", "1", "--batch_size", "2", *output]
    assert predict(capsys, *flags)[0] == 0
    warnings = [record.getMessage() for record in caplog.records if "<unk>" in record.getMessage()]
    assert len(warnings) == 1
    assert "'日' (2 lines: 4, 8)" in warnings[0]


def test_unknown_symbols_of_scores_and_prefixes_are_warnings(capsys, caplog, words, tmp_path):
    targets = tmp_path / "targets.txt"
    targets.write_text("K AE T\nW QQ L D\nK IH T AH N\n")
    assert predict(capsys, "--input", words, "--score", str(targets))[0] == 0
    assert "target: symbols" in caplog.text and "'QQ' (line 2)" in caplog.text
    caplog.clear()
    translator = Translator.from_pretrained(model_folder("g2p_en"), "cpu")
    list(translator.translate(WORDS, prefixes=["K", "", "QQ"], num_beams=1))
    assert "prefix: symbols" in caplog.text and "'QQ' (line 3)" in caplog.text
    caplog.clear()
    assert predict(capsys, "--input", words)[0] == 0
    assert not caplog.records


def test_shipped_model_loads_by_the_auto_classes():
    folder = model_folder("g2p_en")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target_tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="target_tokenizer")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    outputs = model.generate(**tokenizer(["world"], return_tensors="pt"))
    assert target_tokenizer.batch_decode(outputs, skip_special_tokens=True) == ["W ER L D"]


def test_shipped_model_of_reactions_finds_reactants():
    folder = model_folder("retrosynthesis")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    paracetamol = "CC(=O)Nc1ccc(O)cc1"
    reactants = "CC(=O)OC(C)=O.Nc1ccc(O)cc1"  # acetic anhydride and 4-aminophenol
    outputs = model.generate(**tokenizer([paracetamol], return_tensors="pt"))
    assert tokenizer.batch_decode(outputs, skip_special_tokens=True) == [reactants]
    translator = Translator.from_pretrained(folder, "cpu")
    assert list(translator.translate([paracetamol])) == [reactants]


def test_names_of_shipped_models(tmp_path, in_tmp_path):
    assert shipped_models() == ["en_de", "en_fr", "g2p_en", "retrosynthesis"]
    assert model_folder("runs/other") == "runs/other"
    (tmp_path / "g2p_en").mkdir()
    assert model_folder("g2p_en") == "g2p_en"  # a folder of the user wins


def test_translator_and_fine_tuning_know_the_shipped_models(tmp_path):
    folder = model_folder("g2p_en")
    expected = list(Translator.from_pretrained(folder, "cpu").translate(WORDS))
    assert list(Translator.from_pretrained("g2p_en", "cpu", ensemble=["g2p_en"]).translate(WORDS)) == expected
    args = RunArguments(str(tmp_path), model_name_or_path="g2p_en")
    assert base_folder(args, fetch=False) == Path(folder)
    sizes = json.loads(Path(folder, "config.json").read_text("utf-8"))
    assert load_base_model("g2p_en").model.config.vocab_size == sizes["vocab_size"]


@pytest.mark.slow
def test_predict_reads_a_pipe(repository, python):
    command = ["-m", "vanilla_transformer_cli", "predict", "--model", "g2p_en"]
    done = python.run(command, input="world\n", cwd=repository)
    assert done.stdout == "W ER L D\n", done.stderr


def test_scores_of_a_model_of_sequences_are_not_of_languages(command, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("\n".join(WORDS) + "\n")
    targets = tmp_path / "targets.txt"
    targets.write_text("K AE T\nW ER L D\nK IH T AH M\n")
    other = tmp_path / "other.txt"
    other.write_text("K AE T\nW ER L D\nK IH T AH M\n")
    report = tmp_path / "report.html"
    flags = ["--source", str(words), "--reference", str(targets)]
    _, printed, _ = command("evaluate", "--model", "g2p_en", *flags)
    assert "exact match = 66.67 % of 3 sequences" in printed
    assert "token error rate = 8.33" in printed  # one of 12 phonemes
    compared = ["--compare", str(other), "--by", "length", "--report", str(report)]
    _, tables, _ = command("evaluate", "--hypothesis", str(targets), "--compare", "g2p_en", *flags)
    _, more, _ = command("evaluate", "--model", "g2p_en", *flags, *compared)
    page = report.read_text(encoding="utf-8")
    assert "Largest differences, by character error rate" in page
    for text in (printed, tables, more, page):
        assert not re.search("bleu|chrf|translat|languag|sentence", text, re.IGNORECASE)
    status, _, errors = command("evaluate", "--model", "g2p_en", *flags, "--perturb", "typos")
    assert status == 2 and errors.startswith("error: perturb:")


def test_translate_protects_nothing_in_sequences(tmp_path):
    texts = ["N#N", "1", "[NH3+]", "C#N {x}", "www.a.b"]
    tokenizer = train_symbol_tokenizer([(text, 1) for text in texts], "chars")
    model = randomise(tiny_model(vocab_size=len(tokenizer)))
    translator = Translator(model, tokenizer)
    plain = list(translator.translate(texts, max_new_tokens=5))
    assert list(translator.translate(texts, max_new_tokens=5, protect=True)) == plain
    tokenizer.init_kwargs["task"] = "language"
    assert list(Translator(model, tokenizer).translate(texts, max_new_tokens=5, protect=True))[1] == "1"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_table_of_predictions(capsys, words, tmp_path, suffix):
    output = tmp_path / f"out.{suffix}"
    status, _, errors = predict(capsys, "--input", words, "--output", str(output), "--num_beams", "1")
    assert status == 0, errors
    rows = [row for _, row in read_rows(output, {})]
    assert rows == [
        {"line": number, "source": word, "prediction": WORDS[word], "unknown": []}
        for number, word in enumerate(WORDS, start=1)
    ]


@pytest.mark.parametrize(("name", "form"), [("x.parquet", "jsonl"), ("x.parquet", "tsv"), ("x.jsonl", "tsv")])
def test_lists_are_no_rows_of_a_table(capsys, words, tmp_path, name, form):
    flags = ["--n_best", "2", "--format", form, "--output", str(tmp_path / name)]
    status, _, errors = predict(capsys, "--input", words, *flags)
    assert status == 2 and errors.startswith("error: n_best: ") and not (tmp_path / name).exists()


@pytest.mark.parametrize("form", ["moses", "tsv", "jsonl"])
def test_lists_of_a_prediction_are_scored(command, words, tmp_path, form):
    best = tmp_path / f"best.{form}"
    written = ["--n_best", "3", "--format", form, "--output", str(best)]
    assert command("predict", "--model", "g2p_en", "--input", words, *written)[0] == 0
    targets = tmp_path / "targets.txt"
    targets.write_text("K AE T\nW ER L D\nX\n")
    flags = ["--hypothesis", str(best), "--reference", str(targets), "--n_best"]
    status, printed, errors = command("evaluate", *flags, "3")
    assert status == 0, errors
    assert printed.splitlines()[:2] == ["top 1 = 66.67", "top 3 = 66.67"]
    _, printed, _ = command("evaluate", *flags, "1")
    assert "top 3" not in printed


def test_invalid_texts_of_all_chunks_are_one_warning(capsys, caplog, tmp_path, monkeypatch, own_modules):
    monkeypatch.setattr(file_translation, "BATCHES_PER_CHUNK", 1)
    (own_modules / "refusing_normalizer.py").write_text("def refuse(text):\n    return None\n", encoding="utf-8")
    file = tmp_path / "words.txt"
    file.write_text("cat\n" * 6)
    flags = ["--input", str(file), "--n_best", "2", "--num_beams", "2", "--batch_size", "2", "--format", "jsonl"]
    output = ["--output", str(tmp_path / "best.jsonl"), "--normalize", "refusing_normalizer:refuse"]
    assert predict(capsys, *flags, *output)[0] == 0
    assert [record.getMessage() for record in caplog.records] == ["normalize: 12 of 12 hypotheses are invalid"]
