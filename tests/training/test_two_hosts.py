"""Two hosts, as network namespaces with their own addresses: one is lost, the run goes on with the same updates."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer_helpers import assert_same_model
from tests.training import several_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOSTS = {"a": "10.99.43.1", "b": "10.99.43.2"}
STEPS = ["--max_steps", "8", "--average_last", "1", "--resume_from_checkpoint", "auto"]
FLAGS = ["numbers_en_de", *several_processes.FLAGS, *STEPS]
PHASES = "update,save,evaluate"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    """A cable between two namespaces. Yields the start of their names."""
    name = f"vt{os.getpid()}"
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for host in HOSTS:
            ip("netns", "add", name + host)
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        for host, address in HOSTS.items():
            ip("link", "set", name + host, "netns", name + host)
            ip("-n", name + host, "address", "add", f"{address}/24", "dev", name + host)
            for device in ("lo", name + host):
                ip("-n", name + host, "link", "set", device, "up")
        yield name
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", name + host], capture_output=True)


class Cluster:
    """Both hosts with one `torchrun` each, "static" or "elastic", and a folder that they share."""

    def __init__(self, network: str, folder: Path, agent: str, port: int):
        self.network, self.folder, self.agent, self.port = network, folder, agent, port
        (folder / "notes").mkdir(parents=True)

    def start(self, host: str, dies_at: str = "", **environment: str) -> subprocess.Popen:
        address = HOSTS["a"]
        agent = {
            "static": [
                "--node-rank",
                str("ab".index(host)),
                "--master-addr",
                address,
                "--master-port",
                str(self.port),
            ],
            "elastic": [
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{self.port}", "--rdzv-id", "run"),
                *("--rdzv-conf", f"is_host={int(host == 'a')},join_timeout=600", "--local-addr", HOSTS[host]),
                *("--max-restarts", "3"),
            ],
        }[self.agent]
        command = ["ip", "netns", "exec", self.network + host, sys.executable, "-m", "torch.distributed.run"]
        command += [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            *agent,
            str(Path(__file__).with_name("host.py")),
            dies_at,
        ]
        variables = {
            **{"HOST": host, "NOTES": str(self.folder / "notes"), "GLOO_SOCKET_IFNAME": self.network + host},
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **{"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        }
        with open(self.folder / f"log_{host}", "ab") as log:
            return subprocess.Popen(
                [*command, *FLAGS, "--output_dir", str(self.folder / "run")],
                env=os.environ | variables | environment, stdout=log, stderr=log,
            )  # fmt: skip

    def log(self) -> str:
        return "\n".join((self.folder / f"log_{host}").read_text(errors="replace") for host in HOSTS)

    def finish(self, *processes: subprocess.Popen) -> list[int]:
        try:
            return [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()


@pytest.fixture(scope="module")
def undisturbed(network: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cluster = Cluster(network, tmp_path_factory.mktemp("undisturbed"), "static", 29501)
    assert cluster.finish(cluster.start("a"), cluster.start("b")) == [0, 0], cluster.log()
    return cluster.folder / "run"


@pytest.mark.parametrize("agent", ["static", "elastic"])
def test_lost_host_returns_to_the_same_weights(network: str, undisturbed: Path, tmp_path: Path, agent: str) -> None:
    """The host is lost in an update, while saving and in an evaluation."""
    cluster = Cluster(network, tmp_path, agent, 29502 + ["static", "elastic"].index(agent))
    a = cluster.start("a", PHASES)
    for lost in range(len(PHASES.split(","))):
        b = cluster.start("b", PHASES)
        assert cluster.finish(b) == [-9], cluster.log()
        assert len(list((tmp_path / "notes").iterdir())) == lost + 1
        if agent == "static":  # both start again
            assert cluster.finish(a) == [1], cluster.log()
            a = cluster.start("a", PHASES)
    assert cluster.finish(a, cluster.start("b", PHASES)) == [0, 0], cluster.log()
    assert_same_model(tmp_path / "run", undisturbed, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"GLOO_SOCKET_IFNAME": "none0"}, "GLOO_SOCKET_IFNAME.*none0"), ({"OTHER_VERSION": "9.9"}, r"versions.*9\.9")],
)
def test_host_that_differs_is_named_in_one_line(
    network: str, tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    cluster = Cluster(network, tmp_path, "static", 29505)
    hosts = [cluster.start("b", **variables), cluster.start("a")]
    assert cluster.finish(hosts[0]) == [1]
    if "OTHER_VERSION" in variables:
        assert cluster.finish(hosts[1]) == [1]
    hosts[1].kill()  # it waits for the other
    hosts[1].wait()
    assert re.search(f"^error: .*{words}", cluster.log(), re.M), cluster.log()
    assert "Traceback" not in cluster.log().split("error: ")[0]
