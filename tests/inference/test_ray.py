"""Workers of Ray and of Spark give the translations of one process, whichever of them are killed."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_vanilla_transformer import BatchTranslator, Translator
from hf_vanilla_transformer.corpora.inputs import DISTILLED
from hf_vanilla_transformer.inference.fingerprints import translator_fingerprint
from hf_vanilla_transformer.inference.ray_workers import JOBS_OF_A_WORKER, RayPool
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import save_model

#: More in the measurement: RAY_LINES=20000 pytest -m slow -s tests/inference/test_ray.py -k killed
LINES = int(os.environ.get("RAY_LINES", 2000))
KILLED = 5
TEXT = [f"{i} two hundred and {i}" if i % 7 else "" for i in range(LINES)]
SETTINGS = {"num_beams": 2, "max_new_tokens": 12}
FLAGS = ["--batch_size", "8", "--num_beams", "2", "--max_new_tokens", "12", "--device", "cpu"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), TEXT[:100], vocab_size=300, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    translator = Translator.from_pretrained(folder, device="cpu")
    return [text.replace("\n", " ") for text in translator.translate(TEXT, batch_size=8, **SETTINGS)]


def ray_workers(psutil: Any, parent: int, marker: str) -> list[Any]:
    """The processes below `parent` with the name `marker` that have begun to work."""
    workers = []
    with suppress(psutil.NoSuchProcess):  # also a zombie
        for child in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                workers += [child] if marker in " ".join(child.cmdline()) and child.cpu_times().user > 0.1 else []
    return workers


def run_and_kill(command: list[str], marker: str, kills: int, limit: float = 900) -> None:
    """Run a command and kill random workers of it, by the name of their process, with SIGKILL."""
    psutil: Any = pytest.importorskip("psutil", reason="finds the workers")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    rng, seen = random.Random(1), 0
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


@pytest.mark.parametrize("kills", [0, KILLED])
@pytest.mark.parametrize("form", ["txt", "parquet"])
def test_killed_workers_of_ray_lose_and_repeat_nothing(
    folder: Path, expected: list[str], tmp_path: Path, form: str, kills: int
) -> None:
    pytest.importorskip("ray", reason='pip install ".[ray]"')
    source, output = tmp_path / f"in.{form}", tmp_path / ("out.jsonl" if form == "parquet" else "out.txt")
    if form == "txt":
        source.write_text("\n".join(TEXT) + "\n", encoding="utf-8")
    else:
        datasets.Dataset.from_dict({"id": range(LINES), "source": TEXT}).to_parquet(source)
    command = [sys.executable, "-m", "vanilla_transformer_cli", "translate", "--model", str(folder), "--ray", "local"]
    start = time.perf_counter()
    run_and_kill([*command, "--input", str(source), "--output", str(output), *FLAGS], "_Worker.run", kills)
    print(f"\n{form}, {LINES:,} lines, {kills} killed: {time.perf_counter() - start:.1f} s")
    lines = output.read_text(encoding="utf-8").split("\n")[:-1]
    if form == "txt":
        assert lines == expected
    else:
        rows = [json.loads(line) for line in lines]
        assert [(row["line"], row["source"], row["translation"]) for row in rows] == [
            (line, *pair) for line, pair in enumerate(zip(TEXT, expected, strict=True), start=1)
        ]


def test_cluster_with_a_token_translates_for_its_holders(folder: Path, expected: list[str], tmp_path: Path) -> None:
    """`ray start` needs a token if the user has one. Ray itself uses it only for `auto` or RAY_AUTH_MODE=token."""
    pytest.importorskip("ray", reason='pip install ".[ray]"')
    (tmp_path / "in").write_text("\n".join(TEXT[:100]) + "\n", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    holder, stranger = variables | {"HOME": str(tmp_path)}, variables | {"HOME": str(tmp_path / "other")}
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    token = subprocess.check_output([*ray, "get-auth-token", "--generate"], env=holder, text=True).strip()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    start = [*ray, "start", "--head", "--block", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
    with subprocess.Popen([*start, "--port", address.partition(":")[2]], env=holder, stdout=subprocess.PIPE) as head:
        try:
            assert any(b"started" in line for line in head.stdout or ())

            def translate(**environment: str) -> subprocess.CompletedProcess:
                (tmp_path / "out").unlink(missing_ok=True)
                files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--model", str(folder)]
                command = [sys.executable, "-m", "vanilla_transformer_cli", "translate", "--ray", address, *files]
                return subprocess.run([*command, *FLAGS], env=environment, capture_output=True, text=True, timeout=300)

            for refused in (translate(**holder), translate(**stranger | {"RAY_AUTH_MODE": "token"})):
                assert refused.returncode == 2 and "error: ray: " in refused.stderr, refused.stderr
                assert "Traceback" not in refused.stderr
            for accepted in (holder, stranger | {"RAY_AUTH_TOKEN": token}):
                result = translate(**accepted | {"RAY_AUTH_MODE": "token"})
                assert result.returncode == 0, result.stderr
                assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == expected[:100]
        finally:
            head.terminate()


def test_errors_of_workers_of_ray_reach_the_caller(folder: Path) -> None:
    """A refusal of a line, and another model in the folder of a worker."""
    pytest.importorskip("ray", reason='pip install ".[ray]"')
    load = partial(Translator.from_pretrained, folder, device="cpu")
    pool = RayPool("local", load)
    fingerprint = translator_fingerprint(load())
    assert list(pool.map(refuse, [], fingerprint)) == []
    with pytest.raises(UserError, match="^line: refused$"):
        list(pool.map(refuse, ["two"], fingerprint))
    with pytest.raises(UserError, match="^model: a worker of Ray has another model"):
        list(pool.map(refuse, ["two"], "of another model"))


def test_jobs_are_read_as_workers_need_them(folder: Path) -> None:
    pytest.importorskip("ray", reason='pip install ".[ray]"')
    load = partial(Translator.from_pretrained, folder, device="cpu")
    read = 0

    def jobs() -> Iterator[str]:
        nonlocal read
        for read in range(1, 201):
            yield f"job {read}"

    done = []
    for result in RayPool("local", load, workers=1).map(echo, jobs(), translator_fingerprint(load())):
        done.append(result)
        assert read <= len(done) + JOBS_OF_A_WORKER * (os.cpu_count() or 1)
    assert sorted(done) == sorted(f"job {number}" for number in range(1, 201))


def test_ray_that_does_not_start_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception where a node is slow."""
    ray = pytest.importorskip("ray", reason='pip install ".[ray]"')

    def init(*args: Any, **settings: Any) -> None:
        raise Exception("The current node timed out during startup.\nSee the log.")

    monkeypatch.setattr(ray, "init", init)
    pool = RayPool("local", partial(Translator.from_pretrained, folder, device="cpu"))
    message = r"^ray: cannot connect to a cluster at local \(.*timed out.*\): RAY_raylet_start_wait_time_s=300 [^\n]*$"
    with pytest.raises(UserError, match=message):
        list(pool.map(refuse, ["two"], "of no model"))


def echo(translator: Translator, line: str) -> str:
    return line


def refuse(translator: Translator, line: str) -> str:
    raise UserError("line: refused")


def test_distil_on_ray_writes_the_pairs_of_one_process(folder: Path, expected: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='pip install ".[ray]"')
    (tmp_path / "in").write_text("\n".join(TEXT[:200]) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "vanilla_transformer_cli", "distil", "--teacher", str(folder), "--ray", "local"]
    command += ["--source_file", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out"), "--batch_size", "8"]
    subprocess.run([*command, "--num_beams", "2", "--device", "cpu"], check=True)
    translations = Translator.from_pretrained(folder, device="cpu").translate(TEXT[:200], batch_size=8, num_beams=2)
    pairs = [(text, one.replace("\n", " ")) for text, one in zip(TEXT, translations, strict=False) if text]
    written = [(tmp_path / "out" / name).read_text(encoding="utf-8").split("\n")[:-1] for name in DISTILLED]
    assert list(zip(*written, strict=True)) == [pair for pair in pairs if pair[1].strip()]


def test_ray_data_gives_the_translations_of_one_process(folder: Path) -> None:
    ray: Any = pytest.importorskip("ray", reason='pip install ".[ray]"')
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rows = ray.data.from_items([{"line": i, "source": text} for i, text in enumerate(TEXT[:300])])
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
    translations = Translator.from_pretrained(folder, device="cpu").translate(TEXT[:300], **SETTINGS)
    assert [translated[line] for line in range(300)] == list(translations)


def test_spark_gives_the_translations_of_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sql: Any = pytest.importorskip("pyspark.sql", reason='pip install ".[spark]"')
    if subprocess.run(["java", "-version"], capture_output=True).returncode:
        pytest.skip("Spark needs Java")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    spark = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        frame = spark.createDataFrame([(i, text) for i, text in enumerate(TEXT[:300])], "line long, source string")
        translate = BatchTranslator(folder, device="cpu", **SETTINGS)
        rows = frame.repartition(2).mapInPandas(
            translate.map_in_pandas, "line long, source string, translation string"
        )
        translated = {row["line"]: row["translation"] for row in rows.collect()}
    finally:
        spark.stop()
    translations = Translator.from_pretrained(folder, device="cpu").translate(TEXT[:300], **SETTINGS)
    assert [translated[line] for line in range(300)] == list(translations)
