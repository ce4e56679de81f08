"""Runs of several processes, and the signals that end them: the rank that prints, agreement of all ranks, FSDP.

transformers' `enable_jit_checkpoint` notes SIGTERM only, on each rank by itself, and does not stop an evaluation.
"""

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakSet

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets.utils.logging import disable_progress_bar as disable_progress_bars
from torch import distributed, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader
from transformers.utils import logging

from ...utils.errors import Interrupted, UserError
from ...utils.system_calls import encodable, end_later
from ...utils.system_info import versions
from ...utils.untrusted import one_line

Value = TypeVar("Value")


def is_main_rank() -> bool:
    """Return True on rank 0, by the launcher's environment variable RANK."""
    return int(os.environ.get("RANK", "0")) == 0


def silence_other_ranks() -> None:
    """Disable progress bars and warnings of the libraries on all ranks but the main one."""
    if not is_main_rank():
        disable_progress_bars()
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def print_main(message: str) -> None:
    """Print to standard output on the main rank only."""
    if is_main_rank():
        print(encodable(message), flush=True)


def broadcast_from_main(make: Callable[[], Value], step: str | None = None) -> Value:
    """Call `make` on the main rank and return its result on all ranks, for results that depend on time or chance.

    A call of `make` that may take long has the name of a `step`, as in `taking_turns`.
    """
    with nullcontext() if step is None else taking_turns(step, first=True):
        results = [make() if is_main_rank() else None]
    broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]


@contextmanager
def taking_turns(step: str, first: bool) -> Iterator[None]:
    """Run a step on the `first` process of each host, then on its others, which find the files. All leave together.

    They wait in the store of the group. A collective ends after 30 minutes, and a large corpus takes hours. An error
    on one rank ends the step on all.
    """
    if not has_other_ranks():
        yield
        return
    ranks = distributed.get_rank(), distributed.get_world_size()
    with _turns(_get_default_store(), ranks, step, first, socket.gethostname()):
        yield


@contextmanager
def _turns(
    store: distributed.Store, ranks: tuple[int, int], step: str, first: bool, host: str
) -> Iterator[None]:
    """`taking_turns` of the rank and number of ranks in `ranks`."""
    rank, world_size = ranks
    call = store.add(f"hf_vanilla_transformer {step} of rank {rank}", 1)  # the same on all ranks
    together = f"hf_vanilla_transformer {step} {call}"
    on_host = f"{together} on {host}"
    if not first:
        _wait_for(store, on_host)
    try:
        yield
    except BaseException as error:
        known = isinstance(error, UserError)
        reason = str(error) if known else f"{step} failed on {host}: its own output says why"
        with suppress(RuntimeError):  # the launcher has ended
            store.set(f"{on_host} failed", reason)
            by_host = reason if rank == 0 else f"{host}: {reason}"
            store.compare_set(f"{together} failed", "", by_host)
        raise
    if first:
        store.set(on_host, "done")
    if store.add(f"{together} finished", 1) == world_size:
        store.set(together, "done")
    _wait_for(store, together)


def _wait_for(store: distributed.Store, key: str) -> None:
    """Wait until a rank sets a key, however long it takes. Raise UserError if it fails instead."""
    pause = 0.01  # seconds
    while not store.check([key]):
        if store.check([f"{key} failed"]):
            raise UserError(store.get(f"{key} failed").decode())
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


class Agreement:
    """Which flags are set on any rank. All ranks must ask for it. The device is waited for when it is read.

    Args:
        flags: of this rank.
        device: of the run.
    """

    def __init__(self, *flags: bool, device: torch.device):
        self._on_any = torch.tensor(flags, dtype=torch.int32)
        self._copied: torch.Event | None = None
        if not has_other_ranks():
            return
        on_device = self._on_any.to(device, non_blocking=True)
        distributed.all_reduce(on_device, op=distributed.ReduceOp.MAX)
        self._on_any = on_device.to("cpu", non_blocking=True)
        if device.type != "cpu":
            self._copied = torch.Event(device)
            self._copied.record()

    def read(self) -> list[bool]:
        """For each flag, True if it was set on any rank."""
        if self._copied is not None:
            self._copied.synchronize()
        return [bool(each) for each in self._on_any.tolist()]


def has_other_ranks() -> bool:
    """True in a group of several processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def require_first_rank(seconds: float = 300) -> None:
    """Raise UserError if other ranks cannot reach the port of rank 0. torch would repeat warnings for 30 minutes."""
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "0")
    end = time.monotonic() + seconds
    while os.environ.get("RANK", "0") != "0" and host:
        try:
            return socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"MASTER_ADDR: {host}:{port} of rank 0 cannot be reached: open it ({error})"
                ) from error
            time.sleep(1)


def check_equal_versions() -> None:
    """Refuse hosts with different versions of the libraries, whose updates and checkpoints would differ silently.

    A collective: all ranks must call it, and all raise.
    """
    by_rank = gather_object([(versions(), socket.gethostname())])
    (first, host), *others = by_rank
    for installed, other in others:
        names = sorted(name for name in first | installed if first.get(name) != installed.get(name))
        if names:
            listed = ", ".join(
                f"{name} {first.get(name)} and {installed.get(name)}" for name in names
            )
            raise UserError(
                f"versions: {host} and {other} have {listed}; install the same on every host"
            )


# How long another rank waits for the main rank to raise the same error.
_SAME_ERROR_WITHIN = timedelta(seconds=10)


@contextmanager
def errors_on_main_rank_only() -> Iterator[None]:
    """Report a `UserError` that all ranks raise alike only once: the other ranks exit silently.

    An error that the main rank does not raise, such as a full disk of one host, is reported with the name of its host.
    The loss of another rank is one line too.
    """
    try:
        with _report_lost_rank():
            yield
    except UserError as error:
        status = error.status if isinstance(error, Interrupted) else None
        if is_main_rank():
            _tell_other_ranks(error)
            raise
        if status is not None or _is_reported(error):
            raise SystemExit(status or 2) from None
        raise UserError(f"{socket.gethostname()}: {error}") from error


@contextmanager
def _report_lost_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise UserError(f"{lost}: its own output says why") from error


def lost_rank(error: RuntimeError) -> str | None:
    """Say that another rank was lost if this is the error of a collective, or return None."""
    if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
        return None
    return f"a process on another rank ended or cannot be reached ({one_line(error)})"


def _error_key(error: UserError) -> str:
    return f"hf_vanilla_transformer error: {error}"


def _tell_other_ranks(error: UserError) -> None:
    """Record that the main rank reports this error."""
    if has_other_ranks():
        with suppress(RuntimeError):  # the launcher has ended
            _get_default_store().set(_error_key(error), "reported")


def _is_reported(error: UserError) -> bool:
    """True if the main rank, or another one on this host, reports the same error."""
    if not has_other_ranks():
        return False
    store = _get_default_store()
    key = _error_key(error)
    try:
        store.wait([key], _SAME_ERROR_WITHIN)
    except distributed.DistStoreError:
        reports = store.add(f"{key} on {socket.gethostname()}", 1)
        return reports > 1
    except RuntimeError:  # the launcher has ended
        return False
    return True


def shard_tied_modules(model: nn.Module, **settings: Any) -> None:
    """Make each set of modules with tied weights one FSDP2 unit. `settings` are arguments of `fully_shard`."""
    by_weight: dict[torch.Tensor, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear) and not isinstance(module, FSDPModule):
            by_weight.setdefault(module.weight, []).append(module)
    for tied in by_weight.values():
        if len(tied) > 1:
            fully_shard(tied, reshard_after_forward=False, **settings)


@contextmanager
def original_class(model: nn.Module) -> Iterator[None]:
    """Restore the class of a model while it is saved: FSDP2 replaces it, and checkpoints would name FSDP2's."""
    sharded = type(model)
    plain = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    model.__class__ = cast(type[nn.Module], plain)
    try:
        yield
    finally:
        model.__class__ = sharded


# Signals that end a run after its state is saved: Ctrl-C (SIGINT), and SIGTERM of schedulers and containers

STOPPING = (signal.SIGINT, signal.SIGTERM)
#: What `signal.signal` takes and returns.
SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
# torchrun forwards its signal to its workers, although Ctrl-C in a terminal has reached them already.
_LAUNCHER_REPEATS_FOR = 3.0  # seconds
# How long a worker of a DataLoader goes on after SIGTERM, so that the main process can finish and save.
_WORKER_SECONDS = 60
# Loaders whose workers stay after an epoch.
_PERSISTENT: WeakSet[DataLoader] = WeakSet()


class StopSignals:
    """Context that notes the first SIGINT or SIGTERM and restores the default: a second signal stops at once.

    A signal that is ignored (nohup, a background job) stays ignored. Contexts of one object may be nested. Outside the
    main thread Python permits no handlers, so nothing is noted. The first signal prints `message` on the main rank.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # by this rank, or agreed on
        self.agreed: int | None = None  # by all ranks
        self.message = ""
        self._asked: Agreement | None = None  # not read yet
        self._previous: dict[int, SignalHandler] = {}
        self._depth = 0
        self._process = os.getpid()
        self._time = 0.0

    def __enter__(self) -> "StopSignals":
        self._depth += 1
        if (
            self._depth == 1
            and self.received is None
            and threading.current_thread() is threading.main_thread()
        ):
            for number in STOPPING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()

    def agree(self, device: torch.device, *flags: bool, at_once: bool = True) -> list[bool]:
        """Make `agreed` the signal of any rank. All ranks must call it. Return which `flags` any rank has.

        Without `at_once` several ranks learn what they had at the call before, and no device is waited for.
        """
        received = (self.received == each for each in STOPPING)
        asked = Agreement(*received, *flags, device=device)
        if at_once or not has_other_ranks():
            due: Agreement | None = asked
            self._asked = None
        else:
            due = self._asked
            self._asked = asked
        if due is None:
            return [False for _ in flags]
        on_any = due.read()
        signals = [each for each, is_set in zip(STOPPING, on_any, strict=False) if is_set]
        if signals:
            is_new = self.received is None
            self.agreed = self.received = max(signals)
            if is_new:
                self._print()
        return on_any[len(STOPPING) :]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker: the main process ends it
            return
        if self.received is None:
            self.received = number
            self._time = time.monotonic()
            self._print()
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                self._restore()
        elif time.monotonic() - self._time > _LAUNCHER_REPEATS_FOR:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def _print(self) -> None:
        if is_main_rank():
            # Python refuses in the middle of a print, and the terminal may be closed.
            again = "Ctrl-C" if self.received == signal.SIGINT else "the signal"
            with suppress(RuntimeError, OSError, ValueError):
                print_main(f"\nstopping: {self.message} ({again} again stops at once)")


def leave_signals_to_main_process(loader: DataLoader) -> DataLoader:
    """Return the loader, with workers that ignore a signal to all processes: the main process needs them to finish
    the update."""
    plain = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
    if plain.num_workers:
        plain.worker_init_fn = partial(_init_worker, plain.worker_init_fn)
    if plain.persistent_workers:
        _PERSISTENT.add(plain)
        atexit.unregister(end_workers)
        atexit.register(end_workers)  # before what Python does, which sends SIGTERM and waits
    return loader


def end_workers() -> None:
    """End the persistent workers of all loaders. A loader that is read again starts others."""
    for loader in tuple(_PERSISTENT):
        loader._iterator = None  # whose end is that of its workers


def _init_worker(then: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)
    if then is not None:
        then(worker)


def _end_later(number: int, frame: FrameType | None) -> None:
    end_later(_WORKER_SECONDS)
