"""The basis of every test: no network, a Hugging Face home of its own, few threads, fixed seeds."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Imports and the collection of tests make a million objects that stay: looking for garbage among them takes seconds.
gc.disable()

# A shell makes background processes ignore Ctrl-C, and their children, which the tests interrupt, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The libraries read these when they are imported, so they are set before the first import. Subprocesses inherit them.
_HF_HOME = tempfile.TemporaryDirectory(prefix="hf_home_", ignore_cleanup_errors=True)
_THREADS = 1  # the models of the tests are too small to gain from more
os.environ.update(
    HF_HOME=_HF_HOME.name,
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_EVALUATE_OFFLINE="1",
    OMP_NUM_THREADS=str(_THREADS),
    TOKENIZERS_PARALLELISM="false",
)
# More precise homes of a user's own would win over HF_HOME.
for _name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE"):
    os.environ.pop(_name, None)

import random  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests import pretended_gpu  # noqa: E402

torch.set_num_threads(_THREADS)
if not torch.cuda.is_available():
    pretended_gpu.reserve()
# The same examples in every run, and no time limit on a busy machine.
settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_collection_finish() -> None:
    """Leave the libraries and the tests, a million objects, out of the collections of garbage in every test."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def blank_figures() -> Iterator[Callable[..., None]]:
    """Save figures without drawing them, which takes half of the time of a tiny run. Returns what draws them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the extra `plot` is not installed
        yield print
        return
    draw = Figure.savefig

    def save(figure: Any, file: Any, **settings: Any) -> None:
        if isinstance(file, str | Path):
            Path(file).touch()
        else:
            draw(figure, file, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield draw


@pytest.fixture
def drawn_figures(blank_figures: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at figures."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", blank_figures)


@pytest.fixture(params=["dictionaries", "characters"])
def dictionaries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether words of scripts without spaces are ICU's. The test runs with both."""
    if request.param == "characters":
        monkeypatch.setattr("hf_vanilla_transformer.data.words._dictionary_words", lambda: list)
    else:
        pytest.importorskip("icu4py", reason="needs the extra `words`")
    return request.param == "dictionaries"


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tmp_path` as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the Multi30k files, next to the repository and not part of it."""
    folder = REPOSITORY.parent / "shared" / "data" / "multi30k"
    if not folder.is_dir():
        pytest.skip(f"needs the Multi30k files in {folder}")
    return folder


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[Any, str, str]]]:
    """Runs `vanilla-transformer` in this process. Returns exit status, standard output and standard error."""
    from transformers.utils import logging

    from vanilla_transformer_cli.main import main

    verbosity = logging.get_verbosity()

    def command(*arguments: Any) -> tuple[Any, str, str]:
        capfd.readouterr()  # the output before
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        return leaving.value.code or 0, *capfd.readouterr()

    yield command
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
