"""Errors of users: one line that names the argument and says what to do, from subcommands and public functions."""

import os
import re
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import Translator, VanillaTransformerConfig
from hf_vanilla_transformer.engine.continuous import ContinuousSearch
from hf_vanilla_transformer.hub.publishing import publish
from hf_vanilla_transformer.inference.text_io import input_lines, line_writer
from hf_vanilla_transformer.utils.errors import UserError, run_command
from tests.model_helpers import save_model, tiny_model
from vanilla_transformer_cli.main import SUBCOMMANDS, main

# A remedy, or the values that are possible. A path that does not exist needs none.
REMEDY = re.compile(
    r"\b(give|choose|name|write|did you mean|must be|needs|has|none of|least|no such|there is no)\b"
)

COMMANDS = [
    ("train --train no.en no.de --output_dir run", "train: no.en"),
    ("train --train text text --output_dir run --learning_rate -1", "learning_rate"),
    ("train --lerning_rate 1 --output_dir run", "lerning_rate"),
    ("prepare --train text text --output_dir model", "output_dir"),
    ("translate --model none", "none"),
    ("translate --model model --input text --batch_size 0", "batch_size"),
    ("translate --model model --beam_size 4", "--beam_size"),
    ("predict --model none", "none"),
    ("serve --model model", "--model"),
    ("serve --model en-de=model --port 99999", "--port"),
    (
        "translate --model model --input text --length_penalty nan",
        "length_penalty: must be a finite",
    ),
    (
        "translate --model model --input text --repetition_penalty inf",
        "repetition_penalty: must be a finite",
    ),
    (
        "translate --model model --input text --num_beams 99999999",
        "num_beams: must be at most 1,000",
    ),
    (
        "translate --model model --input text --max_new_tokens 99999999999999999999",
        "max_new_tokens: must be at most",
    ),
    (
        "predict --model model --input text --batch_size 99999999999999999999",
        "batch_size: must be at most",
    ),
    ("merge --output none", "none"),
    ("clean no.en no.de --output a b", "no.en"),
    ("clean text text --output a b --skip nothing", "skip"),
    ("clean text text --output a", "--output"),
    ("distil --teacher none --source_file text --output_dir out", "none"),
    ("evaluate --hypothesis text --reference short", "short"),
    ("evaluate --hypothesis text --reference text --bleu_tokenize 13b", "'13b'"),
    ("convert --from fairseq none.pt out", "none.pt"),
    ("convert --from marian model out --set heads", "--set"),
    ("export --to onnx none out", "none"),
    ("export --to ctranslate2 model out --quantization int3", "quantization"),
    ("publish none --repo-id me/x", "none"),
    ("publish model --repo-id a/b/c", "repo_id"),
    ("average --run none --last 1 --output out", "none"),
    ("average --run run --last 0 --output out", "last"),
    ("attention --model model --sentence one --layer 3 --output a.png", "layer"),
    ("shortlist --model model --source text --target short --output out", "short"),
    ("tokenizer text --vocab_size 99 --output_dir out", "vocab_size"),
    ("recipes nonsense", "nonsense"),
    ("prepare --train none.en none.de --output_dir out", "none.en"),
]


def check(message: str, name: str) -> None:
    assert re.fullmatch(r"\S.*\S", message)
    assert "Traceback" not in message
    assert name in message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model and two text files."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "text").write_text("one two\n" * 3, encoding="utf-8")
    (folder / "short").write_text("one two\n", encoding="utf-8")
    save_model(folder / "model", ["one two"] * 3, vocab_size=262)
    return folder


@pytest.mark.parametrize(("line", "name"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_error_of_a_command_is_one_line_with_the_argument_and_a_remedy(
    line, name, folder, command, monkeypatch
):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    status, printed, errors = command(*line.split())
    assert (status, printed) == (2, "")
    assert errors.startswith("error: ")
    assert errors.endswith("\n")
    check(errors.removeprefix("error: ").removesuffix("\n"), name)
    assert REMEDY.search(errors), f"it does not say what to do: {errors}"
    assert sorted(folder.rglob("*")) == before


def test_every_subcommand_has_an_error() -> None:
    assert {line.split()[0] for line, _ in COMMANDS} == SUBCOMMANDS.keys()


CALLS: dict[str, Callable[[Path], Any]] = {
    "bas": lambda model: VanillaTransformerConfig.from_preset("bas"),
    "do_sample": lambda model: ContinuousSearch(tiny_model(), do_sample=True),
    "n_best": lambda model: Translator.from_pretrained(model).translate_nbest(["a"], n_best=0),
    "hf.co/x": lambda model: publish(model, "hf.co/x/y"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_of_a_call_is_one_line_that_names_the_argument(name, folder):
    with pytest.raises((UserError, ValueError)) as raised:
        CALLS[name](folder / "model")
    check(str(raised.value), name)


# Standard output and input


@pytest.fixture
def printing_into(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Runs a command that prints into a file. Returns its exit status."""

    def run(opened: Any) -> Any:
        with opened:
            monkeypatch.setattr("sys.stdout", opened)
            with pytest.raises(SystemExit) as ended:
                run_command(lambda: print("text"))
            opened.flush()  # as Python does at its end
        return ended.value.code

    return run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_standard_output_is_one_line(
    printing_into: Any, capsys: pytest.CaptureFixture
) -> None:
    assert printing_into(open("/dev/full", "w")) == 2  # noqa: SIM115
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert "No space left" in errors
    assert errors.count("\n") == 1


def test_output_without_a_reader_is_no_error(
    printing_into: Any, capsys: pytest.CaptureFixture
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert printing_into(os.fdopen(writing, "w")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stream", "name"), [("stdin", "standard input"), ("stdout", "standard output")]
)
def test_closed_streams_are_one_line(
    stream: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"sys.{stream}", None)
    with pytest.raises(UserError, match=f"{name} is closed: name a file"):
        if stream == "stdin":
            next(input_lines())
        else:
            with line_writer():
                pass


def test_interrupt_while_libraries_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Interrupting(MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "hf_vanilla_transformer.utils.errors":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hf_vanilla_transformer.utils.errors")
    monkeypatch.setattr("sys.meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main(["merge", "--output", "x"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("name", ["a" * 300, "loop"])
def test_odd_names_of_files_are_one_line(
    name: str, folder: Path, command: Any, in_tmp_path: Any
) -> None:
    Path("loop").symlink_to("loop")
    Path("text").symlink_to(folder / "text")
    for line in (
        "predict --model NAME",
        f"translate --model {folder}/model --input NAME",
        "evaluate --hypothesis text --reference NAME",
        "evaluate --hypothesis NAME --reference text --compare NAME",
        f"serve --model {folder}/model --api_key_file NAME",
        "predict --model g2p_en --input text --output NAME",
    ):
        status, printed, errors = command(*line.replace("NAME", name).split())
        assert (status, printed) == (2, ""), errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
