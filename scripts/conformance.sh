#!/usr/bin/env bash
# Run Hugging Face's own model tests on the models of this package and, for comparison, on transformers' Marian:
# bash scripts/conformance.sh [PYTEST ARGUMENT…]
#
# The tests come from the source distribution of the installed transformers. They are downloaded once, into
# .conformance/VERSION, and are no part of this repository. Prints a table of passed, failed and skipped tests, and
# fails if a test does that neither for Marian nor with a reason in tests/conformance/exceptions.py. Arguments go to
# pytest, `-k resize` for example. They select a part of the tests, and the list of reasons is then not checked to be complete.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

ensure_environment dev
cd -- "$root"
version=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("transformers"))')
tests=$root/.conformance/$version
if [ ! -d "$tests" ]; then
  echo "downloading the tests of transformers $version"
  mkdir -p -- "$root/.conformance"
  part=$(mktemp -d "$root/.conformance/part.XXXXXX")
  trap 'rm -rf -- "$part"' EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --dest "$part" --no-deps --no-binary transformers \
    --no-build-isolation "transformers==$version" || die "the download failed (pip says above why)"
  tar -xzf "$part/transformers-$version.tar.gz" -C "$part" "transformers-$version/tests"
  : >"$part/transformers-$version/tests/__init__.py" # one of them loads its folder as a package
  mv -- "$part/transformers-$version/tests" "$tests"
  rm -rf -- "$part"
fi
exec "$python" tests/conformance/run.py "$tests" "$@" </dev/null
