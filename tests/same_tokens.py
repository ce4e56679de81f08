"""The same tokens from the remote code alone, the package and its engine: `python -m tests.same_tokens MODEL SOURCE`.

MODEL is a model folder with its remote code, SOURCE a text file. Translates in float32, in batches of lines: in a
process that loads the folder with `trust_remote_code=True` and never imports the package; with the package; and with
`optimize_for_inference`. Prints how many sentences get the same tokens, and fails if any does not.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

BATCH = 50  # sentences


def translate(folder: str, source: Path, beams: int, remote: bool = False, optimize: bool = False) -> list[list[int]]:
    """The tokens of each line's translation."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=remote, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
    if optimize:
        from hf_vanilla_transformer.inference import optimize_for_inference

        optimize_for_inference(model)
    lines, found = source.read_text(encoding="utf-8").splitlines(), []
    for start in range(0, len(lines), BATCH):
        inputs = tokenizer(lines[start : start + BATCH], padding=True, return_tensors="pt")
        for row in model.generate(**inputs, num_beams=beams, length_penalty=1.0 if beams > 1 else None):
            found.append(row[row.ne(model.config.pad_token_id)].tolist())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder with remote code")
    parser.add_argument("source", type=Path, help="text file")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--remote", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model, args.source = os.path.abspath(args.model), args.source.resolve()
    torch.set_num_threads(args.threads)
    if args.remote:
        print(json.dumps([translate(args.model, args.source, beams, remote=True) for beams in args.beams]))
        assert "hf_vanilla_transformer" not in sys.modules, "the package was imported"
        return
    # by its path and from elsewhere, so that the package cannot be found beside it
    command = [sys.executable, "-P", str(Path(__file__).resolve()), args.model, str(args.source), "--remote"]
    command += ["--threads", str(args.threads), "--beams", *map(str, args.beams)]
    output = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, check=True, text=True).stdout
    alone = json.loads(output.splitlines()[-1])  # below the output of transformers

    import hf_vanilla_transformer  # noqa: F401  (registers the model)

    failed = False
    for beams, remote in zip(args.beams, alone, strict=True):
        package = translate(args.model, args.source, beams)
        engine = translate(args.model, args.source, beams, optimize=True)
        counts = [sum(a == b for a, b in zip(remote, other, strict=True)) for other in (package, engine)]
        failed |= min(counts) < len(remote)
        print(f"beams {beams}: of {len(remote):,} sentences {counts[0]:,} as the package, {counts[1]:,} as its engine")
    sys.exit(failed)


if __name__ == "__main__":
    main()
