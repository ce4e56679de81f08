"""Watched by the tests of the engine: the decoders of searches."""

import pytest

from tests.search_helpers import Model


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The decoders of all searches."""
    made, make = list[type](), Model.make_decoder
    monkeypatch.setattr(Model, "make_decoder", lambda *args: made.append(type(d := make(*args))) or d)
    return made
