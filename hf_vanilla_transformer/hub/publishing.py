"""Upload a model folder to the Hub in one commit, so that a download never mixes two versions.

`HfApi.upload_folder` makes several commits if the package hf_xet is installed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from ..inference.loading import check_model_folder
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError
from ..utils.model_folder import check_model_files
from ..utils.untrusted import one_line, read_json_object
from .card import CardFacts, card_for_repository, model_card
from .model_files import CARD, ModelFiles, choose_files, is_model_file

# `huggingface_hub` 1 sends requests with httpx, later versions with httpx2. `HfHubHTTPError` is one of these as well.
_HTTP_ERRORS: Any = tuple(
    import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)
)


def prepared_files(
    folder: str | os.PathLike, repo_id: str, *, license: str | None = None
) -> ModelFiles:
    """Return the files to upload, without contacting the Hub.

    Args:
        folder: the model's folder. It is not modified.
        repo_id: the model's name on the Hub, for the card's usage code.
        license: the id of the model's license on the Hub, for the card.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    check_model_files(folder)
    files = choose_files(folder)
    check_model_folder(folder, subclasses=False)  # the Hub's users load them with their code
    if {"tokenizer.json", "tokenizer_config.json"} & files.chosen.keys():
        load_tokenizers(folder)
    files.chosen[CARD] = _card(files, folder, repo_id, license)
    return files


def check_repo_id(repo_id: str) -> None:
    """Raise a UserError if the Hub does not accept the name of a repository."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repo_id={repo_id!r} is no name for the Hub: {one_line(error)}") from None


def publish(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    license: str | None = None,
) -> str:
    """Upload a model folder to the Hub in one commit. Create the repository and the branch if necessary.

    An interrupted upload resumes without uploading content again. Files of an older model that this one lacks (shards,
    a second tokenizer) are deleted in the same commit, because `from_pretrained` would read them. Other files of the
    repository stay.

    Args:
        folder: the model's folder. It is not modified.
        repo_id: `name`, or `organisation/name`.
        private: create a private repository, and refuse an existing public one.
        revision: the branch. None for the default one.
        commit_message: the title of the commit.
        license: the id of the model's license on the Hub, for the card.

    Returns:
        The URL of the commit.

    Raises:
        UserError: a problem with the folder, the connection or the permissions of the token.
    """
    api = HfApi()
    files = prepared_files(folder, repo_id, license=license)
    with one_line_errors(repo_id):
        repo_id = make_repository(repo_id, private)
        # With the owner's name.
        files.chosen[CARD] = _card(files, Path(folder), repo_id, license)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.model_info(repo_id, revision=revision or constants.DEFAULT_REVISION)
        if private and there.private is False:
            raise UserError(
                f"{repo_id} is there already and public; make it private on the Hub, or choose another name"
            )
        names = {sibling.rfilename for sibling in there.siblings or []}
        old = set(filter(is_model_file, names)) - files.chosen.keys()
        operations: list[Any] = [CommitOperationDelete(name) for name in sorted(old)]
        operations += [CommitOperationAdd(name, file) for name, file in files.chosen.items()]
        return api.create_commit(
            repo_id, operations, commit_message=commit_message, revision=revision
        ).commit_url


def make_repository(repo_id: str, private: bool | None = None) -> str:
    """Create a model repository if necessary, and return its name with the owner's. Arguments as in `publish`."""
    with one_line_errors(repo_id):
        return HfApi().create_repo(repo_id, private=private, exist_ok=True).repo_id


def destination(args: Any) -> dict[str, Any] | None:
    """Return the arguments of `publish` for a training run. None if it is not published, or not by this rank.

    The run's repository is created before training, so that missing permissions are an early error. `args.push_to_hub`
    is set to False, because `Trainer` would upload the whole folder repeatedly, with a different card.
    """
    if args.hub_token is not None:
        raise UserError(
            "hub_token: arguments end up in logs and files; run `hf auth login`, or put it into HF_TOKEN"
        )
    if not args.push_to_hub:
        return None
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    if strategy in ("checkpoint", "all_checkpoints"):
        raise UserError(
            f"hub_strategy={strategy} would publish checkpoints; only the finished model is published"
        )
    args.push_to_hub = False
    if args.process_index:
        return None
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    repo_id = make_repository(name, args.hub_private_repo)
    return {"repo_id": repo_id, "private": args.hub_private_repo, "revision": args.hub_revision}


def publish_run(folder: Path, where: dict[str, Any]) -> str:
    """Upload a finished run's folder and return the commit's URL. `where` is its `destination`."""
    try:
        return publish(folder, **where)
    except UserError as error:
        again = f"vanilla-transformer publish {folder} --repo-id {where['repo_id']}"
        raise UserError(
            f"the model is in {folder}, but not on the Hub: {error}; then: {again}"
        ) from None


def _card(files: ModelFiles, folder: Path, repo_id: str, license: str | None) -> bytes:
    """The folder's card, or a minimal card, with the model's name on the Hub."""
    card = files.chosen.get(CARD)
    if card is None:
        config = read_json_object(folder / "config.json")
        text = str(model_card(folder, CardFacts(model_name=repo_id, config=config)))
    else:
        try:
            text = card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{folder / CARD}: no UTF-8 text ({error})") from None
    return card_for_repository(text, repo_id, license).encode()


@contextmanager
def one_line_errors(repo_id: str) -> Iterator[None]:
    """Raise a one-line `UserError` instead of the errors of `huggingface_hub`."""
    try:
        yield
    except Exception as error:
        # an upload is a thread, which raises a RuntimeError
        is_of_thread = isinstance(error, RuntimeError) and error.__cause__ is not None
        explained = _explained(error.__cause__ if is_of_thread else error, repo_id)
        if explained is None:
            raise
        raise UserError(explained) from None


def _explained(error: Any, repo_id: str) -> str | None:
    """One line on an error of `huggingface_hub`, or None for other errors."""
    if isinstance(error, UserError):
        return None
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to publish"
    if isinstance(error, _HTTP_ERRORS):
        return _explained_request(error, repo_id)
    if isinstance(error, ValueError) and "README.md" in str(error):
        return f"the Hub does not take the card: {one_line(error)}"
    return None


def _explained_request(error: Any, repo_id: str) -> str:
    response = getattr(error, "response", None)
    if response is None:
        return f"the connection to {constants.ENDPOINT} failed ({one_line(error)}); the same command resumes"
    status = response.status_code
    message = one_line(getattr(error, "server_message", None) or response.reason_phrase)
    advice = {
        401: "the Hub does not know the token: run `hf auth login`, or set HF_TOKEN to one with write access",
        403: f"the token may not write to {repo_id}: use one with write access there, or another name",
        404: f"there is no {repo_id} for this token, or no such branch",
        409: f"another upload is writing to {repo_id}; run the same command again",
        412: f"another upload has written to {repo_id}; run the same command again",
    }
    default = f"the Hub refused to take {repo_id}"
    if status in (408, 429) or status >= 500:
        default = f"the Hub cannot take {repo_id} now; run the same command again later, it resumes"
    return f"{advice.get(status, default)} ({status}: {message})"
