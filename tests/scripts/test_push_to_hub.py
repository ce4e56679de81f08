"""`vanilla-transformer publish`: dry run, upload, errors, and no token in the output."""

from tests.hub import conftest as publishing
from tests.hub.conftest import PRIVATE
from tests.hub.loopback_hub import TOKEN

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
    flags = ["--private", "--branch", "v2", "--commit-message", "Second upload", "--license", "mit"]
    status, printed, errors = command("publish", saved.folder, "--repo-id", "x", *flags)
    assert status == 0, errors
    repository = hub.repositories["me/x"]
    commit = repository.branches["v2"][-1]
    assert printed.strip() == f"{hub.endpoint}/me/x/commit/{commit.oid}"
    assert repository.private and commit.message == "Second upload"
    assert "license: mit" in commit.files["README.md"].decode()
    output = printed + errors + caplog.text
    assert TOKEN not in output and not any(
        TOKEN.encode() in content for content in commit.files.values()
    )


def test_token_argument_is_not_repeated(command, hub, saved):
    for wrong in (["--token", TOKEN], [f"--token={TOKEN}"], [TOKEN], [f"--private={TOKEN}"]):
        status, printed, errors = command("publish", saved.folder, "--repo-id", "x", *wrong)
        assert status == 2 and TOKEN not in printed + errors
    assert hub.requests == []
