"""What `--push_to_hub` means in a training run: one commit of the finished model, instead of `Trainer`'s own."""

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .publishing import make_repository, publish

_STATE_TOO = ("checkpoint", "all_checkpoints")


class Destination(NamedTuple):
    """Where a finished run goes: the arguments of `publish`."""

    repo_id: str
    private: bool | None
    revision: str | None


def destination(args: Any) -> Destination | None:
    """The repository that the run asks for, made before the training so that no rights are missing after it.

    `Trainer` would send the folder as it lies, again and again, with a card of its own; its part is switched off.

    Args:
        args: `TrainingArguments`; `push_to_hub` is False afterwards.

    Returns:
        None where nothing is to be published, or another process does it.

    Raises:
        UserError: the Hub refuses it, a token among the arguments, a strategy that would send the optimizer's state.
    """
    if args.hub_token is not None:
        raise UserError("hub_token: arguments end up in logs and files; run `hf auth login`, or put it into HF_TOKEN")
    if not args.push_to_hub:
        return None
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    if strategy in _STATE_TOO:
        raise UserError(f"hub_strategy={strategy} would publish checkpoints; the finished model alone goes, once")
    args.push_to_hub = False
    if args.process_index:
        return None
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    return Destination(make_repository(name, args.hub_private_repo), args.hub_private_repo, args.hub_revision)


def publish_run(folder: Path, where: Destination) -> str:
    """Send a finished run's folder; the address of the commit comes back.

    Raises:
        UserError: it failed; the model lies where it was saved.
    """
    try:
        return publish(folder, where.repo_id, private=where.private, revision=where.revision)
    except UserError as error:
        again = f"python scripts/push_to_hub.py {folder} --repo-id {where.repo_id}"
        raise UserError(f"the model is in {folder}, but not on the Hub: {error}; then: {again}") from None
