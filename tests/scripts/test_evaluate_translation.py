"""`vanilla-transformer evaluate`: scores of a model and of an existing translation, and wrong arguments."""

import json

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import score_translations
from tests.model_helpers import save_model_of_languages

HYPOTHESES = ["ein kleiner Hund läuft über die Straße", "ja , das ist gut", "Nein"]
REFERENCES = ["ein Hund läuft über die alte Straße", "ja , das ist gut", "nein"]


@pytest.fixture
def work(tmp_path, in_tmp_path):
    """A working directory with texts."""
    for name, lines in {
        "hypotheses": HYPOTHESES,
        "references": REFERENCES,
        "short": REFERENCES[:2],
    }.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0")
    return tmp_path


def test_existing_translation_is_scored(command, work):
    arguments = (
        "--bleu_tokenize none --bleu_lowercase --hypothesis hypotheses --reference references "
        "--output results.json"
    )
    status, printed, errors = command("evaluate", *arguments.split())
    assert status == 0, errors
    scores = score_translations(HYPOTHESES, REFERENCES, tokenize="none", lowercase=True)
    assert printed.splitlines() == [
        f"{scores['bleu_signature']} = {scores['bleu']:.2f}",
        f"{scores['chrf_signature']} = {scores['chrf']:.2f}",
        "exact match = 66.67 % of 3 lines",
    ]
    assert "case:lc|eff:no|tok:none" in printed and errors == ""
    files = {"hypothesis": "hypotheses", "reference": "references"}
    assert json.loads((work / "results.json").read_text(encoding="utf-8")) == scores | files


def test_model_is_scored_with_its_settings(command, work, model_folder):
    arguments = (
        f"--model {model_folder} --source hypotheses --reference references --output results.json "
        "--max_new_tokens 5 --num_beams 2 --batch_size 2 --device cpu"
    )
    status, printed, errors = command("evaluate", *arguments.split())
    assert status == 0, errors
    translator = Translator.from_pretrained(model_folder, device="cpu")
    translations = list(translator.translate(HYPOTHESES, max_new_tokens=5, num_beams=2))
    results = json.loads((work / "results.json").read_text(encoding="utf-8"))
    assert score_translations(translations, REFERENCES).items() <= results.items()
    assert results["settings"] == {
        "batch_size": 2,
        "max_tokens_per_batch": 4096,
        "num_beams": 2,
        "max_new_tokens": 5,
        "length_penalty": "((5 + length) / 6)^0.6",
        "device": "cpu",
        "dtype": "float32",
    }
    assert (results["model"], results["source"]) == (str(model_folder), "hypotheses")
    assert results["sentences_per_second"] == pytest.approx(3 / results["seconds"], rel=0.05)
    assert results["bleu_signature"] in printed and "sentences per second" in printed


def test_results_can_be_written_to_standard_output(command, work):
    status, printed, errors = command(
        "evaluate", "--hypothesis", "hypotheses", "--reference", "references", "--output", "-"
    )
    assert status == 0 and json.loads(printed)["sentences"] == 3 and "exact match" in errors


def test_systems_are_compared(command, work, model_folder, monkeypatch):
    monkeypatch.setattr("hf_vanilla_transformer.evaluation.comparison.TRIALS", 100)
    monkeypatch.setattr("hf_vanilla_transformer.evaluation.comparison.SAMPLES", 100)
    (work / "table.csv").write_text(
        "kind,en,de\n"
        + "".join(f"{k},{h},{r}\n" for k, h, r in zip("aab", ["x", "y", "z"], "123", strict=True))
    )
    (work / "mine.py").write_text(
        "def constant(sources, hypotheses, references):\n    return [1.0] * len(sources)\n"
    )
    arguments = (
        f"--model {model_folder} --source table.csv --reference table.csv --compare references "
        "--source_lang en --target_lang de --by kind --metrics chrf ter mine:constant --output results.json "
        "--report page.html --max_new_tokens 3"
    )
    status, printed, errors = command("evaluate", *arguments.split())
    assert status == 0, errors
    results = json.loads((work / "results.json").read_text(encoding="utf-8"))
    assert list(results["comparison"]["systems"]) == [str(model_folder), "references"]
    assert results["comparison"]["systems"]["references"]["mine:constant"]["score"] == 1
    assert [(label, group["sentences"]) for label, group in results["groups"].items()] == [
        ("a", 2),
        ("b", 1),
    ]
    page = (work / "page.html").read_text(encoding="utf-8")
    assert (
        printed.splitlines()[0].split() == ["system", "chrF", "TER", "mine:constant"]
        and "references" in page
        and "http" not in page
    )


def test_perturbed_text_is_scored(command, work, model_folder):
    files = (
        "--source",
        "hypotheses",
        "--reference",
        "references",
        "hypotheses",
        "--output",
        "results.json",
        "--max_new_tokens",
        3,
    )
    status, printed, errors = command(
        "evaluate", "--model", model_folder, "--perturb", "upper", "merge", *files
    )
    assert status == 0, errors
    results = json.loads((work / "results.json").read_text(encoding="utf-8"))["perturbations"]
    upper = [text.upper() for text in HYPOTHESES]
    translations = list(Translator.from_pretrained(model_folder).translate(upper, max_new_tokens=3))
    expected = score_translations(translations, [[text.upper() for text in REFERENCES], upper])
    assert results["upper"]["systems"][str(model_folder)] == {
        name: expected[name] for name in ("bleu", "chrf")
    }
    assert list(results) == ["none", "upper", "merge"] and "perturbation" in printed
    assert all("nrefs:2" in group["signatures"]["bleu"] for group in results.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hypothesis hypotheses --reference references short", "short"),
        ("--hypothesis hypotheses --reference references --compare short", "short"),
        ("--hypothesis hypotheses --reference references --compare hypotheses", "hypotheses"),
        ("--hypothesis hypotheses --reference references --compare {model}", "--source"),
        ("--hypothesis - --reference -", "standard input"),
        ("--hypothesis - --reference references --compare -", "standard input"),
        (
            "--hypothesis hypotheses --reference references --metrics chrf --bleu_tokenize char",
            "--bleu_tokenize",
        ),
        ("--hypothesis hypotheses --reference references --perturb upper", "--perturb"),
        ("--model {model} --source references --reference references --perturb upside", "'upside'"),
        ("--hypothesis hypotheses --reference references --metrics blue", "'blue'"),
        ("--hypothesis hypotheses --reference references --metrics nothing:here", "nothing:here"),
        ("--hypothesis hypotheses --reference references --metrics broken:metric", "broken:metric"),
        ("--hypothesis hypotheses --reference references --by kind", "--by"),
        ("--hypothesis hypotheses --reference short", "short"),
        ("--model {model} --source short --reference references", "references"),
        ("--hypothesis empty --reference empty", "empty"),
        ("--hypothesis hypotheses --reference missing", "missing"),
        ("--hypothesis hypotheses --reference references --bleu_tokenize 13b", "'13b'"),
        ("--model missing --source short --reference short", "missing: "),
        ("--model {model} --source short --reference short --num_beams 0", "num_beams: "),
        (
            "--model {model} --source short --reference short --output .",
            "error: output . is a folder",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(command, work, model_folder, arguments, message):
    status, printed, errors = command("evaluate", *arguments.format(model=model_folder).split())
    assert status == 2 and printed == ""
    assert errors.startswith("error: ") and message in errors


def test_wrong_arguments_are_refused_before_translation(command, work, model_folder, monkeypatch):
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: pytest.fail("it translated"))
    files = ("--model", model_folder, "--source", "short", "--reference", "short")
    for mistake in (("--bleu_tokenize", "13b"), ("--output", "no/such/folder.json")):
        assert command("evaluate", *files, *mistake)[0] == 2


WITHOUT_MODEL = [
    "--num_beams 4",
    "--batch_size 8",
    "--workers 2",
    "--dtype int8",
    "--trust_remote_code",
]


@pytest.mark.parametrize("flag", WITHOUT_MODEL)
def test_flags_of_models_are_refused_without_a_model(command, work, flag):
    flag = flag.split()
    status, _, errors = command(
        "evaluate", "--reference", "references", "--hypothesis", "references", *flag
    )
    assert (
        status == 2
        and errors.startswith(f"error: {flag[0]} is for models")
        and errors.count("\n") == 1
    )


@pytest.mark.parametrize(
    "arguments", ["--hypothesis a --source b", "--model a", "--model a --hypothesis b", ""]
)
def test_incompatible_flags_are_one_line(command, work, arguments):
    status, _, errors = command("evaluate", "--reference", "references", *arguments.split())
    assert status == 2 and errors.startswith("error: ")


def test_lists_of_translations_are_scored(command, tmp_path, in_tmp_path):
    (tmp_path / "best.txt").write_text(
        "0 ||| b ||| -1\n0 ||| a ||| -2\n1 ||| c ||| -1\n1 ||| d ||| -2\n1 ||| e ||| -3\n"
    )
    (tmp_path / "references").write_text("a\nc\n")
    status, printed, errors = command(
        "evaluate", "--hypothesis", "best.txt", "--reference", "references", "--n_best", "3"
    )
    assert (status, errors) == (0, "")
    assert printed.splitlines()[:2] == ["top 1 = 50.00", "top 3 = 100.00"]
    (tmp_path / "best.txt").write_text("0 ||| b ||| -1\n")
    for flags in (["--n_best", "3"], ["--metrics", "top_k"]):
        status, _, errors = command(
            "evaluate", "--hypothesis", "best.txt", "--reference", "references", *flags
        )
        assert status == 2 and "error: " in errors


def test_groups_are_cells_of_any_type(command, work, model_folder):
    rows = [(2020, "x", "1"), (2020, "y", "2"), (None, "z", "3")]
    lines = [json.dumps({"year": year, "source": one, "target": two}) for year, one, two in rows]
    (work / "table.jsonl").write_text("\n".join(lines) + "\n")
    flags = [
        "--model",
        model_folder,
        "--max_new_tokens",
        3,
        "--metrics",
        "chrf",
        "--output",
        "results.json",
    ]
    status, _, errors = command(
        "evaluate", *flags, "--source", "table.jsonl", "--reference", "table.jsonl", "--by", "year"
    )
    assert status == 0, errors
    groups = json.loads((work / "results.json").read_text())["groups"]
    assert {label: group["sentences"] for label, group in groups.items()} == {"2020": 2, "": 1}
    status, _, errors = command(
        "evaluate", *flags, "--source", "hypotheses", "--reference", "references", "--by", "x"
    )
    assert status == 2 and errors.startswith("error: hypotheses has no column 'x'")


def test_cells_with_line_breaks_are_given_to_the_model_as_in_training(command, work, model_folder):
    (work / "table.csv").write_text('source,target\n"zwei  \nHunde","a\nb"\n')
    flags = [
        "--model",
        model_folder,
        "--source",
        "table.csv",
        "--reference",
        "table.csv",
        "--metrics",
        "m:kept",
    ]
    (work / "m.py").write_text(
        "def kept(sources, hypotheses, references):\n"
        "    return [float((sources, references) == (['zwei  \\nHunde'], ['a\\nb']))]\n"
    )
    status, printed, errors = command("evaluate", *flags, "--max_new_tokens", 3)
    assert status == 0, errors
    assert "1.00" in printed
    # the lines of a file have no line breaks
    (work / "hypothesis").write_text("a b\n")
    _, printed, errors = command(
        "evaluate", "--hypothesis", "hypothesis", "--reference", "table.csv"
    )
    assert "exact match = 100.00 %" in printed, errors


def test_lists_of_systems_are_compared(command, work):
    for name, first in (("a.tsv", "x"), ("b.jsonl", "ja , das ist gut")):
        rows = [[first, "y"], ["ja , das ist gut", first], ["z", "nein"]]
        lines = [
            f"{n}\t{rank}\t{text}\t-1.0\t0.5"
            for n, row in enumerate(rows, 1)
            for rank, text in enumerate(row, 1)
        ]
        if name.endswith("jsonl"):
            lines = [
                json.dumps({"line": n, "candidates": [{"text": text} for text in row]})
                for n, row in enumerate(rows, 1)
            ]
        (work / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [
        "--hypothesis",
        "a.tsv",
        "--compare",
        "b.jsonl",
        "--reference",
        "references",
        "--n_best",
        3,
    ]
    status, printed, errors = command("evaluate", *files, "--output", "results.json")
    assert status == 0, errors
    compared = json.loads((work / "results.json").read_text())["comparison"]["systems"]
    assert [compared[name]["top_1"]["score"] for name in ("a.tsv", "b.jsonl")] == [
        pytest.approx(100 / 3)
    ] * 2
    assert "p_bootstrap" in compared["b.jsonl"]["top_1"] and "system   top 1" in printed


# The text of "fr" is Chinese, for which BLEU has another tokenizer.
TABLE = """kind\tsource\ttarget\tsource_lang\ttarget_lang
x\ttwo dogs\tzwei Hunde\ten\tde
x\tthree\t\ten\tde
y\ta dog\t一只狗在公园里奔跑。\ten\tfr
x\tthree dogs\tdrei Hunde\ten\tde
"""


def test_rows_that_are_left_out_have_no_label(command, work, caplog):
    folder = save_model_of_languages(work / "many")
    (work / "table.tsv").write_text(TABLE, encoding="utf-8")
    files = [
        "--model",
        folder,
        "--source",
        "table.tsv",
        "--reference",
        "table.tsv",
        "--max_new_tokens",
        3,
    ]
    status, printed, errors = command(
        "evaluate", *files, "--by", "kind", "--output", "results.json"
    )
    assert status == 0, errors
    assert "kept 3 of 4 pairs" in caplog.text
    groups = json.loads((work / "results.json").read_text(encoding="utf-8"))["groups"]
    assert {label: group["sentences"] for label, group in groups.items()} == {"x": 2, "y": 1}
    translator = Translator.from_pretrained(folder, device="cpu")
    outputs = list(translator.translate(["a dog"], target_lang="fr", max_new_tokens=3))
    expected = score_translations(outputs, ["一只狗在公园里奔跑。"])["chrf"]
    assert groups["y"]["systems"][str(folder)]["chrf"] == pytest.approx(expected)


def test_perturbed_text_is_in_one_pair_of_languages(command, work):
    folder = save_model_of_languages(work / "many")
    (work / "table.tsv").write_text(TABLE, encoding="utf-8")
    files = [
        "--model",
        folder,
        "--source",
        "table.tsv",
        "--reference",
        "table.tsv",
        "--max_new_tokens",
        3,
    ]
    flags = [*files, "--perturb", "upper", "noise", "--output", "results.json"]
    status, _, errors = command("evaluate", *flags)
    assert status == 2 and errors.splitlines()[-1].startswith("error: perturb: table.tsv")
    status, _, errors = command("evaluate", *flags, "--source_lang", "en", "--target_lang", "fr")
    assert status == 0, errors
    perturbed = json.loads((work / "results.json").read_text(encoding="utf-8"))["perturbations"]
    assert [*perturbed] == ["none", "upper", "noise"]
    for group in perturbed.values():
        assert group["sentences"] == 1 and "tok:zh" in group["signatures"]["bleu"]
