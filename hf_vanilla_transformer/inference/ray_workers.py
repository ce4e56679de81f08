"""Chunks of a translation on the workers of a Ray cluster. Ray restarts a worker that dies and repeats its chunk."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Any, TypeVar

from ..utils.errors import UserError, naming_extras
from ..utils.untrusted import one_line
from .fingerprints import translator_fingerprint
from .translator import Translator

#: A chunk that ends this many workers is the cause, such as one that needs too much memory.
MAX_RETRIES = 20

Job = TypeVar("Job")
Result = TypeVar("Result")


class RayPool:
    """One translator for each accelerator of a cluster, or for each `workers` of its CPU cores without one.

    Args:
        address: of the cluster, as in `ray.init`. "local" starts one on this machine.
        load: loads the translator. It is called once in each worker, and its model must be readable there.
        workers: as in `Translator.from_pretrained`.
        device: "cpu" takes no accelerators.
    """

    def __init__(
        self,
        address: str,
        load: Callable[[], Translator],
        workers: int | None = None,
        device: str | None = None,
    ):
        self.address = address
        self.load = load
        self.workers = workers or 1
        self.device = device

    def map(
        self, function: Callable[[Translator, Job], Result], jobs: Iterable[Job], fingerprint: str
    ) -> Iterator[Result]:
        """Yield `function(translator, job)` for each job, in order of completion. Few jobs are read ahead.

        Raises:
            UserError: what `function` raises, a cluster that cannot be reached, workers that cannot start, or a
                model with another fingerprint on a worker.
        """
        with self._cluster() as ray:
            gpus = 0 if self.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
            count = gpus or max(1, int(ray.cluster_resources().get("CPU", 1)) // self.workers)
            worker = ray.remote(_Worker).options(
                num_cpus=self.workers,
                num_gpus=int(gpus > 0),
                max_restarts=-1,
                max_task_retries=MAX_RETRIES,
            )
            actors = [worker.remote(self.load, function, fingerprint) for _ in range(count)]
            # a second job for each worker, so that none waits for this process
            idle = chain.from_iterable(repeat(actors, 2))
            jobs = iter(jobs)
            running = {actor.run.remote(job): actor for actor, job in zip(idle, jobs, strict=False)}
            # Ray ends a worker without a handle, which frees its cores for one that is restarted
            del actors
            del idle
            while running:
                [done], _ = ray.wait(list(running))
                actor = running.pop(done)
                running |= {actor.run.remote(job): actor for job in islice(jobs, 1)}
                del actor
                yield ray.get(done)

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        """The module `ray`, connected. Its errors become one line."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing
        with naming_extras():
            import ray
        try:
            host, _, port = self.address.rpartition(":")
            if port.isdecimal():  # ray.init tries for minutes
                socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
                _check_token(self.address)
            dashboard = False if self.address == "local" else None
            ray.init(
                self.address,
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except (
            OSError,
            ValueError,
            RuntimeError,
            subprocess.TimeoutExpired,
            ray.exceptions.RayError,
        ) as error:
            raise UserError(
                f"ray: cannot connect to a cluster at {self.address} ({one_line(error)})"
            ) from error
        try:
            yield ray
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise UserError(f"ray: {one_line(error)}; finished chunks are kept") from error
        finally:
            ray.shutdown()


def _check_token(address: str) -> None:
    """Raise ConnectionError for a cluster with another token. `ray.init` only logs it, for 20 s."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    status = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if status.returncode and "authentication token" in status.stderr.lower():
        raise ConnectionError(
            "it has a token: set RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )


class _Worker:
    """An actor with a translator."""

    def __init__(
        self,
        load: Callable[[], Translator],
        function: Callable[[Translator, Any], Any],
        fingerprint: str,
    ):
        self.load = load
        self.function = function
        self.fingerprint = fingerprint
        self.translator: Translator | None = None

    def run(self, job: Any) -> Any:
        """Translate a job. The model is loaded at the first one, where an error reaches the caller."""
        if self.translator is None:
            translator = self.load()
            if translator_fingerprint(translator) != self.fingerprint:
                raise UserError(
                    "model: a worker of Ray has another model in the same folder, or measured another dtype"
                )
            self.translator = translator
        return self.function(self.translator, job)
