"""The README tells the truth: its Python runs, its commands parse, its files and classes exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.recipes import parse_recipe

PACKAGE = "hf_vanilla_transformer"


@pytest.fixture(scope="module")
def readme():
    return (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def section(readme, title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)[1]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """A working directory with what the quickstart leaves, only smaller and untrained."""
    tokenizer = train_tokenizer(["one million eine Million", "two hundred zweihundert"] * 3, 300)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    config = VanillaTransformerConfig(vocab_size=len(tokenizer), **sizes, **heads)
    folder = tmp_path / "runs" / "quickstart"
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_python_runs_from_top_to_bottom(readme, quickstart, tmp_path, capsys):
    namespace: dict = {}
    code = blocks(readme, "python")
    assert len(code) >= 3
    for number, block in enumerate(code, start=1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), namespace)
        if number == 1:
            printed = capsys.readouterr().out.strip().splitlines()[-1]
            assert len(eval(printed)) == 2  # a translation for each of the two sentences
    assert (tmp_path / "runs" / "fine_tuned" / "model.safetensors").is_file()
    assert namespace["trainer"].state.global_step == 20
    assert namespace["config"].encoder_layers == 6 and namespace["model"].config.vocab_size == 8000


def test_every_script_exists(readme, repository):
    named = set(re.findall(r"scripts/[\w/.]+\.(?:py|sh|yaml)", readme))
    assert {"scripts/quickstart.sh", "scripts/test.sh", "scripts/train.py", "scripts/translate.py"} <= named
    assert [name for name in sorted(named) if not (repository / name).is_file()] == []


def commands(readme, script):
    lines = "\n".join(blocks(readme, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if f"scripts/{script}" in line]


def test_the_training_commands_are_recipes_and_fields(readme, repository, monkeypatch):
    monkeypatch.chdir(repository)
    found = commands(readme, "train.py")
    assert found
    for words in found:
        _, data, run = parse_recipe(words[words.index("scripts/train.py") + 1 :])
        assert run.output_dir == "runs/mine" and data.train_source_file == "train.en.gz"


@pytest.mark.parametrize("script", ["translate.py", "evaluate_translation.py", "plot_attention.py"])
def test_the_other_commands_have_the_flags_that_are_named(readme, repository, script):
    source = "".join((repository / "scripts" / name).read_text() for name in (script, "translate.py"))
    found = commands(readme, script)
    assert found
    flags = {word for words in found for word in words if word.startswith("--")}
    assert "--model" in flags and [flag for flag in sorted(flags) if f'"{flag}"' not in source] == []


def test_every_name_in_the_table_of_sections_exists(readme, repository):
    source = "\n".join(path.read_text(encoding="utf-8") for path in (repository / PACKAGE).rglob("*.py"))
    rows = re.findall(r"^\| (§|Table).*?\|(.*)\|$", section(readme, "The paper, section by section"), re.MULTILINE)
    names = [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 12
    for name in names:
        if name == "inverse_sqrt":  # transformers' own
            continue
        for part in name.strip(".").split("."):
            assert re.search(rf"(def|class) {part}\b|self\.{part}\b|\b{part}: ", source), name


def test_nothing_is_left_to_fill_in(readme):
    assert re.findall(r"@@\w+@@|TODO|FIXME", readme) == []
