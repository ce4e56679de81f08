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
# CTranslate2's wheel asks for cuBLAS by its name in CUDA 12. That of CUDA 13 may serve it. If not, it is left out.
"$python" - "$output/cuda_12_names" <<'EOF'
import sys
import sysconfig
from pathlib import Path

links = Path(sys.argv[1])
links.mkdir(exist_ok=True)
for name in ("libcublas", "libcublasLt"):
    for library in Path(sysconfig.get_path("purelib")).glob(f"nvidia/**/{name}.so.13"):
        link = links / f"{name}.so.12"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
EOF
export LD_LIBRARY_PATH="$output/cuda_12_names${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$python" -m scripts.benchmarks gpu "$output" "$@"
