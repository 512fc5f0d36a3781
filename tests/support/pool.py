"""Runs functions on warm pools of worker ranks, and reports the failures of each rank."""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as torch_processes

from . import worker as worker_module
from .messages import RUNNING, Raised, Ready, Reset, Returned, RunTask, Task, receive, send
from .transport import GLOO, Transport

START_TIMEOUT_S = 240.0
TASK_TIMEOUT_S = 60.0
# Ranks fork from a server that has imported these modules, so that a pool starts fast, also after a failure.
PRELOADED = [
    "tests.support.worker",
    "fsdp_flat",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tests.support.beside",
    "tests.support.steps",
    "tests.support.torch_and_ours",
    "tests.support.preloaded",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)
# Time for the other ranks to end once one has failed: they are often stuck in a collective.
GRACE_S = 2.0


class RankFailure(Exception):
    """Reports that a rank raised, died or did not end; the text contains every rank's state and the first cause."""


@dataclass(slots=True)
class Died:
    """Reports that the process ended in the middle of a task."""

    exit_code: int
    when: float


@dataclass(slots=True)
class StillRunning:
    """Reports that the rank had not ended the task when the pool stopped waiting."""

    stack: str = ""


@dataclass(slots=True)
class Worker:
    """Holds one rank's process, the pipe to it, and its log file."""

    rank: int
    process: BaseProcess
    pipe: connection.Connection
    log_path: Path
    stack_path: Path
    num_log_bytes_seen: int = field(default=0)

    def new_output(self) -> str:
        """Return the output of the rank since the last call."""
        with open(self.log_path, "rb") as log:
            log.seek(self.num_log_bytes_seen)
            data = log.read()
        self.num_log_bytes_seen += len(data)
        return data.decode(errors="replace")


Outcome = Returned | Raised | Died | StillRunning


class WorkerPool:
    """Runs ``num_ranks`` processes in one group. A failure closes the pool: its ranks may be in any state.

    Args:
        num_ranks: number of processes.
        transport: the group's backend, and where ranks compute.
    """

    def __init__(self, num_ranks: int, transport: Transport = GLOO) -> None:
        self.num_ranks = num_ranks
        self._transport = transport
        self._directory = Path(tempfile.mkdtemp(prefix="fsdp_flat_ranks_"))
        self._workers: list[Worker] = []
        try:
            self._workers.extend(self._start(rank) for rank in range(num_ranks))
            outcomes = self._wait(START_TIMEOUT_S, Ready)
            if not all(isinstance(outcome, Ready) for outcome in outcomes):
                raise RankFailure(self._report("the start of the worker ranks", outcomes, START_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """True while the pool can run tasks; a failure closes it."""
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [pid_of(worker) for worker in self._workers]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Any:
        """Run ``function`` on every rank and return the results by rank.

        Raises:
            RankFailure: a rank raised, died or did not end within ``timeout`` seconds. The pool is closed then.
        """
        payload = pickled_task(function, args, kwargs)
        try:
            for worker in self._workers:
                # A rank that died between tasks is reported by the wait below.
                send_if_alive(worker.pipe, RunTask(payload))
            outcomes = self._wait(timeout, Returned)
            if all(isinstance(outcome, Raised) and outcome.is_skip for outcome in outcomes):
                self._reset(function)
                pytest.skip(outcomes[0].summary)
            if not all(isinstance(outcome, Returned) for outcome in outcomes):
                raise RankFailure(self._report(name_of(function), outcomes, timeout))
            self._reset(function)
            return [pickle.loads(outcome.payload) for outcome in outcomes]
        except pytest.skip.Exception:
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes and remove their directory."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            # Kill at once: an idle worker has no state to save.
            worker.process.kill()
            worker.process.join()
        self._print_output()
        self._workers = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, rank: int) -> Worker:
        here, there = multiprocessing.Pipe()
        log_path = self._directory / f"log{rank}"
        log_path.touch()  # it may be read before the process opens it
        start_server()
        arguments = (rank, self.num_ranks, there, str(self._directory), self._transport)
        process = SERVER.Process(target=worker_module.main, args=arguments)
        process.start()
        there.close()
        return Worker(rank, process, here, log_path, self._directory / f"stack{rank}")

    def _wait(self, timeout: float, good: type) -> list[Any]:
        """Wait for each rank's outcome: an answer, its death, or that it still runs after the timeout or grace time."""
        outcomes: dict[int, Any] = {}
        stop = time.monotonic() + timeout
        while len(outcomes) < self.num_ranks and time.monotonic() < stop:
            waiting = [worker for worker in self._workers if worker.rank not in outcomes]
            remaining = max(0.0, stop - time.monotonic())
            # Wake up regularly, because a dead rank's children can keep its pipe open.
            readable = connection.wait([worker.pipe for worker in waiting], min(remaining, 0.5))
            for worker in waiting:
                if worker.pipe not in readable and worker.process.exitcode is None:
                    continue
                outcome = self._receive(worker)
                outcomes[worker.rank] = outcome
                is_skip = isinstance(outcome, Raised) and outcome.is_skip
                if not isinstance(outcome, good) and not is_skip:
                    stop = min(stop, time.monotonic() + GRACE_S)
        for worker in self._workers:
            if worker.rank not in outcomes:
                outcomes[worker.rank] = StillRunning(stack_of(worker))
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def _receive(self, worker: Worker) -> Any:
        try:
            if worker.pipe.poll():
                return receive(worker.pipe)
        except (EOFError, OSError):
            pass
        worker.process.join()
        assert worker.process.exitcode is not None
        return Died(worker.process.exitcode, time.monotonic())

    def _reset(self, function: Callable[..., Any]) -> None:
        """Reset every rank, once no rank is inside the task and its process groups any more."""
        for worker in self._workers:
            send_if_alive(worker.pipe, Reset())
        answers = self._wait(TASK_TIMEOUT_S, Ready)
        self._print_output()
        if not all(isinstance(answer, Ready) for answer in answers):
            raise RankFailure(self._report(f"the clean-up after {name_of(function)}", answers, TASK_TIMEOUT_S))
        ignored = [f"--- rank {rank} ---\n{answer.ignored}" for rank, answer in enumerate(answers) if answer.ignored]
        if ignored:
            raise RankFailure(f"{name_of(function)} returned, but left errors behind:\n" + "\n".join(ignored))
        if any(answer.spins for answer in answers):
            self.close()

    def _print_output(self) -> None:
        """Print the output of the ranks, for pytest's capture."""
        for worker in self._workers:
            for line in worker.new_output().splitlines():
                print(f"[rank {worker.rank}] {line}")

    def _report(self, what: str, outcomes: list[Any], timeout: float) -> str:
        first = first_to_fail(outcomes)
        lines = [f"{what} failed on {self.num_ranks} ranks."]
        if first is None:
            lines = [f"{what} did not end within {timeout:g} s on {self.num_ranks} ranks."]
        for rank, outcome in enumerate(outcomes):
            mark = "   <-- first" if rank == first else ""
            lines.append(f"  rank {rank}: {state_of(outcome)}{mark}")
        order = sorted(range(self.num_ranks), key=lambda rank: rank != first)
        for rank in order:
            details = details_of(outcomes[rank])
            if details:
                lines += ["", f"--- rank {rank} ---", details.rstrip()]
            if isinstance(outcomes[rank], Died):
                lines += ["", f"--- the last output of rank {rank} ---"]
                lines += tail(self._workers[rank].log_path)
        return "\n".join(lines)


def start_server() -> None:
    """Start the server from which ranks are forked, unless it runs; it imports the slow modules."""
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if sys.platform == "linux":
        # Otherwise gloo resolves the host name, which fails on some machines.
        environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    before = dict(os.environ)
    try:
        os.environ.update(environ)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def share_server() -> None:
    """Have this process, forked from one that runs the server, use it too; by itself it would start another one."""
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def stop_server() -> None:
    """End the server, which has waited for all of its ranks."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def spawn(function: Callable[..., None], *args: Any, num_ranks: int) -> None:
    """Run ``function(rank, *args)`` in a process of its own for each rank, which starts as fast as a worker.

    For tests that need no process group or one of their own; others run on the warm ranks.
    """
    start_server()
    torch_processes.start_processes(
        run_in_test, (running_test(), function, *args), nprocs=num_ranks, start_method="forkserver"
    )


def run_in_test(rank: int, test: str, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a process that was forked before its test began."""
    os.environ[RUNNING] = test
    function(rank, *args)


def running_test() -> str:
    """Return what pytest calls the test that runs."""
    return os.environ.get(RUNNING, "")


def pid_of(worker: Worker) -> int:
    """Return a worker's process id."""
    assert worker.process.pid is not None
    return worker.process.pid


def pickled_task(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a task with the running test's name and its warning filters, including those of its marks."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"worker ranks find a function by its name, so it must be top-level: {error}") from error
    return pickle.dumps(Task(function, args, kwargs, list(warnings.filters), running_test()))


def send_if_alive(pipe: connection.Connection, message: object) -> None:
    """Send ``message`` unless the other side has closed, which is detected when waiting for its answer."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        send(pipe, message)


def first_to_fail(outcomes: list[Any]) -> int | None:
    """Return the rank that failed first, ignoring collectives that failed because of another rank."""
    failures = [
        (isinstance(outcome, Raised) and (outcome.is_follow_up or outcome.is_skip), outcome.when, rank)
        for rank, outcome in enumerate(outcomes)
        if isinstance(outcome, Raised | Died)
    ]
    return min(failures)[2] if failures else None


def state_of(outcome: Any) -> str:
    """Describe a rank's outcome in one line."""
    if isinstance(outcome, Raised):
        return f"{'skipped' if outcome.is_skip else 'raised'} {outcome.summary}"
    if isinstance(outcome, Died):
        return f"died with {exit_text(outcome.exit_code)}"
    if isinstance(outcome, StillRunning):
        return "still running, its stack is below"
    return "returned"


def exit_text(exit_code: int) -> str:
    """Describe an exit code, with the signal's name."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"exit code {exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"exit code {exit_code}"


def details_of(outcome: Any) -> str:
    """Return the traceback or stack of an outcome, or an empty string."""
    if isinstance(outcome, Raised):
        return outcome.traceback
    if isinstance(outcome, StillRunning):
        return outcome.stack
    return ""


def stack_of(worker: Worker) -> str:
    """Return every Python thread's stack of a running worker, innermost frame first, with source lines."""
    try:
        os.kill(pid_of(worker), signal.SIGUSR1)
        text = ""
        for _ in range(40):
            time.sleep(0.05)
            before, text = text, worker.stack_path.read_text()
            if text and text == before:
                break
    except OSError:
        return "(no stack: the process is gone)"
    threads = [thread for thread in re.split(r"\n\n", text) if "watch_parent" not in thread]
    return with_source("\n".join(threads)) or "(no stack: the process did not answer)"


def with_source(stack: str) -> str:
    """Add to a faulthandler dump the source line of each frame."""
    lines = []
    for line in stack.splitlines():
        lines.append(line)
        match = re.match(r'\s+File "(.*)", line (\d+) in ', line)
        if match:
            source = linecache.getline(match[1], int(match[2])).strip()
            lines += [f"    {source}"] if source else []
    return "\n".join(lines)


def tail(path: Path, num_lines: int = 40) -> list[str]:
    """Return the last lines of a file."""
    return path.read_text(errors="replace").splitlines()[-num_lines:]


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return f"{function.__module__}.{function.__qualname__}"


class WarmPools:
    """Holds the session's pools by number of ranks: started on first use, and again after a failure.

    Args:
        transport: that of all pools.
    """

    def __init__(self, transport: Transport = GLOO) -> None:
        self._transport = transport
        self._pools: dict[int, WorkerPool] = {}

    def pool(self, num_ranks: int) -> WorkerPool:
        """Return the warm pool of ``num_ranks`` ranks."""
        if num_ranks not in self._pools or not self._pools[num_ranks].is_open:
            self._pools[num_ranks] = WorkerPool(num_ranks, self._transport)
        return self._pools[num_ranks]

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> list[Any]:
        """Call :meth:`WorkerPool.run` on the warm pool."""
        return self.pool(num_ranks).run(function, args, kwargs, timeout)

    def close(self) -> None:
        """End every worker."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Gives a test access to a warm pool: ``ranks(2).run(function, ...)``."""

    pools: WarmPools
    num_ranks: int
    timeout: float = TASK_TIMEOUT_S

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the top-level ``function`` on every rank with these arguments.

        Returns:
            Each rank's result, by rank, as a copy.

        Raises:
            RankFailure: with the first cause's traceback and the state of every rank.
        """
        __tracebackhide__ = True
        try:
            return self.pools.run(self.num_ranks, function, args, kwargs, self.timeout)
        except RankFailure as failure:
            # Raise from here, so that pytest shows the test's line and the report, not the pool's frames.
            raise failure.with_traceback(None) from None
