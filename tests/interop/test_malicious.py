"""Malicious files of other toolkits: each is refused in one line and at once, with little memory, and nothing is run.

The files of tests/interop/test_untrusted.py are damaged. These are complete, and ask for too much.
"""

import io
import json
import os
import re
import resource
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import export
from tests.interop.checkpoints import fairseq, joeynmt, marian_npz
from tests.interop.exports import write_model
from tests.interop.foreign import write_fsmt_folder, write_opus_folder
from tests.model_helpers import error_of

SECONDS, BYTES = 60, 2**30
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


def nested_list(depth: int = 30) -> list:
    """Small in memory and in a file, 2^depth items as text."""
    inner: list = ["x"]
    for _ in range(depth):
        inner = [inner, inner]
    return inner


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Less time and memory than the file asks for."""
    start = time.monotonic()
    before = peak()
    yield
    assert time.monotonic() - start < SECONDS
    assert peak() - before < BYTES


def peak() -> int:
    """The most bytes of memory until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refused(source_format: str, source: Path, **options: Any) -> str:
    """The one-line error. Nothing is written."""
    output = source.parent / "converted" / "model"
    message = error_of(convert, source_format, source, output, **options)
    assert message and len(message) < 600
    assert not output.exists()
    return message


@pytest.fixture
def joey(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of JoeyNMT, and its options to be changed."""
    joeynmt.save(tmp_path / "joey", joeynmt.weights((7, 6)))
    return tmp_path / "joey", joeynmt.options()


@pytest.mark.parametrize(
    "text",
    [
        ALIASES + "model: *m\ndata: *m\n",
        "&a a: *a\n",
        "a: " + "[" * 100_000,
        "{a: " * 5_000,
        "model: 2024-13-45\n",
        "model: " + "9" * 5_000 + "\n",
        "model: " + ":".join(["59"] * 300_000) + "\n",
        "? [a, b]\n: c\n",
    ],
)
def test_malicious_yaml(text: str, joey: tuple, tmp_path: Path) -> None:
    folder, _ = joey
    (folder / "config.yaml").write_text(text)
    assert "no configuration of JoeyNMT" in refused("joeynmt", folder)
    arrays = marian_npz.weights((9, 9))
    arrays["special:model.yml"] = np.frombuffer(text.encode() + b"\0", dtype=np.int8)
    np.savez(tmp_path / "model.npz", **arrays)
    if text[0] not in "?{":  # a mapping without any option of the architecture
        refused("marian-npz", tmp_path / "model.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.encoder.num_heads", "four"),
        ("model.encoder.num_heads", 0),
        ("model.encoder.num_heads", 10**400),
        ("model.decoder.activation", ["relu"]),
        ("model.decoder.activation", "no_such_activation"),
        ("model.decoder.dropout", "much"),
        ("model.decoder.embeddings", 7),
        ("testing.beam_size", "many"),
        ("testing.beam_size", 0),
        ("testing.beam_alpha", float("nan")),
        ("testing.max_output_length", {"a": 1}),
        ("data.src.tokenizer_cfg", [1]),
        ("data.src.level", 3),
        ("data.special_symbols", {"lang_tags": [["x"]]}),
        ("data.special_symbols", {"unk_token": 5}),
    ],
)
def test_malicious_joeynmt_options(name: str, value: Any, joey: tuple) -> None:
    folder, given = joey
    *sections, last = name.split(".")
    section = given
    for each in sections:
        section = section[each]
    section[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(given))
    assert last in refused("joeynmt", folder) or value == "no_such_activation"


@pytest.mark.parametrize(
    "options",
    [
        {"adaptive_softmax_cutoff": nested_list()},
        {"encoder_embed_dim": nested_list()},
        {"arch": nested_list()},
        {"activation_fn": ["relu"]},
        {"encoder_attention_heads": "four"},
        {"encoder_attention_heads": 0},
        {"dropout": "much"},
        {"source_lang": nested_list()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_malicious_fairseq_options(options: dict, tmp_path: Path) -> None:
    fairseq.save(tmp_path / "model.pt", fairseq.weights(9, 8), **options)
    assert next(iter(options)).replace("_", "-") in refused(
        "fairseq", tmp_path / "model.pt"
    ).replace("_", "-")


def test_malicious_fairseq_language_cannot_leave_the_folder(tmp_path: Path) -> None:
    fairseq.write_dictionaries(tmp_path, {"a": [*"abcde"], "b": [*"abcd"]})
    file = tmp_path / "in" / "model.pt"
    fairseq.save(
        file,
        fairseq.weights(9, 8),
        source_lang="x/../../dict.a",
        target_lang="x/../../dict.b",
    )
    assert "without a tokenizer" in convert("fairseq", file, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["encoder.layers.3000000.fc1.bias", f"encoder.layers.{'9' * 5000}.fc1.bias"]
)
def test_malicious_layer_numbers(name: str, tmp_path: Path) -> None:
    model = fairseq.weights(9, 8) | {name: torch.ones(fairseq.FFN)}
    fairseq.save(tmp_path / "model.pt", model)
    assert name[:30] in refused("fairseq", tmp_path / "model.pt")


def strided(path: Path, whole: Any) -> None:
    whole["model"]["encoder.embed_tokens.weight"] = torch.zeros(1).expand(10**13, fairseq.D)
    torch.save(whole, path)


def compressed(path: Path, whole: Any) -> None:
    """A gigabyte of zeros in a megabyte, as `torch.load` would read it."""
    torch.save(whole, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def torchscript(path: Path, whole: Any) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (strided, "larger than"),
        (compressed, "compressed"),
        (torchscript, "TorchScript.*state_dict"),
    ],
)
def test_malicious_torch_archives(write: Callable, message: str, model_file: Path) -> None:
    fairseq.save(model_file, fairseq.weights(9, 8))
    write(model_file, torch.load(model_file, weights_only=False))
    found = refused("fairseq", model_file)
    assert re.search(message, found)
    assert not re.search("weights_only|damaged", found)


def npy_header(shape: tuple[int, ...]) -> bytes:
    text = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npy_of_objects() -> bytes:
    with io.BytesIO() as file:
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
        return file.getvalue()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: npy_header((10**13, 64)) + b"\0" * 64, "Unable to allocate"),
        (lambda: npy_header((10**7,)) + bytes(4 * 10**7), "larger than"),
        (npy_of_objects, "Python objects"),
    ],
    ids=["declared", "expanded", "objects"],
)
def test_malicious_npz(write: Callable[[], bytes], message: str, tmp_path: Path) -> None:
    """Arrays of which the file holds little: of a declared shape, or zeros that shrink by a factor of a thousand."""
    marian_npz.save(tmp_path / "model.npz", marian_npz.weights((9, 9)))
    with zipfile.ZipFile(tmp_path / "model.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("surplus.npy", write())
    assert message in refused("marian-npz", tmp_path / "model.npz")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "- &a [*a]\n",
        "a: " + "9" * 5000,
        "a: b\n",
        "? {a: b}\n: 0\n",
        ALIASES,
    ],
)
def test_malicious_marian_vocabulary(content: str, tmp_path: Path) -> None:
    marian_npz.save(tmp_path / "model.npz", marian_npz.weights((9, 9)))
    (tmp_path / "vocab.yml").write_text(content)
    assert "vocab.yml" in refused(
        "marian-npz", tmp_path / "model.npz", source_vocabulary=tmp_path / "vocab.yml"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transformer_heads": "four"}, "transformer-heads=four"),
        ({"transformer_heads": 0}, "transformer-heads=0"),
        ({"transformer_ffn_activation": ["relu"]}, "transformer-ffn-activation="),
        ({"transformer_dropout": "x"}, "transformer-dropout="),
        ({"vocabs": {"a": 1}}, "vocabs="),
        ({"version": 7}, "version="),
    ],
)
def test_malicious_marian_options(options: dict, message: str, tmp_path: Path) -> None:
    extra = {"transformer_ffn_activation": "gelu"} if "version" in options else {}
    marian_npz.save(tmp_path / "model.npz", marian_npz.weights((9, 9)), **extra, **options)
    assert message in refused("marian-npz", tmp_path / "model.npz")


def test_malicious_marian_options_of_decoding(tmp_path: Path) -> None:
    marian_npz.save(tmp_path / "in" / "model.npz", marian_npz.weights((9, 9)))
    for text in (
        "beam-size: many",
        "normalize: [1]",
        "models: 3",
        "models: [a.npz, b.npz]",
        "models: [../../x.npz]",
    ):
        (tmp_path / "in" / "decoder.yml").write_text(text)
        refused("marian-npz", tmp_path / "in")


PEERS = {"marian": write_opus_folder, "fsmt": write_fsmt_folder}


def write_ours(folder: Path) -> None:
    write_model(folder, position_encoding_type="learned", max_position_embeddings=64)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that can be converted or exported, each to be copied and changed."""
    folders = {name: tmp_path_factory.mktemp(name) / "in" for name in (*PEERS, "ours")}
    for name, folder in folders.items():
        PEERS.get(name, write_ours)(folder)
    return folders


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder_layers", 300_000),
        ("decoder_layers", 10**400),
        ("encoder_attention_heads", "four"),
        ("encoder_attention_heads", 0),
        ("activation_function", ["relu"]),
        ("activation_function", "no_such_activation"),
        ("d_model", -1),
        ("model_type", ["marian"]),
    ],
)
def test_malicious_configuration_of_transformers(name, field, value, good, tmp_path):
    shutil.copytree(good[name], tmp_path / "in")
    other = {"encoder_layers": "num_hidden_layers"}.get(field, field)
    set_fields(tmp_path / "in", {field: value, other: value})
    refused(name, tmp_path / "in")


def test_malicious_number_of_positions_allocates_no_table(
    good: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(good["marian"], tmp_path / "in")
    set_fields(tmp_path / "in", {"max_position_embeddings": 50_000_000})
    convert("marian", tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", '{"a": ' * 100_000),
        ("config.json", '{"model_type": ' + "9" * 5000 + "}"),
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", '{"num_beams": "many"}'),
        ("generation_config.json", '{"max_length": [[1]]}'),
        ("generation_config.json", '{"early_stopping": {"a": 1}}'),
        ("generation_config.json", '{"max_new_tokens": -4}'),
        ("vocab.json", "[" * 100_000),
        ("vocab.json", '["a"]'),
        ("tokenizer_config.json", '{"a": ' * 100_000),
        ("source.spm", ""),
        ("source.spm", "x" * 1000),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../../secret.safetensors"}}'),
        ("model.safetensors.index.json", '{"weight_map": [1]}'),
    ],
)
def test_malicious_files_of_an_opus_folder(
    file: str, content: str, good: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(good["marian"], tmp_path / "in")
    if "index" in file:
        (tmp_path / "in" / "model.safetensors").unlink()
    (tmp_path / "in" / file).write_text(content)
    refused("marian", tmp_path / "in")


def not_exported(to: str, good: Path, folder: Path, change: Callable[[Path], object]) -> str:
    """The one-line error of the export of a changed copy of a model folder. Nothing is written."""
    change(shutil.copytree(good, folder / "model"))
    error = error_of(export, to, folder / "model", folder / "out")
    assert not (folder / "out").exists()
    return error


def set_fields(folder: Path, fields: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_ffn_dim": 64}, "fc1"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantization_config"),
        ({"encoder_attention_heads": 0}, "encoder_attention_heads"),
        ({"activation_function": ["relu"]}, "activation_function"),
    ],
)
def test_malicious_model_folders_are_not_exported(fields, message, good, tmp_path):
    error = not_exported(
        "ctranslate2", good["ours"], tmp_path, lambda folder: set_fields(folder, fields)
    )
    assert message in error


@pytest.mark.parametrize(
    ("to", "file", "content"),
    [
        ("marian", "tokenizer.json", ""),
        ("marian", "tokenizer.json", "[" * 100_000),
        ("marian", "generation_config.json", '{"num_beams": "many"}'),
        *(
            (to, "generation_config.json", '{"bad_words_ids": [[99999]]}')
            for to in ("ctranslate2", "marian")
        ),
    ],
)
def test_malicious_files_of_a_model_folder_are_not_exported(to, file, content, good, tmp_path):
    not_exported(to, good["ours"], tmp_path, lambda folder: (folder / file).write_text(content))


SECRET = "0f8e2c"
LINKS = {
    "device": lambda folder: Path("/dev/zero"),
    "pipe": lambda folder: make_pipe(folder / "pipe"),
    "circle": lambda folder: folder / "circle",
    "nothing": lambda folder: folder / "missing",
    "folder": lambda folder: folder,
    "secret": lambda folder: make_secret(folder / "secret"),
}


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_secret(path: Path) -> Path:
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "vocab.json", "model.safetensors"]
)
@pytest.mark.parametrize("target", LINKS)
def test_malicious_links(file: str, target: str, good: dict[str, Path], tmp_path: Path) -> None:
    """A file of a checkpoint that is a link: its target is neither awaited, nor shown, nor written to."""
    (tmp_path / "outside").mkdir()
    pointed = LINKS[target](tmp_path / "outside")
    if target == "circle":
        pointed.symlink_to(pointed)
    shutil.copytree(good["marian"], tmp_path / "in")
    (tmp_path / "in" / file).unlink()
    (tmp_path / "in" / file).symlink_to(pointed)
    assert SECRET not in refused("marian", tmp_path / "in")
    assert target != "secret" or pointed.read_text() == SECRET


@pytest.mark.parametrize("target", ["device", "pipe"])
def test_malicious_links_in_a_model_folder_are_not_exported(target, good, tmp_path):
    def link(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.json").symlink_to(LINKS[target](tmp_path))

    assert "tokenizer.json" in not_exported("marian", good["ours"], tmp_path, link)


def test_malicious_links_in_an_output_folder_are_not_followed(
    good: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "outside.json").write_text("kept")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "outside.json")
    convert("marian", good["marian"], tmp_path / "out", True)
    assert (tmp_path / "outside.json").read_text() == "kept"
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
        == "vanilla_transformer"
    )
