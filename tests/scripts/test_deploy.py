"""The files for clusters, each read by the tool that it is for, where that is installed."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_vanilla_transformer import Translator
from tests.model_helpers import save_model
from tests.trainer_helpers import assert_same_model
from tests.training.several_processes import FLAGS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "scripts" / "deploy"
COMMANDS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LINES = [f"{i} two hundred and {i}" for i in range(40)]


def tool(name: str) -> str:
    path = shutil.which(name, path=COMMANDS)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_files_are_listed() -> None:
    files = [path for path in FILES.iterdir() if path.name != "README.md"]
    listed = re.findall(
        r"`([\w.]+\.(?:sh|yaml|Dockerfile))`", (FILES / "README.md").read_text("utf-8")
    )
    assert sorted(listed) == sorted(path.name for path in files)


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_commands_in_files_parse(path: Path) -> None:
    """The flags of this package's commands, which no tool of a cluster knows."""
    from vanilla_transformer_cli import serve, translate
    from vanilla_transformer_cli.main import parse_arguments

    text = re.sub(r"\\\n|\n {12,}(?=--)", " ", path.read_text("utf-8"))
    for flags in re.findall(r"vanilla-transformer translate ([^\n]*)", text):
        flags = flags.replace("$((JOB_COMPLETION_INDEX + 1))", "3").replace(
            "$SLURM_ARRAY_TASK_ID/", "3/"
        )
        words = re.sub(r'"\$\{@:\d\}"|"', "", flags.replace("${SHARDS:-64}", "64")).split()
        assert parse_arguments(translate, words, "translate").shard == (3, 64)
    if path.name == "kubernetes_server.yaml":
        container = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]["containers"][0]
        assert parse_arguments(serve, container["args"], "serve").model == ["en-de=/model"]


@pytest.mark.parametrize("path", sorted(FILES.glob("*.sh")), ids=lambda path: path.name)
def test_shell_files_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(path: Path) -> None:
    result = subprocess.run([tool("hadolint"), str(path)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout
    assert all(
        (ROOT / name).exists()
        for name in re.findall(r"^COPY (.*) \S+$", path.read_text(), re.M)[0].split()
    )


@pytest.mark.parametrize(
    "path", sorted(FILES.glob("kubernetes_*.yaml")), ids=lambda path: path.name
)
def test_kubernetes_files_fit_the_published_schemas(path: Path) -> None:
    validation: Any = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate"
    )
    documents = list(yaml.safe_load_all(path.read_text("utf-8")))
    assert documents
    for document in documents:
        validation.validate(document, "1.34", strict=True)
        broken = document | {"spec": document["spec"] | {"replica": 1}}
        with pytest.raises(validation.ValidationError):
            validation.validate(broken, "1.34", strict=True)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_do_not_run_as_root(path: Path) -> None:
    text = path.read_text("utf-8")
    assert re.findall(r"^USER (.*)$", text, re.M) == ["1000"] and "FROM ${BASE}" in text


@pytest.mark.parametrize(
    "path", sorted(FILES.glob("kubernetes_*.yaml")), ids=lambda path: path.name
)
def test_pods_meet_the_restricted_standard(path: Path) -> None:
    """The fields that the Pod Security Standard "restricted" requires, and two more."""
    pod = next(yaml.safe_load_all(path.read_text("utf-8")))["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] > 0
    assert (
        context["seccompProfile"] == {"type": "RuntimeDefault"}
        and pod["automountServiceAccountToken"] is False
    )
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in paths and {"name": "HOME", "value": "/tmp"} in container["env"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster of Slurm on this machine, with two nodes of four CPUs."""
    daemons, host = (
        [tool(name) for name in ("munged", "slurmctld", "slurmd")],
        socket.gethostname().partition(".")[0],
    )
    if os.getuid():
        pytest.skip("the daemons of Slurm need root")
    folder = tmp_path_factory.mktemp("slurm")
    folder.parent.chmod(0o755)
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    controller, daemon, *nodes = (port.getsockname()[1] for port in ports)
    for port in ports:
        port.close()
    # cred_expire: the seconds until a requeued job may start, 120 otherwise
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\n"
        f"SlurmctldPort={controller}\nSlurmdPort={daemon}\nAuthInfo=socket={folder}/munge.sock,cred_expire=5\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmctldPidFile={folder}/ctld.pid\n"
        f"SlurmdPidFile={folder}/slurmd-%n.pid\nProctrackType=proctrack/pgid\nTaskPlugin=task/none\nMpiDefault=none\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nJobAcctGatherType=jobacct_gather/none\n"
        "SlurmdParameters=config_overrides\nReturnToService=2\n"
        f"NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{nodes[0]},{nodes[1]}] "
        "CPUs=4 RealMemory=8000\nPartitionName=main Nodes=ALL Default=YES State=UP\n"
    )
    munge = {
        "key-file": "key",
        "socket": "munge.sock",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
        "seed-file": "s",
    }
    commands = [
        [
            daemons[0],
            "--foreground",
            "--force",
            *(f"--{flag}={folder / name}" for flag, name in munge.items()),
        ]
    ]
    (folder / "hosts").write_text(
        "127.0.0.1 localhost node1 node2\n" + Path("/etc/hosts").read_text()
    )
    named = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount --bind {folder}/hosts /etc/hosts && exec "$@"',
        "sh",
    ]
    commands += [
        [daemons[1], "-D"],
        *([*named, daemons[2], "-D", "-N", f"node{number}"] for number in (1, 2)),
    ]
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": COMMANDS,
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    try:
        with open(folder / "log", "wb") as log:
            for command in commands:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
                )
                time.sleep(1)
        for _ in range(60):
            idle = subprocess.run(
                [tool("sinfo"), "-h", "-o", "%T %D"],
                env=environment,
                capture_output=True,
                text=True,
            )
            if idle.stdout.strip() == "idle 2":
                break
            time.sleep(1)
        else:
            pytest.skip(f"Slurm does not run here: {(folder / 'log').read_text()[-500:]}")
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FILES.glob("slurm_*.sh")), ids=lambda path: path.name)
def test_slurm_accepts_the_files(path: Path, slurm: dict[str, str]) -> None:
    command = [tool("sbatch"), "--test-only", str(path), "a", "b", "c"]
    result = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "to start at" in result.stderr, result.stderr


@pytest.mark.parametrize(("shards", "expected"), [({}, "40/64"), ({"SHARDS": "128"}, "40/128")])
def test_shard_that_slurm_runs_again_alone_has_its_share(
    tmp_path: Path, shards: dict[str, str], expected: str
) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    # sbatch --array=40
    array = {
        "SLURM_ARRAY_TASK_ID": "40",
        "SLURM_ARRAY_TASK_MIN": "40",
        "SLURM_ARRAY_TASK_MAX": "40",
    }
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **array, **shards}
    command = ["bash", str(FILES / "slurm_translate.sh"), "model", "in", "out"]
    assert f"--shard {expected}\n" in subprocess.check_output(command, env=env, text=True)


@pytest.mark.slow
def test_shards_of_slurm_merge_to_one_translation(slurm: dict[str, str], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", LINES, vocab_size=300, tie_word_embeddings=False)
    (tmp_path / "in").write_text("\n".join(LINES) + "\n")
    flags = ["--batch_size", "1", "--num_beams", "1", "--max_new_tokens", "4"]
    files = [str(folder), str(tmp_path / "in"), str(tmp_path / "out")]
    command = [
        tool("sbatch"),
        "--wait",
        "--array=1-3",
        f"--output={tmp_path}/log-%a",
        str(FILES / "slurm_translate.sh"),
    ]
    subprocess.run(
        [*command, *files, *flags], env={**slurm, "SHARDS": "3"}, check=True, timeout=900
    )
    subprocess.run([tool("vanilla-transformer"), "merge", "--output", files[2]], check=True)
    expected = Translator.from_pretrained(folder, device="cpu").translate(
        LINES, num_beams=1, max_new_tokens=4, batch_size=1
    )
    assert (tmp_path / "out").read_text() == "".join(
        line.replace("\n", " ") + "\n" for line in expected
    )


@pytest.mark.slow
def test_requeued_training_of_slurm_ends_in_the_same_weights(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    def submit(run: str) -> str:
        files = [
            str(FILES / "slurm_train.sh"),
            "numbers_en_de",
            "--output_dir",
            str(tmp_path / run),
        ]
        command = [
            tool("sbatch"),
            "--parsable",
            f"--output={tmp_path}/log_{run}",
            *files,
            *FLAGS,
            "--max_steps",
            "40",
        ]
        return subprocess.check_output(
            [*command, "--average_last", "1"], env=slurm, text=True
        ).strip()

    def wait(job: str, reached: Callable[[], bool]) -> None:
        for _ in range(600):
            state = subprocess.check_output(
                [tool("scontrol"), "show", "job", job], env=slurm, text=True
            )
            assert "JobState=FAILED" not in state, (tmp_path / "log_requeued").read_text()
            if reached() or "JobState=COMPLETED" in state:
                return
            time.sleep(1)

    job = submit("requeued")
    wait(job, (tmp_path / "requeued" / "checkpoint-2").is_dir)
    subprocess.run([tool("scontrol"), "requeue", job], env=slurm, check=True)
    wait(job, lambda: False)
    wait(submit("undisturbed"), lambda: False)
    assert "resuming from" in (tmp_path / "log_requeued").read_text()
    assert_same_model(tmp_path / "requeued", tmp_path / "undisturbed")


@pytest.mark.parametrize(("installed", "folder"), [("installed", ".venv-dev"), ("", ".venv")])
def test_scripts_leave_an_installed_package_alone(repository, tmp_path, installed, folder):
    """A training may use it: test.sh and docs.sh would put an editable one in its place."""
    (tmp_path / "scripts").mkdir()
    shutil.copyfile(repository / "scripts" / "common.sh", tmp_path / "scripts" / "common.sh")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {installed}\n")
    python.chmod(0o755)
    lines = "source scripts/common.sh; use_own_environment_beside_an_installed_package >/dev/null; echo $venv $python"
    printed = subprocess.run(
        ["bash", "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == [str(tmp_path / folder), str(tmp_path / folder / "bin" / "python")]
