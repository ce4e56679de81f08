"""Watched and replaced in the tests of the engine: the decoders of searches, and the recorder of their steps."""

from typing import Any

import pytest

from hf_vanilla_transformer.engine import captured, optimize
from tests.engine.recorded_steps import Eager
from tests.search_helpers import Model


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The decoders of all searches."""
    made: list[type] = []
    make_decoder = Model.make_decoder

    def make(*args: Any) -> Any:
        decoder = make_decoder(*args)
        made.append(type(decoder))
        return decoder

    monkeypatch.setattr(Model, "make_decoder", make)
    return made


@pytest.fixture
def eager_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a pretended GPU are repeated by running them."""
    monkeypatch.setattr(
        optimize, "not_optimizable", lambda model: None
    )  # its parameters are of another class
    monkeypatch.setattr(captured, "recorder_of", lambda device: Eager())
