"""Threads that fit the machine, with made-up files of the kernel."""

from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.training.state.callbacks import FitThreads
from hf_vanilla_transformer.utils import cpu_time
from hf_vanilla_transformer.utils.cpu_time import (
    CpuTime,
    available_cpus,
    fitting_threads,
    on_fitting_threads,
)


class Machine:
    """Four cores, and processes that use their time in seconds. `wait` lets time pass."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.groups = folder / "cgroup"
        self.process = folder / "self"
        self.statistics = folder / "stat"
        self.clock = 0.0
        self.own = 0.0
        self.ticks = [0] * 8
        made_up = {
            "_CONTROL_GROUPS": self.groups,
            "_PROCESS": self.process,
            "_STATISTICS": self.statistics,
            "usable_cores": lambda: {0, 1, 2, 3},
            "has_low_priority": lambda: False,
            "time.monotonic": lambda: self.clock,
            "time.process_time": lambda: self.own,
            "os.sysconf": lambda name: 100,
        }
        for name, value in made_up.items():
            monkeypatch.setattr(f"{cpu_time.__name__}.{name}", value, raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        self.wait(0.0)

    def wait(
        self,
        seconds: float,
        own: float = 0.0,
        user: float = 0.0,
        nice: float = 0.0,
        idle: float = 0.0,
    ) -> None:
        """Let time pass: `own`, `user`, `nice` and `idle` are in cores."""
        self.clock += seconds
        self.own += own * seconds
        for column, cores in ((0, own + user), (1, nice), (3, idle)):
            self.ticks[column] += int(100 * cores * seconds)
        ticks = " ".join(map(str, self.ticks))
        self.statistics.write_text(
            f"cpu  9 9\ncpu0 {ticks} 0 0\ncpu1{10 * ' 0'}\ncpu4 {ticks} 0 0\nintr 1 2\n"
        )

    def limit(self, group: str, quota: int | None, period: int = 100_000) -> None:
        """Write the file of a control group."""
        folder = self.groups / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "group, quotas, cpus",
    [
        ("", {}, 4),
        ("", {"": None}, 4),
        ("", {"": 150_000}, 1.5),
        ("a/b", {"a/b": 250_000, "a": None}, 2.5),
        ("a/b", {"a/b": None, "a": 50_000}, 0.5),
        ("a/b", {"a/b": 800_000}, 4),
        ("host/name/of/a/container", {"": 200_000}, 2),
    ],
)
def test_quotas_of_all_groups_above_count(machine, group, quotas, cpus):
    machine.process.write_text(f"9:name=systemd:/x\n3:cpuset:/\n0::/{group}\n")
    for name, quota in quotas.items():
        machine.limit(name, quota)
    assert available_cpus() == cpus


def test_cores_that_others_use_get_no_thread(machine):
    meter = CpuTime()
    assert meter.idle_cores() == 4
    machine.wait(1.0, own=2.0, user=1.1)
    assert meter.idle_cores() == 3
    machine.wait(1.0, own=1.0, user=9.0)
    assert meter.idle_cores() == 1
    for seconds in (1.0, 1.0):
        machine.wait(seconds, own=3.0, nice=1.0)
        assert meter.idle_cores() == 1
    machine.wait(1.0, own=3.0, nice=1.0)
    assert meter.idle_cores() == 4


@pytest.mark.parametrize("low", [False, True])
def test_busy_seconds_are_those_of_the_kernel(machine, low, monkeypatch):
    """user nice system idle iowait irq softirq steal, of which two are no work"""
    monkeypatch.setattr(cpu_time, "has_low_priority", lambda: low)
    for column in range(8):
        ticks = [0] * 10
        ticks[column] = 250
        machine.statistics.write_text(f"cpu3 {' '.join(map(str, ticks))}\n")
        machine.clock, machine.own = 7.0, 2.0
        is_busy = column in (0, 2, 5, 6, 7) or (low and column == 1)
        assert CpuTime._sample() == (7.0, 2.5 * is_busy, 2.0)


def test_measurement_takes_a_second(machine):
    meter = CpuTime()
    machine.wait(0.9, user=3.0)
    assert meter.idle_cores() == 4
    machine.wait(0.1, user=3.0)
    assert meter.idle_cores() == 1
    assert fitting_threads(1) == 1


def test_system_without_statistics_counts_no_others(machine):
    machine.statistics.unlink()
    meter = CpuTime()
    machine.clock, machine.own = 5.0, 9.0
    assert meter.idle_cores() == 4


@pytest.fixture
def busy(machine, monkeypatch) -> Machine:
    """A machine with time for 2 threads."""
    meter = CpuTime()
    monkeypatch.setattr(cpu_time, "measured_cpu_time", lambda: meter)
    machine.wait(1.0, user=2.0)
    return machine


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_explicit_number_of_threads_stays(busy, monkeypatch):
    assert [fitting_threads(limit) for limit in (4, 2, 1)] == [2, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert fitting_threads(4) == 4


def test_torch_has_its_threads_back_after_a_search(busy, four_threads):
    with pytest.raises(KeyError), on_fitting_threads():
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == 4


def test_training_uses_the_fitting_threads(busy, four_threads, capsys):
    class Arguments:
        device = torch.device("cpu")

    callback = FitThreads()

    def threads_of_a_step() -> int:
        callback.on_step_begin(Arguments(), None, None)
        return torch.get_num_threads()

    assert [threads_of_a_step() for _ in range(2)] == [2, 2]
    assert "".join(capsys.readouterr()).count("OMP_NUM_THREADS") == 1
    busy.wait(11.0)
    threads_of_a_step()
    busy.wait(1.0)
    threads_of_a_step()
    busy.wait(1.0)
    assert threads_of_a_step() == 4
    busy.wait(1.0, user=4.0)
    assert threads_of_a_step() == 1
    callback.on_train_end(Arguments(), None, None)
    assert torch.get_num_threads() == 4
