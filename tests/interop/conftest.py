"""Fixtures of the tests of the converters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.interop.foreign import Record, assert_same_logits, converted
from tests.interop.restatement import Restatement, assert_restated

# peer, format, source, reference, options of the conversion -> model and tokenizers
Compare = Callable[..., tuple]


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """Where a test writes a checkpoint of one file."""
    return tmp_path / "model.pt"


@pytest.fixture
def compared(tmp_path: Path, record_property: Record) -> Compare:
    """Converts, compares the logits with the reference's, and records the peer. Returns what `converted` does."""

    def compare(
        peer: str,
        source_format: str,
        source: Path,
        theirs: Restatement | nn.Module,
        **options: Any,
    ) -> tuple:
        found = converted(source_format, source, tmp_path / "ours", **options)
        compare_logits = assert_restated if isinstance(theirs, Restatement) else assert_same_logits
        record_property("logits", (peer, compare_logits(found[0], theirs)))
        return found

    return compare
