"""Full disks in every phase of a run: one line that names the folder, and complete files stay complete.

    python -m scripts.trials.full_disk --trials 20

Each trial mounts a small tmpfs, which needs root, and trains in it until it is full. The size decides in which phase
that is. The run must end with status 2 and one line that names the mounted folder, every checkpoint in it must be
complete, and with more space the run resumed by `--resume_from_checkpoint auto` must end with the weights of an
undisturbed one. With `--limit` a limit of the size of a file (RLIMIT_FSIZE) takes the place of the tmpfs: this needs
no root.
"""

import argparse
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.trials.forked_runs import (
    SETTINGS,
    ForkedRun,
    empty_folder,
    import_libraries,
    write_pairs,
)
from scripts.trials.signals import RUNS, outcome, undisturbed

LEAST, MOST = 4, 1600  # KiB: less than the cached data needs, more than a whole run


@contextmanager
def tmpfs(folder: Path, kibibytes: int) -> Iterator[None]:
    """A file system of this size, mounted on an empty folder."""
    mount(folder, "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def mount(folder: Path, *arguments: str) -> None:
    """Raises CalledProcessError where it is not permitted."""
    subprocess.run(["mount", *arguments, folder], check=True, capture_output=True)


def why_no_mount(folder: Path) -> str | None:
    """The reason why nothing can be mounted here, or None."""
    try:
        with tmpfs(folder, 64):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", b"").decode() or error).strip()


def trial(
    folder: Path, settings: dict[str, Any], kibibytes: int, limit: bool, expected: Any
) -> str:
    """Train in too little space, then resume with enough. Returns a description. An AssertionError is a fault."""
    disk = folder / "disk"
    disk.mkdir()
    settings = settings | {"output_dir": disk / "run"}
    if limit:
        printed, status = run_with_limit(folder, settings, disk / "cache", kibibytes)
    else:
        mount(disk, "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs")
        run = ForkedRun(settings, disk / "cache", folder / "log")
        (status,), printed = run.wait(300), run.output()
    try:
        if status:
            assert status == 2 and "Traceback" not in printed, (
                f"{kibibytes} KiB: status {status}\n{printed}"
            )
            lines = [line for line in printed.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1 and str(disk) in lines[0], f"{kibibytes} KiB\n{printed}"
            for checkpoint in disk.glob("run/checkpoint-*"):
                assert (checkpoint / "trainer_state.json").stat().st_size, (
                    f"{checkpoint} is incomplete\n{printed}"
                )
        if not limit:
            mount(disk, "-o", "remount,size=64m")
        again = ForkedRun(
            settings | {"resume_from_checkpoint": "auto"}, disk / "cache", folder / "log 2"
        )
        assert again.wait(300) == [0], f"{kibibytes} KiB: {printed}\n--- resumed\n{again.output()}"
        found = outcome(disk / "run")
        assert found == expected, (
            f"{kibibytes} KiB: other weights or scores\n{printed}\n--- resumed\n{again.output()}"
        )
    finally:
        if not limit:
            subprocess.run(["umount", "-l", disk], check=True)
    return lines[0].replace(str(folder), "") if status else "enough space"


def run_with_limit(
    folder: Path, settings: dict[str, Any], cache: Path, kibibytes: int
) -> tuple[str, int]:
    """The output and the status of a run whose files may have at most this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (kibibytes * 1024, before[1])
    )  # of this process and its children
    try:
        run = ForkedRun(settings, cache, folder / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (status,) = run.wait(300)
    return run.output(), status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="sizes to try (default 20)")
    parser.add_argument(
        "--limit", action="store_true", help="limit the size of files instead of mounting a tmpfs"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    import_libraries()
    faults = 0
    with tempfile.TemporaryDirectory(prefix="disk_trials_") as temporary:
        root = Path(temporary)
        if not arguments.limit and (reason := why_no_mount(root)) is not None:
            print(f"nothing can be mounted: {reason}; --limit works everywhere")
            return 3
        settings = {**SETTINGS, **write_pairs(root), **RUNS["token batches, average"]}
        with empty_folder(root / "undisturbed") as folder:
            expected = undisturbed(folder, settings, 1)
        most = 200 if arguments.limit else MOST
        for number in range(arguments.trials):
            # Geometric steps: most phases write little.
            kibibytes = round(LEAST * (most / LEAST) ** (number / max(1, arguments.trials - 1)))
            with empty_folder(root / "trial") as folder:
                try:
                    what = trial(folder, settings, kibibytes, arguments.limit, expected)
                except (AssertionError, TimeoutError) as error:
                    faults += 1
                    what = f"FAULT {error}"
            print(f"{kibibytes} KiB: {what}", flush=True)
    print(f"{faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
