"""Run commands in a Python that lacks libraries. Arguments: their names with commas, then a JSON list of commands."""

import io
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Any

libraries, commands = sys.argv[1].split(","), json.loads(sys.argv[2])
find_spec, distribution = PathFinder.find_spec, metadata.Distribution.from_name


def find_spec_of_others(name: str, path: Any = None, target: Any = None) -> Any:
    return None if name.partition(".")[0] in libraries else find_spec(name, path, target)


def distribution_of_others(name: str) -> Any:
    if name.replace("-", "_") in libraries:
        raise metadata.PackageNotFoundError(name)
    return distribution(name)


PathFinder.find_spec = staticmethod(find_spec_of_others)  # type: ignore[method-assign]
metadata.Distribution.from_name = staticmethod(distribution_of_others)  # type: ignore[method-assign]

from vanilla_transformer_cli.main import main  # noqa: E402

if __name__ == "__main__":  # not in the workers of a benchmark
    for arguments in commands:
        output, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                main(arguments)
            except SystemExit as leaving:
                status = leaving.code or 0
            except BaseException:
                status = traceback.format_exc()
        print(json.dumps([status, errors.getvalue()]), flush=True)
