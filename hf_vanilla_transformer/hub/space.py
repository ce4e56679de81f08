"""A static Space on the Hub: a site that translates in the browser with one model."""

import os
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi

from ..errors import UserError
from .publishing import check_repo_id, commit, one_line_errors, with_retries

CARD = "README.md"
_KEPT = (".gitattributes",)  # belongs to the repository, not to the site


def publish_space(
    site: str | os.PathLike,
    repo_id: str,
    model_id: str,
    *,
    title: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload site",
    token: str | None = None,
) -> str:
    """Create or update a static Space in one commit: the site's files and a card replace an older site.

    Args:
        site: a folder with an index.html. It is not modified.
        repo_id: the Space, `name` or `organisation/name`.
        model_id: the model on the Hub, for a link in the card.
        title: the Space's title. None for its name.
        private: create a private Space.
        commit_message: the title of the commit.
        token: a token with write access. None for the token of `hf auth login` or HF_TOKEN.

    Returns:
        The URL of the commit.

    Raises:
        UserError: no site there, an invalid name, or a problem with the connection or the permissions of the token.
    """
    site, api = Path(site), HfApi(token=token)
    if not (site / "index.html").is_file():
        raise UserError(f"{site}: no site there (index.html is missing); write one with export --to web")
    check_repo_id(repo_id)
    check_repo_id(model_id, "model_id")
    files: dict[str, Path | bytes] = {
        path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*")) if path.is_file()
    }
    with one_line_errors(repo_id):
        space: dict[str, Any] = {"repo_type": "space", "space_sdk": "static", "private": private, "exist_ok": True}
        repo_id = with_retries(lambda: api.create_repo(repo_id, **space)).repo_id
        files[CARD] = space_card(title or repo_id.rpartition("/")[2], model_id).encode()
        there = with_retries(lambda: api.space_info(repo_id))
        old = {sibling.rfilename for sibling in there.siblings or []} - {*_KEPT}
        return commit(api, repo_id, files, old, commit_message=commit_message, repo_type="space")


def space_card(title: str, model_id: str) -> str:
    """The Space's README.md; `models` makes the Hub link the Space and the model to each other."""
    metadata = {
        **{"title": title, "emoji": "🔤", "colorFrom": "indigo", "colorTo": "gray"},
        **{"sdk": "static", "pinned": False, "models": [model_id], "tags": ["translation", "transformers.js"]},
    }
    header = yaml.safe_dump(metadata, allow_unicode=True, sort_keys=False)
    text = (
        f"[{model_id}](https://huggingface.co/{model_id}) translates here in the browser: no text leaves it.\n"
        f"`model/` is what transformers.js and optimum load."
    )
    return f"---\n{header}---\n\n# {title}\n\n{text}\n"
