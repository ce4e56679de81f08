#!/usr/bin/env bash
# Run the tests that other libraries can break with the oldest versions that pyproject.toml allows:
# bash scripts/minimum_versions.sh [--torch]
#
# Lays them over the tested versions, in .venv-minimum. torch stays. --torch takes the oldest torch, too, which on Linux
# brings the CUDA libraries, several gigabytes, unless pip is told of PyTorch's index of CPU builds.
# Hugging Face's own tests, those of the oldest transformers, come last.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

case ${1-} in
  "") ;;
  --torch) with_torch=yes ;;
  *) die "$1: unknown argument; there is --torch" ;;
esac

mapfile -t wanted < <(requirements | sed -E 's/>=([^,]+).*/==\1/')
[ -n "${with_torch:-}" ] || mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | grep -v '^torch==')
layer_environment .venv-minimum "${wanted[@]}"
cd -- "$root"
if [ -z "$layered" ]; then
  echo "the registry of packages cannot be reached: the oldest versions were not tested"
  exit
fi
test_versions
conformance
