"""Send a model folder to the Hugging Face Hub, in one commit.

  vanilla-transformer publish runs/quickstart --repo-id me/numbers-en-de --dry-run
  vanilla-transformer publish runs/quickstart --repo-id me/numbers-en-de --private

Uploads weights, configuration, tokenizers, remote code, card, plots and results, but no checkpoints, optimizer state
or text. After a failure, the same command resumes.

Log in once with `hf auth login`, or set HF_TOKEN to a token with write access. There is no flag for it, because
command lines end up in logs.
"""

import argparse
import re
from typing import NoReturn

from .parsing import Parser


class SecretiveParser(Parser):
    """A parser that does not repeat unknown arguments in error messages, because they may be tokens."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments") or "unknown flag" in message:
            message = (
                "there is an unknown flag or a second folder, and there is no flag for a token"
            )
        super().error(re.sub(r"hf_\w+", "hf_...", message))


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = SecretiveParser(prog, __doc__)
    parser.add_argument(
        "folder", metavar="DIR", help="a run's output_dir, or a folder of save_pretrained"
    )
    parser.add_argument(
        "--repo-id", required=True, metavar="NAME", help="on the Hub: model or organisation/model"
    )
    parser.add_argument("--private", action="store_true", help="make the new repository private")
    parser.add_argument("--dry-run", action="store_true", help="list the files")
    parser.add_argument(
        "--revision", "--branch", metavar="BRANCH", help="branch, created if necessary"
    )
    parser.add_argument(
        "--commit-message", default="Upload model", metavar="TEXT", help="(default: Upload model)"
    )
    parser.add_argument(
        "--license", metavar="ID", help="the model's license for the card, as apache-2.0"
    )
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.hub.publishing import prepared_files, publish

    if arguments.dry_run:
        files = prepared_files(arguments.folder, arguments.repo_id, license=arguments.license)
        sizes = files.sizes()
        print(f"to {arguments.repo_id}:")
        for name, size in sizes.items():
            print(f"  {size:>15,}  {name}")
        print(f"  {sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
        print("not uploaded:", ", ".join(files.left) or "nothing")
        return
    address = publish(
        arguments.folder,
        arguments.repo_id,
        private=True if arguments.private else None,
        revision=arguments.revision,
        commit_message=arguments.commit_message,
        license=arguments.license,
    )
    print(address)
