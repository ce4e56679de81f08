"""Bring a model folder to the Hub in one commit, so that whoever loads it sees the old model or the new one.

Uploads, their resumption and most of the retries are `huggingface_hub`'s. What it sends only once (making a repository
or a branch, the commit itself) is sent again here when the Hub asks for it, and all of it when the connection breaks.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from ..errors import UserError
from ..untrusted import one_line, read_json_object
from .card import CardFacts, card_for_repository, model_card
from .model_files import ADAPTER_CONFIG, CARD, ModelFiles, choose_files, is_model_file, json_bytes, shard

# What `huggingface_hub`'s HTTP library raises when a connection fails; the library's name depends on the version.
_ConnectionFailed: Any = HfHubHTTPError.__mro__[1]

_BUSY = (408, 429, 500, 502, 503, 504)
_WAITS = (1, 2, 4, 8, 8)  # seconds, as `huggingface_hub` waits
_LONGEST_WAIT = 300
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
    """All that would be sent, ready to be sent; nothing is asked of the Hub.

    Args:
        folder: a model folder, or that of a peft adapter; it stays as it is.
        repo_id: the model's name on the Hub, which the card's usage lines load.
        include: files to send besides those that `choose_files` chooses.
        max_shard_size: weights above this size go in shards, such as 5GB; None sends them as they lie.
        license: the model's, as the Hub names it, for the card.
        base_model: what the adapter is for, as the Hub names it.

    Returns:
        A context, in which the files exist.

    Raises:
        UserError: see `choose_files`; a name that the Hub would not take.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repo_id={repo_id!r} is no name for the Hub: {one_line(error)}") from None
    folder = Path(folder)
    files = choose_files(folder, include)
    if ADAPTER_CONFIG in files.chosen:
        _name_base_model(files, folder, base_model)
    files.chosen[CARD] = _card(files, folder, repo_id, license)
    with TemporaryDirectory(prefix="hf_upload_") as beside:
        if max_shard_size is not None:
            shard(files, max_shard_size, Path(beside))
        yield files


def publish(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    token: str | None = None,
    **choices: Any,
) -> str:
    """Send a model folder to the Hub in one commit; the repository and the branch are made where there are none.

    Sent again, it goes on where it was cut: content that has arrived is not sent twice. Parts of an older model that
    this one does not have (its shards, its second tokenizer) are deleted in the same commit, because they would be
    loaded with it; other files of the repository stay.

    Args:
        folder: a model folder, or that of a peft adapter.
        repo_id: `name`, or `organisation/name`.
        private: make a new repository private; a public one of this name is then refused.
        revision: branch; None is the default one.
        commit_message: what the Hub shows.
        token: with write access; None is what `hf auth login` or HF_TOKEN gave.
        **choices: those of `prepared_files`.

    Returns:
        The address of the commit.

    Raises:
        UserError: what the user can mend, from the folder to the rights of the token.
    """
    api = HfApi(token=token)
    with prepared_files(folder, repo_id, **choices) as files, _one_line_errors(repo_id):
        repo_id = make_repository(repo_id, private, token)
        files.chosen[CARD] = _card(files, Path(folder), repo_id, choices.get("license"))  # now with the owner's name
        if revision is not None:
            _patiently(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        there = _patiently(lambda: api.model_info(repo_id, revision=revision or constants.DEFAULT_REVISION))
        if private and there.private is False:
            raise UserError(f"{repo_id} is there already and public; make it private on the Hub, or leave out private")
        old = {sibling.rfilename for sibling in there.siblings or [] if is_model_file(sibling.rfilename)}
        deleted = sorted(old - files.chosen.keys())

        def commit() -> Any:
            # made anew each time: they remember what the repository had, and a commit may have got through
            operations: list[Any] = [CommitOperationDelete(name) for name in deleted]
            operations += [CommitOperationAdd(name, _content(files.chosen[name])) for name in sorted(files.chosen)]
            return api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)

        return _patiently(commit).commit_url


def make_repository(repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Make a repository for a model, where there is none.

    Args:
        repo_id, private, token: those of `publish`.

    Returns:
        Its name with the owner's.

    Raises:
        UserError: the Hub refuses it.
    """
    with _one_line_errors(repo_id):
        return _patiently(lambda: HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True)).repo_id


def _content(content: Path | bytes) -> str | bytes:
    return str(content) if isinstance(content, Path) else content


def _card(files: ModelFiles, folder: Path, repo_id: str, license: str | None) -> bytes:
    """The folder's card with the name that the model has on the Hub; where there is none, one with what is known."""
    card = files.chosen.get(CARD)
    if card is None:
        config = read_json_object(folder / "config.json") if "config.json" in files.chosen else {}
        text = str(model_card(folder, CardFacts(model_name=repo_id, config=config)))
    else:
        text = card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8")
    return card_for_repository(text, repo_id, license).encode()


def _name_base_model(files: ModelFiles, folder: Path, base_model: str | None) -> None:
    """peft names the base model as it was loaded, and a folder of this machine is of no use to anybody else."""
    config = read_json_object(folder / ADAPTER_CONFIG)
    named = str(config.get("base_model_name_or_path") or "")
    if base_model is None:
        if not named or os.path.isabs(named) or named.startswith(".") or Path(named).exists():
            raise UserError(
                f"{folder / ADAPTER_CONFIG} names its base model {named!r}, which nobody else has; publish that "
                f"first, and give its name as base_model"
            )
        return
    config["base_model_name_or_path"] = base_model
    files.chosen[ADAPTER_CONFIG] = json_bytes(config)
    card = files.chosen.get(CARD)
    if named and isinstance(card, Path):
        files.chosen[CARD] = card.read_text(encoding="utf-8").replace(named, base_model).encode()


# What the Hub answers


def _patiently(call: Callable[[], Result]) -> Result:
    """Call again when the Hub is busy or the connection breaks, after as long as it asks for."""
    for wait in _WAITS:
        try:
            return call()
        except (HfHubHTTPError, _ConnectionFailed, RuntimeError) as error:
            response = getattr(_cause(error), "response", None)
            if response is None and isinstance(_cause(error), _ConnectionFailed):
                asked = ""
            elif response is not None and response.status_code in _BUSY and _sent_once(response.request):
                asked = response.headers.get("Retry-After", "")
            else:
                raise
            time.sleep(min(int(asked), _LONGEST_WAIT) if asked.isdigit() else wait)
    return call()


def _sent_once(request: Any) -> bool:
    """Whether no version of `huggingface_hub` repeats this request by itself when the Hub is busy."""
    return any(part in request.url.path for part in _SENT_ONCE)


def _cause(error: BaseException) -> BaseException:
    """What went wrong with an upload; its thread wraps it."""
    return error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error


@contextmanager
def _one_line_errors(repo_id: str) -> Iterator[None]:
    """Turn what the Hub refuses into a line that says what to do.

    Raises:
        UserError: always instead of `huggingface_hub`'s errors.
    """
    try:
        yield
    except UserError:
        raise
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set; unset it to publish") from None
    except (HfHubHTTPError, _ConnectionFailed, RuntimeError) as error:
        if not isinstance(_cause(error), HfHubHTTPError | _ConnectionFailed):
            raise
        raise UserError(_explained(_cause(error), repo_id)) from None
    except ValueError as error:
        if "README.md" not in str(error):
            raise
        raise UserError(f"the Hub does not take the card: {one_line(error)}") from None


def _explained(error: Any, repo_id: str) -> str:
    response = getattr(error, "response", None)
    if response is None:
        return f"the connection to {constants.ENDPOINT} failed ({one_line(error)}); the same command goes on"
    status = response.status_code
    said = one_line(getattr(error, "server_message", None) or response.reason_phrase)
    advice = {
        401: "the Hub does not know the token: run `hf auth login`, or put one with write access into HF_TOKEN",
        403: f"the token may not write to {repo_id}: use one with write access there, or another name",
        404: f"there is no {repo_id} for this token, or no such branch",
        409: f"somebody else is writing to {repo_id}; run the same command again",
        412: f"somebody else has written to {repo_id}; run the same command again",
    }
    if status in _BUSY:
        return f"the Hub is busy ({status}: {said}); run the same command again later, it goes on where it stopped"
    return f"{advice.get(status, f'the Hub refused to take {repo_id}')} ({status}: {said})"
