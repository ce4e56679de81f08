#!/usr/bin/env bash
# Build the documentation in runs/docs: bash scripts/docs.sh [SPHINX ARGUMENT…]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

use_own_environment_beside_an_installed_package
ensure_environment docs
cd -- "$root"
"$python" -m sphinx --builder html --fail-on-warning --keep-going --quiet --jobs auto --conf-dir scripts/docs "$@" . runs/docs
echo "open runs/docs/index.html"
