#!/usr/bin/env bash
# Run the fast tests with the oldest versions that pyproject.toml allows: bash scripts/minimum_versions.sh [PYTEST ARGUMENT…]
#
# Makes .venv-minimum. On Linux pip's torch brings the CUDA libraries, several gigabytes. Without a GPU, tell pip of
# PyTorch's index of CPU builds first.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

venv=$root/.venv-minimum
python=$venv/bin/python
lowest=$venv/lowest.txt

[ -x "$python" ] || "$(find_python)" -m venv "$venv"
# The lower bound of every library that the package needs, as an exact version. The extras may be newer.
"$python" - "$root/pyproject.toml" >"$lowest.new" <<'PYTHON'
import re
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    needed = re.search(r"^dependencies = \[(.*?)^\]", file.read(), re.DOTALL | re.MULTILINE)[1]
for name, version in re.findall(r'"([A-Za-z][\w-]*)>=([\d.]+)[^"]*"', needed):
    print(f"{name}=={version}")
PYTHON
mv -- "$lowest.new" "$lowest"
"$python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint "$lowest" --editable "${root}[dev]"
cd -- "$root"
"$python" -m pip list --disable-pip-version-check 2>/dev/null | grep -iE '^(torch|transformers|accelerate|tokenizers|huggingface_hub) '
[ "$#" -gt 0 ] || set -- -n auto --dist loadfile
exec "$python" -m pytest -q "$@"
