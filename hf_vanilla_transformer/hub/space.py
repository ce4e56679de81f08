"""A static Space on the Hub: a site that runs one model in the browser."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import HfApi, RepoCard
from huggingface_hub.errors import RepositoryNotFoundError

from ..utils.errors import UserError
from .publishing import check_repo_id, commit, one_line_errors, require_private, with_retries

CARD = "README.md"
MANIFEST = "files.txt"  # the files of the site in the Space: only these are deleted by an update


@dataclass(frozen=True)
class SpaceChanges:
    """The changes of a commit to a Space."""

    repo_id: str  #: with the owner's name
    private: bool | None  #: of a new Space. None is the owner's default
    files: dict[str, Path | bytes]  #: name in the Space -> content
    deleted: set[str]  #: files of an older site


def space_changes(
    site: str | os.PathLike,
    repo_id: str,
    model_id: str,
    *,
    title: str | None = None,
    private: bool | None = None,
    task: str = "language",
) -> SpaceChanges:
    """Compare a site with a Space, and change nothing. Arguments and errors as in `publish_space`."""
    site = Path(site)
    api = HfApi()
    if not (site / "index.html").is_file():
        raise UserError(
            f"{site}: no site there (index.html is missing); write one with export --to web"
        )
    check_repo_id(repo_id)
    check_repo_id(model_id, "model_id")
    files = _site_files(site)
    with one_line_errors(repo_id):
        repo_id = _with_owner(api, repo_id)
        model_id = _with_owner(api, model_id)
        model = _info(api.model_info, model_id)
        if model and (model.private or getattr(model, "gated", False)):
            private = True
        deleted: set[str] = set()
        space = _info(api.space_info, repo_id)
        if space is None:
            card = space_card(title or repo_id.rpartition("/")[2], model_id, task)
            files[CARD] = card.encode()
        else:
            require_private(space, private)
            there = {sibling.rfilename for sibling in space.siblings or []}
            older_card = _read(api, repo_id, CARD, there) or "---\n---\n"
            metadata = RepoCard(older_card, ignore_metadata_errors=True).data
            if metadata.get("sdk") != "static" or model_id not in (metadata.get("models") or []):
                raise UserError(
                    f"{repo_id} is a Space for something else than {model_id}: give --space another name"
                )
            older = _read(api, repo_id, MANIFEST, there)
            deleted = {name for name in older.split("\n") if name in there} - files.keys()
    files[MANIFEST] = "\n".join(sorted(files.keys() - {CARD})).encode()
    return SpaceChanges(repo_id, private or None, files, deleted)


def _with_owner(api: HfApi, name: str) -> str:
    return name if "/" in name else f"{with_retries(api.whoami)['name']}/{name}"


def publish_space(
    site: str | os.PathLike,
    repo_id: str,
    model_id: str,
    *,
    title: str | None = None,
    private: bool | None = None,
    task: str = "language",
) -> str:
    """Create or update a static Space in one commit. The site's files replace the files of an older site.

    Other files of the Space, and its card, stay. Hidden files of the site are not uploaded.

    Args:
        site: a folder with an index.html. It is not modified.
        repo_id: the Space, `name` or `organisation/name`.
        model_id: the model on the Hub, for a link in the card. If it is private or gated, the Space is private.
        title: the title of a new Space. None for its name.
        private: create a private Space.
        task: of the model, "language" or "sequence". It decides the words of a new card.

    Returns:
        The URL of the commit.

    Raises:
        UserError: no site there, or a link in it, an invalid name, a Space that is not of this model, a public Space
            for a model that is not public, or a problem with the connection or the permissions of the token.
    """
    changes = space_changes(
        site,
        repo_id,
        model_id,
        title=title,
        private=private,
        task=task,
    )
    api = HfApi()
    with one_line_errors(changes.repo_id):
        space: dict[str, Any] = {"repo_type": "space", "space_sdk": "static", "exist_ok": True}
        with_retries(lambda: api.create_repo(changes.repo_id, private=changes.private, **space))
        settings = {"commit_message": "Upload site", "repo_type": "space"}
        return commit(api, changes.repo_id, changes.files, changes.deleted, **settings)


def _site_files(site: Path) -> dict[str, Path | bytes]:
    files: dict[str, Path | bytes] = {}
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link: a site contains files only")
        if path.is_file() and name.as_posix() != CARD:
            files[name.as_posix()] = path
    return files


def _info(info: Callable[[str], object], repo_id: str) -> Any:
    """Facts about a repository, or None if there is none."""
    try:
        return with_retries(lambda: info(repo_id))
    except RepositoryNotFoundError:
        return None


def _read(api: HfApi, repo_id: str, name: str, there: set[str]) -> str:
    """The text of a file of a Space, or an empty one."""
    if name not in there:
        return ""
    with TemporaryDirectory(prefix="space_") as folder:
        path = with_retries(
            lambda: api.hf_hub_download(repo_id, name, repo_type="space", local_dir=folder)
        )
        return Path(path).read_text(encoding="utf-8")


def space_card(title: str, model_id: str, task: str) -> str:
    """The Space's README.md. `models` makes the Hub link the Space and the model to each other."""
    metadata = {
        "title": title,
        "emoji": "🔤",
        "colorFrom": "indigo",
        "colorTo": "gray",
        "sdk": "static",
        "pinned": False,
        "models": [model_id],
        "tags": [
            "translation" if task == "language" else "sequence-to-sequence",
            "transformers.js",
        ],
    }
    header = yaml.safe_dump(metadata, allow_unicode=True, sort_keys=False)
    verb = "translates" if task == "language" else "runs"
    text = (
        f"[{model_id}](https://huggingface.co/{model_id}) {verb} here in the browser: no text leaves it.\n"
        f"`model/` is what transformers.js and optimum load."
    )
    return f"---\n{header}---\n\n# {title}\n\n{text}\n"
