"""The files that travel with a checkpoint, and somebody who has the checkpoint only."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports

import hf_vanilla_transformer
from hf_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerModel,
)
from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from tests.model_helpers import WITHOUT_THE_PACKAGE, padded, randomise, sentences, tiny_config, tiny_model

PACKAGE = Path(hf_vanilla_transformer.__file__).parent
SHIPPED = sorted(PACKAGE.glob("*_vanilla_transformer.py"))
THIRD_PARTY = {"torch", "transformers", "safetensors", "tokenizers"}

AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    "AutoModelForTextEncoding": "modeling_vanilla_transformer.VanillaTransformerEncoderModel",
    "AutoModelForSequenceClassification": "modeling_vanilla_transformer.VanillaTransformerForSequenceClassification",
}


def imports_of(path: Path) -> list[tuple[int, str, list[str]]]:
    """(dots, module, names) of every import in a file, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name, []) for alias in node.names]
    return found


def defined_in(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def needed_by(stem: str) -> set[str]:
    """A shipped file and all that it imports, directly or not."""
    found, waiting = set(), [stem]
    while waiting:
        stem = waiting.pop()
        if stem not in found:
            found.add(stem)
            waiting += [module for level, module, _ in imports_of(PACKAGE / f"{stem}.py") if level]
    return found


def test_the_expected_files_are_here() -> None:
    expected = {"configuration", "generation", "layers", "loss", "modeling", "stacks"}
    assert expected <= {path.stem.removesuffix("_vanilla_transformer") for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_imports_only_what_a_remote_user_has(path: Path) -> None:
    siblings = {sibling.stem: sibling for sibling in SHIPPED}
    for level, module, names in imports_of(path):
        if level == 0:
            root = module.split(".")[0]
            assert root != "__future__", "it switches off the checks of @strict"
            assert root in THIRD_PARTY or root in sys.stdlib_module_names, module
        else:
            assert level == 1, f"{'.' * level}{module}"
            assert module in siblings, f"from .{module} import {names}"
            assert set(names) <= defined_in(siblings[module]), f"from .{module} import {names}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_other_line_looks_like_a_relative_import(path: Path) -> None:
    # transformers searches the text, docstrings and comments included.
    seen = set(get_relative_imports(path))
    assert seen == {module for level, module, _ in imports_of(path) if level}


@pytest.mark.parametrize(
    "model_class",
    [
        VanillaTransformerModel,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerEncoderModel,
        VanillaTransformerForSequenceClassification,
    ],
)
def test_saving_writes_the_code(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    model_class(tiny_config()).save_pretrained(tmp_path)
    written = {path.stem for path in tmp_path.glob("*.py")}
    assert written == needed_by("modeling_vanilla_transformer")
    for stem in written:
        assert (tmp_path / f"{stem}.py").read_bytes() == (PACKAGE / f"{stem}.py").read_bytes()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["auto_map"] == AUTO_MAP
    # `pipeline()` takes the only entry for the task, so an encoder or a classifier must not have it
    assert ("custom_pipelines" in config) == (model_class is VanillaTransformerForConditionalGeneration)
    assert config["model_type"] == "vanilla_transformer"


STRANGER = """
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoModelForTextEncoding,
    AutoTokenizer,
)


def use(name, again, numbers):
    batch = load_file(numbers)
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True).eval()
    assert AutoConfig.from_pretrained(name, trust_remote_code=True).d_model == 32
    assert not type(model).__module__.startswith("hf_vanilla_transformer")
    ids, target = batch["input_ids"], batch["decoder_input_ids"]
    results = {"written": model.generate(ids, attention_mask=ids.ne(1).long(), max_new_tokens=8)}
    results["logits"] = model(input_ids=ids, decoder_input_ids=target).logits.detach()
    base = AutoModel.from_pretrained(name, trust_remote_code=True).eval()
    results["base"] = base(input_ids=ids, decoder_input_ids=target).last_hidden_state.detach()
    encoder = AutoModelForTextEncoding.from_pretrained(name, trust_remote_code=True).eval()
    results["encoder"] = encoder(ids).last_hidden_state.detach()
    classifier = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True, num_labels=3)
    assert classifier(ids).logits.shape == (2, 3)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    words = tokenizer(["two hundred and thirty-four"], return_tensors="pt")
    assert tokenizer.decode(words["input_ids"][0], skip_special_tokens=True) == "two hundred and thirty-four"
    results["words"] = words["input_ids"]
    results["translation"] = model.generate(**words, max_new_tokens=8)
    model.train()(input_ids=ids, labels=target).loss.backward()
    model.save_pretrained(again)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, numbers)


for place in range(1, len(sys.argv), 3):
    use(*sys.argv[place : place + 3])
"""


def put_into_hub_cache(folder: Path, home: Path, name: str) -> None:
    """Lay a model folder out as `huggingface_hub` leaves it: blobs, and a snapshot that links them."""
    repository, revision = home / "hub" / f"models--{name.replace('/', '--')}", "1" * 40
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = repository / "snapshots" / revision / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")


@torch.no_grad()
def test_checkpoint_works_without_the_package(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=320, lm_head_bias=True, label_smoothing=0.1)
    tokenizer = train_tokenizer(["two hundred and thirty-four", "zweihundertvierunddreißig"] * 9, vocab_size=320)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    repository = "somebody/translator-1.0"  # a dot, which no Python module's name can have
    put_into_hub_cache(folder, tmp_path / "home", repository)
    batch = {"input_ids": padded(sentences([6, 3])), "decoder_input_ids": torch.tensor(sentences([5, 5], seed=1))}
    (tmp_path / "stranger.py").write_text(WITHOUT_THE_PACKAGE + STRANGER, encoding="utf-8")
    # -I: neither the working directory nor PYTHONPATH
    command = [sys.executable, "-I", "stranger.py"]
    places = [
        (name, tmp_path / f"again-{i}", tmp_path / f"numbers-{i}") for i, name in enumerate((folder, repository))
    ]
    for name, again, numbers in places:
        save_file(batch, numbers)
        command += [str(name), str(again), str(numbers)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr

    outputs = model.model(**batch)
    written = model.generate(batch["input_ids"], attention_mask=batch["input_ids"].ne(1).long(), max_new_tokens=8)
    words = tokenizer(["two hundred and thirty-four"], return_tensors="pt")
    for _, again, numbers in places:
        found = load_file(numbers)
        assert found["logits"].equal(model(**batch).logits)
        assert found["base"].equal(outputs.last_hidden_state)
        assert found["encoder"].equal(outputs.encoder_last_hidden_state)
        assert found["written"].tolist() == written.tolist()
        assert found["words"].equal(words["input_ids"])
        assert found["translation"].tolist() == model.generate(**words, max_new_tokens=8).tolist()
        # What the stranger saved is as good as what we saved.
        assert {path.name for path in again.glob("*.py")} == {path.name for path in folder.glob("*.py")}
        entries = [json.loads((each / "config.json").read_text())["custom_pipelines"] for each in (folder, again)]
        assert entries[0] == entries[1]
        assert AutoModelForSeq2SeqLM.from_pretrained(again).eval()(**batch).logits.equal(found["logits"])


def test_models_in_memory_are_independent_of_their_folder(tmp_path: Path) -> None:
    # Saving changes neither the configuration nor the weights.
    model = randomise(VanillaTransformerForConditionalGeneration(tiny_config()))
    before = model.config.to_dict(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    after = model.config.to_dict()
    changed = {name for name in before[0] | after if before[0].get(name) != after.get(name)}
    assert changed <= {"architectures", "dtype"}
    assert all(tensor.equal(before[1][name]) for name, tensor in model.state_dict().items())
