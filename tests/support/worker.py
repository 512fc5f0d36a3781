"""Runs a worker rank: joins one process group, then runs the functions it receives until the pipe closes."""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_flat.comm import calls

from .messages import RUNNING, Raised, Ready, Reset, Returned, RunTask, Task, receive, send
from .transport import Transport, on_rank_device, set_transport

GROUP_TIMEOUT = timedelta(seconds=60)

# Error texts of a collective after another rank has failed: never the first cause of a failure.
FOLLOW_UPS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "gloo",
    "NCCL",
)


def main(rank: int, num_ranks: int, pipe: Connection, path: str, transport: Transport) -> None:
    """Run the process of a rank; its output goes to a file in the directory ``path``."""
    # Ctrl-C goes to the test session only, which then ends its workers.
    os.setsid()
    directory = Path(path)
    print_to(directory / f"log{rank}")
    stacks = open(directory / f"stack{rank}", "w")  # noqa: SIM115  stays open for the signal handler
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=watch_parent, daemon=True).start()
    rewrite_asserts()

    torch.set_num_threads(1)
    set_transport(transport, rank)
    base_store = dist.FileStore(str(directory / "store"), num_ranks)
    dist.init_process_group(transport.backend, store=base_store, rank=rank, world_size=num_ranks, timeout=GROUP_TIMEOUT)
    dist.barrier()
    serve(pipe, FirstState(base_store))
    # Exit without joining the groups' threads: no work of theirs is needed any more.
    os._exit(0)


def print_to(path: str | Path) -> None:
    """Append the output of this process to a file, unbuffered."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def watch_parent() -> None:
    """End this process when the test session ends, also in the middle of a collective."""
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    os._exit(1)


def rewrite_asserts() -> None:
    """Install pytest's assertion rewriting, so that a plain ``assert`` in a test module shows its values."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def serve(connection: Connection, first_state: FirstState) -> None:
    """Answer each message until the pipe closes."""
    ignored: list[str] = []
    first_state.restore()
    send(connection, Ready())
    while True:
        try:
            message = receive(connection)
        except EOFError:
            return
        if isinstance(message, RunTask):
            ignored.clear()
            with unprintable_errors_into(ignored):
                answer: Returned | Raised = run_task(message.payload)
        elif isinstance(message, Reset):
            with unprintable_errors_into(ignored):
                first_state.restore()
            answer = Ready("\n".join(ignored), first_state.spinning.found())  # type: ignore[assignment]
        sys.stdout.flush()
        sys.stderr.flush()
        send(connection, answer)


def run_task(payload: bytes) -> Returned | Raised:
    """Call the function; an exception is converted to a record, so that no frame outlives the task."""
    try:
        with warnings.catch_warnings():
            task: Task = pickle.loads(payload)
            warnings.filters[:] = task.warning_filters  # type: ignore[index]
            os.environ[RUNNING] = task.test
            with on_rank_device():
                result = task.function(*task.args, **task.kwargs)
            return Returned(pickle.dumps(result))
    except BaseException as error:
        return describe(error)


def describe(error: BaseException) -> Raised:
    """Convert an exception to a record, without the frames of this file."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = traceback.format_exception_only(type(error), error)[0].strip()
    return Raised(
        summary=summary,
        traceback=text,
        is_skip=isinstance(error, pytest.skip.Exception),
        is_follow_up=isinstance(error, RuntimeError) and any(sign in str(error) for sign in FOLLOW_UPS),
        when=time.monotonic(),
    )


@contextmanager
def unprintable_errors_into(ignored: list[str]) -> Iterator[None]:
    """Collect errors of finalizers and threads, which Python only prints; pytest fails a test for them."""

    def unraisable(info: sys.UnraisableHookArgs) -> None:
        text = "".join(traceback.format_exception(info.exc_type, info.exc_value, info.exc_traceback))
        ignored.append(f"{info.err_msg or 'Exception ignored in'}: {info.object!r}\n{text}")

    def thread_error(info: threading.ExceptHookArgs) -> None:
        text = "".join(traceback.format_exception(info.exc_type, info.exc_value, info.exc_traceback))
        ignored.append(f"Exception in thread {info.thread}\n{text}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, thread_error
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks


_CACHE = type(functools.lru_cache(len))


def torch_caches() -> list[Any]:
    """Return the caches of functions of ``torch.distributed`` that no collection before has kept."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is _CACHE and (each.__module__ or "").startswith("torch.distributed.")
    ]


class FirstState:
    """Restores the initial state of every task: one process group, fixed seeds, default settings."""

    def __init__(self, base_store: dist.Store) -> None:
        self._base_store = base_store
        self._num_restores = 0
        self._environ = dict(os.environ)
        self._directory = os.getcwd()
        self._streams: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        from .preloaded import CACHES  # which freezes what has been imported until then

        self._num_modules = len(sys.modules)
        self._caches = list(CACHES)
        self.spinning = SpinningThreads()

    def restore(self) -> None:
        """Restore the process's initial state. Called when no rank is inside the task any more."""
        self._num_restores += 1
        sys.stdout, sys.stderr = self._streams
        if os.environ != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        os.chdir(self._directory)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self._forget_groups()
        self._collect_garbage()

    def _forget_groups(self) -> None:
        """Destroy every group but the default one, and make the names of later groups unique."""
        world: Any = distributed_c10d._world
        default = world.default_pg
        others = [group for group in world.pg_map if group is not default]
        for group in others:
            dist.destroy_process_group(group)
        # Ranks may have made different calls in the default group, or have given one up.
        calls._calls.clear()
        # Ranks may have counted groups differently in the last task, and some group names are hashes of the ranks:
        # restart the count at a number that depends on the task alone, and give each task a prefix for its keys.
        has_new = world.group_count != 1000 * (self._num_restores - 1)
        world.group_count = 1000 * self._num_restores
        backend, _ = world.pg_map[default]
        world.pg_map[default] = (backend, dist.PrefixStore(f"task{self._num_restores}", self._base_store))
        if (others or has_new) and "torch.distributed.tensor" in sys.modules:
            # It caches meshes, whose groups are destroyed, under keys that an equal new mesh would hit. They keep the
            # groups' threads too, of which one never sleeps again if a test ended amid its message (gloo).
            clear_sharding_cache()
            for cache in self._caches:
                cache.cache_clear()

    def _collect_garbage(self) -> None:
        gc.collect()
        if len(sys.modules) != self._num_modules:
            # Imported code stays alive: exclude it from later collections, which then take a millisecond.
            self._num_modules = len(sys.modules)
            self._caches += torch_caches()
            gc.freeze()


class SpinningThreads:
    """Finds threads of gloo that run all the time.

    A test that ends amid a message of the default group leaves gloo with a write whose buffer is gone: its thread is
    woken again and again, since the socket can be written to.
    """

    WINDOW_S = 5.0
    MOST = 0.25  # of the time; other threads of gloo take less than 0.05

    def __init__(self) -> None:
        self._since, self._used = time.monotonic(), self._used_s()

    def found(self) -> bool:
        """Return whether there has been such a thread since the last look, which was some seconds ago at least."""
        elapsed = time.monotonic() - self._since
        if elapsed < self.WINDOW_S:
            return False
        before, used = self._used, self._used_s()
        self._since, self._used = time.monotonic(), used
        return any(seconds - before.get(thread, seconds) > self.MOST * elapsed for thread, seconds in used.items())

    def _used_s(self) -> dict[str, float]:
        """Return the CPU time of each thread of gloo; none where the system does not tell."""
        used = {}
        for thread in Path("/proc/self/task").glob("*"):
            with suppress(OSError):
                name, _, rest = (thread / "stat").read_text().rpartition(")")
                if "gloo_tcp" in name:
                    ticks = rest.split()
                    used[thread.name] = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        return used


def clear_sharding_cache() -> None:
    """Clear DTensor's caches of derived shardings, by private functions where torch has them, since 2.9 and later."""
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear_planners = getattr(
        sys.modules["torch.distributed.tensor._redistribute"], "clear_redistribute_planner_cache", None
    )
    if clear_planners is not None:
        clear_planners()
