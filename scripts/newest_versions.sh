#!/usr/bin/env bash
# Run the tests that other libraries can break with their newest versions in the ranges of pyproject.toml:
# bash scripts/newest_versions.sh [--beyond] [--torch]
#
# Lays what is newer than the tested versions over them, in .venv-newest. If nothing is, or the registry cannot be
# reached, it says so and runs no test. --beyond ignores the upper bounds, and prints the lines to change if the tests
# pass. --torch takes a newer torch, too, which on Linux brings the CUDA libraries, several gigabytes, unless pip is
# told of PyTorch's index of CPU builds.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

upper_bounds=kept
for argument in "$@"; do
  case $argument in
    --beyond) upper_bounds=dropped ;;
    --torch) with_torch=yes ;;
    *) die "$argument: unknown argument; there are --beyond and --torch" ;;
  esac
done

mapfile -t within < <(requirements)
mapfile -t unbounded < <(requirements | sed 's/,<.*//')
if [ "$upper_bounds" = kept ]; then
  layer_environment .venv-newest "${within[@]}"
else
  layer_environment .venv-newest "${unbounded[@]}"
fi
cd -- "$root"
if [ -n "$layered" ]; then
  test_versions
  conformance
elif [ -n "$unreachable" ]; then
  echo "the registry of packages cannot be reached: the newest versions were not tested"
else
  echo "no newer versions than the tested ones: nothing to test"
fi

if [ "$upper_bounds" = kept ]; then
  "$python" -m pip install --quiet --dry-run --report - --upgrade --retries 1 --timeout 30 \
    --constraint .venv-newest/constraints.txt "${unbounded[@]}" 2>/dev/null | "$python" -c '
import json
import sys

for each in json.load(sys.stdin)["install"]:
    name, version = each["metadata"]["name"], each["metadata"]["version"]
    print(f"beyond the ranges: {name} {version}; bash scripts/newest_versions.sh --beyond tests it")
'
  exit
fi
"$python" - <<'PYTHON'
from importlib.metadata import version

from packaging.version import Version

from hf_vanilla_transformer.utils.version import TESTED

for name, (oldest, newest) in TESTED.items():
    installed = Version(version(name))
    major, minor = installed.major, installed.minor
    if (major, minor) > Version(newest).release:
        print(f'pyproject.toml:   "{name}>={oldest},<{major}.{minor + 1}"')
        print(f'utils/version.py: "{name}": ("{oldest}", "{major}.{minor}")')
PYTHON
