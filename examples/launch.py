"""Starts the ranks of a job on this machine, and ends the job with the reason when one of them fails.

Under `torchrun` none of this is needed and `run_rank` leaves everything to it. This launcher is for
`python train_gpt.py --ranks 2`: it needs no port (the ranks meet in a file), and it tells the rank that failed first
from those that failed because their peer was gone.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

FOLDER_VARIABLE = "EXAMPLE_LAUNCH_FOLDER"  # set in ranks started here, not in those of torchrun
POLL_S = 0.05
SETTLE_S = 0.3  # after the first failure: time for the others to say that they failed earlier
TERMINATE_S = 3.0  # between asking the other ranks to end and killing them


class JobFailedError(RuntimeError):
    """A rank failed; the others were stopped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended: `culprit` is True where no failure of another rank can have been the cause."""

    rank: int
    time: float
    reason: str
    culprit: bool = False
    details: str = ""


# ------------------------------------------------------------------------------------------------------- in a rank


def inside_rank() -> bool:
    """Returns whether this process is one rank of a job, started here or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_rank(main: Callable[[], None]) -> None:
    """Runs `main` as this rank, and leaves the reason for its launcher if it fails."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        record(main)()  # torchrun's own way to learn the reason
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        failure = {
            "time": time.time(),
            "reason": "".join(traceback.format_exception_only(error)).strip(),
            "details": traceback.format_exc(),
        }
        _failure_file(folder, int(os.environ["RANK"])).write_text(json.dumps(failure))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not sys.exit: cleaning up could wait for peers that never answer


@contextlib.contextmanager
def process_group(backend: str) -> Iterator[None]:
    """Joins this rank with the others. Every rank must call this."""
    folder = os.environ.get(FOLDER_VARIABLE)
    dist.init_process_group(
        backend,
        init_method="env://" if folder is None else (Path(folder) / "store").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=5),  # a rank that is alive and silent for longer is an error as well
    )
    yield
    dist.destroy_process_group()  # after a failure the process just ends


def _end_with_parent() -> None:
    """Ends this rank when its launcher is gone, however it went: its end of our stdin closes."""
    os.read(0, 1)
    os._exit(1)


# ---------------------------------------------------------------------------------------------------- in the parent


def start_ranks(command: Sequence[str], num_ranks: int) -> None:
    """Runs `command` once per rank and returns when all ranks have ended well.

    Raises:
        JobFailedError: a rank raised or was killed. The other ranks have been stopped by then.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_flat_") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, folder)
                processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE))
            pids = ", ".join(str(process.pid) for process in processes)
            print(f"started {num_ranks} rank{'s' * (num_ranks > 1)}, process id {pids}", flush=True)
            _wait(processes, folder)
        finally:
            _stop(processes)


def _environment(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {
        "OMP_NUM_THREADS": str(threads),  # ranks that each use every core are slower than ranks that share them
        **os.environ,
        **{name: str(value) for name, value in names.items()},
        FOLDER_VARIABLE: folder,
    }


def _failure_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"failure_of_rank_{rank}.json"


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            break
        time.sleep(POLL_S)
    time.sleep(SETTLE_S)
    failures = [failure for rank, process in enumerate(processes) if (failure := _failure(rank, process, folder))]
    first = min(failures, key=lambda failure: (not failure.culprit, failure.time))
    raise JobFailedError(f"{first.details}rank {first.rank} of {len(processes)} {first.reason}; the job was stopped")


def _failure(rank: int, process: subprocess.Popen[bytes], folder: str) -> Failure | None:
    """Returns why a rank failed, or None for one that did not (yet)."""
    file = _failure_file(folder, rank)
    code = process.poll()
    if file.exists():
        said = json.loads(file.read_text())
        return Failure(rank, said["time"], f"failed: {said['reason']}", details=said["details"])
    if not code:
        return None
    if code > 0:
        return Failure(rank, time.time(), f"ended with exit code {code}")
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    # A library that loses its peers may abort; every other signal is this rank's own trouble.
    return Failure(rank, time.time(), f"was killed by {name}{hint}", culprit=name != "SIGABRT")


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs and collects every process, so that none outlives the job."""
    for process in processes:
        process.terminate()  # does nothing to a process that has ended
    deadline = time.monotonic() + TERMINATE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
