"""A switch that stops all searches."""

import threading
from collections.abc import Iterator

import pytest

from hf_vanilla_transformer.engine.continuous import ContinuousSearch


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no search takes a step."""
    event = threading.Event()
    step = ContinuousSearch.step
    monkeypatch.setattr(ContinuousSearch, "step", lambda self: event.wait(30) and step(self))
    yield event
    event.set()
