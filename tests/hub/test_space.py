"""A static Space with the real client on a Hub on loopback: one commit, with a card that links the model."""

from pathlib import Path

import pytest
from huggingface_hub import RepoCard

from hf_vanilla_transformer.hub.space import publish_space, space_changes
from hf_vanilla_transformer.utils.errors import UserError
from tests.hub.loopback_hub import Commit
from tests.model_helpers import error_of

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
    assert commits[-1].files.keys() == {*FILES, "README.md", ".gitattributes", "files.txt"}
    assert all(commits[-1].files[name] == content for name, content in FILES.items())
    card = RepoCard(commits[-1].files["README.md"].decode(), ignore_metadata_errors=False)
    assert card.data.sdk == "static" and card.data.models == ["me/numbers-en-de"]
    assert card.data.title == "English → German" and "me/numbers" not in hub.repositories
    assert not (site / "README.md").exists()


def test_card_of_a_space_for_sequences_has_no_words_of_translation(hub, site: Path) -> None:
    publish_space(site, "me/reactions", "me/reactions", title="Reactions", task="sequence")
    card = hub.repositories["spaces/me/reactions"].branches["main"][-1].files["README.md"].decode()
    assert "translat" not in card
    assert "me/reactions" in RepoCard(card).data.models


def test_update_deletes_only_files_of_the_older_site(hub, site: Path) -> None:
    publish_space(site, "me/numbers", "me/numbers-en-de")
    branch = hub.repositories["spaces/me/numbers"].branches["main"]
    own = {"data.csv": b"of the owner", "README.md": branch[-1].files["README.md"] + b"More words."}
    branch.append(Commit("by hand", branch[-1].files | own, [], []))
    (site / "model" / "config.json").rename(site / "model" / "other.json")
    changes = space_changes(site, "numbers", "numbers-en-de")
    assert (changes.repo_id, changes.deleted) == ("me/numbers", {"model/config.json"}) and len(branch) == 3
    publish_space(site, "me/numbers", "me/numbers-en-de")
    assert branch[-1].deleted == ["model/config.json"]
    assert branch[-1].files.keys() == {
        *("index.html", "model/onnx/encoder_model.onnx", "model/other.json", "files.txt"),
        *("README.md", ".gitattributes", "data.csv"),
    }
    assert own.items() <= branch[-1].files.items()


@pytest.mark.parametrize(
    "card", [None, "# A demo\n", "---\nsdk: gradio\nmodels: [me/m]\n---\n", "---\nsdk: static\nmodels: [me/x]\n---\n"]
)
def test_space_for_something_else_is_not_touched(hub, site: Path, card: str | None) -> None:
    branch = hub.make("spaces/me/demo").branches["main"]
    branch[-1].files.update({"app.py": b"import gradio", **({"README.md": card.encode()} if card else {})})
    assert "me/demo" in error_of(publish_space, site, "me/demo", "me/m")
    assert len(branch) == 1 and "spaces/me/m" not in hub.repositories


@pytest.mark.parametrize("restricted", [True, False], ids=["model", "argument"])
def test_weights_that_are_not_public_stay_so(hub, site: Path, restricted: bool) -> None:
    hub.make("me/m", private=restricted)
    private = None if restricted else True
    publish_space(site, "me/new", "me/m", private=private)
    assert hub.repositories["spaces/me/new"].private
    publish_space(site, "me/new", "me/m", private=private)
    hub.repositories["spaces/me/new"].private = False
    assert "public" in error_of(publish_space, site, "me/new", "me/m", private=private)
    assert len(hub.repositories["spaces/me/new"].branches["main"]) == 2


def test_links_and_hidden_files_are_not_uploaded(hub, site: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    (site / ".env").write_text("PASSWORD=1")
    (site / ".git").mkdir()
    (site / ".git" / "config").write_text("[core]")
    publish_space(site, "me/numbers", "me/m")
    assert not any("/." in f"/{name}" for name in hub.files("spaces/me/numbers").keys() - {".gitattributes"})
    for link, target in ((site / "x.txt", tmp_path / "id_rsa"), (site / "folder", tmp_path)):
        link.symlink_to(target)
        with pytest.raises(UserError, match=link.name):
            publish_space(site, "me/numbers", "me/m")
        link.unlink()
