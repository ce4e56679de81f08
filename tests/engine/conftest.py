"""Watched by the tests of the engine: the decoders of searches, and modules that would be compiled."""

from typing import Any

import pytest

from hf_vanilla_transformer.engine import optimize
from hf_vanilla_transformer.engine.compiled import CompiledModule
from tests.search_helpers import Model


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The decoders of all searches."""
    made, make = list[type](), Model.make_decoder
    monkeypatch.setattr(Model, "make_decoder", lambda *args: made.append(type(d := make(*args))) or d)
    return made


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that would have been compiled. They run as they are."""
    names: list[str] = []

    def compile_nothing(self: CompiledModule, args: tuple) -> Any:
        names.append(self.function.__name__)
        return self.module().forward

    monkeypatch.setattr(CompiledModule, "_compile", compile_nothing)
    monkeypatch.setattr(optimize, "compile_error", lambda device: None)
    return names
