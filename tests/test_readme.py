"""READMEs, guides and CONTRIBUTING: Python blocks run, commands parse, and files, flags and names in them exist."""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import io
import itertools
import re
import runpy
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest
from num2words import num2words

from hf_vanilla_transformer.interop.converting import FORMATS as IMPORT_FORMATS
from hf_vanilla_transformer.interop.exporting import FORMATS as EXPORT_FORMATS
from hf_vanilla_transformer.training.run.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
)
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.utils.shipped_models import model_folder, shipped_models
from scripts.benchmarks.decoding_engines import ENGINES as DECODING_ENGINES
from scripts.benchmarks.training import ENGINES as TRAINING_ENGINES
from tests.model_helpers import SMALL_SIZES, save_model, save_model_of_languages, slow
from tests.serving.running_server import running_server
from vanilla_transformer_cli.main import main as vanilla_transformer
from vanilla_transformer_cli.parsing import SHARED, recipe_path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla_transformer"
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "scripts" / "docs").glob("*.md")),
        *sorted((ROOT / "scripts" / "docs" / "zh").glob("*.md")),
        *(
            path
            for folder in (PACKAGE, ROOT / "scripts", ROOT / "tests")
            for path in sorted(folder.rglob("README.md"))
        ),
    ]
}
README = DOCUMENTS["README.md"]
# Tables with the flags of other toolkits.
OTHER_TOOLKITS = re.compile(r"^\| (?:refused|recipe) \|.*?(?=^$|\Z)", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The parts of every command in a bash block, without variables before it, comments and redirections."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        split = shlex.split(line, comments=True)
        for is_pipe, group in itertools.groupby(split, "|".__eq__):
            parts = [] if is_pipe else list(group)
            end = next(
                (index for index, part in enumerate(parts) if part in ("<", ">")), len(parts)
            )
            start = next(
                (index for index, part in enumerate(parts) if not re.match(r"[A-Z0-9_]+=", part)),
                end,
            )
            found += [parts[start:end]] if parts[start:end] else []
    return found


ALL_COMMANDS = [
    pytest.param(command, id=f"{name}: {' '.join(command)[:60]}")
    for name in DOCUMENTS
    for command in commands(DOCUMENTS[name])
]


def section(text: str, title: str) -> str:
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None, title
    return found[1]


def test_main_folders_have_a_readme():
    folders = ["", "hf_vanilla_transformer/interop/", "scripts/benchmarks/", "scripts/", "tests/"]
    assert {f"{folder}README.md" for folder in [*folders, "scripts/recipes/"]} <= DOCUMENTS.keys()


@pytest.fixture
def quickstart(tmp_path, in_tmp_path):
    """A working directory with the quickstart's model folder, small and untrained."""
    folder = save_model(
        tmp_path / "runs" / "quickstart",
        ["one million eine Million", "two hundred zweihundert"] * 3,
        vocab_size=300,
        **SMALL_SIZES,
    )
    return folder


def run_python(name, capsys):
    """Run the Python blocks of a document in one namespace. Return it, and the last line that each block printed."""
    namespace: dict = {"__name__": "__main__"}
    printed = []
    for number, block in enumerate(blocks(DOCUMENTS[name], "python"), start=1):
        exec(compile(block, f"{name}, Python block {number}", "exec"), namespace)
        lines = capsys.readouterr().out.strip().splitlines()
        assert {*re.findall(r"^print\(.*\)  # (.+)$", block, re.MULTILINE)} <= {*lines}
        printed.append((lines or [""])[-1])
    return namespace, printed


def test_python_of_readme_runs(quickstart, tmp_path, capsys):
    namespace, printed = run_python("README.md", capsys)
    assert printed[0] == SHOWN_BY_PYTHON[0].strip()
    translations = [each["translation_text"] for each in eval(printed[1])]
    assert len(translations) == 2 and all(isinstance(each, str) for each in translations)
    assert (tmp_path / "runs" / "fine_tuned" / "model.safetensors").is_file()
    assert namespace["trainer"].state.global_step == 20


# Flags that make the trainings of the first commands short, by the number of the command.
SHORTER = {
    2: "--numbers_size 40 --max_steps 2 --eval_steps 2 --save_steps 2 --d_model 16 --encoder_layers 1 "
    "--decoder_layers 1 --encoder_ffn_dim 16 --decoder_ffn_dim 16 --max_eval_samples 2 --max_test_samples 2",
    4: "--max_steps 2 --per_device_train_batch_size 2",
}

FIRST_COMMANDS = [
    arguments
    for title in ("Quick start", "Fine-tune")
    for executable, *arguments in commands(section(README, title))
    if executable == "vanilla-transformer" and arguments[0] != "predict"
]  # translate and serve with the shipped model, train, translate, and the fine-tuning

SHOWN_BY_COMMANDS = blocks(section(README, "Quick start"), "text")
SHOWN_BY_PYTHON = blocks(section(README, "Translate"), "text")


def test_first_command_translates_a_sentence(capsys, monkeypatch):
    (_, sentence), translate = commands(section(README, "Quick start"))[3:5]
    assert translate == ["vanilla-transformer", *FIRST_COMMANDS[0]]
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(f"{sentence}\n".encode()), encoding="utf-8")
    )
    with pytest.raises(SystemExit) as leaving:
        vanilla_transformer(FIRST_COMMANDS[0])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == SHOWN_BY_COMMANDS[0]


def run_first_commands(tmp_path, capfd):
    """Train, translate and fine-tune by the README's commands, as in an empty folder with two text files."""
    for name, lines in (
        ("input.en", "seven\ntwo hundred\n"),
        ("train.en", "".join(f"{num2words(n)}\n" for n in range(20))),
        ("train.de", "".join(f"{num2words(n, lang='de')}\n" for n in range(20))),
    ):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    for number, arguments in enumerate(FIRST_COMMANDS[2:], start=2):
        with pytest.raises(SystemExit) as leaving:
            vanilla_transformer([*arguments, *SHORTER.get(number, "").split()])
        assert leaving.value.code == 0, capfd.readouterr().err


def test_first_screen_trains_translates_and_fine_tunes(tmp_path, in_tmp_path, capfd):
    run_first_commands(tmp_path, capfd)
    for run in ("quickstart", "tuned"):
        assert (tmp_path / "runs" / run / "model.safetensors").is_file()
        assert (tmp_path / "runs" / run / "README.md").is_file()


@pytest.mark.slow  # a process that imports torch
def test_first_screen_serves(tmp_path):
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    assert FIRST_COMMANDS[1] == ["serve", "--model", "en_de"]
    with running_server(Path(model_folder("en_de")), tmp_path) as server:
        (form, answer), *_ = re.findall(
            r"^\$ curl (-d .*) http.*\n(.*)$",
            DOCUMENTS["scripts/docs/serving.md"],
            re.M,
        )
        data = "&".join(shlex.split(form.replace("-d ", "")))
        request = urllib.request.Request(f"{server.url}/translate", data.replace(" ", "+").encode())
        assert urllib.request.urlopen(request).read().decode() == answer


def test_quick_start_installs_the_tested_versions_without_cuda():
    _, torch, package, *_ = commands(section(README, "Quick start"))
    assert torch[:2] == package[:2] == ["pip", "install"]
    assert torch[-1].endswith("/whl/cpu") and package[2:4] == ["-c", "scripts/constraints.txt"]


def test_python_of_package_readme_runs(quickstart, capsys):
    namespace, printed = run_python("hf_vanilla_transformer/README.md", capsys)
    assert namespace["config"].encoder_layers == 6 and namespace["config"].vocab_size == 8000
    assert [len(eval(line)) for line in printed[1:3]] == [2, 2]
    assert "1 decoder layers of (B, H, T, S)" in printed
    assert namespace["model"].config.vocab_size == len(namespace["tokenizer"])
    assert f"{len(namespace['tokenizer'])} tokens: ['<2de> ', 'Ġtwo']" in "\n".join(printed)


# Short ones. Training takes seconds. test_docs.py compares the code of the Chinese editions in `TRANSLATED`.
GUIDES = ["first_translator", "serving", "your_data", "converting", "extending", "many_languages"]
GUIDES += ["zh/first_translator", "zh/your_data", "reactions", "phonemes", "scale"]
TRANSLATED = ["zh/reactions", "zh/phonemes"]


@pytest.mark.parametrize(
    "guide",
    [*GUIDES, *slow(*TRANSLATED, "fine_tuning")],  # two trainings of 20 updates
)
def test_python_of_guide_runs(guide, quickstart, capsys):
    if guide == "fine_tuning":
        pytest.importorskip("peft")
    if guide == "many_languages":
        save_model_of_languages(Path("runs/three"))
    for language in ("en", "de", "zh"):
        Path(f"train.{language}").write_text("one\ntwo\n", encoding="utf-8")
    namespace, printed = run_python(f"scripts/docs/{guide}.md", capsys)
    assert any(printed)


def test_python_of_no_other_document_is_left_out():
    with_python = {name for name, text in DOCUMENTS.items() if "```python" in text}
    guides = {f"scripts/docs/{guide}.md" for guide in (*GUIDES, *TRANSLATED, "fine_tuning")}
    # test_predict.py runs these
    cards = {f"hf_vanilla_transformer/models/{name}/README.md" for name in shipped_models()}
    # test_shipped_translator.py runs this
    everyday = "scripts/recipes/everyday/README.md"
    assert with_python == {
        "README.md",
        "hf_vanilla_transformer/README.md",
        everyday,
        *cards,
        *guides,
    }


class Parsed(BaseException):
    """Ends a script when its arguments are parsed. No `except Exception` catches it."""


@pytest.fixture
def parse(monkeypatch):
    """Parse the command line of a script or module without running the rest of it."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser, args=None, namespace=None):
        raise Parsed(parse_args(parser, args, namespace))

    def parse(run, command):
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(Parsed):
            run()

    return parse


def parse_script(path, arguments, parse):
    assert (ROOT / path).is_file(), path
    parse(lambda: runpy.run_path(str(ROOT / path), run_name="__main__"), [path, *arguments])


def parse_subcommand(arguments, parse):
    if arguments[0] in ("train", "prepare"):
        parse_recipe([recipe_path(arguments[1]), *arguments[2:]])
    else:
        parse(lambda: vanilla_transformer(arguments), [])


def parse_module(name, arguments, parse):
    if name == "vanilla_transformer_cli":
        return parse_subcommand(arguments, parse)
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    if spec.submodule_search_locations:  # a package, run by its __main__
        importlib.import_module(f"{name}.__main__").parse_arguments(arguments, f"python -m {name}")
        return
    if ".parse_args(" in Path(spec.origin).read_text(encoding="utf-8"):
        parse(importlib.import_module(name).main, [name, *arguments])
    else:
        assert arguments == []


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_command_parses(command, parse, monkeypatch):
    monkeypatch.chdir(ROOT)
    executable, *arguments = command
    if executable == "bash":
        assert Path(arguments[0]).is_file()
    elif executable == "source":
        assert arguments == [".venv/bin/activate"]
    elif executable in ("echo", "printf"):
        assert arguments[-1]
    elif executable == "python3":
        assert arguments == ["-m", "venv", ".venv", "&&", "source", ".venv/bin/activate"]
    elif executable == "pip" and arguments[1].startswith("torch"):
        assert arguments[1] in Path("scripts/constraints.txt").read_text("utf-8").splitlines()
        assert arguments[2:] == ["--index-url", "https://download.pytorch.org/whl/cpu"]
    elif executable == "pip":
        extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[-1])
        assert arguments[:3] == ["install", "-c", "scripts/constraints.txt"] and extras is not None
        for extra in (extras[1] or "").split(","):
            assert not extra or re.search(
                rf"^{extra} = \[", Path("pyproject.toml").read_text("utf-8"), re.M
            )
    elif executable == "vanilla-transformer":
        parse_subcommand(arguments, parse)
    elif executable == "accelerate":
        launcher = importlib.import_module("accelerate.commands.launch").launch_command_parser()
        launched = launcher.parse_args(arguments[1:])
        assert launched.config_file is None or Path(launched.config_file).is_file()
        assert launched.module
        parse_module(launched.training_script, launched.training_script_args, parse)
    else:
        assert executable in ("python", ".venv/bin/python"), command
        if arguments[0] == "-m":
            parse_module(arguments[1], arguments[2:], parse)
        else:
            parse_script(arguments[0], arguments[1:], parse)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_exist(name):
    text = DOCUMENTS[name]
    named = re.findall(
        r"(?<![\w/.])(?:scripts|tests|hf_vanilla_transformer)/[\w/.]+\.(?:py|sh|yaml)", text
    )
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.fixture(scope="module")
def known_flags():
    """The flags of all commands, and the fields of recipes."""
    fields = {
        each.name
        for group in (ModelArguments, DataArguments, RunArguments)
        for each in dataclasses.fields(group)
    }
    folders = (PACKAGE, ROOT / "scripts", ROOT / "tests")
    sources = [path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")]
    flags = {flag for source in sources for flag in re.findall(r'"(--[a-z][\w-]*)["=]', source)}
    calls = [
        node
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_flags"
    ]
    fields |= {keyword.arg for call in calls for keyword in call.keywords}
    return flags | {f"--{name}" for name in (*fields, *SHARED, "help")}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_in_prose_exist(name, known_flags):
    written = {
        flag
        for code in re.findall(r"`([^`]+)`", re.sub(OTHER_TOOLKITS, "", prose(DOCUMENTS[name])))
        for flag in re.findall(r"--[a-z][\w-]*", code)
    }
    assert sorted(written - known_flags) == []


def test_benchmark_engines_exist():
    text = "".join(DOCUMENTS.values())
    engines = set(re.findall(r"\b(?:ours|marian|ctranslate2)_\w*(?:fp32|bf16|int8)\b", text))
    assert len(engines) > 6
    assert sorted(engines - {*DECODING_ENGINES, *TRAINING_ENGINES}) == []


def test_recipes_are_all_described():
    recipes = {path.name for path in (ROOT / "scripts" / "recipes").glob("*.yaml")}
    assert [
        name for name in sorted(recipes) if name not in DOCUMENTS["scripts/recipes/README.md"]
    ] == []


def test_formats_are_all_described():
    text = DOCUMENTS["hf_vanilla_transformer/interop/README.md"]
    assert [
        name for name in (*IMPORT_FORMATS, *EXPORT_FORMATS) if f"| `{name}` |" not in text
    ] == []


def test_names_in_the_table_of_sections_exist():
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    rows = re.findall(
        r"^\| (§|Table).*?\|(.*)\|$",
        section(DOCUMENTS["hf_vanilla_transformer/README.md"], "The paper, section by section"),
        re.MULTILINE,
    )
    names = [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 12
    for name in names:
        if name == "inverse_sqrt":  # of transformers
            continue
        for part in name.strip(".").split("."):
            assert re.search(rf"(def|class) {part}\b|self\.{part}\b|\b{part}: ", source), name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_is_left_to_fill_in(name):
    assert re.findall(r"@@\w+@@|TODO|FIXME", DOCUMENTS[name]) == []
