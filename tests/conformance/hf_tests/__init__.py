"""Hugging Face's own tests, and our stand-ins for what they import.

The source distribution of transformers carries the files `tests/test_*.py` only. `scripts/conformance.sh` unpacks
them into a folder that is no part of this repository; it becomes part of this package here, so that their relative
imports find the modules beside this file, which are ours.
"""

import os

__path__.append(os.environ["HF_TESTS"])
