"""`--push_to_hub` of a training run: one commit of the finished model, instead of the uploads of `Trainer`."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from .publishing import make_repository, publish

_WITH_CHECKPOINTS = ("checkpoint", "all_checkpoints")


def destination(args: Any) -> dict[str, Any] | None:
    """Return the arguments of `publish` for a finished run. None if it is not published, or not by this rank.

    The run's repository is created before training, so that missing permissions are an early error. `args.push_to_hub`
    is set to False, because `Trainer` would upload the whole folder repeatedly, with a different card.
    """
    if args.hub_token is not None:
        raise UserError("hub_token: arguments end up in logs and files; run `hf auth login`, or put it into HF_TOKEN")
    if not args.push_to_hub:
        return None
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    if strategy in _WITH_CHECKPOINTS:
        raise UserError(f"hub_strategy={strategy} would publish checkpoints; only the finished model is published")
    args.push_to_hub = False
    if args.process_index:
        return None
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    repo_id = make_repository(name, args.hub_private_repo)
    return {"repo_id": repo_id, "private": args.hub_private_repo, "revision": args.hub_revision}


def publish_run(folder: Path, where: dict[str, Any]) -> str:
    """Upload a finished run's folder and return the commit's URL."""
    try:
        return publish(folder, **where)
    except UserError as error:
        again = f"vanilla-transformer publish {folder} --repo-id {where['repo_id']}"
        raise UserError(f"the model is in {folder}, but not on the Hub: {error}; then: {again}") from None
