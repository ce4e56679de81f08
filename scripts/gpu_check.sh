#!/usr/bin/env bash
# Check and measure on a machine with one GPU, in ten minutes at most: bash scripts/gpu_check.sh OUT [--source F --target F]
# Figures appear in OUT as JSON, section by section. Started again, it continues with the missing ones.
set -euo pipefail
output=$(realpath -m "${1:?give a folder for the figures}")
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$output"
if "$python" -c "import pytest" 2>/dev/null; then
  timeout --signal=INT --kill-after=10 120 "$python" -m pytest -q -m gpu tests/gpu 2>&1 | tee "$output/tests.txt" || echo "some tests failed: the figures follow"
else
  echo "tests: not run, pytest is not installed" | tee "$output/tests.txt"
fi
exec "$python" -m scripts.benchmarks gpu "$output" "$@"
