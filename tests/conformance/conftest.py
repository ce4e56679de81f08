"""Hugging Face's tests need a download: `bash scripts/conformance.sh` runs what is here, plain pytest does not."""

collect_ignore = ["hf_tests"]
