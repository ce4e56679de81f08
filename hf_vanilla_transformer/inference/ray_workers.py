"""Chunks of a translation on a Ray cluster. Ray restarts a worker that dies, and repeats its chunk."""

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

from ..utils.errors import UserError, naming_extras
from ..utils.untrusted import one_line
from .fingerprints import translator_fingerprint
from .translator import Translator

#: A chunk that ends this many workers is the cause, such as one that needs too much memory.
MAX_RETRIES = 20

JOBS_OF_A_WORKER = 2  # the next one is there when one ends

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass
class RayPool:
    """One translator for each accelerator of a cluster, or for each `workers` of its CPU cores without one.

    Args:
        address: of the cluster, as in `ray.init`. "local" starts one on this machine.
        load: loads the translator. It is called once in each worker, and its model must be readable there.
        workers: as in `Translator.from_pretrained`.
        device: "cpu" takes no accelerators.
    """

    address: str
    load: Callable[[], Translator]
    workers: int | None = None
    device: str | None = None

    def map(
        self, function: Callable[[Translator, Job], Result], jobs: Iterable[Job], fingerprint: str
    ) -> Iterator[Result]:
        """Yield `function(translator, job)` for each job, in order of completion.

        A few jobs for each worker are read ahead.

        Raises:
            UserError: what `function` raises, a cluster that cannot be reached, workers that cannot start, or a
                model with another fingerprint on a worker.
        """
        unread = iter(jobs)
        first = list(islice(unread, 1))
        if not first:
            return
        with _cluster(self.address) as ray:
            resources = ray.cluster_resources()
            gpus = 0 if self.device == "cpu" else int(resources.get("GPU", 0))
            cores = self.workers or 1
            count = gpus or max(1, int(resources.get("CPU", 1)) // cores)
            remote_worker = ray.remote(_Worker).options(
                num_cpus=cores,
                num_gpus=int(gpus > 0),
                max_restarts=-1,
                max_task_retries=MAX_RETRIES,
            )
            # no more workers than jobs
            ahead = [*first, *islice(unread, count - 1)]
            workers = [remote_worker.remote(self.load, function, fingerprint) for _ in ahead]
            for result in _results(ray, workers, chain(ahead, unread)):
                if isinstance(result, UserError):
                    raise result
                yield result


def _results(ray: Any, workers: Iterable[Any], jobs: Iterator[Any]) -> Iterator[Any]:
    """The results of the jobs, in order of completion. A worker that is not ready yet has no job."""
    starting = {worker.problem.remote(): worker for worker in workers}
    running: dict[Any, Any] = {}  # result that is to come -> worker
    while starting or running:
        done = ray.wait([*running, *starting])[0][0]
        is_new = done in starting
        worker = starting.pop(done) if is_new else running.pop(done)
        wanted = JOBS_OF_A_WORKER if is_new else 1
        given = list(islice(jobs, wanted))
        running.update((worker.run.remote(job), worker) for job in given)
        if len(given) < wanted:
            starting.clear()  # there is nothing left for them
        result = ray.get(done)
        if not is_new or result is not None:
            yield result


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """The module `ray`, connected. Its errors become one line."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing
    with naming_extras():
        import ray
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # ray.init tries for minutes
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        ray.init(
            address,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # a node that is too slow raises no subclass
        remedy = ": RAY_raylet_start_wait_time_s=300 waits longer" if address == "local" else ""
        raise UserError(
            f"ray: cannot connect to a cluster at {address} ({one_line(error)}){remedy}"
        ) from error
    try:
        yield ray
    except ray.exceptions.RayError as error:
        raise UserError(f"ray: {one_line(error)}; finished chunks are kept") from error
    finally:
        ray.shutdown()


class _Worker:
    """A translator, and what it does with each job. A UserError is a result, and reaches the caller as it is."""

    def __init__(
        self,
        load: Callable[[], Translator],
        function: Callable[[Translator, object], object],
        fingerprint: str,
    ):
        self.function = function
        self.translator: Translator | UserError
        try:
            self.translator = load()
            if translator_fingerprint(self.translator) != fingerprint:
                raise UserError("model: a worker of Ray has another model in the same folder")
        except UserError as error:
            self.translator = error

    def problem(self) -> UserError | None:
        """Why this worker cannot translate, or None."""
        return self.translator if isinstance(self.translator, UserError) else None

    def run(self, job: object) -> object:
        if isinstance(self.translator, UserError):
            return self.translator
        try:
            return self.function(self.translator, job)
        except UserError as error:
            return error
