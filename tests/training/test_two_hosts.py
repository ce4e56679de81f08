"""Two hosts, as network namespaces with their own addresses: one is lost, the run goes on with the same updates."""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.trainer_helpers import as_flags, assert_same_model
from tests.training import several_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOSTS = {"a": "10.99.43.1", "b": "10.99.43.2"}
STEPS = {
    "max_steps": 8,
    "average_last": 1,
    "resume_from_checkpoint": "auto",
    # torch 2.13 does not resume an optimizer without a state, such as plain SGD, from FULL_STATE_DICT.
    "optim_args": "momentum=0.9",
    "learning_rate": 0.1,
    "max_test_samples": 8,
}
FLAGS = ["numbers_en_de", *several_processes.FLAGS, *as_flags(STEPS)]
#: Deaths of a host in each phase. With 0, one in all. With several, all agents are tried with DDP and FSDP2:
#: HOST_DEATHS=3 pytest -m slow -s tests/training/test_two_hosts.py -k lost
DEATHS = int(os.environ.get("HOST_DEATHS", 0))
#: agent, and the checkpoints of FSDP2 ("" for DDP)
RUNS = [
    ("static", ""),
    ("elastic", "FULL_STATE_DICT"),
    ("elastic", ""),
    ("static", "SHARDED_STATE_DICT"),
]


def random_deaths(hosts: str, seed: int) -> list[str]:
    """Some seconds after the start of updates, evaluations and saves of a run of 8 updates."""
    rng = random.Random(seed)
    steps = {"evaluate": [2, 4, 6, 8], "save": [2, 4, 6, 8], "update": [1, 2, 3, 4, 5, 6, 7]}
    order = list(steps)
    chosen = [
        (step, phase)
        for phase in reversed(order)
        for step in rng.sample(steps[phase], max(DEATHS, 1))
    ]
    if not DEATHS:
        chosen = [chosen[seed - 1]]  # a save for the first run, an update for the second
    chosen.sort(key=lambda death: (death[0], order.index(death[1])))
    return [
        f"{rng.choice(hosts)}:{phase}:{step}:{rng.uniform(0, 0.05):.3f}" for step, phase in chosen
    ]


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
    """Both hosts with one `torchrun` each, "static" or "elastic", and a folder that they share.

    Args:
        sharded: the checkpoints of FSDP2, or "" for DDP.
        hosts: the number of them that a run needs.
    """

    def __init__(
        self,
        network: str,
        folder: Path,
        agent: str,
        port: int,
        sharded: str = "",
        hosts: str = "2",
    ):
        self.network = network
        self.folder = folder
        self.agent = agent
        self.port = port
        self.sharded = sharded
        self.hosts = hosts
        (folder / "notes").mkdir(parents=True)

    def rendezvous(self, host: str) -> list[str]:
        """Flags of `torchrun`."""
        first = HOSTS["a"]
        if self.agent == "static":
            rank = str("ab".index(host))
            return ["--node-rank", rank, "--master-addr", first, "--master-port", str(self.port)]
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first}:{self.port}",
            "--rdzv-id=run",
            f"--rdzv-conf=is_host={int(host == 'a')},join_timeout=600",
            f"--local-addr={HOSTS[host]}",
            "--max-restarts=9",
        ]

    def start(self, host: str, deaths: Sequence[str] = (), **environment: str) -> subprocess.Popen:
        command = [
            *("ip", "netns", "exec", self.network + host),
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", self.hosts, "--nproc-per-node", "1"),
            *self.rendezvous(host),
            str(Path(__file__).with_name("host.py")),
            ",".join(deaths),
            *FLAGS,
            *("--output_dir", str(self.folder / "run")),
        ]
        variables = {
            "HOST": host,
            "NOTES": str(self.folder / "notes"),
            "GLOO_SOCKET_IFNAME": self.network + host,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "SHARDED_STATE": self.sharded,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with open(self.folder / f"log_{host}", "ab") as log:
            return subprocess.Popen(
                command, env=os.environ | variables | environment, stdout=log, stderr=log
            )

    def log(self) -> str:
        return "\n".join(
            (self.folder / f"log_{host}").read_text(errors="replace") for host in HOSTS
        )

    def finish(self, *processes: subprocess.Popen) -> list[int]:
        try:
            return [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()


@pytest.fixture(scope="module")
def undisturbed(network: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model folder of a run with DDP ("") or FSDP2."""

    @cache
    def run(sharded: str) -> Path:
        cluster = Cluster(network, tmp_path_factory.mktemp("undisturbed"), "static", 29501, sharded)
        assert cluster.finish(cluster.start("a"), cluster.start("b")) == [0, 0], cluster.log()
        return cluster.folder / "run"

    return run


@pytest.mark.parametrize(("agent", "sharded"), RUNS[: 2 if DEATHS <= 1 else None])
def test_lost_host_returns_to_the_same_weights(
    network: str, undisturbed: Callable[[str], Path], tmp_path: Path, agent: str, sharded: str
) -> None:
    """A host is lost in updates, saves and evaluations. With "elastic", only one that has not the rendezvous."""
    number = RUNS.index((agent, sharded))
    cluster = Cluster(network, tmp_path, agent, 29502 + number, sharded)
    deaths = random_deaths("b" if agent == "elastic" else "ab", seed=number)
    print(f"\n{agent} {sharded or 'DDP'}: {deaths}")
    a = cluster.start("a", deaths)
    for _ in range(len(deaths) + 1):
        b = cluster.start("b", deaths)
        waiting = [b] if agent == "elastic" else [a, b]
        if -9 not in cluster.finish(*waiting):
            break
        if agent == "static":  # both start again
            a = cluster.start("a", deaths)
    assert cluster.finish(a, b) == [0, 0], cluster.log()
    assert len(list((tmp_path / "notes").iterdir())) == len(deaths)
    assert_same_model(tmp_path / "run", undisturbed(sharded), rtol=0, atol=0)


@pytest.mark.parametrize("sharded", ["", "FULL_STATE_DICT"] if DEATHS else ["FULL_STATE_DICT"])
def test_run_goes_on_without_a_lost_host(
    network: str, undisturbed: Callable[[str], Path], tmp_path: Path, sharded: str
) -> None:
    """The same updates by fewer processes: `--nnodes 1:2`."""
    cluster = Cluster(network, tmp_path, "elastic", 29506, sharded, hosts="1:2")
    a = cluster.start("a")
    b = cluster.start("b", ["b:update:5:0"])
    assert cluster.finish(b, a) == [-9, 0], cluster.log()
    assert_same_model(tmp_path / "run", undisturbed(sharded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "none0"}, "GLOO_SOCKET_IFNAME.*none0"),
        ({"OTHER_VERSION": "9.9"}, r"versions.*9\.9"),
        ({"FULL_DISK": "start"}, rf"{socket.gethostname()}: /.*(no space|allowed size)"),
        (
            {"FULL_DISK": "update"},
            rf"{socket.gethostname()}: /.*(no space|allowed size).*training stopped",
        ),
    ],
)
def test_host_that_differs_is_named_in_one_line(
    network: str, tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    cluster = Cluster(network, tmp_path, "static", 29505)
    b = cluster.start("b", **variables)
    a = cluster.start("a")
    assert cluster.finish(b) == [1]
    if "GLOO_SOCKET_IFNAME" not in variables:
        assert cluster.finish(a) == [1]
    a.kill()  # it waits for the other
    a.wait()
    assert re.search(f"^error: .*{words}", cluster.log(), re.M), cluster.log()
    for host in HOSTS:
        before, error, _ = (
            (tmp_path / f"log_{host}").read_text(errors="replace").partition("error: ")
        )
        assert not error or "Traceback" not in before
