"""The basis of every test: no network, a Hugging Face home of its own, few threads, fixed seeds."""

import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
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
for _name in (
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_MODULES_CACHE",
    "HF_METRICS_CACHE",
    "HF_EVALUATE_CACHE",
):
    os.environ.pop(_name, None)

import random  # noqa: E402

import jinja2  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests import covering, pretended_gpu  # noqa: E402
from tests.forked_interpreter import Interpreter  # noqa: E402

torch.set_num_threads(_THREADS)
if not torch.cuda.is_available():
    pretended_gpu.reserve()
# The same examples in every run, and no time limit on a busy machine.
settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The marker `covering`."""
    covering.leave_to_slow_tests(items)


def pytest_collection_finish() -> None:
    """Leave the libraries and the tests, a million objects, out of the collections of garbage in every test.

    The others are few enough to wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> None:
    """Leave out what earlier modules imported and cached, too: accelerate collects garbage in every training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed(0) formats the stack, for a GPU that is initialised later.
    seed_torch = (
        torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    )
    seed_torch(0)


@pytest.fixture(scope="session", autouse=True)
def short_translations() -> Iterator[int]:
    """Models that have learned nothing translate as long as they may: 8 tokens more than the source has, not 50.

    Returns the limit of the package.
    """
    from hf_vanilla_transformer import generation_vanilla_transformer as generation

    with pytest.MonkeyPatch.context() as patch:
        limit = generation.MAX_LENGTH_OVER_SOURCE
        patch.setattr(generation, "MAX_LENGTH_OVER_SOURCE", 8)
        yield limit


@pytest.fixture
def limit_of_the_package(short_translations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Translations of any length that a user gets."""
    from hf_vanilla_transformer import generation_vanilla_transformer as generation

    monkeypatch.setattr(generation, "MAX_LENGTH_OVER_SOURCE", short_translations)


@pytest.fixture(scope="session", autouse=True)
def drawing() -> Iterator[dict[tuple[Any, str], Any]]:
    """Leave the figures of trainings empty and unsaved: a third of the time of a tiny run.

    Returns the functions that draw: (module or class, name) -> function.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the extra `plot` is not installed
        yield {}
        return
    from hf_vanilla_transformer.utils.plotting import figure_file

    draw = Figure.savefig

    def save(figure: Any, file: Any, **settings: Any) -> None:
        if isinstance(file, str | Path):
            Path(file).touch()
        else:
            draw(figure, file, **settings)

    def leave_empty(*arguments: Any) -> Path:
        *_, path = arguments
        with figure_file(path):
            return Path(path)

    with pytest.MonkeyPatch.context() as patch:
        replaced = {(Figure, "savefig"): save}
        if finishing := sys.modules.get("hf_vanilla_transformer.training.run.finishing"):
            replaced |= {
                (finishing, "plot_attention"): leave_empty,
                (finishing, "plot_curve"): leave_empty,
            }
        originals = {place: getattr(*place) for place in replaced}
        for place, function in replaced.items():
            patch.setattr(*place, function)
        yield originals


@pytest.fixture(scope="session", autouse=True)
def computed_once() -> Iterator[None]:
    """Compile the template of the model cards once, spell each number once, and compute Marian's positions once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", functools.cache(jinja2.Environment.compile))
        if numbers := sys.modules.get("hf_vanilla_transformer.corpora.numbers"):
            patch.setattr(numbers, "num2words", functools.cache(numbers.num2words))
        if marian := sys.modules.get("transformers.models.marian.modeling_marian"):
            positions = marian.MarianSinusoidalPositionalEmbedding
            patch.setattr(positions, "create_weight", once_for_each_size(positions.create_weight))
        yield


@pytest.fixture(scope="session", autouse=True)
def unsynced_files() -> Iterator[None]:
    """Do not wait for the disk, a sixth of the time of a run: tests kill processes, and no machine loses its power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_forkserver() -> Iterator[None]:
    """Let the server that processes are copies of import what all of them need: it starts once, for one of them."""
    users = ("batches.encoded_blocks", "cleaning.judging", "serving.document_process")
    modules = [f"hf_vanilla_transformer.{name}" for name in users]
    preload = forkserver.set_forkserver_preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            forkserver, "set_forkserver_preload", lambda names: preload([*names, *modules])
        )
        yield


def once_for_each_size(
    create_weight: Callable[[Any], torch.Tensor],
) -> Callable[[Any], torch.Tensor]:
    weights: dict[Any, torch.Tensor] = {}

    def copied(module: Any) -> torch.Tensor:
        size = (module.weight.shape, module.weight.dtype, torch.get_default_device())
        if size not in weights:
            weights[size] = create_weight(module)
        return weights[size].clone()

    return copied


@pytest.fixture
def drawn_figures(drawing: dict[tuple[Any, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at figures."""
    for place, function in drawing.items():
        monkeypatch.setattr(*place, function)


@pytest.fixture(params=["dictionaries", "characters"])
def dictionaries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether words of scripts without spaces are ICU's. The test runs with both."""
    if request.param == "characters":
        monkeypatch.setattr("hf_vanilla_transformer.text.words._dictionary_words", lambda: list)
    else:
        pytest.importorskip("icu4py", reason="needs the extra `words`")
    return request.param == "dictionaries"


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tmp_path` as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_modules(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, whose modules can be imported. They are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(in_tmp_path))
    yield in_tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if str(file).startswith(str(in_tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def python() -> Iterator[Interpreter]:
    """Runs programs in processes of their own, which need not import the libraries."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


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
