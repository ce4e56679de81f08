"""A static Space with the real client on a Hub on loopback: one commit, with a card that links the model."""

from pathlib import Path

import pytest
from huggingface_hub import RepoCard

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.hub.space import publish_space

FILES = {"index.html": b"<p>", "model/onnx/encoder_model.onnx": b"graph" * 99, "model/config.json": b"{}"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_bytes(content)
    return tmp_path / "site"


def test_space_is_made_in_one_commit_with_a_card(hub, site: Path) -> None:
    address = publish_space(site, "numbers", "me/numbers-en-de", title="English → German")
    commits = hub.repositories["spaces/me/numbers"].branches["main"]
    assert [commit.message for commit in commits] == ["initial commit", "Upload site"]
    assert address.endswith(f"/spaces/me/numbers/commit/{commits[-1].oid}")
    assert commits[-1].files.keys() == {*FILES, "README.md", ".gitattributes"}
    assert all(commits[-1].files[name] == content for name, content in FILES.items())
    card = RepoCard(commits[-1].files["README.md"].decode(), ignore_metadata_errors=False)
    assert card.data.sdk == "static" and card.data.models == ["me/numbers-en-de"]
    assert card.data.title == "English → German" and "me/numbers" not in hub.repositories
    assert not (site / "README.md").exists()


def test_space_is_updated_without_the_files_of_an_older_site(hub, site: Path) -> None:
    publish_space(site, "me/numbers", "me/numbers-en-de")
    (site / "model" / "config.json").rename(site / "model" / "other.json")
    publish_space(site, "me/numbers", "me/numbers-en-de")
    (_, first, second) = hub.repositories["spaces/me/numbers"].branches["main"]
    assert second.deleted == ["model/config.json"] and "model/config.json" in first.files
    assert second.files.keys() == {
        *("index.html", "model/onnx/encoder_model.onnx", "model/other.json"),
        *("README.md", ".gitattributes"),
    }


def test_space_is_retried_while_the_hub_is_busy(hub, site: Path) -> None:
    hub.faults = {"create": [(503, {})], "commit": [(429, {"Retry-After": "3"})], "info": ["lost"]}
    publish_space(site, "numbers", "me/numbers-en-de")
    assert len(hub.repositories["spaces/me/numbers"].branches["main"]) == 2


def test_space_reports_mistakes_in_one_line(hub, site: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index\.html"):
        publish_space(tmp_path, "numbers", "me/numbers-en-de")
    with pytest.raises(UserError, match="repo_id='a/b/c'"):
        publish_space(site, "a/b/c", "me/numbers-en-de")
    with pytest.raises(UserError, match="model_id='a/b/c'"):
        publish_space(site, "numbers", "a/b/c")
    with pytest.raises(UserError, match="them/numbers"):
        publish_space(site, "them/numbers", "me/numbers-en-de")
    assert hub.repositories == {}
