"""Workers of Ray and of Spark give the translations of one process, whichever of them are killed."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_vanilla_transformer import BatchTranslator, Translator
from hf_vanilla_transformer.corpora.inputs import DISTILLED
from hf_vanilla_transformer.inference.fingerprints import translator_fingerprint
from hf_vanilla_transformer.inference.ray_workers import RayPool
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import save_model

#: More in the measurement: RAY_LINES=20000 pytest -m slow -s tests/inference/test_ray.py -k killed
LINES = int(os.environ.get("RAY_LINES", 2000))
KILLED = 5
TEXT = [f"{i} two hundred and {i}" if i % 7 else "" for i in range(LINES)]
SETTINGS = {"num_beams": 2, "max_new_tokens": 12}
FLAGS = ["--batch_size", 8, "--num_beams", 2, "--max_new_tokens", 12, "--device", "cpu"]

pytestmark = pytest.mark.slow


@pytest.fixture
def ray() -> Any:
    return pytest.importorskip("ray", reason='pip install ".[ray]"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("model"),
        TEXT[:100],
        vocab_size=300,
        tie_word_embeddings=False,
    )


@pytest.fixture
def load(folder: Path) -> Callable[[], Translator]:
    return partial(Translator.from_pretrained, folder, device="cpu")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    translator = Translator.from_pretrained(folder, device="cpu")
    return [
        text.replace("\n", " ") for text in translator.translate(TEXT, batch_size=8, **SETTINGS)
    ]


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "vanilla_transformer_cli", *map(str, arguments)]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def ray_workers(
    psutil: Any,
    parent: int,
    marker: str,
) -> list[Any]:
    """The processes below `parent` with the name `marker` that have begun to work."""
    workers = []
    with suppress(psutil.NoSuchProcess):  # also a zombie
        for child in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if marker in " ".join(child.cmdline()) and child.cpu_times().user > 0.1:
                    workers.append(child)
    return workers


def run_and_kill(
    command: list[str],
    marker: str,
    kills: int,
    limit: float = 900,
) -> None:
    """Run a command and kill random workers of it, by the name of their process, with SIGKILL."""
    psutil: Any = pytest.importorskip("psutil", reason="finds the workers")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    rng = random.Random(1)
    seen = 0
    deadline = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(rng.uniform(0.2, 1.0))
        workers = ray_workers(psutil, process.pid, marker) if seen < kills else []
        if workers:
            rng.choice(workers).send_signal(signal.SIGKILL)
            seen += 1
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    assert seen == kills, f"only {seen} workers were killed"


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("kills", [0, KILLED])
@pytest.mark.parametrize("form", ["txt", "parquet"])
def test_killed_workers_of_ray_lose_and_repeat_nothing(
    folder: Path,
    expected: list[str],
    tmp_path: Path,
    form: str,
    kills: int,
) -> None:
    source = tmp_path / f"in.{form}"
    if form == "txt":
        output = tmp_path / "out.txt"
        write_lines(source, TEXT)
    else:
        output = tmp_path / "out.jsonl"
        datasets.Dataset.from_dict({"id": range(LINES), "source": TEXT}).to_parquet(source)
    files = ["--model", folder, "--input", source, "--output", output]
    start = time.perf_counter()
    run_and_kill(command("translate", "--ray", "local", *files, *FLAGS), "_Worker.run", kills)
    print(f"\n{form}, {LINES:,} lines, {kills} killed: {time.perf_counter() - start:.1f} s")
    lines = read_lines(output)
    if form == "txt":
        assert lines == expected
        return
    for number, (line, text, translation) in enumerate(
        zip(lines, TEXT, expected, strict=True), start=1
    ):
        assert json.loads(line) == {
            "line": number,
            "source": text,
            "translation": translation,
        }


@pytest.mark.usefixtures("ray")
def test_cluster_with_a_token_translates_for_its_holders(
    folder: Path,
    expected: list[str],
    tmp_path: Path,
) -> None:
    """`ray start` needs a token if the user has one. Ray itself uses it only for `auto` or RAY_AUTH_MODE=token."""
    source = write_lines(tmp_path / "in", TEXT[:100])
    output = tmp_path / "out"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    holder = variables | {"HOME": str(tmp_path)}
    stranger = variables | {"HOME": str(tmp_path / "other")}
    of_ray = [sys.executable, "-m", "ray.scripts.scripts"]
    token = subprocess.check_output(
        [*of_ray, "get-auth-token", "--generate"],
        env=holder,
        text=True,
    ).strip()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = [
        *of_ray,
        "start",
        "--head",
        "--block",
        "--num-cpus=1",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--port={port}",
    ]
    call = command(
        "translate",
        *("--ray", f"127.0.0.1:{port}"),
        *("--input", source),
        *("--output", output),
        *("--model", folder),
        *FLAGS,
    )

    def translate(environment: dict[str, str]) -> subprocess.CompletedProcess:
        output.unlink(missing_ok=True)
        return subprocess.run(
            call,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    with_token = {"RAY_AUTH_MODE": "token"}
    with subprocess.Popen(start, env=holder, stdout=subprocess.PIPE) as head:
        try:
            assert any(b"started" in line for line in head.stdout or ())
            for environment in (holder, stranger | with_token):
                refused = translate(environment)
                assert refused.returncode == 2, refused.stderr
                assert "error: ray: " in refused.stderr
                assert "Traceback" not in refused.stderr
            for environment in (holder, stranger | {"RAY_AUTH_TOKEN": token}):
                accepted = translate(environment | with_token)
                assert accepted.returncode == 0, accepted.stderr
                assert read_lines(output) == expected[:100]
        finally:
            head.terminate()


@pytest.mark.usefixtures("ray")
def test_errors_of_workers_of_ray_reach_the_caller(load: Callable[[], Translator]) -> None:
    """A refusal of a line, and another model in the folder of a worker."""
    pool = RayPool("local", load)
    fingerprint = translator_fingerprint(load())
    assert list(pool.map(refuse, [], fingerprint)) == []
    for model, message in (
        (fingerprint, "^line: refused$"),
        ("of another model", "^model: a worker of Ray has another model"),
    ):
        with pytest.raises(UserError, match=message):
            list(pool.map(refuse, ["two"], model))


def test_ray_that_does_not_start_is_one_line(
    ray: Any,
    load: Callable[[], Translator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray raises a plain Exception where a node is slow."""

    def init(*args: Any, **settings: Any) -> None:
        raise Exception("The current node timed out during startup.\nSee the log.")

    monkeypatch.setattr(ray, "init", init)
    message = r"^ray: cannot connect to a cluster at local \(.*timed out.*\): RAY_raylet_start_wait_time_s=300 [^\n]*$"
    with pytest.raises(UserError, match=message):
        list(RayPool("local", load).map(refuse, ["two"], "of no model"))


def refuse(translator: Translator, line: str) -> str:
    raise UserError("line: refused")


@pytest.mark.usefixtures("ray")
def test_distil_on_ray_writes_the_pairs_of_one_process(
    folder: Path,
    load: Callable[[], Translator],
    tmp_path: Path,
) -> None:
    lines = TEXT[:200]
    source = write_lines(tmp_path / "in", lines)
    output = tmp_path / "out"
    files = ["--teacher", folder, "--source_file", source, "--output_dir", output]
    flags = ["--ray", "local", "--batch_size", 8, "--num_beams", 2, "--device", "cpu"]
    subprocess.run(command("distil", *files, *flags), check=True)
    translations = load().translate(lines, batch_size=8, num_beams=2)
    pairs = [(text, one.replace("\n", " ")) for text, one in zip(lines, translations, strict=True)]
    written = zip(*(read_lines(output / name) for name in DISTILLED), strict=True)
    assert list(written) == [(text, one) for text, one in pairs if text and one.strip()]


def assert_as_by_one_process(translated: dict[int, str], load: Callable[[], Translator]) -> None:
    """The first 300 lines."""
    assert translated == dict(enumerate(load().translate(TEXT[:300], **SETTINGS)))


def test_ray_data_gives_the_translations_of_one_process(
    ray: Any,
    folder: Path,
    load: Callable[[], Translator],
) -> None:
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        rows = ray.data.from_items(
            [{"line": i, "source": text} for i, text in enumerate(TEXT[:300])]
        )
        rows = rows.map_batches(
            BatchTranslator,
            fn_constructor_args=[str(folder)],
            fn_constructor_kwargs=SETTINGS,
            concurrency=1,
            batch_size=64,
        )
        translated = {row["line"]: row["translation"] for row in rows.take_all()}
    finally:
        ray.shutdown()
    assert_as_by_one_process(translated, load)


def test_spark_gives_the_translations_of_one_process(
    folder: Path,
    load: Callable[[], Translator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sql: Any = pytest.importorskip("pyspark.sql", reason='pip install ".[spark]"')
    if subprocess.run(["java", "-version"], capture_output=True).returncode:
        pytest.skip("Spark needs Java")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    spark = (
        sql.SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    try:
        columns = "line long, source string"
        frame = spark.createDataFrame(list(enumerate(TEXT[:300])), columns)
        translate = BatchTranslator(folder, device="cpu", **SETTINGS)
        rows = frame.repartition(2).mapInPandas(
            translate.map_in_pandas, f"{columns}, translation string"
        )
        translated = {row["line"]: row["translation"] for row in rows.collect()}
    finally:
        spark.stop()
    assert_as_by_one_process(translated, load)
