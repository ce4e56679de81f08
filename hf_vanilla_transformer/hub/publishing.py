"""Upload a model folder to the Hub in one commit, so that a download never mixes two versions.

`huggingface_hub` uploads, resumes, and retries most requests. If the Hub is busy, this module retries the requests
that are otherwise sent only once (creating a repository or a branch, the commit). If a connection fails, it retries
all.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from ..inference.loading import check_model_folder
from ..utils.errors import UserError
from ..utils.untrusted import one_line, read_json_object
from .card import CardFacts, card_for_repository, model_card
from .model_files import ADAPTER_CONFIG, CARD, ModelFiles, choose_files, is_model_file, shard

# `huggingface_hub` 1 sends requests with httpx, later versions with httpx2. `HfHubHTTPError` is one of these as well.
_HTTP_ERRORS: Any = tuple(
    import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)
)

_BUSY = (408, 429, 500, 502, 503, 504)
_WAITS = (1, 2, 4, 8, 8)  # seconds, as `huggingface_hub` waits
_LONGEST_WAIT = 300
# requests that no supported version of `huggingface_hub` retries
_SENT_ONCE = ("/api/repos/create", "/branch/", "/revision/", "/api/validate-yaml", "/commit/")


Result = TypeVar("Result")


@contextmanager
def prepared_files(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    include: Sequence[str] = (),
    max_shard_size: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> Iterator[ModelFiles]:
    """A context with the files to upload. It does not contact the Hub.

    Args:
        folder: the folder of a model or of a peft adapter. It is not modified.
        repo_id: the model's name on the Hub, for the card's usage code.
        include: additional files. See `choose_files`.
        max_shard_size: split larger weights into shards, such as 5GB. None uploads them unchanged.
        license: the id of the model's license on the Hub, for the card.
        base_model: the name on the Hub of an adapter's base model.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    files = choose_files(folder, include)
    if ADAPTER_CONFIG in files.chosen:
        _name_base_model(files, folder, base_model)
    else:
        check_model_folder(folder, subclasses=False)  # the Hub's users load them with their code
    files.chosen[CARD] = _card(files, folder, repo_id, license)
    with TemporaryDirectory(prefix="hf_upload_") as temporary:
        if max_shard_size is not None:
            shard(files, max_shard_size, Path(temporary))
        yield files


def check_repo_id(repo_id: str, argument: str = "repo_id") -> None:
    """Raise a UserError that names the argument if the Hub does not accept the name of a repository."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"{argument}={repo_id!r} is no name for the Hub: {one_line(error)}"
        ) from None


def publish(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    **choices: Any,
) -> str:
    """Upload a model folder to the Hub in one commit. Create the repository and the branch if necessary.

    An interrupted upload resumes without uploading content again. Files of an older model that this one lacks (shards,
    a second tokenizer) are deleted in the same commit, because `from_pretrained` would read them. Other files of the
    repository stay.

    Args:
        folder: the folder of a model or of a peft adapter.
        repo_id: `name`, or `organisation/name`.
        private: create a private repository, and refuse an existing public one.
        revision: the branch. None for the default one.
        commit_message: the title of the commit.
        **choices: arguments of `prepared_files`.

    Returns:
        The URL of the commit.

    Raises:
        UserError: a problem with the folder, the connection or the permissions of the token.
    """
    api = HfApi()
    with prepared_files(folder, repo_id, **choices) as files, one_line_errors(repo_id):
        repo_id = make_repository(repo_id, private)
        # With the owner's name.
        files.chosen[CARD] = _card(files, Path(folder), repo_id, choices.get("license"))
        if revision is not None:
            with_retries(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        there = with_retries(
            lambda: api.model_info(repo_id, revision=revision or constants.DEFAULT_REVISION)
        )
        require_private(there, private)
        old = {
            sibling.rfilename
            for sibling in there.siblings or []
            if is_model_file(sibling.rfilename)
        }
        return commit(
            api, repo_id, files.chosen, old, commit_message=commit_message, revision=revision
        )


def commit(
    api: HfApi, repo_id: str, files: Mapping[str, Path | bytes], old: set[str], **settings: Any
) -> str:
    """Add `files`, delete other `old` ones in one commit, and return its URL. `settings` are of `create_commit`."""

    def attempt() -> Any:
        # new operations per attempt, because they cache the state of the repository
        operations: list[Any] = [CommitOperationDelete(name) for name in sorted(old - files.keys())]
        operations += [CommitOperationAdd(name, file) for name, file in sorted(files.items())]
        return api.create_commit(repo_id, operations, **settings)

    return with_retries(attempt).commit_url


def require_private(repository: Any, private: bool | None) -> None:
    """Refuse a public repository for what must stay private."""
    if private and repository.private is False:
        raise UserError(
            f"{repository.id} is there already and public; make it private on the Hub, or choose another name"
        )


def make_repository(repo_id: str, private: bool | None = None) -> str:
    """Create a model repository if necessary, and return its name with the owner's. Arguments as in `publish`."""
    with one_line_errors(repo_id):
        return with_retries(
            lambda: HfApi().create_repo(repo_id, private=private, exist_ok=True)
        ).repo_id


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
        config = read_json_object(folder / "config.json") if "config.json" in files.chosen else {}
        text = str(model_card(folder, CardFacts(model_name=repo_id, config=config)))
    else:
        text = card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8")
    return card_for_repository(text, repo_id, license).encode()


def _name_base_model(files: ModelFiles, folder: Path, base_model: str | None) -> None:
    """Replace the base model's name. peft copies it from `from_pretrained`, so it may be a local folder."""
    config = read_json_object(folder / ADAPTER_CONFIG)
    named = str(config.get("base_model_name_or_path") or "")
    if base_model is None:
        if not named or os.path.isabs(named) or named.startswith(".") or Path(named).exists():
            raise UserError(
                f"{folder / ADAPTER_CONFIG} names the base model {named!r}, a local folder; publish it first, "
                f"and give its name as base_model"
            )
        return
    config["base_model_name_or_path"] = base_model
    files.chosen[ADAPTER_CONFIG] = (
        json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    ).encode()
    card = files.chosen.get(CARD)
    if named and isinstance(card, Path):
        files.chosen[CARD] = card.read_text(encoding="utf-8").replace(named, base_model).encode()


# Retries and errors


def with_retries(call: Callable[[], Result]) -> Result:
    """Retry while the Hub is busy or the connection fails, after `Retry-After` seconds if the Hub sets them."""
    for usual in _WAITS:
        try:
            return call()
        except (*_HTTP_ERRORS, RuntimeError) as error:
            wait = _seconds_to_wait(_cause(error), usual)
            if wait is None:
                raise
            time.sleep(wait)
    return call()


def _seconds_to_wait(error: Any, usual: int) -> int | None:
    """The seconds before a request is sent again, or None if that would not help."""
    if not isinstance(error, _HTTP_ERRORS):
        return None
    response = getattr(error, "response", None)
    if response is None:  # the connection failed
        return usual
    path = response.request.url.path
    if response.status_code not in _BUSY or not any(part in path for part in _SENT_ONCE):
        return None
    retry_after = response.headers.get("Retry-After", "")
    return min(int(retry_after), _LONGEST_WAIT) if retry_after.isdigit() else usual


def _cause(error: BaseException) -> BaseException:
    """The error of an upload, without the RuntimeError of its thread."""
    return (
        error.__cause__
        if isinstance(error, RuntimeError) and error.__cause__ is not None
        else error
    )


@contextmanager
def one_line_errors(repo_id: str) -> Iterator[None]:
    """Raise a one-line `UserError` instead of the errors of `huggingface_hub`."""
    try:
        yield
    except Exception as error:
        explained = _explained(_cause(error), repo_id)
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
    if status in _BUSY:
        return (
            f"the Hub is busy ({status}: {message}); run the same command again later, it resumes"
        )
    return f"{advice.get(status, f'the Hub refused to take {repo_id}')} ({status}: {message})"
