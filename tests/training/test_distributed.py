"""Agreement of several processes and their signals, with the other processes replaced by small objects."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace as Fake
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.distributed import DistBackendError, DistStoreError
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from hf_vanilla_transformer.training.state import distributed
from hf_vanilla_transformer.training.state.distributed import (
    Agreement,
    StopSignals,
    broadcast_from_main,
    check_equal_versions,
    end_workers,
    errors_on_main_rank_only,
    has_other_ranks,
    is_main_rank,
    leave_signals_to_main_process,
    lost_rank,
    original_class,
    print_main,
    require_first_rank,
    shard_tied_modules,
    silence_other_ranks,
)
from hf_vanilla_transformer.utils.errors import Interrupted, UserError
from tests.model_helpers import error_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rank", "is_main"), [(None, True), ("0", True), ("1", False)])
def test_only_the_first_rank_prints(
    rank: str | None,
    is_main: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    for name in ("logging", "disable_progress_bars"):
        monkeypatch.setattr(distributed, name, MagicMock())
    assert is_main_rank() is is_main
    print_main("line")
    assert capsys.readouterr().out == ("line\n" if is_main else "")
    silence_other_ranks()
    assert distributed.disable_progress_bars.called is not is_main
    assert distributed.logging.set_verbosity_error.called is not is_main
    made: list[int] = []
    monkeypatch.setattr(
        distributed, "broadcast_object_list", lambda values: values.__setitem__(0, 7)
    )
    assert broadcast_from_main(lambda: made.append(1)) == 7
    assert bool(made) is is_main
    turns: list[Any] = []
    monkeypatch.setattr(
        distributed, "taking_turns", lambda *given, **more: nullcontext(turns.append((given, more)))
    )
    broadcast_from_main(dict)
    broadcast_from_main(dict, "reading")
    assert turns == [(("reading",), {"first": True})]


def several(monkeypatch: pytest.MonkeyPatch, size: int = 2, others: Any = 0) -> None:
    """Pretend a group of processes, of which another one has these flags."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: size > 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    joined = torch.tensor(others, dtype=torch.int32)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda flags, op: flags.logical_or_(joined)
    )


@pytest.mark.parametrize(("size", "found"), [(0, False), (1, False), (2, True)])
def test_group_of_one_has_no_other_ranks(
    size: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    several(monkeypatch, size, others=[0, 1])
    assert has_other_ranks() is found
    assert Agreement(True, False, device=CPU).read() == [True, found]


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 1)])
def test_turns_are_those_of_several_processes(
    size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several(monkeypatch, size)
    turns = MagicMock()
    for name, value in (("_turns", turns), ("_get_default_store", lambda: "store")):
        monkeypatch.setattr(distributed, name, value)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed.socket, "gethostname", lambda: "host")
    with distributed.taking_turns("reading", first=False):
        pass
    expected = [(("store", (1, 2), "reading", False, "host"),)] * count
    assert turns.call_args_list == expected


@pytest.mark.parametrize(
    ("received", "others", "agreed", "lines"),
    [
        (None, [0, 0, 0, 1], None, 0),
        (signal.SIGINT, [0, 0, 0, 1], signal.SIGINT, 0),  # it was printed before
        (None, [0, 1, 0, 1], signal.SIGTERM, 1),
        (signal.SIGINT, [0, 1, 0, 1], signal.SIGTERM, 0),
    ],
)
def test_all_ranks_have_the_signal_of_any(
    received: Any,
    others: list[int],
    agreed: Any,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    several(monkeypatch, others=others)
    signals = StopSignals()
    signals.received = received
    assert signals.agree(CPU, True, False) == [True, True]
    assert (signals.agreed, signals.received) == (agreed, agreed)
    assert capsys.readouterr().out.count("(the signal again stops at once)") == lines


def test_flags_that_no_device_is_waited_for_are_those_of_the_call_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals = StopSignals()
    assert signals.agree(CPU, True, at_once=False) == [True], "one process waits for nobody"
    several(monkeypatch)
    answers = [signals.agree(CPU, flag, at_once=False) for flag in (True, False, False)]
    assert answers == [[False], [True], [False]]


def test_handlers_stay_until_the_outer_context_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        with signals:
            pass
        assert signal.getsignal(signal.SIGTERM) == signals._note
    assert signal.getsignal(signal.SIGTERM) == before
    signals.received = signal.SIGTERM
    with signals:
        assert signal.getsignal(signal.SIGTERM) == before


def test_forked_worker_notes_no_signal(capsys: pytest.CaptureFixture) -> None:
    signals = StopSignals()
    signals._process = os.getpid() + 1
    signals._note(signal.SIGINT, None)
    assert signals.received is None
    assert capsys.readouterr().out == ""


def test_signal_after_that_of_the_launcher_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher repeats it for three seconds."""
    clock = Fake(monotonic=lambda: clock.now, now=50.0)
    raised: list[int] = []
    monkeypatch.setattr(distributed, "time", clock)
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    signals = StopSignals()
    counts = []
    for clock.now in (50.0, 53.0, 53.1):
        signals._note(signal.SIGTERM, None)
        counts.append(len(raised))
    assert counts == [0, 0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_leave_signals_to_the_main_process(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: dict[int, Any] = {}
    started: list[int] = []
    loader = DataLoader([1], num_workers=workers, worker_init_fn=started.append)
    wrapped = Fake(base_dataloader=loader)
    assert leave_signals_to_main_process(wrapped) is wrapped
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    loader.worker_init_fn(5)
    assert started == [5]
    ending = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: distributed._end_later}
    assert handlers == (ending if workers else {})
    bare = leave_signals_to_main_process(DataLoader([1], num_workers=workers))
    if workers:
        bare.worker_init_fn(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starting a worker takes seconds")
def test_persistent_workers_end_after_training(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(distributed, "atexit", Fake(register=at_exit.append, unregister=print))
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    leave_signals_to_main_process(loader)
    assert at_exit == [end_workers]
    end_workers()  # of a loader that was never read
    for _ in range(2):
        assert [int(each) for each in loader] == [1, 2]
        workers = loader._iterator._workers
        assert all(each.is_alive() for each in workers)
        end_workers()
        assert [each.exitcode for each in workers] == [0]


@pytest.mark.slow
def test_a_program_with_persistent_workers_ends() -> None:
    """Python sends SIGTERM to the workers that are left, and waits for them."""
    program = """
from torch.utils.data import DataLoader
from hf_vanilla_transformer.training.state.distributed import leave_signals_to_main_process
loader = leave_signals_to_main_process(DataLoader([1, 2], num_workers=1, persistent_workers=True))
print(list(loader), flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert process.communicate(timeout=distributed._WORKER_SECONDS / 2) == ("", "")
    assert process.returncode == 0


class Clock:
    """A time that passes in `sleep` alone."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.mark.parametrize(("opens", "tries"), [(0, 1), (3, 4), (5, 6), (99, 7)])
def test_first_rank_is_tried_every_second(
    opens: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tried: list[tuple[str, int]] = []

    def connect(place: tuple[str, int], timeout: float) -> Any:
        tried.append(place)
        if clock.now < opens:
            raise OSError("refused")
        return Fake(close=lambda: None)

    monkeypatch.setattr(distributed, "time", clock)
    monkeypatch.setattr(distributed, "socket", Fake(create_connection=connect))
    for name, value in (("RANK", "1"), ("MASTER_ADDR", "first"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    if opens == 99:
        assert "first:29500 of rank 0" in error_of(require_first_rank, seconds=5)
    else:
        require_first_rank(seconds=5)
    assert tried == [("first", 29500)] * tries
    monkeypatch.delenv("MASTER_ADDR")
    require_first_rank(seconds=5)
    assert len(tried) == tries


def test_pauses_of_a_wait_double_up_to_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(distributed, "time", clock)
    store = Fake(check=lambda keys: keys == ["done"] and len(clock.pauses) == 9)
    distributed._wait_for(store, "done")
    assert clock.pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]


@pytest.mark.parametrize(
    ("other", "listed"),
    [
        ({"torch": "2", "peft": "1"}, None),
        ({"torch": "3", "peft": "1"}, "torch 2 and 3"),
        ({"torch": "2"}, "peft 1 and None"),
        ({"torch": "2", "peft": "1", "new": "4"}, "new None and 4"),
    ],
)
def test_hosts_with_other_versions_are_named(
    other: dict[str, str], listed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"torch": "2", "peft": "1"}
    by_rank = [(first, "a"), (first, "a"), (other, "b")]
    monkeypatch.setattr(distributed, "gather_object", lambda own: by_rank)
    if listed is None:
        check_equal_versions()
    else:
        assert error_of(check_equal_versions).startswith(f"versions: a and b have {listed};")


@pytest.mark.parametrize(("rank", "expected"), [("0", Interrupted), ("1", SystemExit)])
def test_signal_has_its_status_on_each_rank(
    rank: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(expected) as caught, errors_on_main_rank_only():
        raise Interrupted("stopped", signal.SIGTERM)
    assert getattr(caught.value, "status", getattr(caught.value, "code", None)) == 143


@pytest.mark.parametrize(
    ("error", "reports", "found"),
    [
        (None, 0, True),
        (RuntimeError("the launcher has ended"), 2, False),
        (DistStoreError("nothing in time"), 1, False),
        (DistStoreError("nothing in time"), 2, True),
    ],
)
def test_error_is_reported_by_one_rank(
    error: Exception | None, reports: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Fake(wait=MagicMock(side_effect=error), add=lambda key, number: reports)
    monkeypatch.setattr(distributed, "_get_default_store", lambda: store)
    monkeypatch.setattr(distributed, "has_other_ranks", lambda: False)
    assert not distributed._is_reported(UserError("a"))
    monkeypatch.setattr(distributed, "has_other_ranks", lambda: True)
    assert distributed._is_reported(UserError("a")) is found


def test_errors_of_collectives_are_those_of_lost_ranks() -> None:
    assert lost_rank(RuntimeError("shape")) is None
    for error in (RuntimeError("gloo: closed"), DistBackendError("closed")):
        assert "another rank ended or cannot be reached" in str(lost_rank(error))
    with pytest.raises(RuntimeError, match="shape"), errors_on_main_rank_only():
        raise RuntimeError("shape")


def test_tied_modules_are_sharded_as_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    units: list[Any] = []
    monkeypatch.setattr(
        distributed, "fully_shard", lambda *given, **more: units.append((given, more))
    )
    model = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Linear(2, 3), "c": nn.Linear(2, 3)})
    model["b"].weight = model["a"].weight
    shard_tied_modules(model, mesh=4)
    tied = [model["a"], model["b"]]
    assert units == [((tied,), {"reshard_after_forward": False, "mesh": 4})]


def test_model_is_saved_with_its_own_class() -> None:
    class Sharded(FSDPModule, nn.Linear):
        pass

    model = nn.Linear(2, 3)
    model.__class__ = Sharded
    with pytest.raises(KeyError), original_class(model):
        assert type(model) is nn.Linear
        raise KeyError
    assert type(model) is Sharded
