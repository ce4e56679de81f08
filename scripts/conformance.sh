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
conformance "$@"
