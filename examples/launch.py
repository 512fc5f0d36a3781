"""Starts the ranks of a job on this machine, and stops the job with an error message when one of them fails.

`torchrun` does not need this file; under it, `run_rank` only calls `main`. This launcher is for
`python train_gpt.py --ranks 2`. It needs no port (the rendezvous uses a file), and it distinguishes the rank that
failed first from ranks that failed because another rank was gone.
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

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

FOLDER_VARIABLE = "EXAMPLE_LAUNCH_FOLDER"  # set in ranks started here, not in those of torchrun
POLL_S = 0.05
SETTLE_S = 0.3  # time after the first failure in which other ranks can report an earlier one
TERMINATE_S = 3.0  # time between SIGTERM and SIGKILL for the other ranks


class JobFailedError(RuntimeError):
    """Reports that a rank failed; the others were stopped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes why a rank ended; `culprit` is True if no failure of another rank can be the cause."""

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
    """Runs `main` as this rank; if it fails, writes the reason for the launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        record(main)()  # reports the error to torchrun
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
        os._exit(1)  # not sys.exit: cleanup could wait for ranks that never answer


def compute_device() -> torch.device:
    """Returns this rank's GPU, and makes it current, if this machine has one for each rank; else the CPU."""
    if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initializes the default process group for tensors on `device`: gloo for CPUs, NCCL for GPUs.

    Every rank must call this.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method="env://" if folder is None else (Path(folder) / "store").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=5),  # a rank that hangs for longer is an error as well
    )
    yield
    dist.destroy_process_group()  # not reached after a failure: the process exits


def _end_with_parent() -> None:
    """Ends this rank when its launcher ends for any reason, which closes this process's stdin."""
    os.read(0, 1)
    os._exit(1)


# ---------------------------------------------------------------------------------------------------- in the parent


def start_ranks(command: Sequence[str], num_ranks: int) -> None:
    """Runs `command` once per rank and returns when all ranks have succeeded.

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
        "OMP_NUM_THREADS": str(threads),  # ranks that share the cores are faster than ranks that each use all of them
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
    """Returns the failure of a rank, or None if it has not failed (yet)."""
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
    # A library may abort when other ranks are gone; every other signal is this rank's own failure.
    return Failure(rank, time.time(), f"was killed by {name}{hint}", culprit=name != "SIGABRT")


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends and reaps every process, so that none outlives the job."""
    for process in processes:
        process.terminate()  # no effect on a process that has ended
    deadline = time.monotonic() + TERMINATE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
