#!/usr/bin/env bash
# Measure and check on a machine with one GPU, in twelve minutes at most: bash scripts/gpu_check.sh OUT [--source F --target F]
# Figures appear in OUT as JSON, section by section, and the tests follow. Started again, it continues with the missing
# figures. `--device cpu --quick` tries it without a GPU.
set -euo pipefail
output=$(realpath -m "${1:?give a folder for the figures}")
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$output"
git rev-parse HEAD >"$output/commit.txt" 2>/dev/null || echo "no git here: note the commit" >"$output/commit.txt"

# CTranslate2's wheel asks for cuBLAS by its name in CUDA 12. The wheel nvidia-cublas-cu12 has it. If only torch's
# nvidia-cublas of CUDA 13 is there, a link of that name may serve.
cublas=$("$python" - "$output/cuda_12_names" <<'EOF'
import sys
import sysconfig
from pathlib import Path

installed = Path(sysconfig.get_path("purelib")) / "nvidia"
if found := next(iter(installed.glob("**/libcublas.so.12")), None):
    print(found.parent)
else:
    links = Path(sys.argv[1])
    links.mkdir(exist_ok=True)
    for name in ("libcublas", "libcublasLt"):
        for library in installed.glob(f"**/{name}.so.13"):
            link = links / f"{name}.so.12"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
    print(links)
EOF
)
[ -n "$(ls -A -- "$cublas")" ] || echo "CTranslate2 on a GPU needs: pip install nvidia-cublas-cu12"
export LD_LIBRARY_PATH="$cublas${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

status=0
"$python" -m scripts.benchmarks gpu "$output" "$@" 2>&1 | tee "$output/figures.txt" || status=$?
if "$python" -c "import pytest" 2>/dev/null; then
  timeout --signal=INT --kill-after=10 120 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu 2>&1 |
    tee "$output/tests.txt" || status=$?
else
  echo "tests: not run, pytest is not installed" | tee "$output/tests.txt"
fi
exit "$status"
