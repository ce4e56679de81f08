"""`vanilla-transformer publish`: dry run, upload, errors, and no token in the output."""

import pytest

from tests.hub import conftest as publishing
from tests.hub.conftest import PRIVATE
from tests.hub.loopback_hub import TOKEN
from tests.interop.exports import require_onnx

hub, saved = publishing.hub, publishing.saved  # the fixtures


def test_dry_run_lists_files_without_requests(command, hub, saved):
    status, printed, errors = command("publish", saved.folder, "--repo-id", "me/x", "--dry-run")
    assert status == 0 and errors == "" and hub.requests == []
    lines = printed.splitlines()
    sizes = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in lines[1:-2]}
    assert sizes["model.safetensors"] == (saved.folder / "model.safetensors").stat().st_size
    assert {"config.json", "README.md", "modeling_vanilla_transformer.py"} < sizes.keys()
    assert lines[-2].split()[0].replace(",", "") == str(sum(sizes.values()))
    stays = lines[-1].removeprefix("not uploaded: ").split(", ")
    assert {"optimizer.pt", "train.en", ".env", "checkpoint-5/"} <= set(stays)
    assert not sizes.keys() & PRIVATE.keys()


def test_upload_prints_the_commit(command, hub, saved, caplog):
    flags = ["--private", "--branch", "v2", "--commit-message", "Second upload", "--max-shard-size", "20KB"]
    status, printed, errors = command(
        "publish", saved.folder, "--repo-id", "x", *flags, "--include", "train.en", "--license", "mit"
    )
    assert status == 0, errors
    repository = hub.repositories["me/x"]
    commit = repository.branches["v2"][-1]
    assert printed.strip() == f"{hub.endpoint}/me/x/commit/{commit.oid}"
    assert repository.private and commit.message == "Second upload"
    assert {"train.en", "model.safetensors.index.json"} <= commit.files.keys()
    assert "license: mit" in commit.files["README.md"].decode()
    output = printed + errors + caplog.text
    assert TOKEN not in output and not any(TOKEN.encode() in content for content in commit.files.values())


def test_token_argument_is_not_repeated(command, hub, saved):
    for wrong in (["--token", TOKEN], [f"--token={TOKEN}"], [TOKEN], [f"--private={TOKEN}"]):
        status, printed, errors = command("publish", saved.folder, "--repo-id", "x", *wrong)
        assert status == 2 and TOKEN not in printed + errors
    assert hub.requests == []


@pytest.mark.slow
def test_space_is_published_beside_the_model(command, hub, saved):
    require_onnx()
    status, printed, errors = command("publish", saved.folder, "--repo-id", "numbers", "--space")
    assert status == 0, errors
    model, space = hub.repositories["me/numbers"], hub.repositories["spaces/me/numbers"]
    assert [len(each.branches["main"]) for each in (model, space)] == [2, 2]
    files = space.branches["main"][-1].files
    assert {"index.html", "site.json", "model/config.json", "model/onnx/encoder_model_quantized.onnx"} < files.keys()
    card, oid = files["README.md"].decode(), space.branches["main"][-1].oid
    assert "models:\n- me/numbers\n" in card and "sdk: static" in card and "title: en → de" in card
    assert printed.splitlines()[1] == f"en → de: {hub.endpoint}/spaces/me/numbers/commit/{oid}"


@pytest.mark.slow
def test_dry_run_lists_the_changes_of_the_space(command, hub, saved):
    require_onnx()
    assert command("publish", saved.folder, "--repo-id", "me/x", "--space", "me/y")[0] == 0
    space = hub.repositories["spaces/me/y"].branches["main"]
    space[-1].files["files.txt"] += b"\nold.js"
    space[-1].files["old.js"] = b""
    before = [len(each.branches["main"]) for each in hub.repositories.values()]
    status, printed, _ = command("publish", saved.folder, "--repo-id", "x", "--dry-run", "--space", "y")
    assert status == 0 and printed.splitlines()[-1].endswith("static Space me/y; deleted there: old.js")
    assert [len(each.branches["main"]) for each in hub.repositories.values()] == before
