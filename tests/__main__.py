"""Runs the suite as several pytest sessions side by side: ``python -m tests [files or folders] [pytest's options]``.

While the ranks of one session wait for each other, for programs or for timeouts, those of another run. Sessions take
files from one queue. They are forked from this process, which has imported what they need, and share one server that
forks their ranks. A failure of any session is the result.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.pool import PRELOADED, share_server, start_server, stop_server
from tests.support.selection import SIZE, size_in
from tests.support.session import NUM_BYTES, FilesOfQueue

ROOT = Path(__file__).parent.parent
NUM_SESSIONS = 3
QUIET = ("-q", "-o", "console_output_style=classic")
# Run by a command of their own.
APART = ("tests/clients", "tests/fuzz", "tests/hosts", "tests/soak")


def main(arguments: list[str]) -> int:
    """Run all sessions; print a character for each file, then each session's failures, then all closing lines.

    Args:
        arguments: files and folders, by default all but those with a command of their own; and options for each
            session, such as ``-x`` or ``--size quick``.

    Returns:
        0 if all pass, else the exit status of a session that failed.
    """
    begun = time.monotonic()
    os.chdir(ROOT)
    paths = [argument for argument in arguments if not argument.startswith("-") and Path(argument).exists()]
    files = files_of(paths or ["tests"], () if paths else APART)
    # Ranks are forked from the server, which starts before a session reads its options.
    os.environ[SIZE] = size_in(arguments)
    options = [*QUIET, *(argument for argument in arguments if argument not in paths)]
    # The server imports what ranks need, while this process imports the same for the sessions. Processes forked from it
    # that are no warm ranks, which print to their pool, say nothing beside the line of progress.
    with open(os.devnull, "wb") as nowhere, output_to(nowhere):
        start_server()
    for module in PRELOADED:
        import_module(module)
    queue, queue_end = os.pipe()
    os.write(queue_end, b"".join(number.to_bytes(NUM_BYTES, "big") for number in range(len(files))))
    os.close(queue_end)
    progress, progress_end = os.pipe()
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(min(NUM_SESSIONS, len(files)))]
        sessions = [
            context.Process(target=run_session, args=(options, FilesOfQueue(files, queue, progress_end), log))
            for log in logs
        ]
        print(f"{len(files)} files in {len(sessions)} sessions: ", end="", flush=True)
        for session in sessions:
            session.start()
            stack.callback(session.terminate)
        os.close(progress_end)
        show_progress(progress, sessions, queue if "-x" in options else None)
        # The time of processes counts once they have been waited for.
        for session in sessions:
            session.join()
        stop_server()
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        used_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        print(f" {time.monotonic() - begun:.0f} s, {used_s:.0f} s of CPU", flush=True)
        return report(sessions, logs)


def files_of(paths: Sequence[str], apart: Sequence[str]) -> list[Path]:
    """Return the files of tests in some folders, in the order in which sessions take them.

    Args:
        paths: files and folders, relative to the root of the project.
        apart: folders that are left out.
    """
    found = {
        file for path in paths for file in ([Path(path)] if Path(path).is_file() else Path(path).rglob("test_*.py"))
    }
    return sorted(file for file in found if not any(file.is_relative_to(folder) for folder in apart))


@contextmanager
def output_to(file: IO[Any]) -> Iterator[None]:
    """Have this process, and processes that it starts, print to a file inside the block."""
    kept = [(stream.fileno(), os.dup(stream.fileno())) for stream in (sys.stdout, sys.stderr)]
    for descriptor, _ in kept:
        os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, before in kept:
            os.dup2(before, descriptor)
            os.close(before)


def run_session(options: list[str], plugin: FilesOfQueue, log: IO[str]) -> None:
    """Run a session in this process, which is forked for it; its output goes to a file."""
    with output_to(log):
        share_server()
        status = pytest.main([*options, "tests"], plugins=[plugin])
        # pytest unlocks its temporary folder there, which the end of a forked process leaves out.
        atexit._run_exitfuncs()
        sys.stdout.flush()
    # Options may leave nothing to run of the files that this session has taken.
    sys.exit(0 if status is pytest.ExitCode.NO_TESTS_COLLECTED else status)


def show_progress(progress: int, sessions: Sequence[BaseProcess], queue: int | None) -> None:
    """Print what sessions write to a pipe, on one line, until all have ended; empty a ``queue`` once one has."""
    running = {session.sentinel for session in sessions}
    while running:
        for ready in connection.wait([progress, *running]):
            if ready == progress:
                print(os.read(progress, 4096).decode(), end="", flush=True)
            else:
                running.discard(ready)
                while queue is not None and os.read(queue, 4096):
                    pass


def report(sessions: Sequence[BaseProcess], logs: Sequence[IO[str]]) -> int:
    """Print what each session has said, then the closing lines of all; return the status of one that failed, or 0."""
    closings = []
    for session, log in zip(sessions, logs, strict=True):
        log.seek(0)
        *lines, closing = log.read().strip().splitlines() or ["no output"]
        if session.exitcode not in (0, 1):
            closing = f"a session ended with status {session.exitcode} after: {closing}"
        print(*lines, sep="\n", end="\n" if lines else "")
        closings.append(closing)
    print(*closings, sep="\n", flush=True)
    return next((session.exitcode for session in sessions if session.exitcode), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
