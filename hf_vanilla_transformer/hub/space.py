"""A static Space on the Hub: a site that translates in the browser, beside the model that it was made of."""

import os
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from ..errors import UserError
from .publishing import check_repo_id, one_line_errors, with_retries

CARD = "README.md"
_KEPT = (".gitattributes",)  # of the repository, not of the site


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
    """Make or update a static Space in one commit: the site's files, a card, and none of an older site's.

    Args:
        site: a folder with an index.html; it is not modified.
        repo_id: the Space, `name` or `organisation/name`.
        model_id: the model on the Hub, which the card links.
        title: of the Space; None for its name.
        private: create a private Space.
        commit_message: title of the commit.
        token: with write access; None for that of `hf auth login` or HF_TOKEN.

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

        def create() -> str:
            created = api.create_repo(repo_id, repo_type="space", space_sdk="static", private=private, exist_ok=True)
            return created.repo_id

        repo_id = with_retries(create)
        files[CARD] = space_card(title or repo_id.rpartition("/")[2], model_id).encode()
        there = with_retries(lambda: api.space_info(repo_id))
        old = {sibling.rfilename for sibling in there.siblings or []} - {*_KEPT}

        def commit() -> str:
            # new operations per attempt, because they cache the state of the repository
            operations: list = [CommitOperationDelete(name) for name in sorted(old - files.keys())]
            operations += [CommitOperationAdd(*each) for each in files.items()]
            done = api.create_commit(repo_id, operations, commit_message=commit_message, repo_type="space")
            return done.commit_url

        return with_retries(commit)


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
