"""Chunks of a translation on a Ray cluster, with Ray Data. Ray restarts a worker that dies and repeats its chunk."""

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..utils.errors import UserError, naming_extras
from ..utils.untrusted import one_line
from .fingerprints import translator_fingerprint
from .translator import Translator

#: A chunk that ends this many workers is the cause, such as one that needs too much memory.
MAX_RETRIES = 20

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
        """Yield `function(translator, job)` for each job, in order of completion. All jobs are read first.

        Raises:
            UserError: what `function` raises, a cluster that cannot be reached, workers that cannot start, or a
                model with another fingerprint on a worker.
        """
        rows = [{"job": pickle.dumps(job)} for job in jobs]
        if not rows:
            return
        with _cluster(self.address) as ray:
            resources = ray.cluster_resources()
            gpus = 0 if self.device == "cpu" else int(resources.get("GPU", 0))
            cores = self.workers or 1
            count = gpus or max(1, int(resources.get("CPU", 1)) // cores)
            # a block for each job, because Ray repeats and reports whole blocks
            results = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                _Worker,
                fn_constructor_args=[self.load, function, fingerprint],
                batch_size=1,
                concurrency=min(count, len(rows)),
                num_cpus=cores,
                num_gpus=int(gpus > 0),
                ray_remote_args_fn=lambda: {"max_task_retries": MAX_RETRIES},
            )
            for row in results.iter_rows():
                result = pickle.loads(row["result"])
                if isinstance(result, UserError):
                    raise result
                yield result


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """The module `ray`, connected. Its errors become one line."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing
    with naming_extras():
        import ray
        import ray.data
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
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it says that it shows no bars
    ray.data.DataContext.get_current().enable_progress_bars = False
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
        self.load = load
        self.function = function
        self.fingerprint = fingerprint
        self.translator: Translator | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"result": [pickle.dumps(self.run(pickle.loads(job))) for job in batch["job"]]}

    def run(self, job: Any) -> Any:
        try:
            if self.translator is None:
                translator = self.load()
                if translator_fingerprint(translator) != self.fingerprint:
                    raise UserError("model: a worker of Ray has another model in the same folder")
                self.translator = translator
            return self.function(self.translator, job)
        except UserError as error:
            return error
