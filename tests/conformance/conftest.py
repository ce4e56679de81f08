"""Hugging Face's tests need a download: `bash scripts/conformance.sh` runs these tests, plain pytest does not."""

collect_ignore = ["hf_tests"]
