"""One pytest session of several that share a queue of files: it collects a file when it comes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Bytes of a file's number in the queue.
NUM_BYTES = 2
PASSED, FAILED = b".", b"F"


class FilesOfQueue:
    """Has a session run the files whose numbers it takes from a pipe, which other sessions read too.

    A file is collected once, by the session that runs it. Fixtures of the session, such as the warm ranks, live as long
    as the session.

    Args:
        files: the files by their numbers.
        queue: file descriptor of the pipe's end to read from. A read of a number takes it whole.
        progress: file descriptor to which a byte is written for each file that has ended.
    """

    def __init__(self, files: Sequence[Path], queue: int, progress: int) -> None:
        self._files, self._queue, self._progress = files, queue, progress
        self._modules: dict[Path, pytest.Collector] = {}
        self._is_collecting_files = False
        self._num_errors = 0  # of the collection

    # First, before pytest's own, which also imports every file.
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        self._is_collecting_files = True
        session.perform_collect([str(file) for file in self._files], genitems=False)
        self._is_collecting_files = False
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._is_collecting_files:
            # These are files; options such as -k are for the tests in them.
            self._modules = {module.path: module for module in items}
            items.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = self._items(session)
        item, num_failed = next(items, None), 0
        while item is not None:
            # The next one tells pytest which fixtures end with this one; it may be of the next file.
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if following is None or following.path != item.path:
                failed = session.testsfailed - self._num_errors
                self._tell(FAILED if failed > num_failed else PASSED)
                num_failed = failed
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    # The letters of tests, which pytest prints in a line of their own, say nothing beside those of other sessions.
    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Iterator[None]:
        category, _, word = yield
        return category, "", word

    def _items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        while number := os.read(self._queue, NUM_BYTES):
            num_failed = session.testsfailed
            # Without one where a conftest.py leaves the file out. Errors in it are reported, and counted as failures.
            module = self._modules.get(self._files[int.from_bytes(number, "big")].absolute())
            items = list(session.genitems(module)) if module else []
            session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
            session.testscollected += len(items)
            # The file before may have a test to run yet, and does not count these.
            errors = session.testsfailed - num_failed
            self._num_errors += errors
            if not items:
                self._tell(FAILED if errors else PASSED)
            yield from items

    def _tell(self, byte: bytes) -> None:
        os.write(self._progress, byte)
