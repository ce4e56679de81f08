"""The command `vanilla-transformer`: its subcommands, their help, and the recipes that come with it."""

import dataclasses
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from torch import distributed

from hf_vanilla_transformer.inference.text_io import line_writer
from hf_vanilla_transformer.training.run.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
)
from tests.model_helpers import error_of
from vanilla_transformer_cli.main import SUBCOMMANDS, main, parse_arguments
from vanilla_transformer_cli.train import HELP


def test_command_without_arguments_lists_the_subcommands(command):
    status, printed, _ = command()
    assert status == 0
    listed = [
        line.split()[0] for line in printed.split("subcommands:\n")[1].split("\n\n")[0].splitlines()
    ]
    assert listed == list(SUBCOMMANDS)


def test_unknown_subcommand_is_one_line_with_the_nearest(command):
    status, _, errors = command("trnslate")
    assert (
        status == 2 and errors.startswith("error: trnslate: ") and errors.endswith(" translate?\n")
    )
    status, _, errors = command("wipe")
    assert status == 2 and errors.startswith("error: wipe: ") and " train, " in errors


def test_flag_before_the_subcommand_is_told_its_place(command):
    assert command("--model", "x", "translate") == (
        2,
        "",
        "error: translate: the subcommand comes first: vanilla-transformer translate …\n",
    )


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["recipes", "number_en_de"], "did you mean numbers_en_de?"),
        (["train", "number_en_de", "--output_dir", "x"], "did you mean numbers_en_de?"),
        (["predict", "--model", "g2p"], "did you mean g2p_en?"),
    ],
)
def test_name_that_is_nearly_known_gets_a_suggestion(command, arguments, hint):
    status, printed, errors = command(*arguments)
    assert status == 2 and printed == "" and errors.count("\n") == 1 and hint in errors


def test_version_is_that_of_the_package(command):
    import hf_vanilla_transformer

    assert command("--version") == (0, f"{hf_vanilla_transformer.__version__}\n", "")


@pytest.mark.parametrize(
    ("subcommand", "chosen", "expected"),
    [
        ("translate", None, "128"),
        ("serve", None, "128"),
        ("translate", "1000", "1000"),
        ("train", None, "64"),
        ("clean", None, None),
    ],
)
def test_kernel_cache_is_small_where_models_run(subcommand, chosen, expected, monkeypatch):
    variable, seen = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", []
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "64")  # restored afterwards
    monkeypatch.setenv(variable, chosen or "")
    if chosen is None:
        monkeypatch.delenv(variable)
    module = SimpleNamespace(
        parse_arguments=lambda arguments, prog: SimpleNamespace(),
        main=lambda parsed: seen.append(os.environ.get(variable)),
    )
    monkeypatch.setitem(sys.modules, f"vanilla_transformer_cli.{subcommand}", module)
    with pytest.raises(SystemExit):
        main([subcommand])
    assert seen == [expected]


class Holder:
    """An object that holds itself and another one, as a trainer holds its process group."""

    def __init__(self, held):
        self.itself = self
        self.held = held


def threads_of_gloo():
    tasks = Path("/proc/self/task").glob("*/comm")
    return [name for name in (task.read_text() for task in tasks) if "gloo" in name]


def test_subcommand_leaves_the_process_group(monkeypatch, tmp_path):
    def start(parsed):
        distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        Holder(distributed.group.WORLD)
        assert threads_of_gloo()

    module = SimpleNamespace(parse_arguments=lambda arguments, prog: SimpleNamespace(), main=start)
    monkeypatch.setitem(sys.modules, "vanilla_transformer_cli.train", module)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 0
    assert not distributed.is_initialized()
    assert not threads_of_gloo(), "they may abort a process that ends"


@pytest.mark.parametrize("subcommand", [None, *SUBCOMMANDS])
def test_help_imports_neither_torch_nor_the_package_and_takes_less_than_a_second(
    subcommand, repository, tmp_path
):
    code = (
        "import sys\nfrom vanilla_transformer_cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print({'torch', 'hf_vanilla_transformer'} & sys.modules.keys(), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-c", code, *([subcommand] if subcommand else []), "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env={"PYTHONPATH": str(repository / "scripts"), "PYTHONIOENCODING": "ascii"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0, process.stderr
    if subcommand is not None:
        assert f"usage: vanilla-transformer {subcommand} " in process.stdout
        assert f"\n  vanilla-transformer {subcommand} " in process.stdout, "it has an example"
    assert process.stderr == "set()\n"
    # CPU time, which other processes do not change
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_common_fields_of_train_are_fields_of_a_recipe():
    known = {
        each.name
        for group in (ModelArguments, DataArguments, RunArguments)
        for each in dataclasses.fields(group)
    }
    _, _, fields = HELP.partition("--help-all")
    shown = re.findall(r"^  --(\w+) \S", fields, re.MULTILINE)
    assert len(shown) == len(set(shown)) > 30
    named = re.findall(r"[a-z]+_\w+", fields)
    assert sorted({*shown, *named} - known) == []


def test_help_of_train_has_groups_a_recipe_and_an_example(command):
    status, printed, _ = command("train", "--help")
    assert status == 0 and printed.startswith(
        "usage: vanilla-transformer train [RECIPE] [--FIELD VALUE ...]\n"
    )
    for title in ("data", "model", "training", "evaluation"):
        assert f"\n{title}:\n" in printed
    assert "vanilla-transformer train numbers_en_de" in printed and "--help-all" in printed
    assert all(name in printed for name in ("TMX", "--source_column", "--train_weights"))
    assert "--fsdp" not in printed


@pytest.mark.parametrize(
    ("arguments", "start", "hint"),
    [
        # an unknown flag before a missing one
        (["translate", "--beam_size", "4"], "--beam_size: ", "--num_beams?"),
        (["translate", "--modle", "x"], "--modle: ", "--model?"),
        (["evaluate", "--tokenize", "none"], "--tokenize: ", "--bleu_tokenize?"),
        (["evaluate", "--lowercase"], "--lowercase: ", "--bleu_lowercase?"),
        (["average", "--qqqq"], "--qqqq: ", "--"),
        (["convert", "a", "b"], "", "--from"),
    ],
)
def test_wrong_flag_is_one_line_with_a_hint(command, arguments, start, hint):
    status, printed, errors = command(*arguments)
    assert status == 2 and printed == "" and errors.count("\n") == 1
    assert errors.startswith(f"error: {start}") and hint in errors and "--help" in errors


def test_flag_may_be_spelt_with_dashes_or_underscores(command, tmp_path):
    for flags in (["--repo-id", "x", "--dry-run"], ["--repo_id=x", "--dry_run"]):
        status, _, errors = command("publish", str(tmp_path), *flags)
        assert status == 2 and str(tmp_path) in errors


def test_recipes_are_listed_with_what_they_train(command, repository):
    status, printed, _ = command("recipes")
    files = {path.stem for path in (repository / "scripts" / "recipes").glob("*.yaml")}
    assert status == 0
    assert {line.split()[0] for line in printed.splitlines()} == {
        name for name in files if not name.startswith("accelerate_")
    }
    assert all(len(line.split()) > 3 and line[-1] in ".:" for line in printed.splitlines())
    assert "(34.5 BLEU on its lower-cased, tokenised" in printed and "tokenised\n" not in printed


def test_recipe_is_printed_as_a_file_that_can_be_edited(command, repository):
    status, printed, _ = command("recipes", "numbers_en_de")
    assert status == 0
    assert printed == (repository / "scripts" / "recipes" / "numbers_en_de.yaml").read_text(
        encoding="utf-8"
    )
    assert yaml.safe_load(printed)["numbers_size"] == 20_000


def test_repeated_flag_of_several_values_has_all_of_them() -> None:
    from vanilla_transformer_cli import clean, serve

    served = parse_arguments(
        serve, ["--model", "a", "--port", "1", "--model", "b", "c", "--port", "2"], "serve"
    )
    assert (served.model, served.port) == (["a", "b", "c"], 2)
    files = ["x.en", "x.de", "--output", "y.tsv"]
    cleaned = parse_arguments(
        clean, [*files, "--exclude", "a.en", "a.de", "--exclude=b.tsv"], "clean"
    )
    assert cleaned.exclude == ["a.en", "a.de", "b.tsv"] and cleaned.input == files[:2]
    assert parse_arguments(clean, files, "clean").exclude is None


SAME_FILE = {
    "translate": "translate --model m --input FILE --output SAME",
    "translate of a pair": "translate --model m --input other --score FILE --output SAME",
    "predict": "predict --model m --input FILE --output SAME",
    "clean": "clean FILE other --output SAME clean.de",
    "clean with another text": "clean other --exclude FILE --output SAME clean.de",
    "report of clean": "clean FILE other --output clean.en clean.de --report SAME",
    "pairs that clean drops": "clean FILE other --output clean.tsv --dropped SAME",
    "evaluate": "evaluate --hypothesis FILE --reference other --output SAME",
    "report of evaluate": "evaluate --hypothesis other --reference FILE --report SAME",
    "shortlist": "shortlist --model m --source FILE --target other --output SAME",
    "convert": "convert --from marian FILE SAME",
    "export": "export --to onnx FILE SAME",
    "average": "average FILE --output SAME",
    "attention": "attention --model FILE --sentence a --output SAME",
}


@pytest.mark.parametrize("name", SAME_FILE)
@pytest.mark.parametrize("way", ["same", "link", "hard link", "dots"])
def test_output_that_is_an_input_is_refused(command, tmp_path, monkeypatch, name, way):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.tsv"
    text.write_text("a\tb\n", encoding="utf-8")
    other = tmp_path / f"{way}.tsv"
    if way == "link":
        other.symlink_to(text)
    elif way == "hard link":
        os.link(text, other)
    same = {"same": "text.tsv", "dots": f"./{tmp_path.name}/../text.tsv"}.get(way, other.name)
    if way == "dots":
        (tmp_path / tmp_path.name).mkdir()
    words = SAME_FILE[name].split()
    status, _, errors = command(
        *[{"FILE": "text.tsv", "SAME": same}.get(word, word) for word in words]
    )
    assert status == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and "the same file" in errors
    assert text.read_text(encoding="utf-8") == "a\tb\n"


@pytest.mark.parametrize("name", sorted(SAME_FILE.keys() - {"convert", "export", "average"}))
def test_output_in_a_missing_folder_is_refused_before_anything_is_read(
    command, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    words = [
        {"FILE": "text.tsv", "SAME": "no/out.tsv"}.get(word, word)
        for word in SAME_FILE[name].split()
    ]
    line = "error: no/out.tsv: there is no folder no: make it, or name another file\n"
    assert command(*words) == (2, "", line) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(SAME_FILE.keys() - {"convert", "export", "average"}))
@pytest.mark.parametrize("output", ["out.txt.bz2", "out.XZ", "out.xlsx", "out.parquet.gz"])
def test_output_of_a_format_that_is_not_written_is_refused(
    command, tmp_path, monkeypatch, name, output
):
    monkeypatch.chdir(tmp_path)
    words = [
        {"FILE": "text.tsv", "SAME": output}.get(word, word) for word in SAME_FILE[name].split()
    ]
    status, out, errors = command(*words)
    assert (
        (status, out) == (2, "")
        and f"{output}: this format is not written" in errors
        and errors.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(SAME_FILE.keys() - {"convert", "export", "average"}))
def test_output_that_is_a_folder_is_refused_before_anything_is_read(
    command, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no").mkdir()
    words = [{"FILE": "text.tsv", "SAME": "no"}.get(word, word) for word in SAME_FILE[name].split()]
    status, out, errors = command(*words)
    assert (
        (status, out) == (2, "")
        and errors.endswith(" no is a folder: name a file\n")
        and errors.count("\n") == 1
    )
    assert error_of(line_writer("no").__enter__) == "output no is a folder: name a file"


@pytest.mark.parametrize(
    "arguments", [["recipes"], ["evaluate", "--hypothesis", "a", "--reference", "b"]]
)
def test_deleted_folder_is_one_line(command, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert command(*arguments) == (
        2,
        "",
        "error: the current folder was deleted: cd to another one\n",
    )


def test_two_outputs_in_one_file_are_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, errors = command(
        *["clean", "a.en", "a.de", "--output", "b.tsv", "--dropped", "./b.tsv"]
    )
    assert status == 2 and "the same file" in errors


def test_distilled_text_does_not_replace_its_source(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "train.target.txt"
    source.write_text("a\n", encoding="utf-8")
    words = ["distil", "--teacher", "m", "--source_file", "train.target.txt", "--output_dir", "."]
    status, _, errors = command(*words)
    assert status == 2 and "the same file" in errors


@pytest.mark.parametrize(
    "arguments", [["recipes"], ["evaluate", "--hypothesis", "h", "--reference", "r"]]
)
def test_results_are_not_lost_in_a_closed_output(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)  # as after `>&-`
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: standard output is closed: redirect it to a file\n"
