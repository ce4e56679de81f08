"""Optional libraries: each is in one extra, and a command without it says which in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.utils.errors import EXTRAS
from tests.interop.foreign import write_fsmt_folder, write_opus_folder
from tests.model_helpers import tiny_model
from vanilla_transformer_cli.main import SUBCOMMANDS

TRAIN = "train --train {0}/a.en {0}/a.de --test {0}/a.en {0}/a.de --max_steps 1 --use_cpu true"
TRAIN += " --generation_max_length 4 --output_dir {0}/"
SMALL = " --vocab_size 280 --d_model 16 --encoder_layers 1 --decoder_layers 1"
SMALL += " --encoder_ffn_dim 16 --decoder_ffn_dim 16"
BOARD = TRAIN + "board --report_to tensorboard" + SMALL
LORA = TRAIN + "lora --lora_r 2 --model_name_or_path {0}/model"
COMMANDS = [
    TRAIN + "run" + SMALL,
    BOARD,
    LORA,
    TRAIN + "opus_tuned --model_name_or_path {0}/opus",
    TRAIN + "fsmt_tuned --model_name_or_path {0}/fsmt",
    "translate --model {0}/model --input {0}/a.en",
    "translate --model {0}/model --input {0}/a.en --paragraphs",
    "translate --model {0}/opus --input {0}/a.en --max_new_tokens 2",
    "serve --model en-de={0}/none",
    "translate --model {0}/model --input {0}/a.en --output {0}/o --shard 1/1",
    "merge --output {0}/o",
    "clean {0}/a.en {0}/a.de --output {0}/c.en {0}/c.de",
    "clean {0}/a.en {0}/a.de --output {0}/c.en {0}/c.de --detect --source_lang en --target_lang de",
    "distil --teacher {0}/opus --source_file {0}/a.en --output_dir {0}/distilled --batch_size 2",
    "evaluate --model {0}/opus --source {0}/a.en --reference {0}/a.de",
    "convert --from marian {0}/opus {0}/from_marian",
    "convert --from fsmt {0}/fsmt {0}/from_fsmt",
    "export --to ctranslate2 {0}/model {0}/ctranslate2",
    "export --to marian {0}/model {0}/marian",
    "export --to onnx {0}/model {0}/onnx",
    "export --to web {0}/model {0}/web",
    "export --to argos {0}/opus_folder {0}/x.argosmodel --languages en de",
    "translate --model {0}/model --input {0}/a.md",
    "publish {0}/model --repo-id me/x --dry-run",
    "average {0}/model {0}/model --output {0}/averaged",
    "attention --model {0}/model --sentence one --output {0}/attention.png",
    "predict --model {0}/model --input {0}/a.en",
    "train --train cmudict --max_steps 1 --output_dir {0}/phonemes --source_tokens chars --target_tokens words",
    "shortlist --model {0}/model --source {0}/a.en --target {0}/a.de --output {0}/shortlist",
    "prepare --train {0}/a.en {0}/a.de --vocab_size 280 --output_dir {0}/data",
    "tokenizer {0}/a.en --vocab_size 280 --output_dir {0}/t",
    "recipes",
    "tokenizer {0}/a.en --vocab_size 270 --output_dir {0}/t2 --sentencepiece",
]

# What needs each library. onnxruntime only checks exports, and transformers reads some files without protobuf.
ALONE = {
    **dict.fromkeys(
        ("fastapi", "uvicorn", "pydantic", "python_multipart"), "serve --model en-de={0}/model"
    ),
    "prometheus_client": "serve --model en-de={0}/model",
    "sentencepiece": "convert --from marian {0}/opus {0}/m",
    "sacremoses": "convert --from fsmt {0}/fsmt {0}/f",
    "sentencex": "translate --model {0}/model --input {0}/a.en --paragraphs",
    "markdown_it": "translate --model {0}/model --input {0}/a.md --output {0}/b.md",
    **dict.fromkeys(("onnx", "onnxscript"), "export --to onnx {0}/model {0}/onnx"),
    "ctranslate2": "export --to ctranslate2 {0}/model {0}/ct2",
    "tensorboard": BOARD,
    "peft": LORA,
    "ray": "translate --model {0}/model --input {0}/a.en --output {0}/o --ray local",
    "matplotlib": "attention --model {0}/model --sentence one --output {0}/attention.png",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hidden")
    write_opus_folder(folder / "opus")
    write_fsmt_folder(folder / "fsmt")
    tokenizer = train_tokenizer(["one two three"] * 3, 280)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    save_tokenizers(folder / "model", tokenizer)
    for name in ("a.en", "a.de", "a.md"):
        (folder / name).write_text("one two\nthree\n" * 5)
    return folder


def test_every_subcommand_is_tried() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(SUBCOMMANDS)


def test_extras_are_those_of_the_project(repository: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = {
        name.replace("-", "_").removesuffix(
            "_py"
        ): extra  # markdown-it-py is imported as markdown_it
        for extra, requirements in extras.items()
        if extra not in ("dev", "docs")
        for name in re.findall(r"^([\w-]+)>=", "\n".join(requirements), re.MULTILINE)
    }
    assert optional == EXTRAS


@pytest.mark.slow
@pytest.mark.parametrize("libraries", [",".join(EXTRAS), *ALONE])
def test_hidden_library_is_named_as_its_extra(
    libraries: str, folder: Path, repository: Path, tmp_path: Path
) -> None:
    """All of them, in every command, and each of them in the command that needs it."""
    link = tmp_path / "work"  # each library writes into folders of its own
    link.mkdir()
    for path in folder.iterdir():
        (link / path.name).symlink_to(path)
    alone = libraries in ALONE
    lines = [ALONE[libraries]] if alone else COMMANDS
    commands = [line.format(link).split() for line in lines]
    script = [sys.executable, "-m", "tests.hidden_library", libraries, json.dumps(commands)]
    environment = os.environ | {"PYTHONPATH": f"{repository}:{repository / 'scripts'}"}
    process = subprocess.run(
        script, capture_output=True, text=True, env=environment, cwd=repository, timeout=900
    )
    results: list[Any] = [
        json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")
    ]
    assert len(results) == len(commands), process.stderr
    extras = {EXTRAS[libraries]} if alone else set(EXTRAS.values())
    refused = 0
    for command, (status, errors) in zip(commands, results, strict=True):
        if status == 0 or "no such f" in errors:  # argos, of a folder that is not there
            continue
        assert status == 2, (command, status, errors)
        assert "Traceback" not in errors, (command, errors)
        (error,) = (line for line in errors.splitlines() if line.startswith("error: "))
        assert any(f'pip install ".[{extra}]"' in error for extra in extras), (command, errors)
        refused += 1
    assert refused >= (1 if alone else 12)
