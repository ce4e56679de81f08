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

WORDS = {"cat": "K AE T", "world": "W ER L D", "kitten": "K IH T AH N"}


@pytest.fixture
def predict(command, tmp_path):
    """Runs `predict` on lines. Returns exit status, standard output and standard error."""

    def predict(lines, *flags):
        source = write(tmp_path / "input.txt", lines)
        return command("predict", "--model", "g2p_en", "--input", source, *flags)

    return predict


def write(file, lines):
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def candidates_of(output):
    return [json.loads(line)["candidates"] for line in output.splitlines()]


def test_shipped_model_predicts_phonemes(predict):
    status, output, errors = predict(WORDS)
    assert status == 0
    assert output.splitlines() == list(WORDS.values())
    assert not re.search("BLEU|language", output + errors)


def test_capitals_of_words_are_read_as_small_letters(predict, caplog):
    status, output, _ = predict(["Hello", "HELLO", "hello", "Kitten", "WORLD"])
    assert status == 0
    assert not caplog.records
    *hello, kitten, world = output.splitlines()
    assert len(set(hello)) == 1
    assert hello[0] in ("HH AH L OW", "HH EH L OW")
    assert (kitten, world) == (WORDS["kitten"], WORDS["world"])
    tokenizer = AutoTokenizer.from_pretrained(model_folder("g2p_en"))
    assert tokenizer.backend_tokenizer.decode(tokenizer("Hello")["input_ids"]) == "hello"
    target = AutoTokenizer.from_pretrained(model_folder("g2p_en"), subfolder="target_tokenizer")
    assert target.unk_token_id in target("hh")["input_ids"]


def test_hyphen_is_standard_output(predict, in_tmp_path):
    status, output, _ = predict(WORDS, "--output", "-", "--num_beams", "1")
    assert status == 0
    assert output.splitlines()[0] == WORDS["cat"]
    assert not Path("-").exists()


def test_n_best_and_scores(predict, tmp_path):
    _, output, _ = predict(WORDS, "--n_best", "3")
    rows = [line.split(" ||| ") for line in output.splitlines()]
    assert [row[1] for row in rows[::3]] == list(WORDS.values())
    assert all(len(row) == 3 and float(row[2]) < 0 for row in rows)
    targets = write(tmp_path / "targets.txt", WORDS.values())
    _, output, _ = predict(WORDS, "--score", targets)
    log_probabilities = [line.split("\t")[1].split() for line in output.splitlines()]
    assert [len(tokens) for tokens in log_probabilities] == [4, 5, 6]  # and the end
    status, _, errors = predict(WORDS, "--score", targets, "--n_best", "2")
    assert status == 2
    assert errors.startswith("error: --score")


def test_formats_of_n_best_lists(predict, caplog, own_modules):
    (own_modules / "phoneme_normalizer.py").write_text(
        "def first_phoneme(text):\n    return text.split()[0] if text != 'K AE T' else None\n"
    )
    flags = ["--n_best", "4", "--num_beams", "4"]
    status, output, errors = predict(WORDS, *flags, "--format", "tsv")
    assert status == 0, errors
    rows = [line.split("\t") for line in output.splitlines()]
    assert [row[2] for row in rows if row[1] == "1"] == list(WORDS.values())
    for number in ("1", "2", "3"):
        own_rows = [row for row in rows if row[0] == number]
        scores = [float(row[3]) for row in own_rows]
        assert scores == sorted(scores, reverse=True)
        assert sum(float(row[4]) for row in own_rows) == pytest.approx(1, abs=1e-4)

    normalize = ["--format", "jsonl", "--normalize", "phoneme_normalizer:first_phoneme"]
    _, output, _ = predict(WORDS, *flags, *normalize)
    cat, world, _ = candidates_of(output)
    assert cat[0]["text"] == "K AE T"
    assert not cat[0]["valid"]
    assert "1 of 12 hypotheses" in caplog.text
    expected = {}  # the probability of each first phoneme, added here
    for number, _, text, _, probability, *_ in rows:
        if number == "2":
            first = text.split()[0]
            expected[first] = expected.get(first, 0) + float(probability)
    assert {one["text"]: one["probability"] for one in world} == pytest.approx(expected, abs=1e-4)


def test_spellings_of_one_input_are_one_list(predict, tmp_path):
    spellings = ["cat", "kat", "world", "wurld"]
    flags = ["--n_best", "3", "--format", "jsonl", "--spellings", "2"]
    _, output, _ = predict(spellings, *flags)
    assert [candidates[0]["text"] for candidates in candidates_of(output)] == ["K AE T", "W ER L D"]
    written = tmp_path / "written.jsonl"
    assert predict(spellings, *flags, "--output", written)[0] == 0
    for text in (output, written.read_text()):
        assert [json.loads(line)["line"] for line in text.splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "argument"),
    [
        ("--format tsv", "n_best_format"),
        ("--n_best 2 --spellings 2", "n_best_format"),
        ("--n_best 2 --format tsv --normalize no_module:f", "normalize"),
        ("--score targets.txt --format tsv", "--score"),
        ("--score targets.txt --num_beams 2", "--score is for existing outputs, --num_beams"),
        ("--score targets.txt --workers 1", "--score is for existing outputs, --workers"),
        ("--score targets.txt --shortlist table", "--score is for existing outputs, --shortlist"),
        ("--source_column word", "--source_column has no effect"),
        # lists are no rows of a table
        ("--n_best 2 --format jsonl --output x.parquet", "n_best: "),
        ("--n_best 2 --format tsv --output x.parquet", "n_best: "),
        ("--n_best 2 --format tsv --output x.jsonl", "n_best: "),
    ],
)
def test_flags_of_n_best_lists_without_effect_are_refused(predict, in_tmp_path, flags, argument):
    status, _, errors = predict(WORDS, *flags.split())
    assert status == 2
    assert errors.startswith(f"error: {argument}")
    assert errors.count("\n") == 1
    assert [file.name for file in in_tmp_path.iterdir()] == ["input.txt"]


def test_lines_and_odd_input(predict):
    status, output, _ = predict(["cat", "", "c日t", "a" * 300, "cat"], "--num_beams", "1")
    assert status == 0
    first, blank, _, _, last = output.splitlines()
    assert first == last == "K AE T"
    assert blank == ""


@pytest.mark.parametrize("written", [False, True])
def test_unknown_symbols_are_one_warning(predict, caplog, tmp_path, monkeypatch, written):
    monkeypatch.setattr(file_translation, "BATCHES_PER_CHUNK", 1)
    lines = [*["cat"] * 3, "c日t本", *["cat"] * 3, "c本t"]
    output = ["--output", tmp_path / "written.txt"] if written else []
    assert predict(lines, "--num_beams", "1", "--batch_size", "2", *output)[0] == 0
    (warning,) = [
        record.getMessage() for record in caplog.records if "<unk>" in record.getMessage()
    ]
    assert "'日' (2 lines: 4, 8)" in warning


def test_unknown_symbols_of_scores_and_prefixes_are_warnings(predict, caplog, tmp_path):
    targets = write(tmp_path / "targets.txt", ["K AE T", "W QQ L D", "K IH T AH N"])
    assert predict(WORDS, "--score", targets)[0] == 0
    assert "target: symbols" in caplog.text
    assert "'QQ' (line 2)" in caplog.text
    caplog.clear()
    translator = Translator.from_pretrained("g2p_en", "cpu")
    list(translator.translate(WORDS, prefixes=["K", "", "QQ"], num_beams=1))
    assert "prefix: symbols" in caplog.text
    assert "'QQ' (line 3)" in caplog.text


def test_invalid_texts_of_all_chunks_are_one_warning(
    predict, caplog, tmp_path, monkeypatch, own_modules
):
    monkeypatch.setattr(file_translation, "BATCHES_PER_CHUNK", 1)
    (own_modules / "refusing_normalizer.py").write_text("def refuse(text):\n    return None\n")
    flags = "--n_best 2 --num_beams 2 --batch_size 2 --format jsonl --normalize refusing_normalizer:refuse"
    assert predict(["cat"] * 6, *flags.split(), "--output", tmp_path / "best.jsonl")[0] == 0
    assert [record.getMessage() for record in caplog.records] == [
        "normalize: 12 of 12 hypotheses are invalid"
    ]


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("g2p_en", "world", "W ER L D"),
        # paracetamol, from acetic anhydride and 4-aminophenol
        ("retrosynthesis", "CC(=O)Nc1ccc(O)cc1", "CC(=O)OC(C)=O.Nc1ccc(O)cc1"),
    ],
)
def test_shipped_model_loads_by_the_auto_classes(name, source, target):
    folder = model_folder(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target_tokenizer = tokenizer
    if Path(folder, "target_tokenizer").is_dir():
        target_tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="target_tokenizer")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    outputs = model.generate(**tokenizer([source], return_tensors="pt"))
    assert target_tokenizer.batch_decode(outputs, skip_special_tokens=True) == [target]
    assert list(Translator.from_pretrained(name, "cpu").translate([source])) == [target]


def test_names_of_shipped_models(tmp_path, in_tmp_path):
    assert shipped_models() == ["en_de", "en_fr", "g2p_en", "retrosynthesis"]
    assert model_folder("runs/other") == "runs/other"
    (tmp_path / "g2p_en").mkdir()
    assert model_folder("g2p_en") == "g2p_en"  # a folder of the user wins


def test_translator_and_fine_tuning_know_the_shipped_models(tmp_path):
    folder = model_folder("g2p_en")
    expected = list(Translator.from_pretrained(folder, "cpu").translate(WORDS))
    ensemble = Translator.from_pretrained("g2p_en", "cpu", ensemble=["g2p_en"])
    assert list(ensemble.translate(WORDS)) == expected
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
    source = write(tmp_path / "words.txt", WORDS)
    targets = write(tmp_path / "targets.txt", ["K AE T", "W ER L D", "K IH T AH M"])
    other = tmp_path / "other.txt"
    other.write_bytes(targets.read_bytes())
    report = tmp_path / "report.html"
    flags = ["--source", source, "--reference", targets]
    model = ["evaluate", "--model", "g2p_en", *flags]
    _, printed, _ = command(*model)
    assert "exact match = 66.67 % of 3 sequences" in printed
    assert "token error rate = 8.33" in printed  # one of 12 phonemes
    _, tables, _ = command("evaluate", "--hypothesis", targets, "--compare", "g2p_en", *flags)
    _, more, _ = command(*model, "--compare", other, "--by", "length", "--report", report)
    page = report.read_text(encoding="utf-8")
    assert "Largest differences, by character error rate" in page
    for text in (printed, tables, more, page):
        assert not re.search("bleu|chrf|translat|languag|sentence", text, re.IGNORECASE)
    status, _, errors = command(*model, "--perturb", "typos")
    assert status == 2
    assert errors.startswith("error: perturb:")


def test_translate_protects_nothing_in_sequences():
    texts = ["N#N", "1", "[NH3+]", "C#N {x}", "www.a.b"]
    tokenizer = train_symbol_tokenizer([(text, 1) for text in texts], "chars")
    model = randomise(tiny_model(vocab_size=len(tokenizer)))

    def translate(**settings):
        return list(Translator(model, tokenizer).translate(texts, max_new_tokens=5, **settings))

    assert translate(protect=True) == translate()
    tokenizer.init_kwargs["task"] = "language"
    assert translate(protect=True)[1] == "1"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_table_of_predictions(predict, tmp_path, suffix):
    output = tmp_path / f"out.{suffix}"
    status, _, errors = predict(WORDS, "--output", output, "--num_beams", "1")
    assert status == 0, errors
    assert [row for _, row in read_rows(output, {})] == [
        {"line": number, "source": word, "prediction": phonemes, "unknown": []}
        for number, (word, phonemes) in enumerate(WORDS.items(), start=1)
    ]


@pytest.mark.parametrize("form", ["moses", "tsv", "jsonl"])
def test_lists_of_a_prediction_are_scored(predict, command, tmp_path, form):
    best = tmp_path / f"best.{form}"
    assert predict(WORDS, "--n_best", "3", "--format", form, "--output", best)[0] == 0
    targets = write(tmp_path / "targets.txt", ["K AE T", "W ER L D", "X"])
    flags = ["evaluate", "--hypothesis", best, "--reference", targets, "--n_best"]
    status, printed, errors = command(*flags, "3")
    assert status == 0, errors
    assert printed.splitlines()[:2] == ["top 1 = 66.67", "top 3 = 66.67"]
    assert "top 3" not in command(*flags, "1")[1]
