#!/usr/bin/env bash
# Run the tests: bash scripts/test.sh [PYTEST ARGUMENT…]
#
# Makes .venv if there is none and installs the tests' packages. Arguments go to pytest, paths counted from the
# repository: `bash scripts/test.sh tests/corpora -x`. `-m slow` runs the slow tests, left out otherwise. Without
# arguments the files are shared by a process for each core, as `-n auto --dist loadfile` does for a part of the tests.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

use_own_environment_beside_an_installed_package
ensure_environment dev
cd -- "$root"
# Tests write and delete thousands of small files: in memory, where it has room, so that none waits for a disk.
free_memory=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1 || true)  # KB
[ "${free_memory:-0}" -lt 8000000 ] || export TMPDIR="${TMPDIR:-/dev/shm}"
[ "$#" -gt 0 ] || set -- -n auto --dist loadfile
exec "$python" -m pytest -q "$@"
