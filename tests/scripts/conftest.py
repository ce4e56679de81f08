"""The command `vanilla-transformer` in this process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers.utils import logging

from vanilla_transformer_cli.main import main


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[Any, str, str]]]:
    """Runs the command; returns exit status, standard output and standard error."""
    verbosity = logging.get_verbosity()

    def command(*arguments: Any) -> tuple[Any, str, str]:
        capfd.readouterr()  # the output before
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        return leaving.value.code or 0, *capfd.readouterr()

    yield command
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
