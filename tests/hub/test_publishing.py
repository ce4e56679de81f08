"""Publishing with the real client to a Hub on loopback: one commit of the right files, also after network errors."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM

import hf_vanilla_transformer
from hf_vanilla_transformer.hub import model_files
from hf_vanilla_transformer.hub.card import SECRET, _public_text
from hf_vanilla_transformer.hub.publishing import prepared_files, publish
from hf_vanilla_transformer.utils.errors import UserError
from tests.hub.conftest import PRIVATE
from tests.hub.loopback_hub import TOKEN
from tests.model_helpers import WITHOUT_THE_PACKAGE, error_of

CODE = {
    path.name
    for path in Path(hf_vanilla_transformer.__file__).parent.glob("*_vanilla_transformer.py")
}
PUBLIC = CODE | {
    *(
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "curve.png",
        "all_results.json",
    ),
    *("tokenizer.json", "tokenizer_config.json"),
    *("target_tokenizer/tokenizer.json", "target_tokenizer/tokenizer_config.json"),
}


def copy_of(folder: Path, where: Path) -> Path:
    return Path(shutil.copytree(folder, where / "copy"))


def written(files: dict[str, bytes], where: Path) -> Path:
    """Write a repository's files to a folder."""
    for name, content in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(content)
    return where


def test_publish_commits_the_model_files_once(hub, saved) -> None:
    before = {path: path.read_bytes() for path in saved.folder.rglob("*") if path.is_file()}
    address = publish(saved.folder, "translator", commit_message="First model")
    commits = hub.repositories["me/translator"].branches["main"]
    assert [commit.message for commit in commits] == ["initial commit", "First model"]
    assert address == f"{hub.endpoint}/me/translator/commit/{commits[-1].oid}"
    assert commits[-1].files.keys() == PUBLIC | {".gitattributes"}
    assert not hub.repositories["me/translator"].private
    for name in PUBLIC - {"README.md"}:
        assert commits[-1].files[name] == (saved.folder / name).read_bytes(), name
    assert {path: path.read_bytes() for path in saved.folder.rglob("*") if path.is_file()} == before


def test_prepared_files_list_what_is_not_uploaded(saved) -> None:
    files = prepared_files(saved.folder, "me/x")
    assert files.sizes().keys() == PUBLIC and files.sizes()["curve.png"] == len(b"a plot")
    whole = {"checkpoint-5/", "runs/", "notes/", ".git/"}
    assert set(files.left) == whole | {
        name for name in PRIVATE if not name.startswith(tuple(whole))
    }


@pytest.mark.parametrize(
    ("name", "pattern", "matches"),
    [
        ("a.json", "*.json", True),
        ("a/b.json", "*.json", False),
        ("a/b.json", "*/*.json", True),
        ("a/b/c.json", "*/*.json", False),
    ],
)
def test_star_of_a_pattern_ends_with_its_folder(name, pattern, matches) -> None:
    assert model_files._matches(name, ["other", pattern]) is matches


def test_card_has_the_name_on_the_hub(hub, saved) -> None:
    publish(saved.folder, "translator", license="apache-2.0")
    text = hub.files("me/translator")["README.md"].decode()
    card = ModelCard(text)
    assert card.data.model_name == "translator" and card.data.license == "apache-2.0"
    assert card.data.eval_results[0].metric_value == 12.3
    assert re.findall(r'^name = "(.*?)"', text, re.MULTILINE) == ["me/translator"] * 3
    assert "\n# translator\n" in text and '"run"' not in text


def test_foreign_card_is_kept_and_a_missing_one_created(hub, saved, tmp_path) -> None:
    folder = copy_of(saved.folder, tmp_path)
    (folder / "README.md").write_text("# Mine\n\nno front matter\n", encoding="utf-8")
    publish(folder, "foreign")
    assert hub.files("me/foreign")["README.md"] == (folder / "README.md").read_bytes()
    (folder / "README.md").unlink()
    publish(folder, "missing")
    card = ModelCard(hub.files("me/missing")["README.md"].decode())
    assert card.data.pipeline_tag == "translation" and 'name = "me/missing"' in card.text


# Network errors and refusals


@pytest.mark.parametrize(
    ("kind", "fault", "message"),
    [
        ("create", (429, {}), "later.*429"),
        ("yaml", (502, {}), "later.*502"),
        ("commit", (500, {}), "later.*500"),
        ("commit", "lost", "connection"),
        ("put", (400, {}), "400"),
    ],
)
def test_failed_upload_says_so_and_the_same_command_resumes(
    hub, saved, kind, fault, message
) -> None:
    hub.faults[kind] = [fault]
    with pytest.raises(UserError, match=message):
        publish(saved.folder, "x")
    publish(saved.folder, "x")
    (_, commit) = hub.repositories["me/x"].branches[
        "main"
    ]  # only one, even if its response was lost
    assert commit.files["model.safetensors"] == (saved.folder / "model.safetensors").read_bytes()
    arrived = hub.count("put")
    publish(saved.folder, "y")
    assert hub.count("put") == arrived  # the same content is not sent again


def test_unknown_token_and_missing_permissions_are_one_line_errors(hub, saved, monkeypatch) -> None:
    with pytest.raises(UserError, match="token.* google/x.*403"):
        publish(saved.folder, "google/x")
    hub.faults["commit"] = [(403, {})]
    with pytest.raises(UserError, match="token.* x: "):
        publish(saved.folder, "x")
    other = "hf_" + "unknownTOKEN" * 3
    monkeypatch.setenv("HF_TOKEN", other)
    with pytest.raises(UserError, match="token.*hf auth login") as raised:
        publish(saved.folder, "y")
    assert other not in str(raised.value)
    monkeypatch.delenv("HF_TOKEN")
    assert "token" in error_of(publish, saved.folder, "y")
    assert "me/y" not in hub.repositories


def test_offline_mode_and_unreachable_hub_are_one_line_errors(hub, saved, monkeypatch) -> None:
    constants = sys.modules["huggingface_hub.constants"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 " in error_of(publish, saved.folder, "x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in error_of(publish, saved.folder, "x")


def test_card_in_another_encoding_is_a_one_line_error(saved, tmp_path) -> None:
    folder = copy_of(saved.folder, tmp_path)
    (folder / "README.md").write_bytes("# Größe".encode("latin-1"))
    assert f"{folder / 'README.md'}: no UTF-8 text" in error_of(prepared_files, folder, "me/x")


# Existing repositories


def test_files_of_an_older_model_are_deleted_and_others_kept(hub, saved, tmp_path) -> None:
    publish(saved.folder, "x")
    hub.files("me/x")["samples.txt"] = b"unrelated"
    folder = copy_of(saved.folder, tmp_path)
    shutil.rmtree(folder / "target_tokenizer")
    (folder / "model.safetensors").unlink()
    model = copy.deepcopy(saved.model)
    model.resize_decoder_token_embeddings(model.config.vocab_size)  # one tokenizer serves both
    model.save_pretrained(folder, max_shard_size="20KB")
    publish(folder, "me/x")
    last = hub.repositories["me/x"].branches["main"][-1]
    gone = {
        "model.safetensors",
        "target_tokenizer/tokenizer.json",
        "target_tokenizer/tokenizer_config.json",
    }
    assert set(last.deleted) == gone
    assert last.files["samples.txt"] == b"unrelated"


def test_same_model_again_makes_no_commit(hub, saved) -> None:
    first = publish(saved.folder, "x")
    assert publish(saved.folder, "x") == first
    assert len(hub.repositories["me/x"].branches["main"]) == 2


def test_revision_creates_a_branch(hub, saved) -> None:
    for _ in range(2):
        publish(saved.folder, "x", revision="v2")
    assert hub.files("me/x", "v2").keys() >= PUBLIC
    assert hub.files("me/x").keys() == {".gitattributes"}


def test_private_repository_is_private(hub, saved) -> None:
    publish(saved.folder, "secret", private=True)
    assert hub.repositories["me/secret"].private
    publish(saved.folder, "secret", private=True)
    hub.make("me/open")
    with pytest.raises(UserError, match="me/open.*public"):
        publish(saved.folder, "open", private=True)
    assert hub.files("me/open").keys() == {".gitattributes"}


# Folders that are refused before any request


def damage_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def link(name: str, target: str):
    def make(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)

    return make


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (link("LICENSE", "/etc/passwd"), "/etc/passwd"),
        (link("README.md", "../../outside.md"), "README.md"),
        (link("target_tokenizer", "/etc"), "target_tokenizer"),
        (link("model.safetensors", "missing"), "model.safetensors"),
        (damage_weights, "model.safetensors"),
        (write("config.json", "{"), "config.json"),
        (write("README.md", f"see {TOKEN}"), "README.md"),
        (
            lambda folder: (folder / "layers_vanilla_transformer.py").unlink(),
            "layers_vanilla_transformer.py",
        ),
        (
            lambda folder: (folder / "pipeline_vanilla_transformer.py").unlink(),
            "pipeline_vanilla_transformer.py",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_invalid_folder_is_refused_without_requests(hub, saved, tmp_path, change, message) -> None:
    folder = copy_of(saved.folder, tmp_path)
    change(folder)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        publish(folder, "x")
    assert hub.requests == [] and TOKEN not in str(raised.value)


SECRETS = [
    "AKIA" + "A1" * 8,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3" * 10,
    "glpat-" + "aB3-" * 5,
    "AIza" + "aB3-_" * 7,
    "xoxb-" + "12345-" * 3,
    "sk-" + "aB3" * 16,
    "sk-ant-api03-" + "aB3-_" * 9,
    "eyJ" + "aB3" * 5 + ".eyJ" + "aB3" * 5 + "." + "aB3" * 5,
    "-----BEGIN " + "RSA PRIVATE KEY",
    "https://me:" + "word@example.org/a",
]


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret[:8])
def test_secrets_are_neither_published_nor_in_a_card(saved, tmp_path, secret) -> None:
    folder = copy_of(saved.folder, tmp_path)
    write("README.md", f"see {secret}")(folder)
    with pytest.raises(UserError, match=r"README\.md seems to contain a secret") as raised:
        prepared_files(folder, "me/x")
    assert secret not in str(raised.value) and SECRET.search(_public_text(f"see {secret}")) is None


def test_names_and_addresses_are_no_secrets() -> None:
    for text in (
        "opus-mt-en-sk-cs",
        "hf_vanilla_transformer",
        "https://example.org:80/a@b",
        "a task-of-the-" + "x" * 50,
    ):
        assert SECRET.search(text) is None


# Shards


def test_shards_are_uploaded_and_load(hub, saved, tmp_path) -> None:
    folder = copy_of(saved.folder, tmp_path)
    (folder / "model.safetensors").unlink()
    saved.model.save_pretrained(folder, max_shard_size="20KB")
    publish(folder, "x")
    files = hub.files("me/x")
    shards = sorted(path.name for path in folder.glob("model-*"))
    assert len(shards) > 1 and {name for name in files if name.startswith("model-")} == set(shards)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(
        written(files, tmp_path / "downloaded")
    ).state_dict()
    assert all(tensor.equal(loaded[name]) for name, tensor in saved.model.state_dict().items())
    (folder / shards[0]).unlink()
    with pytest.raises(UserError, match=shards[0]):
        publish(folder, "x")


# Downloads

DOWNLOAD = """
import json

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

name, sentences = "me/translator", json.loads(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
source = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
target = AutoTokenizer.from_pretrained(name, subfolder="target_tokenizer")
ids = model.generate(**source(sentences, padding=True, return_tensors="pt"))
translate = pipeline(model=name, trust_remote_code=True, device="cpu")
print(json.dumps({
    "ids": ids.tolist(),
    "texts": target.batch_decode(ids, skip_special_tokens=True),
    "pipeline": translate(sentences, batch_size=3),
}))
"""


@pytest.mark.slow
def test_download_without_the_package_gives_the_same_translations(hub, saved, tmp_path) -> None:
    publish(saved.folder, "translator")
    sentences = ["one two", "three", "two one three"]
    (tmp_path / "download.py").write_text(WITHOUT_THE_PACKAGE + DOWNLOAD, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
    }
    # -I: neither the working directory nor PYTHONPATH
    command = [sys.executable, "-I", "download.py", json.dumps(sentences)]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    batch = saved.source(sentences, padding=True, return_tensors="pt")
    ids = saved.model.generate(**batch)
    assert found["ids"] == ids.tolist()
    assert found["texts"] == saved.target.batch_decode(ids, skip_special_tokens=True)
    assert [each["translation_text"] for each in found["pipeline"]] == found["texts"]
    assert len(set(found["texts"])) > 1 and hub.count("resolve") > 0


def test_push_to_hub_of_transformers_uploads_a_model_that_loads(hub, saved, tmp_path) -> None:
    # `model.push_to_hub` and `tokenizer.push_to_hub`: one commit each, without a card of this package
    saved.model.push_to_hub("own")
    saved.source.push_to_hub("own")
    files = hub.files("me/own")
    assert files.keys() >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    }
    assert files.keys() & PRIVATE.keys() == set()
    folder = written(files, tmp_path / "downloaded")
    batch = saved.source(["one two"], return_tensors="pt")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    assert loaded.generate(**batch).equal(saved.model.generate(**batch))
